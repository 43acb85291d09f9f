//! Redis Cluster: from a slot to the node that serves it.
//!
//! After "Redirection and resharding" in the Redis Cluster specification. Each node has its own connection, as in
//! `connection/`, which replaces broken and silent ones. The cluster client of the `redis` crate is not used: it sends `ASKING` and the
//! command after it separately on a connection that other calls use, too; it takes the `sunsubscribe` push of a slot that moves
//! for the reply to another call; and it does not detect silence.
//!
//! # Behavior
//! A node that refuses a call because its slot moves has not executed it. The call is sent again: to the node that the error
//! names (`MOVED`, `ASK`), or after a pause (`TRYAGAIN`, `CLUSTERDOWN`). All other errors are returned to the caller: the call
//! may have been executed. After each of them the map of the slots is read again.

mod map;
mod refusal;
mod sharded_pubsub;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use parking_lot::{Mutex, MutexGuard};
use redis::{Cmd, ConnectionAddr, Value};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::Instant;

use self::map::{Address, Ranges, SlotMap};
use self::refusal::{Refusal, refusal};
pub(in super::super) use self::sharded_pubsub::ShardedSubscription;
use super::majority::majority_of;
use crate::backoff::Backoff;
use crate::engine::redis::config::RedisConfig;
use crate::engine::redis::connection::Link;
use crate::engine::redis::connection::liveness::SIGNIFICANT_WAIT;
use crate::engine::redis::connection::request::Attempt as AsAttempt;
use crate::engine::redis::error::Failure;
use crate::engine::redis::scripts::Script;

/// The number of nodes that are asked for the map at the same time.
const ASKED: usize = 5;
/// The backoff of calls that a moving slot refused.
const RETRY: Backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(100));
/// The number of redirections in a row without a pause.
const HOPS: u32 = 5;

#[derive(Default)]
struct State {
    map: Option<SlotMap>,
    nodes: HashMap<Address, Arc<Link>>,
    refreshing: Option<Refreshing>,
    closed: bool,
}

type Refreshing = Shared<BoxFuture<'static, Result<(), Failure>>>;

/// The connections to all nodes of a cluster.
pub(in super::super) struct Cluster {
    pub(super) config: RedisConfig,
    pub(in super::super) runtime: Handle,
    state: Mutex<State>,
    /// Notified when the map has changed.
    changes: watch::Sender<()>,
}

impl Cluster {
    /// Needs a current runtime.
    pub(in super::super) fn new(config: RedisConfig) -> Arc<Self> {
        Arc::new(Cluster {
            config,
            runtime: Handle::current(),
            state: Mutex::default(),
            changes: watch::Sender::new(()),
        })
    }

    pub(in super::super) fn limit(&self) -> Duration {
        self.config.limit
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Runs the first of these scripts that the node with the slot of their keys executes: each has fewer keys than the one before, for
    /// a name whose keys are not all on the same node because its slot moves. With several scripts, the last `TRYAGAIN` is returned at
    /// once.
    pub(in super::super) async fn run_first(
        self: &Arc<Self>,
        scripts: &[(&Script, &Cmd)],
        slot: u16,
        as_attempt: AsAttempt<'_>,
    ) -> Result<Value, Failure> {
        let started = Instant::now();
        let (has_smaller, mut has_paused) = (scripts.len() > 1, false);
        let mut scripts = scripts;
        let (mut backoff, mut hops) = (RETRY, 0);
        let mut asked = None;
        while let [(script, call), smaller @ ..] = scripts {
            let asking = asked.is_some();
            let address = match asked.take() {
                Some(address) => address,
                None => self.master(slot).await?,
            };
            let node = self.node(&address)?;
            let mut attempt = Attempt {
                cluster: self,
                sent: Instant::now(),
                answered: false,
            };
            let answer = async {
                let connection = node.connection().await?;
                node.run_on(&connection, script, call, asking, as_attempt).await
            };
            let answer = answer.await;
            attempt.answered = true;
            let failure = match answer {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            if failure.is_split() && has_smaller {
                // Once: usually another node has all keys a moment later.
                if !std::mem::replace(&mut has_paused, true) {
                    tokio::time::sleep(backoff.delay()).await;
                    continue;
                }
                if smaller.is_empty() {
                    return Err(failure);
                }
                scripts = smaller;
                continue;
            }
            let mut is_redirected = true;
            match refusal(&failure, &address) {
                Some(Refusal::Moved(slot, to)) => self.learn(slot, &to),
                Some(Refusal::Ask(to)) => asked = Some(to),
                Some(Refusal::Later) => {
                    // This node serves the slot: the redirection was correct.
                    (is_redirected, hops) = (false, 0);
                    self.refresh_soon();
                }
                None => {
                    if failure.retryable() {
                        self.refresh_soon();
                    }
                    return Err(failure);
                }
            }
            if is_redirected {
                hops += 1;
                if hops <= HOPS {
                    continue;
                }
            }
            // With jitter, because all clients of the slot wait for the same.
            let pause = backoff.delay();
            if started.elapsed() + pause >= self.limit() / 4 {
                return Err(if is_redirected { Failure::Moving } else { failure });
            }
            tokio::time::sleep(pause).await;
        }
        Err(Failure::Moving)
    }

    /// Returns the link to the node that serves a slot, by the current map.
    pub(in super::super) async fn serving(self: &Arc<Self>, slot: u16) -> Result<Arc<Link>, Failure> {
        self.node(&self.master(slot).await?)
    }

    /// Returns a connection to each current master.
    pub(in super::super) async fn masters(self: &Arc<Self>) -> Result<Vec<Arc<Link>>, Failure> {
        self.refresh().await?;
        let masters = self.state().map.as_ref().map(SlotMap::masters).unwrap_or_default();
        masters.iter().map(|master| self.node(master)).collect()
    }

    /// Returns the master of a slot, as far as is known.
    async fn master(self: &Arc<Self>, slot: u16) -> Result<Address, Failure> {
        let known = || self.state().map.as_ref().and_then(|map| map.master(slot).cloned());
        if let Some(master) = known() {
            return Ok(master);
        }
        self.refresh().await?;
        known().ok_or(Failure::Unserved)
    }

    fn node(&self, address: &Address) -> Result<Arc<Link>, Failure> {
        let mut state = self.state();
        if state.closed {
            return Err(Failure::Closed(self.config.address().into()));
        }
        let node = state.nodes.entry(address.clone());
        Ok(node.or_insert_with(|| Link::new(self.config.node(address))).clone())
    }

    fn learn(self: &Arc<Self>, slot: u16, master: &Address) {
        if let Some(map) = &mut self.state().map {
            map.learn(slot, master);
        }
        self.changes.send_replace(());
        // Other slots have probably moved, too.
        self.refresh_soon();
    }

    /// Reads the map again in the background.
    fn refresh_soon(self: &Arc<Self>) {
        let refresh = self.refresh();
        self.runtime.spawn(refresh.boxed());
    }

    /// Reads the map again, once for all concurrent callers.
    fn refresh(self: &Arc<Self>) -> Refreshing {
        let mut state = self.state();
        if let Some(refreshing) = &state.refreshing {
            return refreshing.clone();
        }
        let cluster = self.clone();
        let work = self.runtime.spawn(async move {
            let outcome = cluster.ask().await;
            let mut state = cluster.state();
            state.refreshing = None;
            let map = SlotMap::new(&outcome?);
            let masters = map.masters();
            // Drops the nodes without slots. (A node that a redirection names comes back.)
            state.nodes.retain(|address, _| masters.contains(address));
            state.map = Some(map);
            drop(state);
            cluster.changes.send_replace(());
            Ok(())
        });
        let address = self.config.address().into();
        let refreshing = async move { work.await.unwrap_or(Err(Failure::Closed(address))) }
            .boxed()
            .shared();
        state.refreshing = Some(refreshing.clone());
        refreshing
    }

    /// Returns the map of the majority of some known nodes, or else of the nodes of the URL.
    async fn ask(self: &Arc<Self>) -> Result<Ranges, Failure> {
        let known = self.state().map.as_ref().map(SlotMap::masters).unwrap_or_default();
        if !known.is_empty()
            && let Ok(ranges) = self.ask_some(known).await
        {
            return Ok(ranges);
        }
        self.ask_some(self.config.seeds().iter().filter_map(host_and_port).collect())
            .await
    }

    async fn ask_some(self: &Arc<Self>, mut nodes: Vec<Address>) -> Result<Ranges, Failure> {
        fastrand::shuffle(&mut nodes);
        nodes.truncate(ASKED);
        let mut slots = redis::cmd("CLUSTER");
        slots.arg("SLOTS");
        let slots = &slots;
        let asking = nodes.into_iter().map(|address| async move {
            let at = format!("{}:{}", address.0, address.1);
            let call = async {
                let node = self.node(&address)?;
                let answer = node.call(slots).await;
                let answer = answer.map_err(|failure| failure.in_cluster(&node.config().address()))?;
                map::ranges(&answer, &address).ok_or(Failure::Unexpected("CLUSTER SLOTS"))
            };
            match tokio::time::timeout(self.limit() / 4, call).await {
                Ok(Ok(ranges)) if ranges.is_empty() => Err(Failure::Unserved),
                Ok(answer) => answer,
                Err(late) => Err(Failure::connect(&at.into(), io::Error::from(late).into())),
            }
        });
        majority_of(asking).await.map_err(|failures| {
            // A temporary error is the better information if they differ.
            let best = failures.iter().find(|failure| failure.retryable()).or(failures.first());
            best.cloned().unwrap_or(Failure::Unserved)
        })
    }

    /// Closes the connections after the calls on them have ended, and refuses new calls.
    pub(in super::super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        for (_, node) in state.nodes.drain() {
            node.close();
        }
    }
}

fn host_and_port(address: &ConnectionAddr) -> Option<Address> {
    match address {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => Some((host.clone(), *port)),
        _ => None,
    }
}

/// A call in flight. If it is dropped without an answer, the map is read again: the node may have been replaced.
struct Attempt<'a> {
    cluster: &'a Arc<Cluster>,
    sent: Instant,
    answered: bool,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.answered && self.sent.elapsed() >= SIGNIFICANT_WAIT {
            self.cluster.refresh_soon();
        }
    }
}
