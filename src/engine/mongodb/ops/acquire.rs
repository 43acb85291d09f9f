//! One try: take every name, then stamp what was taken. `fence.rs` says why that is two steps.

use std::sync::Arc;
use std::time::Duration;

use mongodb::bson::{Document, Timestamp, doc};
use mongodb::options::{Acknowledgment, ReturnDocument, WriteConcern};

use super::attempts::Caller;
use super::documents;
use super::failure::Failure;
use super::fence::Stamp;
use super::pool::Class;
use super::queue::{self, Waiter};
use super::session::Session;
use super::stamp::{Unstamped, not_newer};
use super::watch::Use;
use super::{Core, Outcome};
use crate::engine::Acquired;
use crate::model::{Claim, Key, OwnerToken};

/// How often a try starts over when what it took was gone, or changed by an earlier try of the same claim, before it was
/// stamped. Leases shorter than a round trip get there, and a call that was given up and is still under way.
const ROUNDS: usize = 3;
/// When to try again when it is not known how long the holder lasts: somebody got or freed the name just now.
const SOON: Duration = Duration::from_millis(1);

/// The shortest lease whose end is written by an estimate.
const SHORTEST_ESTIMATED: Duration = Duration::from_secs(1);

/// What became of one name.
pub(super) enum Taken {
    /// It is this owner's: newly taken (no stamp), or held since an earlier try, or handed on to it.
    Ours(Unstamped),
    /// It is somebody else's.
    Busy(Busy),
}

impl Taken {
    /// Reads an answer. `None`: the calculated fields are missing, because the driver sent the command twice. The caller then
    /// repeats the attempt.
    pub(super) fn of(document: &Document, owner: &OwnerToken, is_settled: bool) -> Option<Self> {
        if documents::is_owned_by(document, owner) {
            return Some(Taken::Ours(Unstamped {
                stamp: Stamp::of(document),
                is_settled,
                written: None,
            }));
        }
        documents::is_answer(document).then(|| {
            Taken::Busy(Busy {
                left: documents::remaining(document),
                place: None,
                ahead: documents::ahead(document),
            })
        })
    }
}

/// A name that another owner holds.
pub(super) struct Busy {
    /// The rest of its lease. `None`: no end.
    pub(super) left: Option<Duration>,
    /// The place of the waiter, and its use of the change stream.
    pub(super) place: Option<(u64, Option<Use>)>,
    /// Number of live waiters before that place.
    pub(super) ahead: usize,
}

impl Busy {
    fn without_place(left: Option<Duration>) -> Self {
        let (place, ahead) = (None, 0);
        Busy { left, place, ahead }
    }
}

impl Core {
    /// The engine's `try_acquire`: one attempt with one permit, in a task of its own.
    ///
    /// # Behavior
    /// An attempt that is dropped before it has a permit sends nothing. When it is dropped later, its task rolls back what it
    /// wrote, with the same permit.
    pub(super) async fn attempt(self: &Arc<Self>, claim: &Claim) -> Outcome<Acquired> {
        self.attempts.ended(&claim.owner).await;
        let permit = self.pool.permit(self.class([claim])).await;
        claim.mark_sent();
        let (waiting, mut working, caller) = self.attempts.begin(vec![claim.owner.clone()]);
        let (core, claim) = (self.clone(), claim.clone());
        let attempt = async move {
            let outcome = core.acquire(&claim, &caller, None).await;
            // A busy answer to a claim that does not wait means that nothing was written.
            if claim.waiting || !matches!(outcome, Ok(Acquired::Held { .. })) {
                core.roll_back_if_dropped(&[&claim], &caller, outcome.as_ref().err())
                    .await;
            }
            working.note(&outcome);
            drop(working);
            outcome
        };
        let outcome = self.pool.run(permit, attempt).await;
        drop(waiting);
        outcome
    }

    /// Returns the class of an attempt for these claims. A waiter that was notified of its turn has little time to confirm, so
    /// it does not wait behind other attempts.
    pub(super) fn class<'a>(&self, claims: impl IntoIterator<Item = &'a Claim>) -> Class {
        let mut claims = claims.into_iter();
        let line = self.line.as_ref();
        match line.is_some_and(|line| claims.any(|claim| line.known.has_reservation(&claim.owner))) {
            true => Class::Confirm,
            false => Class::Acquire,
        }
    }

    /// Releases what the claims of a dropped attempt hold, and removes their places. After a server failure it does nothing:
    /// the service repeats the release.
    pub(super) async fn roll_back_if_dropped(&self, claims: &[&Claim], caller: &Caller, failure: Option<&Failure>) {
        if caller.is_gone() && failure.is_none_or(Failure::is_cancelled) {
            let rolled_back = self.release_claims(claims).await;
            if let Err(failure) = rolled_back {
                tracing::debug!(%failure, "a dropped attempt could not be rolled back");
            }
        }
    }

    /// Makes the steps of an attempt. `first`: the outcome of its first name, if that step is done.
    pub(super) async fn acquire(&self, claim: &Claim, caller: &Caller, mut first: Option<Taken>) -> Outcome<Acquired> {
        let mut newest = None;
        for _ in 0..ROUNDS {
            let taken = match self.take_all(claim, caller, first.take()).await? {
                Ok(taken) => taken,
                Err(held) => return Ok(held),
            };
            newest = newest.max(newest_of(&taken));
            caller.check()?;
            if let Some(fence) = self.stamp_all(claim, &taken, &mut newest).await? {
                if let Some(line) = &self.line {
                    line.known.leave(&claim.owner);
                }
                self.index.check_if_due();
                return Ok(Acquired::Granted { fence });
            }
        }
        self.give_back(claim, claim.keys().len(), newest).await?;
        Ok(held(&claim.keys()[0], Some(SOON)))
    }

    /// Takes the names in their order, so that two claims that overlap meet at the first they share. Frees what it took when
    /// one is busy.
    pub(super) async fn take_all(
        &self,
        claim: &Claim,
        caller: &Caller,
        first: Option<Taken>,
    ) -> Outcome<Result<Vec<Unstamped>, Acquired>> {
        let keys = claim.keys();
        let mut all = Vec::with_capacity(keys.len());
        let taken = self.take_each(claim, caller, first, &mut all).await;
        let (key, busy) = match taken {
            Ok(None) => return Ok(Ok(all)),
            Ok(Some(busy)) => (&keys[all.len()], busy),
            // The task of the attempt rolls everything back.
            Err(failure) if failure.is_cancelled() => return Err(failure),
            Err(failure) => {
                // As good as it gets: what cannot be given back expires. What an earlier try was granted, and a later one may
                // be granted again, stays.
                let _ = self.give_back(claim, all.len(), None).await;
                return Err(failure);
            }
        };
        self.give_back(claim, all.len(), newest_of(&all)).await?;
        if let (Some(line), Some((number, open))) = (&self.line, busy.place) {
            let before = line.known.position(&claim.owner).map(|(key, _)| key);
            line.waits(claim, key, number, busy.left, open);
            line.known.set_ahead(key, busy.ahead.min(line.known.ahead(key)));
            if let Some(before) = before.filter(|before| before != key) {
                // A set waits for one name at a time.
                line.leave(&before, &claim.owner).await?;
            }
        }
        Ok(Err(held(key, busy.left)))
    }

    /// Takes names until one is busy, and says so: the one behind those that it has added to `all`.
    async fn take_each(
        &self,
        claim: &Claim,
        caller: &Caller,
        first: Option<Taken>,
        all: &mut Vec<Unstamped>,
    ) -> Outcome<Option<Busy>> {
        match first {
            Some(Taken::Ours(taken)) => all.push(taken),
            Some(Taken::Busy(busy)) => return Ok(Some(busy)),
            None => {}
        }
        let line = self.line.as_ref();
        let (awaited, number) = line.and_then(|line| line.known.position(&claim.owner)).unzip();
        let number = number.unwrap_or(0);
        // All at once, until it turns out that they are not all free.
        let mut at_once = claim.keys().len();
        while let Some((key, _)) = claim.keys()[all.len()..].split_first() {
            caller.check()?;
            // The name that was waited for is not just free. The end of a short lease is worth the dearer write, which
            // gets it right.
            if awaited.as_ref() != Some(key) && claim.ttl.duration() >= SHORTEST_ESTIMATED {
                let before = all.len();
                self.insert(claim, caller, all, at_once).await?;
                if all.len() > before {
                    at_once *= 4;
                    continue;
                }
                at_once = 1;
            }
            match self.take(key, claim, caller, number).await? {
                Taken::Ours(taken) => all.push(taken),
                Taken::Busy(busy) => return Ok(Some(busy)),
            }
        }
        Ok(None)
    }

    /// Takes one name that is not free, most likely.
    ///
    /// The primary's own acknowledgement is mostly enough: nothing is granted before the stamp, which lies behind this write in
    /// the oplog, has the full write concern. A busy answer, which promises nothing, need not wait for other members.
    async fn take(&self, key: &Key, claim: &Claim, caller: &Caller, number: u64) -> Outcome<Taken> {
        let id = self.id(key);
        caller.check()?;
        if !claim.waiting
            && claim.ttl.duration() >= SHORTEST_ESTIMATED
            && let Some(busy) = self.busy(&id, claim).await?
        {
            return Ok(Taken::Busy(busy));
        }
        let line = self.line.as_ref().filter(|_| claim.waiting);
        if line.is_some() && number == 0 && claim.ttl.duration() < SHORTEST_ESTIMATED {
            // Nobody knows yet whether it is busy, and the way to hear of its end is worth something.
            if let Taken::Ours(taken) = self.take_or_wait(&id, claim, caller, None, None).await? {
                return Ok(Taken::Ours(taken));
            }
        }
        // Whoever takes a place hears of its turn from then on, or looks often.
        match line {
            Some(line) => {
                let open = caller.while_here(line.listen(key)).await?;
                caller.check()?;
                let process = line.process.as_str();
                self.take_or_wait(&id, claim, caller, Some(Waiter { process, number }), open)
                    .await
            }
            None => self.take_or_wait(&id, claim, caller, None, None).await,
        }
    }

    /// The try that finds a document, most likely, and takes a place in its queue for a `waiter`, who hears by `open`.
    async fn take_or_wait(
        &self,
        id: &str,
        claim: &Claim,
        caller: &Caller,
        waiter: Option<Waiter<'_>>,
        open: Option<Use>,
    ) -> Outcome<Taken> {
        // Whoever has a place tries because it is its turn, most likely, and then this is the only step.
        let is_settled = waiter.as_ref().is_some_and(|waiter| waiter.number > 0);
        let take = match &self.line {
            Some(_) => queue::take(claim, waiter.as_ref()),
            None => documents::take(claim),
        };
        let seen = match &waiter {
            Some(_) => documents::seen_by_waiter(&claim.owner),
            None => documents::seen(),
        };
        let mut session = caller.session.get(&self.pool).await?;
        let Session { connected, session } = &mut *session;
        for _ in 0..ROUNDS {
            let mut trying = connected
                .locks
                .find_one_and_update(documents::one_or_none(id), take.clone())
                .upsert(true)
                .return_document(ReturnDocument::After)
                .projection(seen.clone())
                .session(&mut *session);
            if !is_settled {
                trying = trying.write_concern(one_member());
            }
            let document = match trying.await.map_err(Failure::from) {
                Ok(Some(document)) => document,
                Ok(None) => break,
                // Somebody inserted the document while this try was about to.
                Err(failure) if failure.is_duplicate_key() => continue,
                Err(failure) => return Err(failure),
            };
            if let Some(taken) = Taken::of(&document, &claim.owner, is_settled) {
                return Ok(match taken {
                    Taken::Busy(busy) => Taken::Busy(Busy {
                        place: documents::place(&document).map(|place| (place, open)),
                        ..busy
                    }),
                    ours => ours,
                });
            }
        }
        Ok(Taken::Busy(Busy::without_place(Some(SOON))))
    }

    /// Makes the documents of names that are free, in one command up to the first that is not: the cheapest write that there
    /// is, and no more than that is needed most of the time. Adds them to `all`, at most so many.
    async fn insert(&self, claim: &Claim, caller: &Caller, all: &mut Vec<Unstamped>, at_once: usize) -> Outcome<()> {
        let written = self.estimate.write(claim.ttl);
        let keys = claim.keys()[all.len()..].iter().take(at_once);
        let documents: Vec<Document> = keys
            .map(|key| documents::inserted(&self.id(key), claim, &written))
            .collect();
        let asked = documents.len();
        let mut session = caller.session.get(&self.pool).await?;
        let Session { connected, session } = &mut *session;
        // One is a smaller command than a list of one.
        let inserted = match <[Document; 1]>::try_from(documents) {
            Ok([only]) => {
                let insertion = connected.locks.insert_one(only).write_concern(one_member());
                insertion.session(session).await.map(drop)
            }
            Err(several) => {
                let insertion = connected.locks.insert_many(several).write_concern(one_member());
                insertion.session(session).await.map(drop)
            }
        };
        let count = match inserted.map_err(Failure::from) {
            Ok(()) => asked,
            Err(failure) if failure.is_duplicate_key() => failure.index(),
            Err(failure) => return Err(failure),
        };
        all.extend((0..count).map(|_| Unstamped {
            written: Some(written),
            ..Unstamped::default()
        }));
        Ok(())
    }

    /// Whether a name is busy for who does not wait: a look, which keeps nobody from writing. `None`: it looks free, or
    /// this owner's.
    async fn busy(&self, id: &str, claim: &Claim) -> Outcome<Option<Busy>> {
        let found = self
            .locks()
            .find_one(doc! { "_id": id })
            .projection(documents::seen())
            .await?;
        let busy = found.filter(|document| !documents::is_owned_by(document, &claim.owner));
        let left = busy.as_ref().map(documents::remaining);
        Ok(left
            .filter(|left| *left != Some(Duration::ZERO))
            .map(Busy::without_place))
    }

    /// Frees the first names of the claim, those that were taken, with stamps up to `newest`, or (`None`) without one.
    ///
    /// A command that is still on its way when its answer is given up may arrive during a later try of the same claim.
    /// It must not free what that one was granted: hence only documents with the stamps seen here, or none.
    async fn give_back(&self, claim: &Claim, taken: usize, newest: Option<Timestamp>) -> Outcome<()> {
        if taken == 0 {
            return Ok(());
        }
        let ids = &self.ids(claim)[..taken];
        let newest = newest.unwrap_or(Timestamp { time: 0, increment: 0 });
        let owned = not_newer(documents::owned(ids, &claim.owner), newest);
        self.part_with(ids, &claim.owner, owned).await?;
        Ok(())
    }
}

/// The newest of the stamps that were seen.
fn newest_of(taken: &[Unstamped]) -> Option<Timestamp> {
    let stamps = taken.iter().filter_map(|taken| taken.stamp);
    stamps.map(|stamp| stamp.tick).max()
}

/// The acknowledgement of the primary alone.
pub(super) fn one_member() -> WriteConcern {
    WriteConcern::builder().w(Acknowledgment::Nodes(1)).build()
}

pub(super) fn held(key: &Key, retry_after: Option<Duration>) -> Acquired {
    Acquired::Held {
        key: key.clone(),
        retry_after,
    }
}
