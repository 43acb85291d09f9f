//! The connections of one engine: which calls may use them, in which order, and what becomes of a call that is dropped.
//!
//! # Why the driver's queue stays empty
//! A driver call that is dropped while it waits for a connection leaves its request in the pool's queue, and the pool's
//! worker removes one request per event (mongodb 3.9.1, `cmap/worker.rs`). After a stall under load that queue consists of
//! dead requests, and every later call waits behind them until it times out. So the engine has as many permits as the pool
//! has connections, and takes a permit before each call. A caller that gives up before it has a permit has sent nothing.
//! From then on the call runs in a task that keeps the permit until the driver has answered, also when the caller is gone:
//! so a caller that gives up neither leaves a request in the driver's queue nor closes a connection.
//!
//! # Order
//! Renewals go before releases, and releases before acquisitions: [`Class`] says how. Within a class the order is that of
//! arrival.
//!
//! # A driver that does not recover
//! A call without an answer is aborted after [`LIMIT`] store timeouts. Where nothing else was answered in all that time
//! although the driver's monitor has seen the server, a new client takes the place of the old one.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use mongodb::bson::Document;
use mongodb::error::ErrorKind;
use mongodb::options::{ClientOptions, CollectionOptions};
use mongodb::{Client, Collection};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Outcome;
use super::failure::Failure;
use super::sight::Sight;
use crate::clock::Moment;

/// After so many store timeouts a call without an answer is aborted.
const LIMIT: u32 = 4;

/// What a call is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// Attempts and queries. At most five eighths of the connections.
    Acquire,
    /// Releases and clean-up. At most a quarter of the connections.
    Release,
    /// Renewals, heartbeats, and attempts of waiters whose turn it is. Any connection. They wait for calls that have a
    /// permit, and not for those that still want one.
    Keep,
}

/// The right to use one connection. Its parts are dropped in this order: whoever waits for a connection is served before
/// the next of the same class.
pub(super) struct Permit {
    _connection: Option<OwnedSemaphorePermit>,
    _class: Option<OwnedSemaphorePermit>,
}

/// Where the locks are.
#[derive(Clone)]
pub(super) struct Place {
    pub database: String,
    pub collection: String,
    pub options: CollectionOptions,
}

impl Place {
    fn of(&self, client: &Client) -> Collection<Document> {
        let database = client.database(&self.database);
        database.collection_with_options(&self.collection, self.options.clone())
    }
}

/// The connections of one engine.
pub(super) struct Pool {
    options: ClientOptions,
    place: Place,
    sight: Arc<Sight>,
    current: RwLock<(Client, Collection<Document>)>,
    connections: Arc<Semaphore>,
    acquisitions: Arc<Semaphore>,
    releases: Arc<Semaphore>,
    limit: Duration,
    /// When the driver answered last.
    answered: AtomicU64,
}

impl Pool {
    /// For calls with `client`, made from `options`, on `size` connections.
    pub(super) fn new(
        client: Client,
        options: ClientOptions,
        place: Place,
        sight: Arc<Sight>,
        size: u32,
        store_timeout: Duration,
    ) -> Arc<Self> {
        let size = size.max(1) as usize;
        let locks = place.of(&client);
        let permits = |count: usize| Arc::new(Semaphore::new(count.max(1)));
        Arc::new(Pool {
            options,
            place,
            sight,
            current: RwLock::new((client, locks)),
            connections: permits(size),
            acquisitions: permits(size * 5 / 8),
            releases: permits(size / 4),
            limit: store_timeout * LIMIT,
            answered: AtomicU64::new(Moment::now().to_nanos()),
        })
    }

    /// The collection of the locks, by the current client.
    pub(super) fn locks(&self) -> Collection<Document> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).1.clone()
    }

    /// The current client.
    pub(super) fn client(&self) -> Client {
        self.current.read().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// Waits for the right to make calls one after the other. Dropping the future leaves the queue.
    pub(super) async fn permit(&self, class: Class) -> Permit {
        let class = match class {
            Class::Acquire => Some(&self.acquisitions),
            Class::Release => Some(&self.releases),
            Class::Keep => None,
        };
        // The semaphores are never closed.
        let class = match class {
            Some(class) => class.clone().acquire_owned().await.ok(),
            None => None,
        };
        Permit {
            _connection: self.connections.clone().acquire_owned().await.ok(),
            _class: class,
        }
    }

    /// Makes `calls` in a task of its own, which keeps the permit until they have ended. Dropping the future leaves the
    /// task alone.
    ///
    /// # Errors
    /// Also when the calls had no end within the limit.
    pub(super) async fn run<T, F>(self: &Arc<Self>, permit: Permit, calls: F) -> Outcome<T>
    where
        T: Send + 'static,
        F: Future<Output = Outcome<T>> + Send + 'static,
    {
        let pool = self.clone();
        let task = tokio::spawn(async move {
            let began = Moment::now();
            let outcome = tokio::time::timeout(pool.limit, calls).await;
            drop(permit);
            match outcome {
                Ok(outcome) => {
                    pool.answered.store(Moment::now().to_nanos(), Relaxed);
                    outcome
                }
                Err(_) => {
                    pool.replace_client_unless_answered_since(began);
                    Err(Failure::unanswered(pool.limit))
                }
            }
        });
        // A task that panicked, or whose runtime ends.
        task.await.unwrap_or_else(|_| Err(Failure(ErrorKind::Shutdown.into())))
    }

    /// Makes `calls` of a class as soon as there is a permit.
    pub(super) async fn call<T, F>(self: &Arc<Self>, class: Class, calls: F) -> Outcome<T>
    where
        T: Send + 'static,
        F: Future<Output = Outcome<T>> + Send + 'static,
    {
        let permit = self.permit(class).await;
        self.run(permit, calls).await
    }

    /// Replaces the client if the driver has not answered anything since `began` although the server is there.
    fn replace_client_unless_answered_since(&self, began: Moment) {
        if self.answered.load(Relaxed) > began.to_nanos() || !self.sight.has_seen_a_server_since(began) {
            return;
        }
        let Ok(client) = Client::with_options(self.options.clone()) else {
            return;
        };
        tracing::warn!(
            "no call was answered for {:?}: the MongoDB client is replaced",
            self.limit
        );
        let locks = self.place.of(&client);
        // The old client goes with the last of its calls.
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = (client, locks);
        self.answered.store(Moment::now().to_nanos(), Relaxed);
    }
}
