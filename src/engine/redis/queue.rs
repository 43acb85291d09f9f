//! The process's part in the queues of Redis.
//!
//! # Behavior
//! What the waiters of this process share is its mailbox, one channel on which the server names the waiter that a name was
//! handed to, and its sign of life: one script for all names, which is also run when the lease in a waiter's way ends,
//! and hands on what has become free.

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

/// The most names in one script, so that the server is not kept from others for long.
const NAMES_AT_ONCE: usize = 100;

/// The waiters of one engine.
pub(super) struct Waiters {
    route: Route,
    layout: Layout,
    /// By what the queues know this engine: random, hexadecimal.
    pub(super) process: String,
    /// With each name goes the mailbox where its waiters are told.
    pub(super) known: Arc<local_waiters::LocalWaiters<Arc<ChannelSubscription>>>,
    mailboxes: Mutex<Mailboxes>,
}

#[derive(Default)]
struct Mailboxes {
    /// Those that are open, by slot.
    open: HashMap<u16, Weak<ChannelSubscription>>,
    /// The only one, where there are no slots: it stays open.
    kept: Option<Arc<ChannelSubscription>>,
}

impl Waiters {
    pub(super) fn new(route: Route, layout: Layout) -> Arc<Self> {
        Arc::new(Waiters {
            route,
            layout,
            process: format!("{:016x}", fastrand::u64(..)),
            known: Arc::new(local_waiters::LocalWaiters::new()),
            mailboxes: Mutex::default(),
        })
    }

    fn mailboxes(&self) -> MutexGuard<'_, Mailboxes> {
        self.mailboxes.lock()
    }

    /// By what the queues know a waiter of this engine: a member as in `queue.lua`.
    pub(super) fn member(&self, claim: &Claim) -> String {
        let (process, owner) = (&self.process, claim.owner.as_str());
        match short_ttl(claim) {
            Some(ttl) => format!("{process}:{owner}:{ttl}"),
            None => format!("{process}:{owner}"),
        }
    }

    /// What a member tells besides its owner, with a colon between the two.
    pub(super) fn place(&self, claim: &Claim) -> Cow<'_, str> {
        match short_ttl(claim) {
            Some(ttl) => format!("{}:{ttl}", self.process).into(),
            None => (&*self.process).into(),
        }
    }

    /// The mailbox for a slot, if it is open: whether this engine would hear of a name that is handed to it.
    pub(super) fn ear(&self, slot: u16) -> Option<Arc<ChannelSubscription>> {
        self.mailboxes().open.get(&slot).and_then(Weak::upgrade)
    }

    /// Opens the mailbox for a slot, for as long as somebody waits there. Where there are no slots it stays open for as
    /// long as the engine lives.
    pub(super) async fn listen(self: &Arc<Self>, slot: u16) -> Result<Arc<ChannelSubscription>, Failure> {
        let waiters = Arc::downgrade(self);
        let deliver = Arc::new(move |message: &[u8]| {
            if let Some(waiters) = waiters.upgrade() {
                waiters.deliver(message);
            }
        });
        let ear = Arc::new(self.route.listen(slot, &self.process, deliver).await?);
        let mut mailboxes = self.mailboxes();
        if let Some(other) = mailboxes.open.get(&slot).and_then(Weak::upgrade) {
            drop(mailboxes);
            return Ok(other);
        }
        mailboxes.open.retain(|_, ear| ear.strong_count() > 0);
        mailboxes.open.insert(slot, Arc::downgrade(&ear));
        if !self.route.is_cluster() {
            mailboxes.kept = Some(ear.clone());
        }
        Ok(ear)
    }

    /// Returns the mailbox for a slot; opens it if necessary.
    pub(super) async fn listening(self: &Arc<Self>, slot: u16) -> Result<Arc<ChannelSubscription>, Failure> {
        match self.ear(slot) {
            Some(ear) => Ok(ear),
            None => self.listen(slot).await,
        }
    }

    /// Wakes the waiter that a message names; all of them when it names none, after a connection was lost.
    fn deliver(self: &Arc<Self>, message: &[u8]) {
        if message.is_empty() {
            self.known.wake_all();
            return;
        }
        // Other messages are not for us to understand.
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
                    // Its place costs the others some time more: whom it is handed to is asked again.
                    tracing::debug!(%failure, "a waiter that nobody knows could not be disowned");
                }
            });
        }
    }

    /// Takes away the place of a waiter that this process does not know. Else the name would be handed to it again and
    /// again: its process is alive, after all.
    async fn remove_waiter(self: &Arc<Self>, member: &str, lock: &str) -> Result<(), Failure> {
        let Some(name) = self.layout.name_of(lock) else {
            return Ok(());
        };
        let mut call = REMOVE_WAITER.call(&self.layout, &[Part::Lock, Part::Queue], std::iter::once(name));
        let slot = self.route.slot(&self.layout, name);
        call.arg(self.route.mailboxes(slot)).arg(member);
        let reply = tokio::time::timeout(self.route.limit(), self.route.run(&REMOVE_WAITER, &call, slot)).await;
        if reply.unwrap_or(Err(Failure::Unexpected("no answer in time")))? == Value::Int(3)
            && let Ok(key) = Key::new(name)
        {
            self.hand_off(&key);
        }
        Ok(())
    }

    /// Hands on a free name in the background, after a script that removed dead waiters and could not finish.
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
                .arg(waiters.route.mailboxes(slot))
                .arg("")
                .arg(0);
            // The loop ends: each call removes some. After a failure the heartbeats of live waiters continue.
            while let Ok(Ok(Value::Int(2..))) =
                tokio::time::timeout(waiters.route.limit(), waiters.route.run(&RELEASE, &call, slot)).await
            {
            }
        });
    }

    /// A waiter has its place in the queue of `key`, behind a lease that ends in `left`.
    pub(super) fn waits(
        self: &Arc<Self>,
        owner: &OwnerToken,
        key: &Key,
        number: u64,
        left: Option<Duration>,
        ear: &Arc<ChannelSubscription>,
    ) {
        if self.known.enter(owner, key, number, left, || ear.clone()) {
            let waiters = self.clone();
            self.route
                .runtime()
                .spawn(async move { waiters.known.run_heartbeats(|names| waiters.look(names)).await });
        }
    }

    /// Gives a sign of life for these names.
    fn look(self: &Arc<Self>, names: Vec<Key>) {
        for some in self.together(names) {
            // A task of its own: a node that hangs must not keep the others from hearing of this process.
            let waiters = self.clone();
            tokio::spawn(async move {
                if let Err(failure) = waiters.beat(&some).await {
                    // Each waiter meets the failure itself, and knows for how long to bear it.
                    tracing::debug!(%failure, "no sign of life could be given");
                    some.iter().for_each(|key| waiters.known.wake(key));
                }
            });
        }
    }

    /// The names in scripts: not too many in one, and none over two slots.
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

    async fn beat(self: &Arc<Self>, names: &[Key]) -> Result<(), Failure> {
        let mut call = HEARTBEAT.call(&self.layout, &[Part::Lock, Part::Queue], names.iter().map(Key::as_str));
        let slot = self.route.slot(&self.layout, names[0].as_str());
        call.arg(self.route.mailboxes(slot)).arg(&self.process);
        let reply = tokio::time::timeout(self.route.limit(), self.route.run(&HEARTBEAT, &call, slot)).await;
        let reply = reply.unwrap_or(Err(Failure::Unexpected("no beat in time")));
        let Value::Array(left) = reply? else {
            return Err(Failure::Unexpected("of heartbeat.lua"));
        };
        for (key, left) in names.iter().zip(left) {
            match left {
                Value::Int(GONE) => self.known.wake(key),
                Value::Int(left) => {
                    let left = u64::try_from(left).ok().map(Duration::from_millis);
                    self.known.set_lease_end(key, left);
                }
                _ => return Err(Failure::Unexpected("of heartbeat.lua")),
            }
        }
        Ok(())
    }
}

/// What `heartbeat.lua` answers for a name that the process has to see to itself.
const GONE: i64 = -2;

/// A ttl that is less than what a name is kept for whom it is handed to, in ms: the queue has it, too.
fn short_ttl(claim: &Claim) -> Option<u64> {
    (claim.ttl.duration() < RESERVATION).then(|| claim.ttl.as_millis())
}
