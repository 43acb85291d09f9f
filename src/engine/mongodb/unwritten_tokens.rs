//! Writes the tokens of grants that were one write (`fence.rs`) into their documents, where `inspect`, a reservation and a transfer
//! read them.
//!
//! A lease that is released within [`DELAY`] needs no such write. The tokens of the others are written together, one update for up
//! to [`MOST_TOGETHER`] leases, which is repeated until it succeeds or the leases end. A renewal and a transfer within this process
//! write the token as well, and so does the hand-off of a release. A transfer to another process waits for it. Until then `inspect`
//! shows no token, and a waiter whose reservation comes from another command (`force_release`) gets a stamp.
//!
//! A grant takes about 200 bytes and its names until its token is written or it is released, and 40 bytes for its place in the order
//! until it is due.
//!
//! The same update ends the leases at most their ttl later: it removes the margin of the estimated end. Only the update that
//! writes the token does so, because a lease with a token may have been extended.

use std::collections::{HashMap, VecDeque};
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
/// The field of the ttl in the update.
const TTL: &str = "ttl";
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
    /// When each token is due, in this order. A token that was forgotten meanwhile is skipped.
    due: VecDeque<(Moment, OwnerToken)>,
    is_running: bool,
}

#[derive(Clone)]
struct Unwritten {
    ids: Vec<String>,
    tick: Timestamp,
    ttl: Ttl,
    /// The end of the lease, unless it is renewed. A renewal writes the token.
    ends: Moment,
}

impl State {
    fn add(&mut self, owner: &OwnerToken, token: Unwritten, now: Moment) {
        self.tokens.insert(owner.clone(), token);
        self.due.push_back((now + DELAY, owner.clone()));
    }

    /// Removes up to [`MOST_TOGETHER`] tokens that are due from the order, oldest first, and returns them. `None`: there are no tokens.
    fn take_due(&mut self, now: Moment) -> Option<Vec<(OwnerToken, Unwritten)>> {
        let mut taken = Vec::new();
        while taken.len() < MOST_TOGETHER
            && let Some((_, owner)) = self.due.pop_front_if(|(due, _)| *due <= now)
        {
            match self.tokens.get(&owner) {
                Some(token) if token.ends > now => taken.push((owner, token.clone())),
                _ => drop(self.tokens.remove(&owner)),
            }
        }
        (!self.tokens.is_empty()).then_some(taken)
    }

    /// Makes tokens that could not be written due again, after all others.
    fn put_back(&mut self, tokens: Vec<(OwnerToken, Unwritten)>, now: Moment) {
        self.due
            .extend(tokens.into_iter().map(|(owner, _)| (now + DELAY, owner)));
        // While no token can be written, grants that were released would pile up.
        let State { tokens, due, .. } = self;
        due.retain(|(_, owner)| tokens.contains_key(owner));
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
        };
        let mut state = self.state.lock();
        state.add(&claim.owner, token, now);
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
            let Some(due) = self.take_due() else { return };
            if due.is_empty() {
                pause = DELAY;
                continue;
            }
            pause = match self.write(&due).await {
                Ok(()) => {
                    backoff.reset();
                    let mut state = self.state.lock();
                    due.iter().for_each(|(owner, _)| drop(state.tokens.remove(owner)));
                    if due.len() < MOST_TOGETHER {
                        DELAY
                    } else {
                        Duration::ZERO
                    }
                }
                Err(failure) => {
                    tracing::debug!(%failure, "fencing tokens could not be written; they are written later");
                    self.state.lock().put_back(due, Moment::now());
                    backoff.delay()
                }
            };
        }
    }

    /// Returns the tokens that are due. `None`: there are no tokens, and the task ends.
    fn take_due(&self) -> Option<Vec<(OwnerToken, Unwritten)>> {
        let mut state = self.state.lock();
        let due = state.take_due(Moment::now());
        if due.is_none() {
            state.due.clear();
            state.is_running = false;
        }
        due
    }

    /// Writes these tokens. A document that has another owner now, or a token, stays unchanged.
    async fn write(&self, tokens: &[(OwnerToken, Unwritten)]) -> Outcome<()> {
        let ids: Vec<&str> = tokens
            .iter()
            .flat_map(|(_, token)| &token.ids)
            .map(String::as_str)
            .collect();
        let owners: Vec<&str> = tokens.iter().map(|(owner, _)| owner.as_str()).collect();
        let unwritten = doc! { "_id": { "$in": ids }, OWNER: { "$in": owners }, FENCE: Bson::Null };
        let of_owners: Vec<Document> = tokens
            .iter()
            .map(|(owner, token)| doc! { OWNER: owner.as_str(), FENCE: token.tick, TTL: millis(token.ttl.duration()) })
            .collect();
        let is_ours = doc! { "$eq": [format!("$$e.{OWNER}"), format!("${OWNER}")] };
        let ours = doc! { "$filter": { "input": { "$literal": of_owners }, "as": "e", "cond": is_ours } };
        let end = doc! { "$add": ["$$NOW", format!("$$ours.{TTL}")] };
        let written = doc! {
            FENCE: format!("$$ours.{FENCE}"),
            EXPIRES_AT: { "$min": [format!("${EXPIRES_AT}"), end] },
        };
        let steps = vec![doc! { "$replaceWith": { "$let": {
            "vars": { "ours": { "$arrayElemAt": [ours, 0] } },
            "in": { "$mergeObjects": ["$$ROOT", written] },
        } } }];
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

    fn unwritten(state: &mut State, ends: Moment, now: Moment) -> OwnerToken {
        let owner = OwnerToken::fresh();
        let token = Unwritten {
            ids: vec!["n".to_owned()],
            tick: Timestamp { time: 1, increment: 1 },
            ttl: Ttl::new(Duration::from_secs(5)).unwrap(),
            ends,
        };
        state.add(&owner, token, now);
        owner
    }

    fn owners(taken: Option<Vec<(OwnerToken, Unwritten)>>) -> Vec<OwnerToken> {
        taken.unwrap().into_iter().map(|(owner, _)| owner).collect()
    }

    #[test]
    fn tokens_are_due_in_the_order_of_their_grants() {
        let (mut state, now) = (State::default(), Moment::now());
        let end = now + Duration::from_secs(5);
        let all: Vec<OwnerToken> = (0..200).map(|_| unwritten(&mut state, end, now)).collect();
        assert!(owners(state.take_due(now)).is_empty(), "too early");
        state.tokens.remove(&all[0]);
        let due = now + DELAY;
        let first = state.take_due(due).unwrap();
        assert_eq!(first.len(), MOST_TOGETHER);
        assert!(first.iter().map(|(owner, _)| owner).eq(&all[1..=MOST_TOGETHER]));
        state.put_back(first, due);
        assert_eq!(owners(state.take_due(due)), all[65..129]);
        assert_eq!(owners(state.take_due(due)), all[129..193]);
        assert_eq!(owners(state.take_due(due)), all[193..]);
        assert!(owners(state.take_due(due)).is_empty());
        assert_eq!(
            owners(state.take_due(due + DELAY)),
            all[1..=64],
            "what could not be written"
        );
    }

    #[test]
    fn nothing_is_kept_of_tokens_that_ended_or_were_forgotten() {
        let (mut state, now) = (State::default(), Moment::now());
        unwritten(&mut state, now + DELAY, now);
        let live = unwritten(&mut state, now + DELAY * 2, now);
        let failed = state.take_due(now + DELAY).unwrap();
        assert_eq!(state.tokens.len(), 1, "one has ended");
        let released = unwritten(&mut state, now + DELAY * 3, now);
        state.tokens.remove(&released);
        state.put_back(failed, now + DELAY);
        assert!(state.due.iter().map(|(_, owner)| owner).eq([&live]));
        assert!(state.take_due(now + DELAY * 2).is_none() && state.due.is_empty());
    }
}
