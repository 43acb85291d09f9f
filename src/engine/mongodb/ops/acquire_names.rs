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
                ahead: documents::ahead(document),
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
    /// Number of live waiters ahead of it.
    pub(crate) ahead: usize,
    /// Whether a gist process holds it.
    pub(crate) is_foreign: bool,
}

impl Busy {
    fn without_position(left: Option<Duration>) -> Self {
        Busy {
            left,
            position: None,
            ahead: 0,
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
        // All names in one command, until one of them is busy.
        let mut at_once = claim.keys().len();
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
                self.insert_free(claim, caller, all, at_once).await?;
                if all.len() > before {
                    at_once *= 4;
                    continue;
                }
                at_once = 1;
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
            .is_some_and(|(busy, has_position)| busy.is_foreign && *has_position);
        if let Some(queue) = queue.filter(|_| !is_still_foreign) {
            // The document is gone, and the queue with it: the waiters of this process return with their numbers.
            queue.known.set_polls(key, false);
            queue.known.wake(key);
        }
        let is_busy = found.is_some();
        let answer = found
            .map(|(busy, _)| busy)
            .filter(|_| is_still_foreign || !claim.waiting);
        Ok((is_busy, answer))
    }

    /// Acquires one name that probably has a document.
    ///
    /// The primary's acknowledgement is enough here: nothing is granted before the stamp, which follows this write in the oplog,
    /// has the full write concern. A busy answer does not wait for other members.
    async fn acquire_name(&self, key: &Key, claim: &Claim, caller: &Caller, number: u64) -> Outcome<NameOutcome> {
        let id = self.id(key);
        if !claim.waiting
            && claim.ttl.duration() >= SHORTEST_ESTIMATED
            && let Some((busy, _)) = self.find_busy(&id, claim).await?
        {
            return Ok(NameOutcome::Busy(busy));
        }
        let queue = self.queue.as_ref().filter(|_| claim.waiting);
        if queue.is_some() && number == 0 && claim.ttl.duration() < SHORTEST_ESTIMATED {
            // Open the change stream only if the name is busy.
            if let NameOutcome::Acquired(name) = self.acquire_or_enqueue(&id, claim, caller, None, None).await? {
                return Ok(NameOutcome::Acquired(name));
            }
        }
        // Do not enqueue before the stream is open: a hand-off would be lost.
        let open = match queue {
            Some(queue) => caller.while_here(queue.open_stream()).await?,
            None => None,
        };
        let waiter = queue.map(|queue| queue.waiter(number, &open));
        self.acquire_or_enqueue(&id, claim, caller, waiter, open).await
    }

    /// Acquires a name that probably has a document, or enters its queue as `waiter`. `open`: the waiter's use of the change
    /// stream.
    async fn acquire_or_enqueue(
        &self,
        id: &str,
        claim: &Claim,
        caller: &Caller,
        waiter: Option<Waiter<'_>>,
        open: Option<StreamUse>,
    ) -> Outcome<NameOutcome> {
        let is_settled = self.is_settled(waiter.as_ref().map_or(0, |waiter| waiter.number));
        let steps = pipelines::acquire(claim, waiter.as_ref());
        let fields = match &waiter {
            Some(_) => documents::waiter_fields(&claim.owner),
            None => documents::attempt_fields(),
        };
        let name = documents::one_or_none(id);
        for _ in 0..ROUNDS {
            let sent = self.send_attempt(name.clone(), steps.clone(), fields.clone(), is_settled, caller);
            let document = sent.await?.unwrap_or_default();
            if let Some(outcome) = NameOutcome::of(&document, &claim.owner, is_settled, open.clone()) {
                return Ok(outcome);
            }
        }
        Ok(NameOutcome::Busy(Busy::without_position(Some(SOON))))
    }

    /// Whether an attempt of the waiter with this number has the full write concern. It probably confirms a hand-off, and then this is
    /// the only step.
    pub(super) fn is_settled(&self, number: u64) -> bool {
        number > 0 && !self.pool.is_without_majority()
    }

    /// Sends the command of an attempt for one name: a filter by its id. Returns the document after it. `None`: another client inserted
    /// the document at the same time.
    pub(crate) async fn send_attempt(
        &self,
        name: Document,
        steps: Vec<Document>,
        fields: Document,
        is_settled: bool,
        caller: &Caller,
    ) -> Outcome<Option<Document>> {
        let mut session = caller.session(&self.pool).await?;
        let Session { connected, session } = &mut *session;
        let update = connected
            .locks_for(is_settled)
            .find_one_and_update(name, steps)
            .upsert(true)
            .return_document(ReturnDocument::After)
            .projection(fields)
            .session(session);
        let sent = Moment::now();
        match update.await.map_err(Failure::from) {
            Err(failure) if failure.is_duplicate_key() => Ok(None),
            answer => {
                let document = answer?;
                if let (Some(queue), Some(document)) = (&self.queue, &document) {
                    queue.clock.read(sent, document);
                }
                Ok(document)
            }
        }
    }

    /// Inserts the documents of up to `at_once` free names, in one command that stops at the first busy one. Adds the names to
    /// `all`. This is the cheapest write. If it can be the only one of the grant (`fence.rs`), it has the full write concern, and
    /// the server answers after that also when a name is busy.
    ///
    /// After an earlier attempt of the claim with a command that was not answered, the grant has a stamp: `roll_back`.
    async fn insert_free(
        &self,
        claim: &Claim,
        caller: &Caller,
        all: &mut Vec<Unstamped>,
        at_once: usize,
    ) -> Outcome<()> {
        let may_be_grant = all.is_empty() && at_once >= claim.keys().len() && !self.attempts.has(&claim.owner);
        let needs_no_stamp = may_be_grant && !claim.needs_token && self.clock.get() == Clock::Process;
        let is_grant = may_be_grant
            && self.unwritten.is_some()
            && claim.ttl.duration() >= SHORTEST_WITH_MARGIN
            && self.clock_offset.allows_margin();
        let estimated = self.clock_offset.end(claim.ttl, is_grant);
        let keys = claim.keys()[all.len()..].iter().take(at_once);
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

    /// Reads whether a name is busy, and whether a claim that waits has a position in its queue. `None`: the name is free or
    /// belongs to this owner.
    async fn find_busy(&self, id: &str, claim: &Claim) -> Outcome<Option<(Busy, bool)>> {
        let fields = match claim.waiting {
            true => documents::waiter_fields(&claim.owner),
            false => documents::attempt_fields(),
        };
        let found = self.locks().find_one(doc! { "_id": id }).projection(fields).await?;
        let Some(document) = found else { return Ok(None) };
        Ok(match NameOutcome::of(&document, &claim.owner, false, None) {
            Some(NameOutcome::Busy(mut busy)) if busy.left != Some(Duration::ZERO) => {
                let has_position = busy.position.take().is_some();
                Some((busy, has_position))
            }
            _ => None,
        })
    }
}
