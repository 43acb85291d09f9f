//! The connection of an engine: opened when a call needs it, shared by all calls, replaced after it broke. Calls on an event
//! loop's thread use the fast path beside it (`fast_path/`).
//!
//! Commands and pushes share one RESP3 connection. A second connection for pub/sub would double the number of connections to
//! the server, would need its own reconnection, and could break without any call noticing.
//!
//! The driver's `ConnectionManager` is not used: it retries by its own rule, and does not replace a connection that is open
//! but silent (a proxy that lost its other side, a peer that vanished).

pub(super) mod dial;
pub(super) mod eviction;
mod fast_path;
pub(super) mod liveness;
pub(super) mod probe;
pub(super) mod pubsub;
pub(super) mod request;
pub(super) mod version;

use std::io;
use std::pin::pin;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use parking_lot::{Mutex, MutexGuard};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ConnectionAddr, PushInfo, PushKind, Value};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot, watch};

use self::liveness::{ATTEMPTS, Health};
use self::pubsub::Topics;
use super::config::{RedisConfig, client, show_address};
use super::error::{Failure, is_refused_login};
use super::fast_path::FastPath;
use super::topology::sentinel;
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::event_loop::unless_it_panics;

/// The capacity of the queue to the driver's task. Its default is 50.
const QUEUE: usize = 1024;
/// The backoff of reconnecting for subscribers.
const RECONNECT: Backoff =
    Backoff::new(Duration::from_micros(37_500), Duration::from_millis(4_500)).with_jitter(2.0 / 3.0);

/// An open connection.
pub(super) struct Connection {
    pub(super) multiplexed: MultiplexedConnection,
    /// Counts the connections of the engine, from 1.
    pub(super) generation: u64,
    pub(super) health: Arc<Health>,
    /// Permits for attempts. Closed when the connection is replaced.
    pub(super) attempts: Semaphore,
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
}

/// The shared connection to one server, and the fast path beside it.
pub(super) struct Link {
    config: RedisConfig,
    address: Arc<str>,
    /// Subscriptions may be dropped outside of a runtime.
    pub(super) runtime: Handle,
    state: Mutex<State>,
    pub(super) topics: Topics,
    /// Whether this link is for the sharded channels of a cluster's node, and for nothing else.
    pub(super) sharded: bool,
    /// Notified when a node has ended a subscription.
    pub(super) endings: watch::Sender<()>,
    fast_path: Mutex<FastPathSlot>,
    /// Whether a call has used the fast path lately (`fast_path.rs`).
    fast_path_used: AtomicBool,
}

enum FastPathSlot {
    /// None. The next one may be opened from this time on.
    Empty(Moment),
    Opening,
    Open(Arc<FastPath>),
    Closed,
}

impl Link {
    /// Creates a link that opens its connection with the first call. Needs a current runtime.
    pub(super) fn new(config: RedisConfig) -> Arc<Self> {
        Self::make(config, false)
    }

    /// Creates a link to a cluster's node for sharded channels only.
    pub(super) fn for_channels(config: RedisConfig) -> Arc<Self> {
        Self::make(config, true)
    }

    fn make(config: RedisConfig, sharded: bool) -> Arc<Self> {
        Arc::new(Link {
            address: config.address().into(),
            config,
            runtime: Handle::current(),
            state: Mutex::new(State {
                slot: Slot::Empty,
                generation: 0,
                restoring: false,
            }),
            topics: Topics::default(),
            sharded,
            endings: watch::Sender::new(()),
            // Never opened lazily: see `open_fast_path` and `allow_fast_path`.
            fast_path: Mutex::new(FastPathSlot::Opening),
            fast_path_used: AtomicBool::new(false),
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
        if let Slot::Open(lost) = &state.slot {
            lost.attempts.close();
        }
        state.generation += 1;
        let (link, generation) = (self.clone(), state.generation);
        let (done, result) = oneshot::channel();
        self.runtime.spawn(FutureExt::boxed(async move {
            if link.config.sentinels().is_some() {
                // The next connection may lead to another server.
                link.lose_fast_path();
            }
            let opening = pin!(tokio::time::timeout(link.config.opening_limit(), link.open(generation)));
            let opened = match unless_it_panics(opening).await {
                Some(Ok(opened)) => opened,
                Some(Err(_)) => {
                    let error = io::Error::from(io::ErrorKind::TimedOut).into();
                    Err(Failure::connect(&link.address, error))
                }
                // A panic. The next call opens a new connection.
                None => {
                    let text = "a bug in holdfast or in its driver: the opening of the connection panicked";
                    let error = io::Error::new(io::ErrorKind::BrokenPipe, text).into();
                    Err(Failure::connect(&link.address, error))
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
        let health = Arc::new(Health::new());
        let options = AsyncConnectionConfig::new()
            // The service has its own timeouts. The driver's 500 ms would make failures of slow replies.
            .set_response_timeout(None)
            .set_connection_timeout(None)
            .set_pipeline_buffer_size(QUEUE)
            .set_push_sender(listener(self, &health, generation));
        let server = dial::locate(&self.config).await?;
        let server_address = server.addr().clone();
        let address: Arc<str> = show_address(&server_address).into();
        let (server, options) = dial::by_server_name(self.config.tls.as_ref(), server, options);
        let opening = async {
            let client = client(server, self.config.tls.as_ref())?;
            client.get_multiplexed_async_connection_with_config(&options).await
        };
        let cannot_connect = |error| match &self.config.credentials {
            // The next attempt gets another login.
            Some(_) if is_refused_login(&error) => Failure::NoLogin(format!("{address} refused it: {error}")),
            _ => Failure::connect(&address, error),
        };
        let started = Moment::now();
        let mut multiplexed = opening.await.map_err(cannot_connect)?;
        health.measured(started.elapsed());
        if self.config.sentinels().is_some() {
            sentinel::confirm(&mut multiplexed, &address).await?;
        }
        tracing::debug!(address = &*address, generation, "connection opened");
        let connection = Arc::new(Connection {
            multiplexed,
            generation,
            health,
            attempts: Semaphore::new(ATTEMPTS),
            address: server_address,
        });
        self.resubscribe(&connection).await.map_err(cannot_connect)?;
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
                if !self.is_subscribed_on(generation) {
                    self.restore(&mut state);
                }
                drop(state);
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
        connection.attempts.close();
        let lost = std::mem::replace(&mut state.slot, Slot::Empty);
        self.restore(&mut state);
        drop(state);
        self.lose_fast_path();
        tracing::debug!(address = &*self.address, generation, "connection replaced");
        drop(lost);
    }

    /// Drops a connection that leads to another server than this one.
    pub(super) fn leave_unless_at(self: &Arc<Self>, (host, port): &(String, u16)) {
        let address = self.config.at(host.clone(), *port);
        let stray = match &self.state().slot {
            Slot::Open(connection) if connection.address != address => connection.generation,
            _ => return,
        };
        self.lose(stray);
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
        if let FastPathSlot::Open(fast_path) = std::mem::replace(&mut *self.fast_path_slot(), FastPathSlot::Closed) {
            fast_path.end();
        }
        let last = std::mem::replace(&mut self.state().slot, Slot::Closed);
        drop(last);
    }
}

impl Drop for Link {
    /// Ends the fast path, which the event loop and the watchdog would keep open. The last owner may be a reply that it reads.
    fn drop(&mut self) {
        if let FastPathSlot::Open(fast_path) = self.fast_path.get_mut() {
            fast_path.abandon();
        }
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

/// Handles the pushes of the server. The driver calls it; it must not block.
fn listener(
    link: &Arc<Link>,
    health: &Arc<Health>,
    generation: u64,
) -> impl Fn(PushInfo) -> Result<(), ()> + Send + Sync + 'static {
    let (link, health) = (Arc::downgrade(link), health.clone());
    move |push| {
        match (push.kind, push.data.as_slice()) {
            (PushKind::Disconnection, _) => {
                health.mark_dead();
                if let Some(link) = link.upgrade() {
                    link.lose(generation);
                }
            }
            (PushKind::Message | PushKind::SMessage, [Value::BulkString(channel), Value::BulkString(message)]) => {
                if let Some(link) = link.upgrade() {
                    link.topics.notify(channel, message);
                }
            }
            (PushKind::SUnsubscribe, [Value::BulkString(channel), ..]) => {
                if let Some(link) = link.upgrade() {
                    link.topics.end(channel);
                    link.endings.send_replace(());
                }
            }
            _ => {}
        }
        Ok(())
    }
}
