//! The end of a transaction: hands off what is free.

use std::time::Duration;

use super::shares::{bounds, is_shared, share_name, without_owner};
use super::{Changes, Content, Ledger, MOST_HAND_OFFS, Notification, Position, RESERVED, Row, StoredName, span};
use crate::engine::RESERVATION;
use crate::engine::hand_off::GrantTimes;
use crate::model::Fence;

impl Ledger {
    /// Returns the time until a name may be free. `None`: it is free, or a shared one without holders.
    pub(in crate::engine) fn busy_for(&self, name: &StoredName) -> Option<Duration> {
        let lease = self.rows.get(name).filter(|row| row.is_live(self.now_us));
        let end_us = match is_shared(name) {
            true => self.shares_of_others(name, "").1,
            false => lease.map(|row| row.expires_us),
        };
        end_us.map(|end_us| span(end_us - self.now_us))
    }

    /// Returns the first live waiter of a name, if it can have the name now.
    pub(in crate::engine) fn served(&self, name: &StoredName) -> Option<Position> {
        let first = self.live(name).next()?;
        let is_free = match first.waiter.share {
            Some(share) => self.shares_of_others(name, "").0.with(share).is_within_limits(),
            None => self.busy_for(name).is_none(),
        };
        is_free.then(|| first.clone())
    }

    /// Hands off each free name, and returns what the transaction writes.
    pub(in crate::engine) fn finish(&mut self) -> Changes {
        let mut changes = Changes::default();
        let concerned = std::mem::take(&mut self.concerned);
        let shortened = std::mem::take(&mut self.shortened);
        for name in &concerned {
            let is_shortened = shortened.iter().any(|short| without_owner(short) == name);
            let mut next = is_shortened.then_some(Content::MayBeFree);
            let (mut handed, mut shortest) = (0, RESERVATION);
            while handed < MOST_HAND_OFFS
                && let Some(first) = self.served(name)
            {
                handed += 1;
                let Some(hold) = self.hand_off(name, first, &mut changes.notifications) else {
                    next = None;
                    break;
                };
                // A process checks its names with each heartbeat, which may be too late if a waiter with a short hold is dead.
                if hold < shortest {
                    shortest = hold;
                    next = next.filter(|_| is_shortened).or(Some(Content::FreeAfter(hold)));
                }
            }
            if handed == MOST_HAND_OFFS {
                changes.unfinished.push(name.clone());
            }
            let first = next.and_then(|content| Some(self.live(name).next()?.notification(content)));
            changes.notifications.extend(first);
        }
        (changes.entered, changes.left) = self.queues.take_changes();
        let recounted = std::mem::take(&mut self.recounted);
        for name in concerned {
            if is_shared(&name) {
                let (first, end) = bounds(&name);
                for (share, row) in self.rows.range_mut(first..end) {
                    if std::mem::take(&mut row.is_changed) {
                        changes.rows.push((share.clone(), row.clone()));
                    }
                }
            }
            let Some(row) = self.rows.get_mut(&name) else { continue };
            if std::mem::take(&mut row.is_changed) || recounted.contains(&name) {
                changes.rows.push((name, row.clone()));
            }
        }
        changes
    }

    /// Hands a free name off to `first`, its first live waiter, and returns for how long; or notifies that one, which keeps its position.
    fn hand_off(
        &mut self,
        name: &StoredName,
        first: Position,
        notifications: &mut Vec<Notification>,
    ) -> Option<Duration> {
        if !self.hands_off {
            notifications.push(first.notification(Content::MayBeFree));
            return None;
        }
        let last_fence = self.last_fence_of(name);
        let row = self.rows.get_mut(name)?;
        let fence = match &first.waiter.holder {
            Some(_) => self.now_us.max(last_fence + 1),
            None => last_fence,
        };
        row.fence = fence;
        row.is_changed = true;
        // The hand-off ends with the liveness of the waiter's process, so that all waiters of a dead process together delay the others by
        // 4.5 s at most.
        let until_us = (self.now_us + i64::from(first.waiter.hold_ms) * 1000).min(first.alive_until_us);
        let hold = span(until_us - self.now_us);
        let handed = Row {
            owner: Some(match &first.waiter.holder {
                Some(_) => first.owner.clone(),
                None => format!("{}{RESERVED}", first.owner),
            }),
            expires_us: until_us,
            fence,
            holder: first.waiter.holder.clone(),
            granted_us: Some(self.now_us),
            metadata: None,
            share: first.waiter.share,
            is_changed: true,
        };
        let held = match first.waiter.share {
            Some(_) => share_name(name, &first.owner),
            None => name.clone(),
        };
        self.rows.insert(held, handed);
        let times = GrantTimes {
            granted_us: self.now_us.unsigned_abs(),
            until_us: until_us.unsigned_abs(),
        };
        let content = match first.waiter.holder {
            Some(_) => Content::Granted(Fence(fence.unsigned_abs()), times),
            None => Content::MayBeFree,
        };
        notifications.push(first.notification(content));
        self.leave(&first.owner);
        Some(hold)
    }
}
