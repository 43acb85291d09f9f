//! The waiters of this process in the queues of Redis.
//!
//! # Behavior
//! The waiters of this process share a channel, on which the server names the waiter that got a name by hand-off. They also
//! share a heartbeat: one script for all names, which is sent at the end of the lease before a waiter, too, and hands off names
//! that became free.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::{Mutex, MutexGuard};
use redis::{Cmd, Value};

use super::error::Failure;
use super::keys::{Layout, Part};
use super::scripts::{HEARTBEAT, RELEASE, REMOVE_WAITER, Script};
use super::topology::{ChannelSubscription, Route};
use crate::clock::Moment;
use crate::engine::core::stream::PendingReply;
use crate::engine::hand_off::{ClockReading, GrantTimes};
use crate::engine::local_waiters;
use crate::engine::{HandOff, WAITER_LIVENESS};
use crate::model::{Claim, Fence, Key, OwnerToken};

/// The largest number of names in one script, so that it blocks the server only for a short time.
const NAMES_AT_ONCE: usize = 100;

/// What a waited name has: the channel of its waiters, and a place in the count of what waits for messages.
type Receiving = (Arc<ChannelSubscription>, Option<PendingReply>);

/// The waiters of one engine.
pub(super) struct Waiters {
    route: Route,
    layout: Layout,
    /// Whether a hand-off may grant a claim. Not with `minReplicas`: a grant counts when the replicas have it. And not where
    /// several servers with clocks of their own have one channel.
    takes_grants: bool,
    /// The name of this engine in the queues: random, hexadecimal.
    pub(super) process: String,
    pub(super) known: Arc<local_waiters::LocalWaiters<Receiving>>,
    channels: Mutex<Channels>,
}

#[derive(Default)]
struct Channels {
    /// The open ones, by slot.
    open: HashMap<u16, Weak<ChannelSubscription>>,
    /// The only one without a cluster: it stays open.
    kept: Option<Arc<ChannelSubscription>>,
    /// The last readings of the servers' clocks, by slot.
    clocks: HashMap<u16, ClockReading>,
}

/// A message to a process: `<member> <lock key>`, with something in front of it if it is more than a wake-up (`queue.lua`).
enum Message<'m> {
    /// A waiter of another process has this time to confirm.
    Wait(Duration),
    /// The waiter got the name, or should make an attempt.
    Wake {
        member: &'m str,
        grant: Option<(Fence, GrantTimes)>,
    },
}

impl Message<'_> {
    /// Returns the message and the lock key. `None`: the message is not understood.
    fn parse(text: &str) -> Option<(Message<'_>, &str)> {
        let (first, rest) = text.split_once(' ')?;
        if let Some(left) = first.strip_prefix("wait:") {
            return Some((Message::Wait(Duration::from_millis(left.parse().ok()?)), rest));
        }
        let Some(grant) = first.strip_prefix("grant:") else {
            let (member, grant) = (first, None);
            return Some((Message::Wake { member, grant }, rest));
        };
        let mut numbers = grant.split(':').map(|number| number.parse::<u64>().ok());
        let mut number = || numbers.next().flatten();
        let fence = Fence(number()?);
        let (granted_us, until_ms) = (number()?, number()?);
        let until_us = until_ms.checked_mul(1000)?;
        let (member, lock) = rest.split_once(' ')?;
        let grant = Some((fence, GrantTimes { granted_us, until_us }));
        Some((Message::Wake { member, grant }, lock))
    }
}

impl Waiters {
    pub(super) fn new(route: Route, layout: Layout, takes_grants: bool) -> Arc<Self> {
        Arc::new(Waiters {
            route,
            layout,
            takes_grants,
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
        format!("{}:{}{}", self.process, claim.owner.as_str(), self.details(claim))
    }

    /// Returns the member without its owner.
    pub(super) fn member_suffix(&self, claim: &Claim) -> String {
        format!("{}{}", self.process, self.details(claim))
    }

    /// Returns what a hand-off has to know of a waiter: `:<pid>@<host>` if it may be a grant, and `:<ttl>` if the ttl is short.
    fn details(&self, claim: &Claim) -> String {
        use std::fmt::Write;
        let mut details = String::new();
        let host = &claim.process.host;
        if self.takes_grants && claim.takes_hand_offs() && !host.is_empty() && !host.contains([' ', ':']) {
            // Writing to a string cannot fail.
            let _ = write!(details, ":{}@{host}", claim.process.pid);
        }
        if claim.ttl.duration() < WAITER_LIVENESS {
            let _ = write!(details, ":{}", claim.ttl.as_millis());
        }
        details
    }

    /// Returns the channel for a slot, if it is open: whether this process receives hand-offs.
    pub(super) fn channel(&self, slot: u16) -> Option<Arc<ChannelSubscription>> {
        self.channels()
            .open
            .get(&self.channel_slot(slot))
            .and_then(Weak::upgrade)
    }

    /// Returns the slot under which the channel for a slot is known: only a cluster has one for each.
    fn channel_slot(&self, slot: u16) -> u16 {
        if self.route.is_cluster() { slot } else { 0 }
    }

    /// Opens the channel for a slot. It stays open while it has waiters; without a cluster, as long as the engine lives.
    pub(super) async fn listen(self: &Arc<Self>, slot: u16) -> Result<Arc<ChannelSubscription>, Failure> {
        let slot = self.channel_slot(slot);
        let waiters = Arc::downgrade(self);
        let handler = Arc::new(move |message: &[u8]| {
            if let Some(waiters) = waiters.upgrade() {
                waiters.deliver(slot, message);
            }
        });
        let channel = Arc::new(self.route.listen(slot, &self.process, handler).await?);
        let mut channels = self.channels();
        if let Some(other) = channels.open.get(&slot).and_then(Weak::upgrade) {
            drop(channels);
            return Ok(other);
        }
        channels.open.retain(|_, channel| channel.strong_count() > 0);
        let Channels { open, clocks, .. } = &mut *channels;
        clocks.retain(|slot, _| open.contains_key(slot));
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

    /// Records that the clock of the server of a slot showed `server_us` after `sent`.
    pub(super) fn read_clock(&self, slot: u16, sent: Moment, server_us: i64) {
        let Ok(server_us) = u64::try_from(server_us) else {
            return;
        };
        let reading = ClockReading { sent, server_us };
        let mut channels = self.channels();
        let last = channels.clocks.entry(slot).or_insert(reading);
        if last.sent < sent {
            *last = reading;
        }
    }

    /// Wakes the waiter that a message names. Wakes all waiters after an empty message: a connection was lost.
    fn deliver(self: &Arc<Self>, slot: u16, message: &[u8]) {
        if message.is_empty() {
            // The next connection may lead to another server.
            self.channels().clocks.remove(&slot);
            self.known.wake_all();
            return;
        }
        // Other messages are ignored.
        let Some((message, lock)) = std::str::from_utf8(message).ok().and_then(Message::parse) else {
            return;
        };
        let key = || self.layout.name_of(lock).and_then(|name| Key::new(name).ok());
        let (member, grant) = match message {
            Message::Wait(left) => {
                if let Some(key) = key() {
                    self.known.set_lease_end(&key, Some(left));
                }
                return;
            }
            Message::Wake { member, grant } => (member, grant),
        };
        let Some(owner) = member.split(':').nth(1).and_then(|owner| OwnerToken::parse(owner).ok()) else {
            return;
        };
        let hand_off = grant.and_then(|(fence, times)| {
            let reading = self.channels().clocks.get(&slot).copied()?;
            let until = reading.local_end(times, Moment::now())?;
            Some(HandOff { fence, until })
        });
        let is_known = match hand_off {
            Some(hand_off) => self.known.grant(&owner, hand_off),
            None => self.known.notify(&owner),
        };
        if !is_known && self.known.has_taken(&owner) {
            // In a cluster a message may arrive from two nodes while a slot moves.
        } else if !is_known {
            let (waiters, member, lock) = (self.clone(), member.to_owned(), lock.to_owned());
            let until_ms = grant.map_or(0, |(_, times)| times.until_us / 1000);
            self.route.runtime().spawn(FutureExt::boxed(async move {
                if let Err(failure) = waiters.remove_waiter(&member, &lock, until_ms).await {
                    // Its position delays the others: the name is handed to it again.
                    tracing::debug!(%failure, "an unknown waiter could not be removed from the queue");
                }
            }));
        } else if let (Some((_, times)), Some(key)) = (grant, key()) {
            // The hand-off limits the liveness of this process to the lease. If it has other waiters for the name, a heartbeat
            // corrects that in time.
            let granted = Duration::from_micros(times.until_us.saturating_sub(times.granted_us));
            self.known.set_lease_end(&key, Some(granted / 2));
        }
    }

    /// Removes a waiter that this process does not know. Else the name would be handed to it again and again, because its
    /// process is alive.
    async fn remove_waiter(self: &Arc<Self>, member: &str, lock: &str, until_ms: u64) -> Result<(), Failure> {
        let Some(name) = self.layout.name_of(lock) else {
            return Ok(());
        };
        let add = |call: &mut Cmd| {
            call.arg(member).arg(self.layout.fences_outlast()).arg(until_ms);
        };
        if let Value::Int(2..) = self.run(&REMOVE_WAITER, &[name], add).await?
            && let Ok(key) = Key::new(name)
        {
            self.hand_off(&key);
        }
        Ok(())
    }

    /// Hands off a free name in the background, after a script that removed dead waiters and could not finish.
    pub(super) fn hand_off(self: &Arc<Self>, key: &Key) {
        let (waiters, key) = (self.clone(), key.clone());
        self.route.runtime().spawn(FutureExt::boxed(async move {
            // The release of an owner that holds nothing.
            let owner = OwnerToken::fresh();
            let add = |call: &mut Cmd| {
                call.arg(owner.as_str());
            };
            // The loop ends: each call removes some. After a failure the heartbeats of live waiters continue.
            while let Ok(Value::Array(answers)) = waiters.run(&RELEASE, &[key.as_str()], add).await
                && let [Value::Int(2..)] = answers[..]
            {}
        }));
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
        if self
            .known
            .enter(owner, key, number, left, || (channel.clone(), channel.waits()))
        {
            let waiters = self.clone();
            self.route.runtime().spawn(FutureExt::boxed(async move {
                waiters
                    .known
                    .run_heartbeats(|names| waiters.send_heartbeats(names))
                    .await
            }));
        }
    }

    /// Sends heartbeats for these names.
    fn send_heartbeats(self: &Arc<Self>, names: Vec<Key>) {
        for some in self.together(names) {
            // In a task of its own: a node that hangs must not delay the heartbeats to other nodes.
            let waiters = self.clone();
            tokio::spawn(FutureExt::boxed(async move {
                if let Err(failure) = waiters.send_heartbeat(&some).await {
                    // Each waiter makes an attempt, gets the error itself, and knows its own deadline.
                    tracing::debug!(%failure, "a heartbeat failed");
                    some.iter().for_each(|key| waiters.known.wake(key));
                }
            }));
        }
    }

    /// Groups the names into scripts: limited in number, and none with two slots.
    fn together(&self, names: Vec<Key>) -> Vec<Vec<Key>> {
        let mut slots: HashMap<u16, Vec<Key>> = HashMap::new();
        for name in names {
            let slot = self.route.slot(&self.layout, name.as_str());
            slots.entry(slot).or_default().push(name);
        }
        let some = slots.values().flat_map(|names| names.chunks(NAMES_AT_ONCE));
        some.map(<[Key]>::to_vec).collect()
    }

    /// Runs a script for the queues of names of one slot, within the limit. `add` adds its arguments after the first.
    async fn run(&self, script: &Script, names: &[&str], add: impl FnOnce(&mut Cmd)) -> Result<Value, Failure> {
        const PARTS: [Part; 3] = [Part::Lock, Part::Queue, Part::Fence];
        let mut call = script.call(&self.layout, &PARTS, names.iter().copied());
        let slot = self.route.slot(&self.layout, names[0]);
        call.arg(self.route.channel_prefix(slot));
        add(&mut call);
        let reply = tokio::time::timeout(self.route.limit(), self.route.run(script, &call, slot, None)).await;
        reply.unwrap_or(Err(Failure::timed_out()))
    }

    async fn send_heartbeat(self: &Arc<Self>, names: &[Key]) -> Result<(), Failure> {
        let texts: Vec<&str> = names.iter().map(Key::as_str).collect();
        let sent = Moment::now();
        let add = |call: &mut Cmd| {
            call.arg(&self.process);
        };
        let Value::Array(left) = self.run(&HEARTBEAT, &texts, add).await? else {
            return Err(Failure::Unexpected("heartbeat.lua"));
        };
        if let Some(Value::Int(server_us)) = left.get(names.len()) {
            self.read_clock(self.route.slot(&self.layout, texts[0]), sent, *server_us);
        }
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
