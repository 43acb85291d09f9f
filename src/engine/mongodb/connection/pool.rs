//! The connections of one engine: which calls may use them, in which order, and what happens to a dropped call.
//!
//! # Why the driver's queue stays empty
//! A driver call that is dropped while it waits for a connection leaves its request in the pool's queue, and the pool's
//! worker removes one request per event (mongodb 3.9.1, `cmap/worker.rs`). After a stall under load that queue consists of
//! dead requests, and every later call waits behind them until it times out. So the engine has as many permits as the pool
//! has open connections (`openings.rs`), and takes a permit before each call. A call that is dropped before it has a permit has
//! sent nothing. From then on it runs in a task that keeps the permit until the driver has answered, also after the caller
//! dropped it. So a dropped call neither leaves a request in the driver's queue nor closes a connection.
//!
//! # Order
//! Each [`Class`] of calls has its own queue and a share of the connections. Each queue is first in, first out, except that of
//! new attempts (`engine/attempt_queue.rs`). An eighth of the connections is reserved for renewals, transfers and heartbeats, which
//! may use every connection. The shares bound how many calls of the other classes wait for a connection, so that neither a
//! renewal nor a release waits behind the attempts of thousands of waiters.
//!
//! # A driver that does not recover
//! A call without an answer is aborted after [`LIMIT`] store timeouts. It is aborted after one where another primary was elected
//! in that time, because the old one may hang, or where calls that began later were answered: then only this call hangs. If no
//! other call was answered in that time either, although a server answered the driver's monitor, the engine replaces the client.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use mongodb::bson::{Document, doc};
use mongodb::options::{CollectionOptions, WriteConcern};
use mongodb::{Client, Collection};
use parking_lot::RwLock;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::clock::Moment;
use crate::engine::attempt_queue::{self, AttemptQueue};
use crate::engine::mongodb::Outcome;
use crate::engine::mongodb::config::ClientSettings;
use crate::engine::mongodb::connection::openings::{OpenConnections, Opening, Openings, UsedOtherwise};
use crate::engine::mongodb::connection::server_monitor::ServerMonitor;
use crate::engine::mongodb::error::Failure;
use crate::model::Key;

/// Number of store timeouts after which a call without an answer is aborted.
const LIMIT: u32 = 4;

/// The purpose of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class<'n> {
    /// Attempts for claims with this first name. At most five eighths of the connections.
    Acquire(&'n Key),
    /// Attempts of waiters that were notified of a hand-off. At most a quarter of the connections.
    Confirm,
    /// Releases and clean-up. At most half of the connections: a release of a name with waiters waits twice for the members.
    Release,
    /// Writes that end sessions (`session.rs`). At most a sixteenth of the connections: they may wait for a write that the
    /// server executes late.
    EndSession,
    /// Queries. At most an eighth of the connections.
    Query,
    /// Renewals, transfers and heartbeats. They may use every connection, and an eighth is reserved for them.
    Keep,
}

/// The right to use one connection. Its parts are dropped in this order, so that a call that waits for a connection goes before
/// the next one of the same class.
pub(crate) struct Permit {
    _connection: Option<OwnedSemaphorePermit>,
    _unreserved: Option<OwnedSemaphorePermit>,
    _class: Option<OwnedSemaphorePermit>,
    _attempt: Option<attempt_queue::Permit>,
}

/// Waits for a share of the connections, if they are limited.
async fn share_of(limit: Option<&Arc<Semaphore>>) -> Option<OwnedSemaphorePermit> {
    // The semaphores are never closed.
    limit?.clone().acquire_owned().await.ok()
}

/// Where the locks are.
#[derive(Clone)]
pub(crate) struct Namespace {
    pub database: String,
    pub collection: String,
    pub options: CollectionOptions,
    /// The write concern of releases: that of the primary alone. A release that is rolled back leaves the name busy until its
    /// lease ends, and a later grant is confirmed by the majority only together with the release before it.
    pub release_concern: WriteConcern,
}

impl Namespace {
    fn of(&self, client: Client) -> Arc<Connected> {
        let database = client.database(&self.database);
        let locks = database.collection_with_options(&self.collection, self.options.clone());
        let mut options = self.options.clone();
        options.write_concern = Some(self.release_concern.clone());
        let releases = database.collection_with_options(&self.collection, options);
        Arc::new(Connected {
            client,
            locks,
            releases,
        })
    }
}

/// A client, and its collection of the locks.
pub(crate) struct Connected {
    pub client: Client,
    pub locks: Collection<Document>,
    /// The same collection, with the write concern of releases.
    pub releases: Collection<Document>,
}

impl Connected {
    /// Returns the collection with the full write concern, or with that of releases, for a write that another one follows.
    pub(crate) fn locks_for(&self, has_full_concern: bool) -> &Collection<Document> {
        if has_full_concern { &self.locks } else { &self.releases }
    }
}

/// Opens a connection to the primary: where all are in use, a command opens one.
fn opening(pool: Weak<Pool>) -> Opening {
    Box::new(move || {
        let client = pool.upgrade().map(|pool| pool.connected().client.clone());
        async move {
            match client {
                Some(client) => client.database("admin").run_command(doc! { "ping": 1 }).await.is_ok(),
                None => false,
            }
        }
        .boxed()
    })
}

/// The connections of one engine.
pub(crate) struct Pool {
    settings: ClientSettings,
    namespace: Namespace,
    monitor: Arc<ServerMonitor>,
    current: RwLock<Arc<Connected>>,
    connections: Arc<Openings>,
    unreserved: Arc<Semaphore>,
    attempts: Arc<AttemptQueue>,
    confirmations: Arc<Semaphore>,
    releases: Arc<Semaphore>,
    session_ends: Arc<Semaphore>,
    queries: Arc<Semaphore>,
    store_timeout: Duration,
    /// When the driver answered last, in nanoseconds of [`Moment`].
    answered: AtomicU64,
    /// The latest beginning of a call that the driver has answered, in nanoseconds of [`Moment`].
    answered_began: AtomicU64,
}

impl Pool {
    /// Creates a pool for calls with `client`, which was made from `settings`, on `size` connections. `open`: those that are open.
    pub(crate) fn new(
        client: Client,
        settings: ClientSettings,
        namespace: Namespace,
        monitor: Arc<ServerMonitor>,
        (size, open): (u32, Arc<OpenConnections>),
        store_timeout: Duration,
    ) -> Arc<Self> {
        let size = size.max(1) as usize;
        let current = RwLock::new(namespace.of(client));
        let permits = |count: usize| Arc::new(Semaphore::new(count.max(1)));
        Arc::new_cyclic(|pool: &Weak<Pool>| Pool {
            connections: Openings::new(open, size, opening(pool.clone())),
            settings,
            namespace,
            monitor,
            current,
            unreserved: permits(size - (size / 8).max(1)),
            confirmations: permits(size / 4),
            attempts: AttemptQueue::new((size * 5 / 8).max(1)),
            releases: permits(size / 2),
            session_ends: permits(size / 16),
            queries: permits(size / 8),
            store_timeout,
            answered: AtomicU64::new(Moment::now().to_nanos()),
            answered_began: AtomicU64::new(0),
        })
    }

    /// Returns the current client and its collection.
    pub(crate) fn connected(&self) -> Arc<Connected> {
        self.current.read().clone()
    }

    /// Returns the collection of the locks with the current client.
    pub(crate) fn locks(&self) -> Collection<Document> {
        self.connected().locks.clone()
    }

    /// Returns the same collection with the write concern of releases.
    pub(crate) fn releases(&self) -> Collection<Document> {
        self.connected().releases.clone()
    }

    /// Whether the members of the replica set confirm no writes, as far as it is known.
    pub(crate) fn is_without_majority(&self) -> bool {
        self.monitor.is_without_majority()
    }

    /// Replaces the failure to find a usable server by a description of the servers.
    pub(crate) fn explain(&self, failure: Failure) -> Failure {
        if failure.is_unconfirmed() {
            self.monitor.note_unconfirmed();
        }
        self.monitor.explain(failure)
    }

    /// Waits for the right to make calls, one at a time. Dropping the future leaves the queue.
    pub(crate) async fn permit(&self, class: Class<'_>) -> Permit {
        let (attempt, limit) = match class {
            Class::Acquire(name) => (Some(self.attempts.permit(name).await), None),
            Class::Confirm => (None, Some(&self.confirmations)),
            Class::Release => (None, Some(&self.releases)),
            Class::EndSession => (None, Some(&self.session_ends)),
            Class::Query => (None, Some(&self.queries)),
            Class::Keep => (None, None),
        };
        let unreserved = Some(&self.unreserved).filter(|_| class != Class::Keep);
        Permit {
            _attempt: attempt,
            _class: share_of(limit).await,
            _unreserved: share_of(unreserved).await,
            _connection: self.connections.permit().await,
        }
    }

    /// Notes that a change stream uses a connection, without a permit.
    pub(crate) fn use_for_stream(&self) -> UsedOtherwise {
        self.connections.use_otherwise()
    }

    /// Makes `calls` in a task of its own, which keeps the permit until they have ended. The task goes on when the future is
    /// dropped.
    ///
    /// # Errors
    /// Those of the calls, or [`Failure::unanswered`] when they did not end within the limit.
    pub(crate) fn run<T, F>(self: &Arc<Self>, permit: Permit, calls: F) -> impl Future<Output = Outcome<T>> + use<T, F>
    where
        T: Send + 'static,
        F: Future<Output = Outcome<T>> + Send + 'static,
    {
        let (pool, (sender, answer)) = (self.clone(), oneshot::channel());
        let calls = async move {
            let outcome = calls.await.map_err(|failure| pool.explain(failure));
            let _ = sender.send(outcome);
        };
        let task = tokio::spawn(self.clone().within_limit(permit, calls.boxed()));
        async {
            // The task panicked, or its runtime ended.
            task.await.unwrap_or_else(|_| Err(Failure::shutdown()))?;
            answer.await.unwrap_or_else(|_| Err(Failure::shutdown()))
        }
    }

    /// Waits for the end of `calls` within the limit. `calls` is boxed: this code is compiled once, and not for each kind of call.
    async fn within_limit(self: Arc<Self>, permit: Permit, calls: BoxFuture<'static, ()>) -> Outcome<()> {
        let began = Moment::now();
        let have_ended = tokio::select! {
            biased;
            () = calls => true,
            () = self.has_no_answer_in_time(began) => false,
        };
        drop(permit);
        if have_ended {
            self.answered.store(Moment::now().to_nanos(), Relaxed);
            self.answered_began.fetch_max(began.to_nanos(), Relaxed);
            return Ok(());
        }
        let waited = began.elapsed();
        if waited >= self.store_timeout * LIMIT {
            self.replace_client_unless_answered_since(began);
        }
        Err(Failure::unanswered(waited))
    }

    /// Makes the calls of a class as soon as there is a permit. Only then does `calls` create its future, because thousands of
    /// calls may wait.
    pub(crate) async fn call<T, F>(self: &Arc<Self>, class: Class<'_>, calls: impl FnOnce() -> F) -> Outcome<T>
    where
        T: Send + 'static,
        F: Future<Output = Outcome<T>> + Send + 'static,
    {
        let permit = self.permit(class).await;
        self.run(permit, calls()).await
    }

    /// Waits for the longest time that a call may take that began just now. That is one store timeout where another primary was
    /// elected, or where calls were answered that began later by half a store timeout: their caller has timed out by then.
    ///
    /// # Behavior
    /// While the whole server hangs it answers no call, and this waits for all of the limit.
    async fn has_no_answer_in_time(&self, began: Moment) {
        let mut election = self.monitor.election();
        let later = began
            .to_nanos()
            .saturating_add((self.store_timeout / 2).as_nanos() as u64);
        tokio::time::sleep(self.store_timeout).await;
        let elected = async {
            if election.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let passed_over = async {
            for _ in 1..LIMIT {
                if self.answered_began.load(Relaxed) >= later {
                    return;
                }
                tokio::time::sleep(self.store_timeout).await;
            }
        };
        tokio::select! {
            () = elected => {}
            () = passed_over => {}
        }
    }

    /// Closes the connections. Waits for the driver for `limit` at most.
    ///
    /// # Behavior
    /// After `shutdown`, the driver's monitor (mongodb 3.9.1, `sdam/monitor.rs`) repeats a failed attempt to connect without a
    /// pause. An attempt at a Unix socket that refuses connections fails without waiting, so the monitor would never yield, and
    /// block this thread. There are no connections to close then; the drop of the client ends the monitor.
    pub(crate) async fn shut_down(&self, limit: Duration) {
        if self.settings.sockets_accept() {
            let _ = tokio::time::timeout(limit, self.connected().client.clone().shutdown().immediate(true)).await;
        }
    }

    /// Replaces the client if the driver has answered no call since `began` although a server answered its monitor.
    fn replace_client_unless_answered_since(&self, began: Moment) {
        if self.answered.load(Relaxed) > began.to_nanos() || !self.monitor.has_seen_a_server_since(began) {
            return;
        }
        let Ok(client) = self.settings.client() else {
            return;
        };
        tracing::warn!(
            "no call was answered for {:?}: the MongoDB client is replaced",
            began.elapsed()
        );
        // The last call of the old client drops it.
        *self.current.write() = self.namespace.of(client);
        self.answered.store(Moment::now().to_nanos(), Relaxed);
    }
}
