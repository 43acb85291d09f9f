//! The waiters of this process in the queues of Redis.
//!
//! # Behavior
//! The waiters of this process share a channel, on which the server names the waiter that got a name by hand-off. They also
//! share a heartbeat: one script for all names, which is sent at the end of the lease before a waiter, too, and hands off names
//! that became free.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use redis::Value;

use super::error::Failure;
use super::keys::{Layout, Part};
use super::scripts::{HEARTBEAT, RELEASE, REMOVE_WAITER};
use super::topology::{ChannelSubscription, Route};
use crate::engine::local_waiters::{self, RESERVATION};
use crate::model::{Claim, Key, OwnerToken};

/// The largest number of names in one script, so that it blocks the server only for a short time.
const NAMES_AT_ONCE: usize = 100;

/// The waiters of one engine.
pub(super) struct Waiters {
    route: Route,
    layout: Layout,
    /// The name of this engine in the queues: random, hexadecimal.
    pub(super) process: String,
    /// Each name has the channel of its waiters.
    pub(super) known: Arc<local_waiters::LocalWaiters<Arc<ChannelSubscription>>>,
    channels: Mutex<Channels>,
}

#[derive(Default)]
struct Channels {
    /// The open ones, by slot.
    open: HashMap<u16, Weak<ChannelSubscription>>,
    /// The only one without a cluster: it stays open.
    kept: Option<Arc<ChannelSubscription>>,
}

impl Waiters {
    pub(super) fn new(route: Route, layout: Layout) -> Arc<Self> {
        Arc::new(Waiters {
            route,
            layout,
            process: format!("{:016x}", fastrand::u64(..)),
            known: Arc::new(local_waiters::LocalWaiters::new()),
            channels: Mutex::default(),
        })
    }

    fn channels(&self) -> MutexGuard<'_, Channels> {
        self.channels.lock()
    }

    /// Returns the name of a waiter in the queues: a member as in `queue.lua`.
    pub(super) fn member(&self, claim: &Claim) -> String {
        let (process, owner) = (&self.process, claim.owner.as_str());
        match short_ttl(claim) {
            Some(ttl) => format!("{process}:{owner}:{ttl}"),
            None => format!("{process}:{owner}"),
        }
    }

    /// Returns the member without its owner, and with a colon between the other two parts.
    pub(super) fn member_suffix(&self, claim: &Claim) -> Cow<'_, str> {
        match short_ttl(claim) {
            Some(ttl) => format!("{}:{ttl}", self.process).into(),
            None => (&*self.process).into(),
        }
    }

    /// Returns the channel for a slot, if it is open: whether this process receives hand-offs.
    pub(super) fn channel(&self, slot: u16) -> Option<Arc<ChannelSubscription>> {
        self.channels().open.get(&slot).and_then(Weak::upgrade)
    }

    /// Opens the channel for a slot. It stays open while it has waiters; without a cluster, as long as the engine lives.
    pub(super) async fn listen(self: &Arc<Self>, slot: u16) -> Result<Arc<ChannelSubscription>, Failure> {
        let waiters = Arc::downgrade(self);
        let deliver = Arc::new(move |message: &[u8]| {
            if let Some(waiters) = waiters.upgrade() {
                waiters.deliver(message);
            }
        });
        let channel = Arc::new(self.route.listen(slot, &self.process, deliver).await?);
        let mut channels = self.channels();
        if let Some(other) = channels.open.get(&slot).and_then(Weak::upgrade) {
            drop(channels);
            return Ok(other);
        }
        channels.open.retain(|_, channel| channel.strong_count() > 0);
        channels.open.insert(slot, Arc::downgrade(&channel));
        if !self.route.is_cluster() {
            channels.kept = Some(channel.clone());
        }
        Ok(channel)
    }

    /// Returns the channel for a slot. Opens it if necessary.
    pub(super) async fn listening(self: &Arc<Self>, slot: u16) -> Result<Arc<ChannelSubscription>, Failure> {
        match self.channel(slot) {
            Some(channel) => Ok(channel),
            None => self.listen(slot).await,
        }
    }

    /// Wakes the waiter that a message names. Wakes all waiters after an empty message: a connection was lost.
    fn deliver(self: &Arc<Self>, message: &[u8]) {
        if message.is_empty() {
            self.known.wake_all();
            return;
        }
        // Other messages are ignored.
        let Some((member, lock)) = std::str::from_utf8(message).ok().and_then(|text| text.split_once(' ')) else {
            return;
        };
        if let Some(left) = member.strip_prefix("wait:") {
            // A waiter of another process has this time to confirm, in ms.
            let key = self.layout.name_of(lock).and_then(|name| Key::new(name).ok());
            if let (Ok(left), Some(key)) = (left.parse(), key) {
                self.known.set_lease_end(&key, Some(Duration::from_millis(left)));
            }
            return;
        }
        let Some(owner) = member.split(':').nth(1).and_then(|owner| OwnerToken::parse(owner).ok()) else {
            return;
        };
        if !self.known.notify(&owner) {
            let (waiters, member, lock) = (self.clone(), member.to_owned(), lock.to_owned());
            self.route.runtime().spawn(async move {
                if let Err(failure) = waiters.remove_waiter(&member, &lock).await {
                    // Its position delays the others: the name is handed to it again.
                    tracing::debug!(%failure, "an unknown waiter could not be removed from the queue");
                }
            });
        }
    }

    /// Removes a waiter that this process does not know. Else the name would be handed to it again and again, because its
    /// process is alive.
    async fn remove_waiter(self: &Arc<Self>, member: &str, lock: &str) -> Result<(), Failure> {
        let Some(name) = self.layout.name_of(lock) else {
            return Ok(());
        };
        let mut call = REMOVE_WAITER.call(&self.layout, &[Part::Lock, Part::Queue], std::iter::once(name));
        let slot = self.route.slot(&self.layout, name);
        call.arg(self.route.channel_prefix(slot)).arg(member);
        let reply = tokio::time::timeout(self.route.limit(), self.route.run(&REMOVE_WAITER, &call, slot)).await;
        if reply.unwrap_or(Err(Failure::timed_out()))? == Value::Int(3)
            && let Ok(key) = Key::new(name)
        {
            self.hand_off(&key);
        }
        Ok(())
    }

    /// Hands off a free name in the background, after a script that removed dead waiters and could not finish.
    pub(super) fn hand_off(self: &Arc<Self>, key: &Key) {
        let (waiters, key) = (self.clone(), key.clone());
        self.route.runtime().spawn(async move {
            // The release of an owner that holds nothing.
            let mut call = RELEASE.call(
                &waiters.layout,
                &[Part::Lock, Part::Queue, Part::Fence],
                std::iter::once(key.as_str()),
            );
            let slot = waiters.route.slot(&waiters.layout, key.as_str());
            call.arg(OwnerToken::fresh().as_str())
                .arg(1)
                .arg(waiters.route.channel_prefix(slot))
                .arg("")
                .arg(0);
            // The loop ends: each call removes some. After a failure the heartbeats of live waiters continue.
            while let Ok(Ok(Value::Int(2..))) =
                tokio::time::timeout(waiters.route.limit(), waiters.route.run(&RELEASE, &call, slot)).await
            {
            }
        });
    }

    /// Records that a waiter is in the queue of `key`, where the current lease ends after `left`.
    pub(super) fn entered(
        self: &Arc<Self>,
        owner: &OwnerToken,
        key: &Key,
        number: u64,
        left: Option<Duration>,
        channel: &Arc<ChannelSubscription>,
    ) {
        if self.known.enter(owner, key, number, left, || channel.clone()) {
            let waiters = self.clone();
            self.route.runtime().spawn(async move {
                waiters
                    .known
                    .run_heartbeats(|names| waiters.send_heartbeats(names))
                    .await
            });
        }
    }

    /// Sends heartbeats for these names.
    fn send_heartbeats(self: &Arc<Self>, names: Vec<Key>) {
        for some in self.together(names) {
            // In a task of its own: a node that hangs must not delay the heartbeats to other nodes.
            let waiters = self.clone();
            tokio::spawn(async move {
                if let Err(failure) = waiters.send_heartbeat(&some).await {
                    // Each waiter makes an attempt, gets the error itself, and knows its own deadline.
                    tracing::debug!(%failure, "a heartbeat failed");
                    some.iter().for_each(|key| waiters.known.wake(key));
                }
            });
        }
    }

    /// Groups the names into scripts: limited in number, and none with two slots.
    fn together(&self, mut names: Vec<Key>) -> Vec<Vec<Key>> {
        if self.route.is_cluster() {
            let mut slots: HashMap<u16, Vec<Key>> = HashMap::new();
            for name in names.drain(..) {
                let slot = self.route.slot(&self.layout, name.as_str());
                slots.entry(slot).or_default().push(name);
            }
            let some = slots.values().flat_map(|names| names.chunks(NAMES_AT_ONCE));
            return some.map(<[Key]>::to_vec).collect();
        }
        names.chunks(NAMES_AT_ONCE).map(<[Key]>::to_vec).collect()
    }

    async fn send_heartbeat(self: &Arc<Self>, names: &[Key]) -> Result<(), Failure> {
        let mut call = HEARTBEAT.call(&self.layout, &[Part::Lock, Part::Queue], names.iter().map(Key::as_str));
        let slot = self.route.slot(&self.layout, names[0].as_str());
        call.arg(self.route.channel_prefix(slot)).arg(&self.process);
        let reply = tokio::time::timeout(self.route.limit(), self.route.run(&HEARTBEAT, &call, slot)).await;
        let reply = reply.unwrap_or(Err(Failure::timed_out()));
        let Value::Array(left) = reply? else {
            return Err(Failure::Unexpected("heartbeat.lua"));
        };
        for (key, left) in names.iter().zip(left) {
            match left {
                Value::Int(GONE) => self.known.wake(key),
                Value::Int(left) => {
                    let left = u64::try_from(left).ok().map(Duration::from_millis);
                    self.known.set_lease_end(key, left);
                }
                _ => return Err(Failure::Unexpected("heartbeat.lua")),
            }
        }
        Ok(())
    }
}

/// The answer of `heartbeat.lua` for a name whose waiters have to make an attempt.
const GONE: i64 = -2;

/// Returns the ttl in ms if it is less than the reservation of a hand-off. The queue contains it then.
fn short_ttl(claim: &Claim) -> Option<u64> {
    (claim.ttl.duration() < RESERVATION).then(|| claim.ttl.as_millis())
}
