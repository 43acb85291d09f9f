//! The tasks of an engine: they grant names to waiters, end leases and positions, and write fencing tokens.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::attempt::{RECORD_DELAY, end_of_position, of_lease};
use super::engine::{Core, OwnClaim};
use super::local::{Granted, Watch};
use super::record::{Stored, UNKNOWN, now_ms};
use super::store::{Failure, Outcome};
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::engine::{HandOff, RESERVATION};
use crate::model::{Fence, Key, OwnerToken};

/// The time until a fencing token that could not be written is written again.
const RECORD_RETRY: Duration = Duration::from_millis(500);

impl Core {
    /// Keeps the watches of names with waiters open.
    pub(super) async fn watch_names(self: Arc<Self>, mut requests: UnboundedReceiver<Watch>) {
        let mut watches = HashMap::new();
        while let Some(request) = requests.recv().await {
            match request {
                Watch::Open(name) => {
                    let watching = tokio::spawn(Box::pin(self.clone().watch(name.clone())));
                    watches.insert(name, AbortOnDropHandle::new(watching));
                }
                Watch::Close(name) => {
                    if let Some(watching) = watches.remove(&name) {
                        watching.abort();
                        // Its end must not end the next watch of the name.
                        let _ = watching.await;
                    }
                }
            }
        }
    }

    async fn watch(self: Arc<Self>, name: Key) {
        let mut backoff = Backoff::for_store();
        loop {
            let watching = self.store.watch(&name);
            tokio::pin!(watching);
            let failure = match timeout(self.opening, &mut watching).await {
                Ok(failure) => failure,
                Err(_) => {
                    if self.local.mirror(&name, |_| ()).is_none() {
                        // Attempts of the waiters report a server that is silent.
                        self.local.wake_name(&name);
                    }
                    watching.await
                }
            };
            tracing::debug!(?failure, %name, "a watch was lost");
            if self.local.lost(&name) {
                backoff.reset();
            } else {
                // Attempts of the waiters report an outage, or a missing permission.
                self.local.wake_name(&name);
            }
            sleep(backoff.delay()).await;
        }
    }

    /// Passes names to the waiters whose entries are granted now.
    pub(super) async fn hand_off(self: Arc<Self>, mut grants: UnboundedReceiver<Granted>) {
        while let Some(granted) = grants.recv().await {
            let core = self.clone();
            tokio::spawn(Box::pin(async move {
                if !core.is_handed_off(&granted).await.unwrap_or(false) {
                    core.local.wake(&granted.owner);
                }
            }));
        }
    }

    /// Passes a name to a waiter whose entry is granted. `false`: the waiter has to make an attempt, as a claim of several names and one
    /// without a subscription do.
    async fn is_handed_off(&self, granted: &Granted) -> Outcome<bool> {
        let Granted { owner, revision, .. } = granted;
        let is_it = |own: &OwnClaim| match &own.entries[..] {
            [entry] => entry.id == granted.entry.id && entry.position == granted.entry.position,
            _ => false,
        };
        let waiting = |own: &OwnClaim| own.fence.is_none() && is_it(own);
        let own = self.claims.get(owner).filter(waiting);
        let Some(own) = own.filter(|_| self.local.is_subscribed(owner)) else {
            return Ok(false);
        };
        let [entry] = &own.entries[..] else { return Ok(false) };
        if entry.record.as_ref().is_none_or(|record| record.set) {
            return Ok(false);
        }
        let fence = match own.needs_token {
            true => self.store.token(entry, *revision).await?,
            false => Some(Fence::NONE),
        };
        let now = Moment::now();
        let (Some(fence), Some(ttl), Some(until)) = (fence, entry.ttl(), self.store.lasts_until(entry.session)) else {
            return Ok(false);
        };
        let reservation = ttl.duration().min(RESERVATION);
        if until < now + reservation / 2 {
            // An attempt finds out whether the session lasts.
            return Ok(false);
        }
        let until = until.min(now + reservation);
        let is_granted = self.claims.update(owner, |_, own| {
            let is_waiting = waiting(own) && !until.is_past();
            is_waiting.then(|| {
                own.fence = Some(fence);
                let records = own.entries.iter_mut().filter_map(|entry| entry.record.as_mut());
                records.for_each(|record| record.since = Some(now_ms()));
                until
            })
        });
        if !is_granted {
            return Ok(false);
        }
        self.records.insert(owner.clone(), (), now + RECORD_DELAY);
        self.local.grant(owner, HandOff { fence, until });
        Ok(true)
    }

    /// Ends leases at their ttl, and the positions of waiters that make no more attempts.
    pub(super) async fn end_claims(self: Arc<Self>) {
        loop {
            for (owner, own) in self.claims.due().await {
                let ttl = own.entries.iter().find_map(Stored::ttl);
                let is_stalled = self.detector.get().is_some_and(|detector| {
                    detector.ping();
                    ttl.is_some_and(|ttl| detector.is_stalled(ttl))
                });
                let is_ending = self.ending.send_if_modified(|ending| {
                    if self.claims.get(&owner).is_some() {
                        // An answer that has arrived since has made it a lease.
                        return false;
                    }
                    if let (None, false, Some(ttl)) = (own.fence, is_stalled, ttl)
                        && self.local.is_subscribed(&owner)
                    {
                        self.claims.insert(owner.clone(), own.clone(), end_of_position(ttl));
                        return false;
                    }
                    ending.insert(owner.clone())
                });
                if !is_ending {
                    continue;
                }
                self.forget(&owner);
                self.local.wake(&owner);
                let core = self.clone();
                tokio::spawn(Box::pin(async move {
                    core.delete(&owner, own).await;
                    core.ending.send_modify(|ending| _ = ending.remove(&owner));
                }));
            }
        }
    }

    /// Deletes entries that have not changed since, until their session ends.
    async fn delete(&self, owner: &OwnerToken, own: OwnClaim) {
        for entry in own.entries {
            let mut deleted = self.delete_entry(owner, &entry).await;
            while let Err(failure) = deleted {
                tracing::debug!(?failure, name = %entry.name, "an expired lock was not deleted");
                let (permits, backoff) = &self.repeats;
                let _permit = permits.acquire().await;
                if self.store.lasts_until(entry.session).is_none() {
                    break;
                }
                deleted = self.delete_entry(owner, &entry).await;
                if deleted.is_ok() {
                    backoff.lock().reset();
                } else {
                    let delay = backoff.lock().delay();
                    sleep(delay).await;
                }
            }
        }
    }

    /// Deletes an entry, unless another process has changed it.
    async fn delete_entry(&self, owner: &OwnerToken, entry: &Stored) -> Outcome<()> {
        if entry.version != UNKNOWN {
            return self.store.delete(std::slice::from_ref(entry)).await.map(|_| ());
        }
        let seen = self.store.read(std::slice::from_ref(&entry.name), Some(owner)).await?;
        match seen.first().and_then(|seen| seen.own.as_ref()) {
            // A write of this process may be executed between the two requests.
            Some(own) if !self.store.delete(std::slice::from_ref(own)).await? => Err(Failure::contended()),
            _ => Ok(()),
        }
    }

    /// Waits until no entries of an owner are deleted in the background.
    pub(super) async fn wait_for_deletions(&self, owner: &OwnerToken) {
        let is_deleted = |ending: &HashSet<OwnerToken>| !ending.contains(owner);
        let _ = self.ending.subscribe().wait_for(is_deleted).await;
    }

    /// Writes the fencing tokens of grants.
    pub(super) async fn write_tokens(self: Arc<Self>) {
        loop {
            for (owner, ()) in self.records.due().await {
                let core = self.clone();
                tokio::spawn(Box::pin(async move {
                    if let Err(failure) = core.write_token(&owner).await {
                        tracing::debug!(?failure, "a fencing token was not written");
                        if core.claims.get(&owner).is_some() {
                            core.records.insert(owner, (), Moment::now() + RECORD_RETRY);
                        }
                    }
                }));
            }
        }
    }

    /// Writes the fencing token of a lease, unless a renewal has to write the lease.
    async fn write_token(&self, owner: &OwnerToken) -> Outcome<()> {
        let Some(own) = self.claims.get(owner) else {
            return Ok(());
        };
        let (Some(fence), mut entries) = (own.fence, own.entries) else {
            return Ok(());
        };
        if entries.iter().any(|entry| entry.version == UNKNOWN) {
            let names: Vec<Key> = entries.iter().map(|entry| entry.name.clone()).collect();
            let seen = self.store.read(&names, Some(owner)).await?;
            entries = seen.into_iter().filter_map(|seen| seen.own).collect();
        }
        let Some(ttl) = entries.iter().filter_map(Stored::ttl).max() else {
            return Ok(());
        };
        if !entries.iter().all(|entry| self.store.is_lease(entry, ttl)) {
            return Ok(());
        }
        let leases = entries.into_iter().map(|entry| of_lease(entry, ttl, fence));
        if let Some(written) = self.write(owner, leases.collect(), Some(owner), ttl).await? {
            self.claims.update(owner, |_, own| {
                let is_writing = own.entries.iter().all(|entry| entry.version == UNKNOWN);
                if is_writing && own.entries.len() == written.len() {
                    own.entries = written;
                }
                None
            });
        }
        Ok(())
    }
}
