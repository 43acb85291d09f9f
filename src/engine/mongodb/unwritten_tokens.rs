//! Writes the tokens of grants that were one write (`fence.rs`) into their documents, where `inspect`, a reservation and a transfer
//! read them.
//!
//! A lease that is released within [`DELAY`] needs no such write. The tokens of the others are written together, one update for up
//! to [`MOST_TOGETHER`] leases, which is repeated until it succeeds or the leases end. A renewal and a transfer within this process
//! write the token as well, and so does the hand-off of a release. A transfer to another process waits for it. Until then `inspect`
//! shows no token, and a waiter whose reservation comes from another command (`force_release`) gets a stamp.
//!
//! A grant takes about 200 bytes and its names until its token is written or it is released.
//!
//! The same update ends the leases at most their ttl later: it removes the margin of the estimated end. Only the update that
//! writes the token does so, because a lease with a token may have been extended.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use mongodb::bson::{Bson, Document, Timestamp, doc};
use parking_lot::Mutex;

use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::engine::mongodb::Outcome;
use crate::engine::mongodb::connection::pool::{Class, Pool};
use crate::engine::mongodb::documents::millis;
use crate::engine::mongodb::fields::{EXPIRES_AT, FENCE, HOLDER, NOW, OWNER, RESERVED};
use crate::model::{Claim, OwnerToken, Ttl};

/// The time from a grant until its token is written, at least (at most twice as long).
pub(crate) const DELAY: Duration = Duration::from_millis(50);
/// Maximum number of leases in one update.
const MOST_TOGETHER: usize = 64;

/// The tokens that are not in their documents yet.
pub(crate) struct UnwrittenTokens {
    pool: Arc<Pool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    tokens: HashMap<OwnerToken, Unwritten>,
    is_running: bool,
}

#[derive(Clone)]
struct Unwritten {
    ids: Vec<String>,
    tick: Timestamp,
    ttl: Ttl,
    /// The end of the lease, unless it is renewed. A renewal writes the token.
    ends: Moment,
    /// When the token is written.
    due: Moment,
}

impl State {
    /// Returns up to [`MOST_TOGETHER`] tokens that are due, the longest due first, and forgets those of leases that have ended.
    /// `None`: there are no tokens.
    ///
    /// # Behavior
    /// Tokens that cannot be written are due again behind all others.
    fn due(&mut self, now: Moment) -> Option<Vec<(OwnerToken, Unwritten)>> {
        self.tokens.retain(|_, token| token.ends > now);
        let mut due: Vec<_> = self.tokens.iter_mut().filter(|(_, token)| token.due <= now).collect();
        due.sort_unstable_by_key(|(_, token)| token.due);
        let due = due.into_iter().take(MOST_TOGETHER).map(|(owner, token)| {
            token.due = now + DELAY;
            (owner.clone(), token.clone())
        });
        let due = due.collect();
        (!self.tokens.is_empty()).then_some(due)
    }
}

impl UnwrittenTokens {
    pub(crate) fn new(pool: Arc<Pool>) -> Arc<Self> {
        let state = Mutex::default();
        Arc::new(UnwrittenTokens { pool, state })
    }

    /// Writes the token of a claim that was granted these documents, unless it is released soon.
    pub(crate) fn write_later(self: &Arc<Self>, claim: &Claim, ids: Vec<String>, tick: Timestamp) {
        let now = Moment::now();
        let token = Unwritten {
            ids,
            tick,
            ttl: claim.ttl,
            ends: now + claim.ttl.duration(),
            due: now + DELAY,
        };
        let mut state = self.state.lock();
        state.tokens.insert(claim.owner.clone(), token);
        if !std::mem::replace(&mut state.is_running, true) {
            tokio::spawn(self.clone().run().boxed());
        }
    }

    /// Returns the token of an owner, if it was not written yet.
    pub(crate) fn of(&self, owner: &OwnerToken) -> Option<Timestamp> {
        self.state.lock().tokens.get(owner).map(|token| token.tick)
    }

    /// Leaves the token of a claim unwritten: it is released, or another owner gets the documents.
    pub(crate) fn forget(&self, owner: &OwnerToken) {
        self.state.lock().tokens.remove(owner);
    }

    /// Leaves all tokens unwritten.
    pub(crate) fn clear(&self) {
        self.state.lock().tokens.clear();
    }

    async fn run(self: Arc<Self>) {
        let mut backoff = Backoff::for_store();
        let mut pause = DELAY;
        loop {
            tokio::time::sleep(pause).await;
            let due = {
                let mut state = self.state.lock();
                let due = state.due(Moment::now());
                state.is_running = due.is_some();
                due
            };
            let Some(due) = due else { return };
            pause = match self.write(&due).await {
                Ok(()) => {
                    backoff.reset();
                    due.iter().for_each(|(owner, _)| self.forget(owner));
                    if due.len() < MOST_TOGETHER {
                        DELAY
                    } else {
                        Duration::ZERO
                    }
                }
                Err(failure) => {
                    tracing::debug!(%failure, "fencing tokens could not be written; they are written later");
                    backoff.delay()
                }
            };
        }
    }

    /// Writes these tokens. A document that has another owner now, or a token, stays unchanged.
    async fn write(&self, tokens: &[(OwnerToken, Unwritten)]) -> Outcome<()> {
        if tokens.is_empty() {
            return Ok(());
        }
        let ids: Vec<&String> = tokens.iter().flat_map(|(_, token)| &token.ids).collect();
        let owners: Vec<&str> = tokens.iter().map(|(owner, _)| owner.as_str()).collect();
        let unwritten = doc! { "_id": { "$in": ids }, OWNER: { "$in": &owners }, FENCE: Bson::Null };
        let at = doc! { "$indexOfArray": [{ "$literal": owners }, format!("${OWNER}")] };
        let of_owner = |value: fn(&Unwritten) -> Bson| {
            let values: Vec<Bson> = tokens.iter().map(|(_, token)| value(token)).collect();
            doc! { "$arrayElemAt": [values, at.clone()] }
        };
        let end = doc! { "$add": ["$$NOW", of_owner(|token| millis(token.ttl.duration()).into())] };
        let steps = vec![doc! { "$set": {
            FENCE: of_owner(|token| token.tick.into()),
            EXPIRES_AT: { "$min": [format!("${EXPIRES_AT}"), end] },
        } }];
        let locks = self.pool.locks();
        let update = || async move {
            locks.update_many(unwritten, steps).await?;
            Ok(())
        };
        self.pool.call(Class::Release, update).await
    }
}

/// How long after its grant a lease may have no token yet: the time of the grant may be wrong by the margin of its end. Later its
/// holder cannot write it.
const UNWRITTEN: Duration = Duration::from_secs(3);

/// Whether the token of a new lease is not written yet.
pub(crate) fn is_without_token_yet(document: &Document) -> bool {
    let since = document
        .get_document(HOLDER)
        .and_then(|holder| holder.get_datetime("since"));
    let is_owned = document
        .get_str(OWNER)
        .is_ok_and(|owner| OwnerToken::parse(owner).is_ok());
    let is_new = since.is_ok_and(|since| {
        let now = document
            .get_datetime(NOW)
            .map_or(i64::MAX, |now| now.timestamp_millis());
        now.saturating_sub(since.timestamp_millis()) < UNWRITTEN.as_millis() as i64
    });
    is_owned && is_new && !document.contains_key(RESERVED) && !document.contains_key(FENCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unwritten(state: &mut State, seconds: u64, granted: Moment) -> OwnerToken {
        let owner = OwnerToken::fresh();
        let token = Unwritten {
            ids: vec!["n".to_owned()],
            tick: Timestamp { time: 1, increment: 1 },
            ttl: Ttl::new(Duration::from_secs(seconds)).unwrap(),
            ends: granted + Duration::from_secs(seconds),
            due: granted + DELAY,
        };
        state.tokens.insert(owner.clone(), token);
        owner
    }

    #[test]
    fn tokens_are_due_some_time_after_their_grants_up_to_64_at_once() {
        let (mut state, now) = (State::default(), Moment::now());
        let all: Vec<OwnerToken> = (0..200).map(|_| unwritten(&mut state, 5, now)).collect();
        assert!(state.due(now).unwrap().is_empty(), "too early");
        state.tokens.remove(&all[0]);
        let mut sizes = Vec::new();
        while let Some(due) = state.due(now + DELAY) {
            sizes.push(due.len());
            due.iter().for_each(|(owner, _)| drop(state.tokens.remove(owner)));
        }
        assert_eq!(sizes, [64, 64, 64, 7]);
    }

    #[test]
    fn tokens_that_cannot_be_written_are_due_again_behind_all_others() {
        let (mut state, now) = (State::default(), Moment::now());
        let ms = Duration::from_millis;
        for at in 0..3 {
            for _ in 0..64 {
                unwritten(&mut state, 5, now + ms(at));
            }
        }
        // No write succeeds. The pauses are longer than a token needs to be due again.
        let mut taken = HashMap::<OwnerToken, u32>::new();
        for round in 0..6 {
            let due = state.due(now + ms(500 * (round + 1))).unwrap();
            assert_eq!(due.len(), 64);
            due.into_iter()
                .for_each(|(owner, _)| *taken.entry(owner).or_default() += 1);
        }
        assert_eq!((taken.len(), taken.values().all(|times| *times == 2)), (192, true));
    }

    #[test]
    fn nothing_is_kept_of_tokens_whose_leases_ended() {
        let (mut state, now) = (State::default(), Moment::now());
        unwritten(&mut state, 5, now);
        let live = unwritten(&mut state, 6, now);
        let due = state.due(now + Duration::from_secs(5)).unwrap();
        assert!(due.iter().map(|(owner, _)| owner).eq([&live]));
        assert_eq!(state.tokens.len(), 1, "it is written again until it succeeds");
        assert!(state.due(now + Duration::from_secs(6)).is_none() && state.tokens.is_empty());
    }
}
