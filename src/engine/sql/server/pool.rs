//! The connections for calls.
//!
//! `connect` opens the first connection. While a task waits and no connection is idle, one more is opened. It must answer before
//! it is used, because a pooler may accept a login and have no connection to the server. A waiting task uses the first connection that
//! becomes idle. If several are idle, it uses the one that was used last. Connections that are idle for [`IDLE`] are closed, except one.

use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::connection::{Connections, TEST_TIMEOUT, open};
use super::{Outcome, Server, Session};
use crate::engine::sql::failure::{Failure, Kind};
use crate::event_loop::unless_it_panics;

/// The time after a failed attempt to connect during which calls fail with it, if no connection is open.
const CONNECT_PAUSE: Duration = Duration::from_millis(50);

/// The time after a failed attempt to connect until another one is made beside open connections.
const BESIDE_PAUSE: Duration = Duration::from_secs(1);

/// How long a connection stays open without use, if there is another one.
const IDLE: Duration = Duration::from_secs(10);

/// The connections of an engine, without one that listens.
pub(super) struct Pool {
    server: Arc<dyn Server>,
    state: Mutex<State>,
    /// Held by the first of the tasks that wait for a connection. The others wait for their turn.
    turn: AsyncMutex<()>,
    /// Notifies that task.
    changes: Notify,
    /// Notifies the tests of silent connections that a new one is open.
    openings: watch::Sender<()>,
    closed: CancellationToken,
    _closing: DropGuard,
}

struct State {
    /// Connections without a task, and since when. The last one is used next.
    idle: Vec<(Instant, Box<dyn Session>)>,
    /// The number of open connections, with those in use.
    open: usize,
    is_opening: bool,
    /// Whether a task that closes idle connections runs.
    is_closing_idle: bool,
    /// The last failure to connect.
    failed: Option<(Instant, Failure)>,
    /// The number of failures to connect.
    failures: usize,
}

/// What a waiting task does next.
enum Next {
    Use(Box<dyn Session>),
    Fail(Failure),
    /// Waits for a change, or until then.
    Wait(Option<Instant>),
}

/// A connection in use. Dropping it returns it, or closes it if statements have no outcome or broke it.
pub(super) struct Checkout {
    pool: Arc<Pool>,
    session: Option<Box<dyn Session>>,
    is_settled: bool,
}

impl Pool {
    /// Creates the pool of an engine with its first connection.
    pub(super) fn new(server: Arc<dyn Server>, first: Box<dyn Session>) -> Arc<Self> {
        let closed = CancellationToken::new();
        Arc::new(Pool {
            server,
            state: Mutex::new(State {
                idle: vec![(Instant::now(), first)],
                open: 1,
                is_opening: false,
                is_closing_idle: false,
                failed: None,
                failures: 0,
            }),
            turn: AsyncMutex::default(),
            changes: Notify::new(),
            openings: watch::Sender::default(),
            _closing: closed.clone().drop_guard(),
            closed,
        })
    }

    pub(super) fn connections(&self) -> &Connections {
        self.server.connections()
    }

    /// Waits for a connection within the store timeout.
    pub(super) async fn checkout(self: &Arc<Self>) -> Outcome<Checkout> {
        let (connections, limit) = (self.connections(), self.connections().store_timeout);
        if let Ok(outcome) = timeout(limit, self.next_usable()).await {
            return outcome;
        }
        let open = self.state.lock().open;
        let failure = if open == 0 {
            Failure::unanswered(&connections.place, limit, Kind::Broken)
        } else {
            let others = match open < self.server.most_for_calls() {
                true => "and no other one could be opened",
                false => "the maximum",
            };
            let ms = limit.as_millis();
            let message = format!("no free connection within {ms} ms: {open} in use, {others}");
            Failure::new(&connections.place, Kind::Refused, message)
        };
        Err(failure.not_sent())
    }

    async fn next_usable(self: &Arc<Self>) -> Outcome<Checkout> {
        let mut failures = self.state.lock().failures;
        loop {
            let session = self.next_idle(&mut failures).await?;
            if let Some(checkout) = self.tested(session).await {
                return Ok(checkout);
            }
        }
    }

    /// Waits for the turn, and for a connection. `failures`: the number of failures to connect that the task need not report.
    async fn next_idle(self: &Arc<Self>, failures: &mut usize) -> Outcome<Box<dyn Session>> {
        let _turn = self.turn.lock().await;
        loop {
            match self.next(failures) {
                Next::Use(session) => return Ok(session),
                Next::Fail(failure) => return Err(failure),
                Next::Wait(None) => self.changes.notified().await,
                Next::Wait(Some(until)) => _ = timeout_at(until, self.changes.notified()).await,
            }
        }
    }

    /// Returns what the first waiting task does next.
    fn next(self: &Arc<Self>, failures: &mut usize) -> Next {
        let mut state = self.state.lock();
        if let Some((_, session)) = state.idle.pop() {
            return Next::Use(session);
        }
        let is_first = state.open == 0;
        if let Some((at, failure)) = &state.failed {
            if is_first && (state.failures > *failures || at.elapsed() < CONNECT_PAUSE) {
                return Next::Fail(failure.clone());
            }
            let until = *at + BESIDE_PAUSE;
            if !is_first && Instant::now() < until {
                *failures = state.failures;
                return Next::Wait(Some(until));
            }
        }
        *failures = state.failures;
        if !state.is_opening && state.open < self.server.most_for_calls() {
            state.is_opening = true;
            let (server, closed, pool) = (self.server.clone(), self.closed.clone(), Arc::downgrade(self));
            let opening = async move {
                let opening = pin!(opening(server.clone(), !is_first));
                let opened = closed.run_until_cancelled(unless_it_panics(opening)).await;
                if let Some(opened) = opened
                    && let Some(pool) = pool.upgrade()
                {
                    pool.opened(opened.unwrap_or_else(|| {
                        let message = "a bug in holdfast or in its driver: the login panicked";
                        Err(Failure::new(&server.connections().place, Kind::Broken, message).not_sent())
                    }));
                }
            };
            tokio::spawn(opening.boxed());
        }
        Next::Wait(None)
    }

    /// Adds a new connection, or records why there is none.
    fn opened(self: &Arc<Self>, opened: Outcome<Box<dyn Session>>) {
        let mut state = self.state.lock();
        state.is_opening = false;
        match opened {
            Ok(session) => {
                state.open += 1;
                drop(state);
                self.openings.send_replace(());
                self.keep(session);
            }
            Err(failure) => {
                tracing::debug!(%failure, "a connection could not be opened");
                state.failures += 1;
                state.failed = Some((Instant::now(), failure));
                drop(state);
                self.changes.notify_one();
            }
        }
    }

    /// Makes a connection idle.
    fn keep(self: &Arc<Self>, session: Box<dyn Session>) {
        let mut state = self.state.lock();
        state.idle.push((Instant::now(), session));
        let closes_idle = state.open > 1 && !std::mem::replace(&mut state.is_closing_idle, true);
        drop(state);
        self.changes.notify_one();
        if closes_idle {
            tokio::spawn(close_idle(Arc::downgrade(self)).boxed());
        }
    }

    /// Tests a connection. `None`: it cannot be used, and is closed.
    fn test(self: &Arc<Self>, session: Box<dyn Session>) -> BoxFuture<'static, Option<Checkout>> {
        let mut checkout = Checkout {
            pool: self.clone(),
            session: Some(session),
            is_settled: false,
        };
        Box::pin(async move {
            let session = checkout.session.as_mut()?;
            let connection = session.connection().clone();
            checkout.is_settled = connection.is_usable(session.ping()).await && session.check_before_use().await;
            checkout.is_settled.then_some(checkout)
        })
    }

    /// Tests a connection for [`TEST_TIMEOUT`]. `None`: it is closed, or has not answered yet. Then
    /// the test continues in a task, and the outdated idle connections are tested, too.
    async fn tested(self: &Arc<Self>, session: Box<dyn Session>) -> Option<Checkout> {
        let mut test = self.test(session);
        if let Some(tested) = (&mut test).now_or_never() {
            return tested;
        }
        if let Ok(tested) = timeout(TEST_TIMEOUT, self.test_beside(test)).await {
            return tested.ok().flatten();
        }
        let is_outdated = |(_, session): &mut (Instant, Box<dyn Session>)| session.connection().is_outdated();
        let outdated: Vec<_> = self.state.lock().idle.extract_if(.., is_outdated).collect();
        for (_, session) in outdated {
            drop(self.test_beside(self.test(session)));
        }
        None
    }

    /// Runs a test in its own task, so that it continues if the caller is dropped: the connection may be the only one that works. Closes a
    /// silent one when a new one is open, or after the store timeout at the latest (after half of it if the pool is full).
    fn test_beside(self: &Arc<Self>, test: BoxFuture<'static, Option<Checkout>>) -> JoinHandle<Option<Checkout>> {
        let has_room = self.state.lock().open < self.server.most_for_calls();
        let limit = self.connections().store_timeout / if has_room { 1 } else { 2 };
        let (mut openings, closed) = (self.openings.subscribe(), self.closed.clone());
        let end = async move {
            sleep(TEST_TIMEOUT).await;
            // Also ends at once if a connection was opened during the sleep.
            let _ = timeout(limit.saturating_sub(TEST_TIMEOUT), openings.changed()).await;
        };
        let testing = async move {
            tokio::select! {
                biased;
                tested = test => tested,
                () = closed.cancelled() => None,
                () = end => None,
            }
        };
        tokio::spawn(testing.boxed())
    }

    /// Cancels the background tasks of the pool.
    pub(super) fn close(&self) {
        self.closed.cancel();
    }

    /// Records the end of a connection.
    fn forget(&self) {
        self.state.lock().open -= 1;
        self.changes.notify_one();
    }
}

/// Opens a connection. `is_beside`: others are open, so it is tested.
async fn opening(server: Arc<dyn Server>, is_beside: bool) -> Outcome<Box<dyn Session>> {
    let mut session = open(&server).await?;
    if is_beside {
        // A pooler may accept a login, and have no connection to the server.
        let connection = session.connection().clone();
        let answered = connection.within_limit(session.ping()).await;
        answered.map_err(Failure::not_sent)?;
    }
    Ok(session)
}

/// Closes connections that are idle for [`IDLE`], until there is one.
async fn close_idle(pool: Weak<Pool>) {
    let mut next = Some(Instant::now() + IDLE);
    while let Some(at) = next {
        sleep_until(at).await;
        let Some((sessions, others)) = pool.upgrade().map(|pool| pool.state.lock().expired()) else {
            return;
        };
        for session in sessions {
            session.close().await;
        }
        next = others;
    }
}

impl State {
    /// Removes connections that are idle for [`IDLE`], except the last one. Returns them, and when the next one may be idle for
    /// that long. `None`: there is only one.
    fn expired(&mut self) -> (Vec<Box<dyn Session>>, Option<Instant>) {
        let now = Instant::now();
        let expired = self.idle.iter().take_while(|(since, _)| *since + IDLE <= now).count();
        let closed = expired.min(self.open.saturating_sub(1));
        self.open -= closed;
        self.is_closing_idle = self.open > 1;
        let sessions = self.idle.drain(..closed).map(|(_, session)| session).collect();
        let since = self.idle.first().map_or(now, |(since, _)| *since);
        (sessions, self.is_closing_idle.then_some(since + IDLE))
    }
}

impl Checkout {
    /// Returns the connection. Its statements need [`Checkout::settle`].
    pub(super) fn session(&mut self) -> Outcome<&mut dyn Session> {
        self.is_settled = false;
        let connections = self.pool.server.connections();
        let broken = || Failure::new(&connections.place, Kind::Broken, "the connection is closed".to_owned());
        self.session.as_deref_mut().ok_or_else(broken)
    }

    /// Returns the outcome of statements. A failure that breaks the connection closes it.
    pub(super) fn settle<T>(&mut self, outcome: Outcome<T>) -> Outcome<T> {
        let is_broken = |failure: &Failure| matches!(failure.kind(), Kind::Broken | Kind::Pooled | Kind::NoTable);
        let server = &self.pool.server;
        if let Err(failure) = &outcome
            && failure.kind() == Kind::NoTable
            && let Some(warnings) = server.warnings()
        {
            let address = &server.connections().place.address;
            warnings.warn(format!(
                "the tables of the locks at {address} were dropped while this service ran: the leases in them are lost, and other callers may \
                 acquire their names. The next call creates the tables again. Migration tools drop tables that they do not know: give \
                 holdfast a schema or a database of its own with the option table"
            ));
        }
        if outcome.as_ref().is_err_and(is_broken) && self.session.take().is_some() {
            self.pool.forget();
        }
        self.is_settled = true;
        outcome
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        match self.session.take() {
            Some(session) if self.is_settled => self.pool.keep(session),
            Some(_) => self.pool.forget(),
            None => {}
        }
    }
}
