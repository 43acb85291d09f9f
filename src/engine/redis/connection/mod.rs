//! The connection of an engine: opened when a call needs it, shared by all calls, replaced after it broke. `wire/` has its protocol.
//!
//! Commands and pushes share one RESP3 connection. A second connection for pub/sub would double the number of connections to
//! the server, would need its own reconnection, and could break without any call noticing.
//!
//! The connections of the `redis` crate are not used. They do not replace a connection that is open but silent (a proxy that lost its
//! other side, a peer that vanished). They send the commands of callers that have left. The caller's event loop cannot poll them.

pub(super) mod dial;
pub(super) mod eviction;
pub(super) mod liveness;
pub(super) mod probe;
pub(super) mod pubsub;
pub(super) mod records;
pub(super) mod request;
mod serving;
pub(super) mod version;

use std::io;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use parking_lot::{Mutex, MutexGuard};
use redis::ConnectionAddr;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};

use self::liveness::Health;
use self::pubsub::Topics;
use self::records::Records;
use self::serving::{Serving, watch_silence};
use self::version::Greeting;
use super::config::{RedisConfig, show_address};
use super::error::{Failure, is_refused_login};
use super::wire::{Wire, flush};
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::event_loop::{Task, unless_it_panics};

/// The backoff of reconnecting for subscribers.
const RECONNECT: Backoff =
    Backoff::new(Duration::from_micros(37_500), Duration::from_millis(4_500)).with_jitter(2.0 / 3.0);

/// The longest wait for a late reply. A server that was stopped may continue at any time, but requests in the buffers of a connection
/// are executed or lost with it within about a minute.
pub(super) const LATE_REPLY: Duration = Duration::from_secs(65);

/// An open connection.
pub(super) struct Connection {
    pub(super) wire: Arc<Wire>,
    /// Counts the connections of the engine, from 1.
    pub(super) generation: u64,
    pub(super) health: Arc<Health>,
    greeting: Option<Greeting>,
    /// The address of the server.
    address: ConnectionAddr,
}

type Opening = Shared<BoxFuture<'static, Result<Arc<Connection>, Failure>>>;

enum Slot {
    Empty,
    /// One attempt to connect, for all callers that wait.
    Opening(Opening),
    Open(Arc<Connection>),
    Closed,
}

struct State {
    slot: Slot,
    /// The generation of the connection in the slot, or of the last one.
    generation: u64,
    /// Whether a task reconnects for subscribers.
    restoring: bool,
    /// The connections that calls may still use.
    open: Vec<Weak<Connection>>,
}

/// The shared connection to one server.
pub(super) struct Link {
    config: RedisConfig,
    address: Arc<str>,
    /// Subscriptions may be dropped outside of a runtime.
    pub(super) runtime: Handle,
    state: Mutex<State>,
    pub(super) topics: Topics,
    /// Whether its channels are the sharded ones of a cluster's node.
    pub(super) sharded: bool,
    /// Notified when a node has ended a subscription.
    pub(super) endings: watch::Sender<()>,
    records: Mutex<Records>,
}

impl Link {
    /// Creates a link that opens its connection with the first call. Needs a current runtime.
    pub(super) fn new(config: RedisConfig) -> Arc<Self> {
        let sharded = !config.seeds().is_empty();
        Arc::new(Link {
            address: config.address().into(),
            config,
            runtime: Handle::current(),
            state: Mutex::new(State {
                slot: Slot::Empty,
                generation: 0,
                restoring: false,
                open: Vec::new(),
            }),
            topics: Topics::default(),
            sharded,
            endings: watch::Sender::new(()),
            records: Mutex::default(),
        })
    }

    pub(super) fn config(&self) -> &RedisConfig {
        &self.config
    }

    /// Returns the longest time of any exchange on a live connection.
    pub(super) fn limit(&self) -> Duration {
        self.config.limit
    }

    /// Returns how long a connection may be silent while calls wait. A little less than the limit: the service's timer
    /// starts before the call, and the call that it ends has to count as one without a reply.
    pub(super) fn silence_limit(&self) -> Duration {
        self.config.limit - self.config.limit / 16
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Returns the current connection. Opens a new one if there is none or if it is lost.
    pub(super) async fn connection(self: &Arc<Self>) -> Result<Arc<Connection>, Failure> {
        let opening = {
            let mut state = self.state();
            match &state.slot {
                Slot::Open(connection) if !connection.health.is_lost(self.silence_limit()) => {
                    return Ok(connection.clone());
                }
                Slot::Opening(opening) => opening.clone(),
                Slot::Closed => return Err(Failure::Closed(self.address.clone())),
                Slot::Open(_) | Slot::Empty => self.start(&mut state),
            }
        };
        opening.await
    }

    /// Returns the current connection, if it is open.
    pub(super) fn current(&self) -> Option<Arc<Connection>> {
        match &self.state().slot {
            Slot::Open(connection) if !connection.health.is_lost(self.silence_limit()) => Some(connection.clone()),
            _ => None,
        }
    }

    /// Returns the current connection, if there is one or if one is being opened.
    pub(super) async fn existing(&self) -> Option<Arc<Connection>> {
        let opening = match &self.state().slot {
            Slot::Open(connection) if !connection.health.is_dead() => return Some(connection.clone()),
            Slot::Opening(opening) => opening.clone(),
            _ => return None,
        };
        opening.await.ok()
    }

    /// Starts to open the next connection in a task: the first caller may be dropped while others wait for the connection.
    fn start(self: &Arc<Self>, state: &mut State) -> Opening {
        let lost = std::mem::replace(&mut state.slot, Slot::Empty);
        if let Slot::Open(lost) = &lost {
            lost.wire.refuse_attempts();
        }
        state.generation += 1;
        let (link, generation) = (self.clone(), state.generation);
        let (done, result) = oneshot::channel();
        self.runtime.spawn(FutureExt::boxed(async move {
            // Without the lock: the calls on it get its errors.
            drop(lost);
            let opening = pin!(tokio::time::timeout(link.config.opening_limit(), link.open(generation)));
            let failed = |error: io::Error| Err(Failure::connect(&link.address, error.into()));
            let opened = match unless_it_panics(opening).await {
                Some(Ok(opened)) => opened,
                Some(Err(_)) => failed(io::ErrorKind::TimedOut.into()),
                // A panic. The next call opens a new connection.
                None => {
                    let text = "a bug in holdfast or in its driver: the opening of the connection panicked";
                    failed(io::Error::new(io::ErrorKind::BrokenPipe, text))
                }
            };
            // All callers may have been dropped.
            let _ = done.send(link.publish(generation, opened));
        }));
        let address = self.address.clone();
        let opening = async move { result.await.unwrap_or(Err(Failure::Closed(address))) }
            .boxed()
            .shared();
        state.slot = Slot::Opening(opening.clone());
        opening
    }

    async fn open(self: &Arc<Self>, generation: u64) -> Result<Arc<Connection>, Failure> {
        let server = dial::locate(&self.config).await?;
        let server_address = server.addr().clone();
        let address: Arc<str> = show_address(&server_address).into();
        let cannot_connect = |failure| match (failure, &self.config.credentials) {
            // The next attempt gets another login.
            (Failure::Call(error), Some(_)) if is_refused_login(&error) => {
                Failure::NoLogin(format!("{address} refused it: {error}"))
            }
            (Failure::Call(error), _) => Failure::connect(&address, error),
            (failure, _) => failure,
        };
        let (health, started) = (Arc::new(Health::new()), Moment::now());
        let opened = dial::open(&self.config, &server, self.topics.receivers()).await;
        let (opened, greeting) = opened.map_err(&cannot_connect)?;
        health.measured(started.elapsed());
        tracing::debug!(address = &*address, generation, "connection opened");
        let event_loop = self.config.event_loop.as_ref();
        let wire = Wire::new(opened, health.clone(), self.config.layout.clone(), event_loop.cloned());
        let serving = Serving {
            link: Arc::downgrade(self),
            wire: Arc::downgrade(&wire),
            health: health.clone(),
            generation,
        };
        Task::spawn(event_loop.map(|event_loop| &**event_loop), serving.run());
        if let Some(event_loop) = event_loop {
            Task::spawn(Some(&**event_loop), flush(Arc::downgrade(&wire)));
        }
        let connection = Arc::new(Connection {
            wire,
            generation,
            health: health.clone(),
            greeting,
            address: server_address,
        });
        let watching = watch_silence(Arc::downgrade(self), Arc::downgrade(&connection), health, self.limit());
        self.runtime.spawn(watching.boxed());
        let subscribed = self.resubscribe(&connection).await;
        subscribed.map_err(|error| cannot_connect(error.into()))?;
        Ok(connection)
    }

    /// Puts the outcome of an attempt to connect into the slot.
    fn publish(
        self: &Arc<Self>,
        generation: u64,
        opened: Result<Arc<Connection>, Failure>,
    ) -> Result<Arc<Connection>, Failure> {
        let mut state = self.state();
        if matches!(state.slot, Slot::Closed) {
            return Err(Failure::Closed(self.address.clone()));
        }
        match &opened {
            Ok(connection) if !connection.health.is_dead() => {
                state.slot = Slot::Open(connection.clone());
                state.open.retain(|open| open.strong_count() > 0);
                state.open.push(Arc::downgrade(connection));
                if !self.is_subscribed_on(generation) {
                    self.restore(&mut state);
                }
                drop(state);
                self.leave_others(&connection.address);
                if generation > 1 {
                    // Messages of the time without a connection were lost.
                    self.topics.notify_all();
                }
            }
            _ => {
                state.slot = Slot::Empty;
                self.restore(&mut state);
            }
        }
        opened
    }

    /// Removes a connection from the slot, if it is still the current one.
    pub(super) fn lose(self: &Arc<Self>, generation: u64) {
        let mut state = self.state();
        let Slot::Open(connection) = &state.slot else { return };
        if connection.generation != generation {
            return;
        }
        connection.health.mark_dead();
        connection.wire.refuse_attempts();
        let lost = std::mem::replace(&mut state.slot, Slot::Empty);
        self.restore(&mut state);
        drop(state);
        tracing::debug!(address = &*self.address, generation, "connection replaced");
        drop(lost);
    }

    /// Ends every connection to another address. Its calls fail: a late reply of a former master is no grant.
    pub(super) fn leave_others(self: &Arc<Self>, address: &ConnectionAddr) {
        let open: Vec<_> = self.state().open.iter().filter_map(Weak::upgrade).collect();
        for stray in open.iter().filter(|connection| connection.address != *address) {
            self.lose(stray.generation);
            stray.wire.end();
        }
    }

    /// Reconnects in the background, and subscribes again, if there are subscribers.
    fn restore(self: &Arc<Self>, state: &mut State) {
        if state.restoring || self.topics.is_empty() {
            return;
        }
        state.restoring = true;
        self.runtime.spawn(keep_trying(Arc::downgrade(self)).boxed());
    }

    /// Closes the connection after the calls on it have ended, and refuses new calls.
    pub(super) fn close(&self) {
        let last = std::mem::replace(&mut self.state().slot, Slot::Closed);
        drop(last);
    }
}

/// Reconnects until there is a connection with all subscriptions, or no subscriber is left.
async fn keep_trying(link: Weak<Link>) {
    let mut backoff = RECONNECT;
    loop {
        // With jitter, so that the clients of a restarted server do not all reconnect at the same time.
        tokio::time::sleep(backoff.delay()).await;
        let Some(link) = link.upgrade() else { return };
        let outcome = link.connection().await;
        if let Ok(connection) = &outcome {
            link.subscribe_refused(connection).await;
        }
        let mut state = link.state();
        let settled = match &state.slot {
            Slot::Open(connection) => !connection.health.is_dead() && link.is_subscribed_on(connection.generation),
            Slot::Closed => true,
            _ => link.topics.is_empty(),
        };
        if settled {
            state.restoring = false;
            return;
        }
        drop(state);
        if let Err(failure) = outcome {
            tracing::debug!(%failure, "still no connection for the waiting");
        }
    }
}
