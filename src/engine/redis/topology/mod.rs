//! The server of an engine, or the servers of a cluster.

pub(super) mod cluster;
pub(super) mod failover;
pub(super) mod majority;
pub(super) mod replicas;
mod rights;
pub(super) mod sentinel;

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::runtime::Handle;

use self::cluster::{Cluster, ShardedSubscription};
use super::config::RedisConfig;
use super::connection::Link;
use super::connection::pubsub::{MessageHandler, RedisSubscription};
use super::connection::request::Attempt;
use super::connection::version::check_server;
use super::error::Failure;
use super::keys::slots::{slot_of, tag_for_slot};
use super::keys::{CHANNEL_PREFIX, Layout};
use super::scripts::Script;
use crate::engine::core::stream::PendingReply;

/// One server, or the servers of a cluster by slot.
#[derive(Clone)]
pub(super) enum Route {
    One(Arc<Link>),
    Cluster(Arc<Cluster>),
}

/// A subscription to the channel of this process. It ends when this is dropped.
pub(super) enum ChannelSubscription {
    One { subscription: RedisSubscription },
    Cluster { _subscription: ShardedSubscription },
}

impl ChannelSubscription {
    /// Counts a waiter, for the event loop. `None`: the subscription ends with its waiters, and is counted itself.
    pub(super) fn waits(&self) -> Option<PendingReply> {
        match self {
            ChannelSubscription::One { subscription } => Some(subscription.waits()),
            ChannelSubscription::Cluster { .. } => None,
        }
    }
}

impl Route {
    /// Needs a current runtime.
    pub(super) fn new(config: RedisConfig) -> Self {
        if config.seeds().is_empty() {
            Route::One(Link::new(config))
        } else {
            Route::Cluster(Cluster::new(config))
        }
    }

    /// Returns the address in the URL, for messages.
    pub(super) fn address(&self) -> String {
        match self {
            Route::One(link) => link.config().address(),
            Route::Cluster(cluster) => cluster.config.address(),
        }
    }

    /// Returns the slot of the keys of a name. It is 0 for all names if one server has all slots.
    pub(super) fn slot(&self, layout: &Layout, name: &str) -> u16 {
        if !self.has_slots() {
            return 0;
        }
        let mut lock = String::new();
        layout.lock(name, &mut lock);
        slot_of(&lock)
    }

    /// Runs a script whose keys are in this slot. `attempt` marks an attempt to acquire.
    pub(super) async fn run(
        &self,
        script: &Script,
        call: &Cmd,
        slot: u16,
        attempt: Attempt<'_>,
    ) -> Result<Value, Failure> {
        self.run_first(&[(script, call)], slot, attempt).await
    }

    /// Runs a script, or a smaller one for a name whose keys are not all on one node of a cluster (see [`Cluster::run_first`]).
    pub(super) async fn run_first(
        &self,
        scripts: &[(&Script, &Cmd)],
        slot: u16,
        attempt: Attempt<'_>,
    ) -> Result<Value, Failure> {
        match (self, scripts) {
            (Route::Cluster(cluster), _) => Box::pin(cluster.run_first(scripts, slot, attempt)).await,
            (Route::One(link), [(script, call), ..]) => {
                let connection = link.connection().await?;
                link.run_on(&connection, script, call, false, attempt).await
            }
            (Route::One(_), []) => Err(Failure::Unserved),
        }
    }

    /// Runs a script once for each of several attempts whose keys are in this slot, in the order of the list.
    pub(super) async fn run_in_order(
        &self,
        script: &Script,
        calls: &[Cmd],
        slot: u16,
        attempt: Attempt<'_>,
    ) -> Result<Vec<Result<Value, Failure>>, Failure> {
        let link = match self {
            Route::One(link) => link.clone(),
            Route::Cluster(cluster) => cluster.serving(slot).await?,
        };
        let connection = link.connection().await?;
        link.run_in_order(&connection, script, calls, attempt).await
    }

    /// Returns the servers that have all keys together.
    pub(super) async fn servers(&self) -> Result<Vec<Arc<Link>>, Failure> {
        match self {
            Route::One(link) => Ok(vec![link.clone()]),
            Route::Cluster(cluster) => cluster.masters().await,
        }
    }

    /// Checks that a server answers, is what the URL says, and is new enough. Returns it.
    pub(super) async fn greet(&self) -> Result<Arc<Link>, Failure> {
        let mut last = Failure::Unserved;
        for server in self.servers().await? {
            match check_server(&server, self.is_cluster()).await {
                // One of the masters of a cluster may be down.
                Err(failure) if failure.retryable() => last = failure,
                outcome => return outcome.map(|()| server),
            }
        }
        Err(last)
    }

    /// Returns the prefix of the channels for the scripts. The name of a process follows it.
    pub(super) fn channel_prefix(&self, slot: u16) -> String {
        match self {
            Route::One(_) => CHANNEL_PREFIX.to_owned(),
            Route::Cluster(_) => format!("{CHANNEL_PREFIX}{{{}}}", tag_for_slot(slot)),
        }
    }

    /// Subscribes to the channel of a process for this slot.
    pub(super) async fn listen(
        &self,
        slot: u16,
        process: &str,
        handler: MessageHandler,
    ) -> Result<ChannelSubscription, Failure> {
        let channel = self.channel_prefix(slot) + process;
        match self {
            Route::One(link) => {
                let subscription = link.subscribe(channel, Some(handler)).await?.idle();
                Ok(ChannelSubscription::One { subscription })
            }
            Route::Cluster(cluster) => {
                let _subscription = cluster.listen(slot, channel, handler).await?;
                Ok(ChannelSubscription::Cluster { _subscription })
            }
        }
    }

    /// Whether the keys of one command have to be in one slot.
    pub(super) fn has_slots(&self) -> bool {
        match self {
            Route::One(link) => link.config().is_sharded(),
            Route::Cluster(_) => true,
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self, Route::Cluster(_))
    }

    pub(super) fn limit(&self) -> Duration {
        match self {
            Route::One(link) => link.limit(),
            Route::Cluster(cluster) => cluster.limit(),
        }
    }

    pub(super) fn runtime(&self) -> &Handle {
        match self {
            Route::One(link) => &link.runtime,
            Route::Cluster(cluster) => &cluster.runtime,
        }
    }

    pub(super) fn close(&self) {
        match self {
            Route::One(link) => link.close(),
            Route::Cluster(cluster) => cluster.close(),
        }
    }
}
