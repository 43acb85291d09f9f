//! What the verbs and the tasks of an engine share.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use tokio_util::sync::CancellationToken;

use super::client::Client;
use super::entry::{Layout, Stored, fence};
use super::leases::{Class, Leases};
use super::unanswered::Attempts;
use crate::clock::Moment;
use crate::engine::HandOff;
use crate::engine::ends::Ends;
use crate::engine::entries::{Granted, LocalEntries, Place};
use crate::model::{Claim, Key, Ttl};
use crate::stall_detector::StallDetector;

/// A name, and the owner token of an entry of it.
pub(super) type Slot = (Key, Arc<str>);

/// An entry of this process.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub id: Arc<str>,
    pub place: Place,
    /// Whether its transaction created several entries of its name.
    pub has_siblings: bool,
    /// The revision of its last change.
    pub revision: i64,
    /// Its etcd lease, and the class of that.
    pub lease: i64,
    pub class: Class,
    /// The ttl in its record.
    pub ttl: Ttl,
    /// Whether it waits for a hand-off. `false`: it holds, or a claim of several names keeps it.
    pub is_waiter: bool,
}

impl Held {
    /// Describes a new entry of a claim.
    pub(super) fn new(claim: &Claim, place: Place, lease: i64, class: Class) -> Self {
        Held {
            id: claim.owner.as_str().into(),
            place,
            has_siblings: false,
            revision: place.0 as i64,
            lease,
            class,
            ttl: claim.ttl,
            is_waiter: false,
        }
    }

    /// Describes a stored entry.
    pub(super) fn of(stored: &Stored, class: Class, ttl: Ttl) -> Self {
        Held {
            id: stored.id.as_str().into(),
            place: stored.place(),
            has_siblings: stored.has_siblings(),
            revision: stored.kv.mod_revision,
            lease: stored.kv.lease,
            class,
            ttl,
            is_waiter: false,
        }
    }
}

/// Returns the end of a waiter's entry before its grant: there is none.
pub(super) fn never() -> Moment {
    Moment::from_nanos(u64::MAX)
}

pub(super) struct Core {
    pub client: Arc<Client>,
    pub leases: Leases,
    pub layout: Layout,
    pub held: Ends<Slot, Held>,
    pub entries: Arc<LocalEntries>,
    pub attempts: Arc<Attempts>,
    pub detector: OnceLock<Arc<StallDetector>>,
    /// Whether the task runs that keeps the etcd lease of the waiters alive.
    keeps_waiters: AtomicBool,
    pub closed: CancellationToken,
}

impl Core {
    pub(super) fn new(client: Arc<Client>, layout: Layout, entries: Arc<LocalEntries>) -> Self {
        Core {
            leases: Leases::new(client.clone()),
            client,
            layout,
            held: Ends::new(),
            entries,
            attempts: Arc::default(),
            detector: OnceLock::new(),
            keeps_waiters: AtomicBool::new(false),
            closed: CancellationToken::new(),
        }
    }

    /// Passes their grants to waiters. A waiter of several names makes an attempt.
    pub(super) fn granted(&self, granted: Vec<Granted>) {
        for Granted { key, owner, revision } in granted {
            let slot = (key, owner.as_str().into());
            let held = self.held.get(&slot).filter(|(_, held)| held.is_waiter);
            let until = held.as_ref().and_then(|(_, held)| {
                let end = self.leases.end_of(held.lease)?;
                Some(end.min(Moment::now() + held.ttl.duration()))
            });
            let (Some((_, mut held)), Some(until)) = (held, until.filter(|until| !until.is_past())) else {
                self.entries.wake(&owner);
                continue;
            };
            held.is_waiter = false;
            let fence = fence(revision.max(held.place.0), held.place.1);
            self.held.insert(slot, held, until);
            self.entries.grant(&owner, HandOff { fence, until });
        }
    }

    /// Keeps the etcd lease of the waiters alive while it has entries, unless the event loop does not respond.
    pub(super) fn keep_waiters(self: &Arc<Self>) {
        const STALL: Duration = Duration::from_secs(2);
        if self.keeps_waiters.swap(true, SeqCst) {
            return;
        }
        let core = self.clone();
        let keeping = async move {
            loop {
                let stalled_for = core.detector.get().map_or(Duration::ZERO, |detector| {
                    detector.ping();
                    detector.stalled_for()
                });
                let delay = if stalled_for < STALL {
                    core.leases.keep_waiters().await
                } else {
                    Some(Duration::from_millis(500))
                };
                tokio::select! {
                    () = core.closed.cancelled() => return,
                    () = tokio::time::sleep(delay.unwrap_or(Duration::from_millis(500))) => {}
                }
                let is_used = || !core.entries.is_empty() || core.held.any(|held| held.class == Class::Waiters);
                if !is_used() {
                    core.keeps_waiters.store(false, SeqCst);
                    // A waiter may have come in between.
                    if !is_used() || core.keeps_waiters.swap(true, SeqCst) {
                        return;
                    }
                }
            }
        };
        tokio::spawn(keeping.boxed());
    }

    /// Deletes the entries whose leases end, unless they have changed.
    pub(super) async fn delete_ended(self: Arc<Self>) {
        loop {
            let ended = tokio::select! {
                () = self.closed.cancelled() => return,
                ended = self.held.due() => ended,
            };
            let core = self.clone();
            let deleting = async move {
                let core = &core;
                let deletions = futures_util::stream::iter(ended);
                deletions
                    .for_each_concurrent(32, |(slot, held)| core.delete(slot, held))
                    .await;
            };
            tokio::spawn(deleting.boxed());
        }
    }

    /// Deletes an entry, unless it has changed. What cannot be deleted ends with its etcd lease.
    async fn delete(&self, (name, _): Slot, held: Held) {
        const RETRIES: u32 = 10;
        const DELAY: Duration = Duration::from_millis(300);
        let entry = (self.layout.key(&name, &held.id), held.revision);
        for _ in 0..RETRIES {
            match self.delete_unchanged(vec![entry.clone()]).await {
                Ok(_) => return,
                Err(failure) => {
                    tracing::debug!(error = %failure.of("expire"), %name, "an expired lock was not deleted");
                    tokio::time::sleep(DELAY).await;
                }
            }
        }
    }
}
