//! The first step of an attempt: acquires the names of a claim, until one is busy.

use std::time::Duration;

use mongodb::bson::{Document, doc};
use mongodb::options::ReturnDocument;

use crate::clock::Moment;
use crate::engine::mongodb::connection::checkouts;
use crate::engine::mongodb::connection::session::Session;
use crate::engine::mongodb::documents;
use crate::engine::mongodb::error::Failure;
use crate::engine::mongodb::ops::acquire::{ROUNDS, SOON};
use crate::engine::mongodb::ops::attempts::Caller;
use crate::engine::mongodb::ops::clock_offset::SHORTEST_WITH_MARGIN;
use crate::engine::mongodb::ops::fence::{Clock, Stamp};
use crate::engine::mongodb::ops::stamp::Unstamped;
use crate::engine::mongodb::queue::change_stream::StreamUse;
use crate::engine::mongodb::queue::pipelines::{self, Waiter};
use crate::engine::mongodb::{Core, Outcome};
use crate::model::{Claim, Key, OwnerToken};

/// The field of an answer with the queue entries of the claims behind the first.
pub(super) const POSITIONS: &str = "positions";

/// The shortest lease whose end is written by an estimate.
const SHORTEST_ESTIMATED: Duration = Duration::from_secs(1);

/// The outcome of the first step for one name.
pub(crate) enum NameOutcome {
    /// This owner holds the name: newly acquired (without a stamp), acquired by an earlier attempt, or handed off to it.
    Acquired(Unstamped),
    /// Another owner holds the name.
    Busy(Busy),
}

impl NameOutcome {
    /// Reads an answer. `open`: the waiter's use of the change stream. `None`: the calculated fields are missing, because the driver
    /// retried the command. The caller then repeats the step.
    pub(crate) fn of(
        document: &Document,
        owner: &OwnerToken,
        is_settled: bool,
        open: Option<StreamUse>,
    ) -> Option<Self> {
        if documents::is_owned_by(document, owner) {
            return Some(NameOutcome::Acquired(Unstamped {
                stamp: Stamp::of(document),
                is_settled,
                ..Unstamped::default()
            }));
        }
        documents::is_answer(document).then(|| {
            NameOutcome::Busy(Busy {
                left: documents::remaining(document),
                position: documents::position(document).map(|number| (number, open)),
                is_foreign: documents::owner(document).is_none(),
            })
        })
    }
}

/// A name that another owner holds.
pub(crate) struct Busy {
    /// The rest of its lease. `None`: no end.
    pub(crate) left: Option<Duration>,
    /// The waiter's number in the queue, and its use of the change stream.
    pub(crate) position: Option<(u64, Option<StreamUse>)>,
    /// Whether a gist process holds it.
    pub(crate) is_foreign: bool,
}

impl Busy {
    fn without_position(left: Option<Duration>) -> Self {
        Busy {
            left,
            position: None,
            is_foreign: false,
        }
    }
}

impl Core {
    /// Acquires names and adds them to `all`, until one is busy: the next one.
    pub(super) async fn acquire_until_busy(
        &self,
        claim: &Claim,
        caller: &Caller,
        first: Option<NameOutcome>,
        all: &mut Vec<Unstamped>,
    ) -> Outcome<Option<Busy>> {
        match first {
            Some(NameOutcome::Acquired(name)) => all.push(name),
            Some(NameOutcome::Busy(busy)) => return Ok(Some(busy)),
            None => {}
        }
        let queue = self.queue.as_ref();
        let (awaited, number) = queue.and_then(|queue| queue.known.position(&claim.owner)).unzip();
        let number = number.unwrap_or(0);
        while let Some((key, _)) = claim.keys()[all.len()..].split_first() {
            let is_awaited = awaited.as_ref() == Some(key);
            let (is_busy, answer) = self.look_first(key, claim, is_awaited).await?;
            if answer.is_some() {
                return Ok(answer);
            }
            // The name that the claim waits for probably has a document, so an insert would fail. The end of a short lease is
            // no estimate.
            if !is_awaited && !is_busy && claim.ttl.duration() >= SHORTEST_ESTIMATED {
                let before = all.len();
                self.insert_free(claim, caller, all).await?;
                if all.len() > before {
                    continue;
                }
            }
            match self.acquire_name(key, claim, caller, number).await? {
                NameOutcome::Acquired(name) => all.push(name),
                NameOutcome::Busy(busy) => return Ok(Some(busy)),
            }
        }
        Ok(None)
    }

    /// Reads the name where a read is cheaper than a write: while the members confirm nothing, because a write that finds
    /// the name busy waits for them all the same, and in each poll of a waiter behind a gist process. Returns whether the name is
    /// busy, and the answer to the attempt if nothing is to be written.
    async fn look_first(&self, key: &Key, claim: &Claim, is_awaited: bool) -> Outcome<(bool, Option<Busy>)> {
        let queue = self
            .queue
            .as_ref()
            .filter(|queue| is_awaited && !queue.watcher.is_refused());
        let polls = queue.is_some_and(|queue| queue.known.polls(&claim.owner));
        if !polls && (is_awaited || !self.pool.is_without_majority()) {
            return Ok((false, None));
        }
        let found = self.find_busy(&self.id(key), claim).await?;
        let is_still_foreign = found
            .as_ref()
            .is_some_and(|busy| busy.is_foreign && busy.position.is_some());
        if let Some(queue) = queue.filter(|_| !is_still_foreign) {
            // The document is gone, and the queue with it: the waiters of this process return with their numbers.
            queue.known.set_polls(key, false);
            queue.known.wake(key);
        }
        let is_busy = found.is_some();
        // The position stays as it is.
        let answer = found.map(|busy| Busy { position: None, ..busy });
        Ok((is_busy, answer.filter(|_| is_still_foreign || !claim.waiting)))
    }

    /// Acquires one name that probably has a document.
    ///
    /// The primary's acknowledgement is enough here: nothing is granted before the stamp, which follows this write in the oplog,
    /// has the full write concern. A busy answer does not wait for other members.
    async fn acquire_name(&self, key: &Key, claim: &Claim, caller: &Caller, number: u64) -> Outcome<NameOutcome> {
        let id = self.id(key);
        if !claim.waiting
            && claim.ttl.duration() >= SHORTEST_ESTIMATED
            && let Some(busy) = self.find_busy(&id, claim).await?
        {
            return Ok(NameOutcome::Busy(busy));
        }
        let queue = self.queue.as_ref().filter(|_| claim.waiting);
        if queue.is_some() && number == 0 && claim.ttl.duration() < SHORTEST_ESTIMATED {
            // Open the change stream only if the name is busy.
            let (outcome, _) = self.acquire_or_enqueue(&id, (claim, &[]), caller, None, None).await?;
            if matches!(outcome, NameOutcome::Acquired(_)) {
                return Ok(outcome);
            }
        }
        // Do not enqueue before the stream is open: a hand-off would be lost.
        let open = match queue {
            Some(queue) => caller.while_here(queue.open_stream()).await?,
            None => None,
        };
        let waiter = queue.map(|queue| queue.waiter(number, &open));
        let acquired = self.acquire_or_enqueue(&id, (claim, &[]), caller, waiter, open);
        Ok(acquired.await?.0)
    }

    /// Acquires a name that probably has a document, or enters its queue as `waiter`, and the claims of `behind` behind it. `open`: the
    /// waiters' use of the change stream. Returns the document after the command, too.
    pub(super) async fn acquire_or_enqueue(
        &self,
        id: &str,
        (claim, behind): (&Claim, &[&Claim]),
        caller: &Caller,
        waiter: Option<Waiter<'_>>,
        open: Option<StreamUse>,
    ) -> Outcome<(NameOutcome, Document)> {
        let number = waiter.as_ref().map_or(0, |waiter| waiter.number);
        // The attempt of a waiter with a number probably confirms a hand-off, and then this is the only step.
        let is_settled = number > 0 && !self.pool.is_without_majority();
        let mut steps = pipelines::acquire(claim, waiter.as_ref());
        let mut fields = match &waiter {
            Some(_) => documents::waiter_fields(&claim.owner),
            None => documents::attempt_fields(),
        };
        if let (Some(queue), Some(waiter)) = (&self.queue, &waiter)
            && !behind.is_empty()
        {
            let new = behind.iter().filter(|claim| queue.known.number(&claim.owner) == 0);
            steps.extend(pipelines::enter(new.copied(), waiter));
            fields.insert(POSITIONS, pipelines::positions_of(behind));
        }
        for _ in 0..ROUNDS {
            let mut session = caller.session(&self.pool).await?;
            let Session { connected, session } = &mut *session;
            let update = connected
                .locks_for(is_settled)
                .find_one_and_update(documents::one_or_none(id), steps.clone())
                .upsert(true)
                .return_document(ReturnDocument::After)
                .projection(fields.clone())
                .session(session);
            let sent = Moment::now();
            let document = match update.await.map_err(Failure::from) {
                // Another client inserted the document at the same time.
                Err(failure) if failure.is_duplicate_key() => continue,
                answer => answer?.unwrap_or_default(),
            };
            if let Some(queue) = &self.queue {
                queue.clock.read(sent, &document);
            }
            if let Some(outcome) = NameOutcome::of(&document, &claim.owner, is_settled, open.clone()) {
                return Ok((outcome, document));
            }
        }
        let busy = Busy::without_position(Some(SOON));
        Ok((NameOutcome::Busy(busy), Document::new()))
    }

    /// Inserts the documents of the other names, in one command that stops at the first busy one. Adds the names before that one to
    /// `all`. This is the cheapest write. If it can be the only one of the grant (`fence.rs`), it has the full write concern, and
    /// the server answers after that also when a name is busy.
    ///
    /// After an earlier attempt of the claim with a command that was not answered, the grant has a stamp: `roll_back`.
    async fn insert_free(&self, claim: &Claim, caller: &Caller, all: &mut Vec<Unstamped>) -> Outcome<()> {
        let may_be_grant = all.is_empty() && !self.attempts.has(&claim.owner);
        let needs_no_stamp = may_be_grant && !claim.needs_token && *self.clock.lock() == Clock::Process;
        let is_grant = may_be_grant
            && self.unwritten.is_some()
            && claim.ttl.duration() >= SHORTEST_WITH_MARGIN
            && self.clock_offset.allows_margin();
        let estimated = self.clock_offset.end(claim.ttl, is_grant);
        let keys = claim.keys()[all.len()..].iter();
        let documents: Vec<Document> = keys
            .map(|key| documents::inserted(&self.id(key), claim, &estimated))
            .collect();
        let requested = documents.len();
        let mut session = caller.session(&self.pool).await?;
        let Session { connected, session } = &mut *session;
        let locks = connected.locks_for(is_grant || needs_no_stamp);
        let insertion = async {
            // The command for one document is smaller.
            match &*documents {
                [only] => locks.insert_one(only).session(&mut *session).await.map(drop),
                several => locks.insert_many(several).session(&mut *session).await.map(drop),
            }
        };
        let (inserted, sent) = checkouts::counted(insertion).await;
        // The reply to a repeated command may have the time of a later write.
        let tick = session.operation_time().filter(|_| is_grant && sent == 1);
        let count = match inserted.map_err(Failure::from) {
            Ok(()) => requested,
            Err(failure) if failure.is_duplicate_key() => failure.index(),
            Err(failure) => return Err(failure),
        };
        all.extend((0..count).map(|_| Unstamped {
            estimated: Some(estimated),
            inserted_at: tick,
            needs_no_stamp,
            ..Unstamped::default()
        }));
        Ok(())
    }

    /// Reads whether a name is busy, and the position of a claim that waits. `None`: the name is free or belongs to this owner.
    async fn find_busy(&self, id: &str, claim: &Claim) -> Outcome<Option<Busy>> {
        let fields = match claim.waiting {
            true => documents::waiter_fields(&claim.owner),
            false => documents::attempt_fields(),
        };
        let found = self.locks().find_one(doc! { "_id": id }).projection(fields).await?;
        let Some(document) = found else { return Ok(None) };
        Ok(match NameOutcome::of(&document, &claim.owner, false, None) {
            Some(NameOutcome::Busy(busy)) if busy.left != Some(Duration::ZERO) => Some(busy),
            _ => None,
        })
    }
}
