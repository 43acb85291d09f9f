//! Names that stay busy after their release (`minHoldMs`, `oncePer`).
//!
//! A kept entry is a persistent node with the number of the entry of the lease, so that it lasts longer than the session. Its record has the
//! time for which it stays. Servers do not delete it at its end. The process that released the name deletes it, and so does each process
//! with a waiter for the name, and otherwise the next call that reads the name.
//!
//! The other processes use only the clocks of the leaders: they compare the time of its creation with that of a new write, which a
//! majority commits. So neither the clock of a client nor a read that lags behind counts. (A time is that of the leader when it
//! receives the request.) A node with the name of a kept entry is never created twice, so the deletion of one that has ended
//! deletes no other.

use std::sync::Arc;
use std::time::Duration;

use super::client::{Answer, Failure as Refusal, Part, Request, code};
use super::layout::Child;
use super::nodes::{ROUNDS, is_done};
use super::store::Zookeeper;
use crate::clock::Moment;
use crate::engine::entries::{PAGE_SIZE, Record, Seen, Store, Stored};
use crate::model::{Key, OwnerToken, Ttl};

/// The time until the next read after a failure.
const RETRY: Duration = Duration::from_secs(1);

/// Returns the entries that keep a name busy.
fn of_kept(seen: &mut Seen) -> impl Iterator<Item = &mut Stored> {
    let is_kept = |entry: &&mut Stored| Child::is_kept(&entry.id) && entry.record.is_some();
    seen.granted.iter_mut().filter(is_kept)
}

impl Zookeeper {
    /// Deletes kept entries whose time has ended, and then reads the names again. The ttl of each one that stays is the rest of its time.
    pub(super) async fn without_ended(
        &self,
        names: &[Key],
        owner: Option<&OwnerToken>,
        mut seen: Vec<Seen>,
    ) -> Answer<Vec<Seen>> {
        if !seen.iter_mut().any(|seen| of_kept(seen).next().is_some()) {
            return Ok(seen);
        }
        // Boxed: it is rare, and would be a part of every call's future.
        Box::pin(self.ended(names, owner, seen)).await
    }

    async fn ended(&self, names: &[Key], owner: Option<&OwnerToken>, mut seen: Vec<Seen>) -> Answer<Vec<Seen>> {
        for _ in 0..ROUNDS {
            let mut kept: Vec<&mut Stored> = seen.iter_mut().flat_map(of_kept).collect();
            let Some(first) = kept.first() else {
                return Ok(seen);
            };
            let same = first.record.as_ref().map(Record::to_json).unwrap_or_default();
            let write = Request::set_data(&self.path(first), &same, -1);
            let now = match self.client.call(Request::multi(&[write])).await?.parts()?[..] {
                [Part::Changed(stat)] => Some(stat.changed_ms.max(0) as u64),
                // It was deleted since.
                [Part::Failed(code::NO_NODE)] => None,
                [Part::Failed(code)] => return Err(Refusal::Refused(code)),
                _ => return Err(Refusal::Malformed),
            };
            if let Some(now) = now {
                let mut deletions = Vec::new();
                for entry in &mut kept {
                    let (path, created) = (self.path(entry), entry.created_ms);
                    let Some(record) = &mut entry.record else { continue };
                    // Both times are rounded down.
                    let end = created.saturating_add(record.ttl).saturating_add(1);
                    record.ttl = record.ttl.min(end.saturating_sub(now));
                    if record.ttl == 0 {
                        deletions.push(self.client.call(Request::delete(&path, -1)));
                    }
                }
                if deletions.is_empty() {
                    return Ok(seen);
                }
                for deleted in deletions {
                    is_done(deleted.await)?;
                }
            }
            let found = self.list(names).await?;
            seen = self.seen(names, owner, found, &[]).await?;
        }
        Err(Refusal::Refused(code::NO_NODE))
    }

    /// Deletes the kept entries of names with waiters at their ends.
    pub(super) async fn end_kept(self: Arc<Self>) {
        loop {
            let due = self.kept.due().await.into_iter().map(|(name, ())| name);
            let names: Vec<Key> = due.filter(|name| self.local.has_waiters(name)).collect();
            for names in names.chunks(PAGE_SIZE) {
                let mut seen = self.read(names, None).await;
                for (index, name) in names.iter().enumerate() {
                    let next = match &mut seen {
                        Ok(seen) => of_kept(&mut seen[index]).filter_map(|entry| entry.ttl()).min(),
                        Err(_) => Some(Ttl::clamped(RETRY)),
                    };
                    // An event may have scheduled an earlier time.
                    if let (Some(next), None) = (next, self.kept.get(name)) {
                        self.kept.insert(name.clone(), (), Moment::now() + next.duration());
                    }
                }
            }
        }
    }
}
