//! The connections of one engine: their limits, and which of them are silent.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

use super::{Outcome, Server, Session};
use crate::engine::Settings;
use crate::engine::sql::dropped_calls::DroppedCalls;
use crate::engine::sql::failure::{Failure, Kind, Place};
use crate::event_loop::{EventLoop, Task};

/// How long the server has to confirm that it cancelled a statement.
const CANCEL_TIMEOUT: Duration = Duration::from_millis(50);
/// Maximum number of cancel requests for a packet. Each ends one statement.
const MAX_CANCELLATIONS: usize = 6;

/// How long statements on an outdated connection may still run before they are cancelled.
const OUTDATED_GRACE: Duration = Duration::from_millis(100);
/// How long a task waits for the test of a connection. After that the test continues while a new connection is opened. Slow packets do
/// not extend it, because they may have waited for locks.
pub(in crate::engine::sql) const TEST_TIMEOUT: Duration = Duration::from_millis(500);

/// What the connections of an engine share.
pub(in crate::engine::sql) struct Connections {
    pub place: Place,
    pub store_timeout: Duration,
    pub dropped: Arc<DroppedCalls>,
    /// The caller's event loop.
    pub event_loop: Option<Arc<dyn EventLoop>>,
    /// How long the slowest of the last packets took, in microseconds.
    usual_us: AtomicU64,
    /// When a connection answered last.
    answered_at: Mutex<Option<Instant>>,
    /// Incremented when a connection was silent and no other one answered: connections of an earlier epoch may be silent, too.
    epoch: watch::Sender<u64>,
}

/// The limits of one connection.
pub(in crate::engine::sql) struct Connection {
    connections: Arc<Connections>,
    epoch: AtomicU64,
    /// Whether it has answered a statement.
    has_answered: AtomicBool,
    /// Asks the server to cancel the current statement, in the background. `true`: it has done so, and does not
    /// do it later.
    cancel: Box<dyn Fn() -> JoinHandle<bool> + Send + Sync>,
    /// Whether a cancellation may still end a statement.
    has_late_cancellation: AtomicBool,
}

impl Connections {
    pub(in crate::engine::sql) fn new(engine: &'static str, address: &str, settings: &Settings) -> Arc<Self> {
        Arc::new(Connections {
            place: Place {
                engine,
                address: address.into(),
            },
            store_timeout: settings.store_timeout,
            dropped: Arc::default(),
            event_loop: settings.event_loop.clone(),
            usual_us: AtomicU64::new(0),
            answered_at: Mutex::default(),
            epoch: watch::Sender::default(),
        })
    }

    /// Starts a task of the engine, on the caller's event loop if there is one.
    pub(in crate::engine::sql) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Task {
        Task::spawn(self.event_loop.as_deref(), task)
    }

    /// Returns how long the slowest of the last packets took.
    fn usual(&self) -> Duration {
        Duration::from_micros(self.usual_us.load(Ordering::Relaxed))
    }

    /// Completes after two callers were dropped without an answer, and not before twice the usual duration of a packet has passed since
    /// `since`.
    async fn are_suspect(&self, since: Instant) {
        self.dropped.are_suspect().await;
        sleep_until(since + self.usual() * 2).await;
    }

    /// Records how long a packet took. Counts less with each later one.
    fn record(&self, took: Duration) {
        let took = took.as_micros() as u64;
        let usual = self.usual_us.load(Ordering::Relaxed);
        self.usual_us.store(took.max(usual - usual / 8), Ordering::Relaxed);
    }

    /// Returns how long a statement waits for a locked row, where the server has such a limit: at most half of the store timeout, so that
    /// time is left to execute the other calls of the statement without that row.
    pub(in crate::engine::sql) fn lock_wait(&self) -> Duration {
        super::LOCK_WAIT.min(self.store_timeout / 2)
    }

    /// Returns the kind of a failure of TLS. With settings that worked before, a later attempt may succeed, for example after the
    /// certificates have been replaced.
    pub(in crate::engine::sql) fn kind_of_tls(&self) -> Kind {
        match self.have_answered() {
            true => Kind::Refused,
            false => Kind::Permanent,
        }
    }

    /// Whether a connection has ever answered a statement.
    pub(super) fn have_answered(&self) -> bool {
        self.answered_at.lock().is_some()
    }

    /// Returns the current epoch: that of a connection which is opened now.
    pub(in crate::engine::sql) fn epoch(&self) -> u64 {
        *self.epoch.borrow()
    }
}

impl Connection {
    /// Creates the limits of a connection that was opened in `epoch`. `cancel` asks the server to cancel its current statement,
    /// without waiting: a statement that waits for a lock is not ended by the end of its connection.
    pub(in crate::engine::sql) fn new(
        connections: Arc<Connections>,
        epoch: u64,
        cancel: impl Fn() -> JoinHandle<bool> + Send + Sync + 'static,
    ) -> Arc<Self> {
        let cancel = Box::new(cancel);
        let has_late_cancellation = AtomicBool::new(false);
        Arc::new(Connection {
            connections,
            epoch: AtomicU64::new(epoch),
            has_answered: AtomicBool::new(false),
            cancel,
            has_late_cancellation,
        })
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Whether another connection was silent after this one was opened, or was tested.
    pub(super) fn is_outdated(&self) -> bool {
        self.connections.epoch() > self.epoch()
    }

    /// Whether the connection can be used. If another one was silent, `ping` tests this one, without a time limit. `false`: `ping`
    /// failed, or a late cancellation could end a statement.
    pub(in crate::engine::sql) async fn is_usable(&self, ping: impl Future<Output = Outcome<()>>) -> bool {
        let epoch = self.connections.epoch();
        if self.has_late_cancellation.load(Ordering::Relaxed) {
            return false;
        }
        if epoch > self.epoch() {
            if ping.await.is_err() {
                return false;
            }
            self.answered();
            self.epoch.store(epoch, Ordering::Relaxed);
        }
        true
    }

    fn answered(&self) {
        self.has_answered.store(true, Ordering::Relaxed);
        *self.connections.answered_at.lock() = Some(Instant::now());
    }

    /// Makes the other connections of this epoch outdated, after this one was silent for `waited`. Does nothing if another one
    /// has answered in the second half of that time, or if this one has never answered: then the cause is not the server or the
    /// network.
    fn outdate_others(&self, waited: Duration) {
        let answered_at = *self.connections.answered_at.lock();
        if !self.has_answered.load(Ordering::Relaxed) || answered_at.is_some_and(|at| at.elapsed() < waited / 2) {
            return;
        }
        self.connections.epoch.send_if_modified(|epoch| {
            let is_first = *epoch == self.epoch();
            *epoch += u64::from(is_first);
            is_first
        });
    }

    /// Completes when another connection of the same epoch was silent.
    pub(in crate::engine::sql) async fn outdated(&self) {
        let mut epochs = self.connections.epoch.subscribe();
        // The sender lives as long as the connection.
        let _ = epochs.wait_for(|epoch| *epoch > self.epoch()).await;
    }

    /// Asks the server to cancel the current statement.
    pub(super) fn cancel(&self) -> JoinHandle<bool> {
        (self.cancel)()
    }

    /// Waits for the outcome of statements within the store timeout, or until callers that had no answer are dropped, or another
    /// connection was silent. Then cancels them. If the server confirms that, and cancels nothing later, the connection stays usable.
    /// Statements that are cancelled before the store timeout fail with [`Kind::Locked`] if the server confirms the cancellation.
    pub(in crate::engine::sql) async fn within_limit<T: Send>(
        &self,
        statements: impl Future<Output = Outcome<T>> + Send,
    ) -> Outcome<T> {
        self.within(self.connections.store_timeout, statements).await
    }

    /// Waits for the outcome of statements as [`Connection::within_limit`] does, for `limit` at most.
    pub(super) async fn within<T: Send>(
        &self,
        limit: Duration,
        statements: impl Future<Output = Outcome<T>> + Send,
    ) -> Outcome<T> {
        let mut answer = None;
        let statements = async {
            let outcome = statements.await;
            let failed = outcome.as_ref().err().map(Failure::kind);
            answer = Some(outcome);
            failed
        };
        self.supervise(limit, pin!(statements)).await?;
        // `supervise` succeeds only after `answer` was set.
        answer.unwrap_or_else(|| Err(Failure::unexpected(&self.connections.place, "no outcome")))
    }

    /// Waits until `statements` ends, and cancels it if it takes too long (see [`Connection::within_limit`]). It resolves to the kind of
    /// its failure, or to `None`. An error replaces the outcome of the statements.
    async fn supervise(
        &self,
        limit: Duration,
        mut statements: Pin<&mut (dyn Future<Output = Option<Kind>> + Send)>,
    ) -> Outcome<()> {
        let since = Instant::now();
        let is_late = tokio::select! {
            biased;
            failed = &mut statements => {
                self.connections.record(since.elapsed());
                if failed != Some(Kind::Broken) {
                    self.answered();
                }
                return Ok(());
            }
            () = tokio::time::sleep(limit) => true,
            () = self.connections.are_suspect(since) => false,
            () = async { self.outdated().await; tokio::time::sleep(OUTDATED_GRACE).await } => false,
        };
        let waited = since.elapsed();
        let unanswered = |kind| Err(Failure::unanswered(&self.connections.place, waited, kind));
        let mut cancellations: Vec<JoinHandle<bool>> = Vec::new();
        // Each cancellation ends one statement. The next one is sent only after the previous request has ended: otherwise a silent server
        // would receive all of them later.
        for _ in 0..MAX_CANCELLATIONS {
            if cancellations.iter().all(JoinHandle::is_finished) {
                cancellations.push(self.cancel());
            }
            let Ok(failed) = timeout(CANCEL_TIMEOUT, &mut statements).await else {
                continue;
            };
            let cancelled = timeout(CANCEL_TIMEOUT, join_all(cancellations)).await;
            let are_done = cancelled.is_ok_and(|all| all.iter().all(|one| matches!(one, Ok(true))));
            self.has_late_cancellation.fetch_or(!are_done, Ordering::Relaxed);
            return unanswered(match failed {
                // The server answers, so the statement waited for a lock. Callers that were not dropped still have time: a transaction
                // executes their calls.
                // After the store timeout they have none.
                Some(Kind::Cancelled) if is_late => Kind::Refused,
                Some(Kind::Cancelled) => Kind::Locked,
                Some(kind) => kind,
                // A cancelled commit succeeds without the standby that it waited for. Of releases, only the first statement may be committed.
                None => Kind::Refused,
            });
        }
        self.outdate_others(waited);
        unanswered(Kind::Broken)
    }
}

/// Opens a connection within the store timeout, without its set-up.
pub(in crate::engine::sql) async fn connected<C>(
    connections: &Connections,
    connecting: impl Future<Output = Outcome<C>>,
) -> Outcome<C> {
    let limit = connections.store_timeout;
    let opened = timeout(limit, connecting).await;
    let opened = opened.unwrap_or_else(|_| {
        let silence = Failure::unanswered(&connections.place, limit, Kind::Broken);
        Err(match connections.have_answered() {
            true => silence,
            false => silence.with_advice("check the host and the port, where another kind of server may be"),
        })
    });
    opened.map_err(Failure::not_sent)
}

/// Opens a connection within the store timeout. Creates the tables if they are missing.
pub(in crate::engine::sql) async fn open(server: &Arc<dyn Server>) -> Outcome<Box<dyn Session>> {
    let (connections, limit) = (server.connections(), server.connections().store_timeout);
    let mut session = connected(connections, server.clone().connect()).await?;
    if let Ok(ready) = timeout(limit, session.set_up()).await {
        return ready.map(|()| session).map_err(Failure::not_sent);
    }
    drop(session.connection().cancel());
    Err(Failure::unanswered(&connections.place, limit, Kind::Broken).not_sent())
}

/// Opens a connection as [`open`] does, again without prepared statements if there is a pooler.
pub(in crate::engine::sql) async fn open_first(server: &Arc<dyn Server>) -> Outcome<Box<dyn Session>> {
    match open(server).await {
        Err(failure) if failure.kind() == Kind::Pooled => open(server).await,
        opened => opened,
    }
}
