//! What is asked for many names at once: the commands of several calls, put together while the event loop's turn goes on.
//!
//! Calls of one kind that are made one after the other share their commands; a call of another kind begins anew, so that
//! the server carries out everything in the order in which it was asked for. A call on its own is a batch of one.

use redis::{RedisError, RedisResult, Value};
use tokio::sync::oneshot;

use super::super::asked::Telling;
use super::super::keys::{LAST, Layout, Part, Room};
use super::super::resp::{self, Reader};
use super::super::scripts::Script;
use crate::model::{Claim, OwnerToken};

/// What a batch does for each of its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Looks who holds it.
    Look,
    /// Takes it, by the plain commands of `plain.rs`.
    Take,
    /// Gives a vote for it, by those of `quorum/attempt.rs`.
    Vote,
    /// Lets go of it, by a script for many.
    Free,
}

/// A script that lets go of one name each for several owners. No two of the owners are the same.
///
/// - KEYS: the lock keys, then for all of them the first of `parts`, then the second
/// - ARGV: `to`, then the owners' tokens, each perhaps with more behind it
/// - Answer: the number of names when every owner held its name; else for each 1 if its owner held it, 0 if not, or -1 if that
///   failed
pub(in super::super) struct Freeing {
    pub(in super::super) script: fn() -> &'static Script,
    pub(in super::super) parts: [Part; 2],
    /// Where waiters are told.
    pub(in super::super) to: &'static str,
}

/// The answer for a name that has to be let go of by itself.
pub(in super::super) const ALONE: i64 = -1;

/// What came of it, for one name.
#[derive(Debug)]
pub(in super::super) enum Outcome {
    /// Somebody else holds it, or has it reserved.
    Held,
    /// Nobody else does.
    NotHeld,
    /// It was free, and was this owner's still after the token was drawn. `queued`: somebody may have waited for it.
    Taken { fence: i64, queued: bool },
    /// What the four commands said, where it is something else. `SET` was no error.
    Replies(Box<[Value; 4]>),
    /// What the script answers for this name.
    Freed(i64),
}

/// Who is told what came of one name.
enum Teller {
    Call(oneshot::Sender<RedisResult<Outcome>>),
    /// Of a release by a quorum.
    Release(Telling),
    /// Of a vote: of each reply.
    Vote([Telling; 4]),
}

struct Asker {
    owner: OwnerToken,
    teller: Teller,
}

impl Asker {
    fn tell(self, outcome: RedisResult<Outcome>) {
        match (self.teller, outcome) {
            (Teller::Call(sender), outcome) => {
                // Who asked may have gone.
                let _ = sender.send(outcome);
            }
            (Teller::Release(telling), Ok(Outcome::Freed(answer))) => telling.tell(Ok(Value::Int(answer))),
            (Teller::Release(telling), Err(error)) => telling.tell(Err(error)),
            // Dropped, which tells that there is no reply.
            _ => {}
        }
    }
}

/// A batch that is being put together.
pub(super) struct Batch {
    kind: Kind,
    freeing: Option<&'static Freeing>,
    askers: Vec<Asker>,
    room: Room,
    // Of the commands, what differs from name to name.
    locks: Vec<u8>,
    /// Companions.
    first: Vec<u8>,
    /// Companions, or whole commands.
    second: Vec<u8>,
    owners: Vec<u8>,
    /// The server has not known the script of late.
    is_unknown: bool,
}

/// A batch that was sent.
pub(in super::super) struct Sent {
    kind: Kind,
    askers: Vec<Asker>,
}

/// What the replies to a batch say of the server.
pub(super) struct Learnt {
    /// For so many calls, that are told of and do not see to that themselves, something was heard.
    pub(super) told: usize,
    /// It does not know the script.
    pub(super) is_unknown: bool,
    /// An error that may mean that the connection is of no use any more.
    pub(super) error: Option<RedisError>,
}

impl Batch {
    pub(super) fn new() -> Self {
        Batch {
            kind: Kind::Look,
            freeing: None,
            askers: Vec::new(),
            room: Room::default(),
            locks: Vec::new(),
            first: Vec::new(),
            second: Vec::new(),
            owners: Vec::new(),
            is_unknown: false,
        }
    }

    /// How much there is of it, in bytes.
    pub(super) fn len(&self) -> usize {
        self.locks.len() + self.first.len() + self.second.len() + self.owners.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.askers.is_empty()
    }

    /// Whether a call can join it.
    pub(super) fn takes(&self, kind: Kind, owner: &OwnerToken) -> bool {
        // Of two releases by one owner the second finds nothing, which one script for both could not tell.
        let is_twice = || kind == Kind::Free && self.askers.iter().any(|asker| asker.owner == *owner);
        self.is_empty() || self.kind == kind && !is_twice()
    }

    fn join(&mut self, kind: Kind, claim: &Claim, teller: Teller) {
        self.kind = kind;
        let owner = claim.owner.clone();
        self.askers.push(Asker { owner, teller });
    }

    fn call(&mut self, kind: Kind, claim: &Claim) -> oneshot::Receiver<RedisResult<Outcome>> {
        let (sender, outcome) = oneshot::channel();
        self.join(kind, claim, Teller::Call(sender));
        outcome
    }

    pub(super) fn look(&mut self, layout: &Layout, claim: &Claim) -> oneshot::Receiver<RedisResult<Outcome>> {
        let (lock, []) = self.room.keys(layout, claim.keys()[0].as_str(), []);
        resp::word(&mut self.locks, &[lock]);
        self.call(Kind::Look, claim)
    }

    pub(super) fn take(&mut self, layout: &Layout, claim: &Claim) -> oneshot::Receiver<RedisResult<Outcome>> {
        let (lock, [queue]) = self.room.keys(layout, claim.keys()[0].as_str(), [Part::Queue]);
        resp::word(&mut self.locks, &[lock]);
        resp::word(&mut self.first, &[queue]);
        let mut ttl = itoa::Buffer::new();
        let words = [
            "SET",
            lock,
            claim.owner.as_str(),
            "PX",
            ttl.format(claim.ttl.as_millis()),
            "NX",
            "GET",
        ];
        resp::write(&mut self.second, &words);
        self.call(Kind::Take, claim)
    }

    /// A vote for `value` as what the lock key holds, and `floor` as the fence.
    pub(super) fn vote(&mut self, layout: &Layout, claim: &Claim, value: &str, floor: u64, tellings: [Telling; 4]) {
        let (lock, [counter]) = self.room.keys(layout, claim.keys()[0].as_str(), [Part::Counter]);
        resp::word(&mut self.locks, &[lock]);
        let mut digits = itoa::Buffer::new();
        let words = [
            "SET",
            lock,
            value,
            "PX",
            digits.format(claim.ttl.as_millis()),
            "NX",
            "GET",
        ];
        resp::write(&mut self.second, &words);
        resp::write(
            &mut self.second,
            &["ZADD", counter, "GT", "CH", digits.format(floor), "last"],
        );
        self.join(Kind::Vote, claim, Teller::Vote(tellings));
    }

    fn add_free(&mut self, layout: &Layout, freeing: &'static Freeing, claim: &Claim, more: Option<&str>) {
        let (lock, [first, second]) = self.room.keys(layout, claim.keys()[0].as_str(), freeing.parts);
        for (keys, key) in [
            (&mut self.locks, lock),
            (&mut self.first, first),
            (&mut self.second, second),
        ] {
            resp::word(keys, &[key]);
        }
        match more {
            None => resp::word(&mut self.owners, &[claim.owner.as_str()]),
            Some(more) => resp::word(&mut self.owners, &[claim.owner.as_str(), ":", more]),
        }
        self.freeing = Some(freeing);
    }

    /// `more` goes behind the owner's token, after a colon.
    pub(super) fn free(
        &mut self,
        layout: &Layout,
        freeing: &'static Freeing,
        claim: &Claim,
        more: Option<&str>,
    ) -> oneshot::Receiver<RedisResult<Outcome>> {
        self.add_free(layout, freeing, claim, more);
        self.call(Kind::Free, claim)
    }

    /// The same for a release that is told of.
    pub(super) fn free_and_tell(
        &mut self,
        layout: &Layout,
        freeing: &'static Freeing,
        claim: &Claim,
        telling: Telling,
    ) {
        self.add_free(layout, freeing, claim, None);
        self.join(Kind::Free, claim, Teller::Release(telling));
    }

    /// Writes the commands, and begins anew.
    pub(super) fn write(&mut self, out: &mut Vec<u8>) -> Sent {
        let count = self.askers.len();
        let mut digits = itoa::Buffer::new();
        match (self.kind, self.freeing) {
            (Kind::Look, _) => {}
            (Kind::Take, _) => {
                resp::head(out, 1 + count);
                resp::word(out, &["EXISTS"]);
                out.extend_from_slice(&self.first);
                out.extend_from_slice(&self.second);
                resp::write(out, &["INCRBY", LAST, digits.format(count)]);
            }
            (Kind::Vote, _) => {
                out.extend_from_slice(&self.second);
                resp::write(out, &["TIME"]);
            }
            (Kind::Free, Some(freeing)) => {
                let script = (freeing.script)();
                let (verb, script) = if std::mem::take(&mut self.is_unknown) {
                    ("EVAL", script.source())
                } else {
                    ("EVALSHA", script.sha())
                };
                resp::head(out, 3 + 3 * count + 1 + count);
                for word in [verb, script, digits.format(3 * count)] {
                    resp::word(out, &[word]);
                }
                for keys in [&self.locks, &self.first, &self.second] {
                    out.extend_from_slice(keys);
                }
                resp::word(out, &[freeing.to]);
                out.extend_from_slice(&self.owners);
            }
            (Kind::Free, None) => unreachable!("set with the first name"),
        }
        if self.kind != Kind::Free {
            resp::head(out, 1 + count);
            resp::word(out, &["MGET"]);
            out.extend_from_slice(&self.locks);
        }
        for part in [&mut self.locks, &mut self.first, &mut self.second, &mut self.owners] {
            part.clear();
        }
        Sent {
            kind: self.kind,
            askers: std::mem::take(&mut self.askers),
        }
    }

    /// The server does not know the script: the next batch takes its text along.
    pub(super) fn is_unknown(&mut self) {
        self.is_unknown = true;
    }
}

impl Sent {
    /// For how many calls it was.
    pub(super) fn calls(&self) -> usize {
        self.askers.len()
    }

    /// How long the replies are together, when all of them have come.
    pub(super) fn length(&self, input: &[u8]) -> RedisResult<Option<usize>> {
        let count = self.askers.len();
        let replies = match self.kind {
            Kind::Look | Kind::Free => 1,
            Kind::Take => count + 3,
            Kind::Vote => 2 * count + 2,
        };
        resp::length_of(input, replies)
    }

    /// Tells everybody what came of it.
    ///
    /// # Errors
    /// When the replies make no sense.
    pub(super) fn tell(self, replies: &[u8]) -> RedisResult<Learnt> {
        let told = self
            .askers
            .iter()
            .filter(|asker| !matches!(asker.teller, Teller::Call(_)))
            .count();
        let mut learnt = Learnt {
            told,
            is_unknown: false,
            error: None,
        };
        let mut replies = Reader::new(replies);
        match self.kind {
            Kind::Look => tell_looks(self.askers, replies.next()?)?,
            Kind::Take => tell_takes(self.askers, &mut replies)?,
            Kind::Vote => learnt.error = tell_votes(self.askers, &mut replies)?,
            Kind::Free => {
                learnt.error = tell_frees(self.askers, resp::value(replies.next()?)?)?;
                let unknown = redis::ServerErrorKind::NoScript.into();
                learnt.is_unknown = learnt.error.as_ref().is_some_and(|error| error.kind() == unknown);
            }
        }
        Ok(learnt)
    }
}

fn tell_looks(askers: Vec<Asker>, reply: &[u8]) -> RedisResult<()> {
    let mut holders = Reader::elements(reply);
    for asker in askers {
        // Without an answer: a right that is missing may be missing for one of the names only.
        let holder = holders.as_mut().map(Reader::next).transpose()?.and_then(resp::bulk);
        let is_held = holder.is_some_and(|holder| !holder.starts_with(asker.owner.as_str().as_bytes()));
        asker.tell(Ok(if is_held { Outcome::Held } else { Outcome::NotHeld }));
    }
    Ok(())
}

fn tell_takes(askers: Vec<Asker>, replies: &mut Reader<'_>) -> RedisResult<()> {
    let queued = resp::value(replies.next()?)?;
    let mut behind = replies.clone();
    behind.skip(askers.len())?;
    let last = resp::value(behind.next()?)?;
    let standing = behind.next()?;
    let mut holders = Reader::elements(standing);
    let count = askers.len() as i64;
    for (asker, number) in askers.into_iter().zip(1..) {
        let held = replies.next()?;
        let holder = holders.as_mut().map(Reader::next).transpose()?.unwrap_or(standing);
        let fence = match &last {
            Value::Int(last) => Value::Int(last - count + number),
            other => other.clone(),
        };
        let outcome = match (&queued, &fence) {
            (Value::Int(queued), Value::Int(fence))
                if held == resp::NIL && resp::bulk(holder) == Some(asker.owner.as_str().as_bytes()) =>
            {
                Ok(Outcome::Taken {
                    fence: *fence,
                    queued: *queued > 0,
                })
            }
            _ => match resp::value(held)? {
                Value::ServerError(error) => Err(error.into()),
                held => Ok(Outcome::Replies(Box::new([
                    queued.clone(),
                    held,
                    fence,
                    resp::value(holder)?,
                ]))),
            },
        };
        asker.tell(outcome);
    }
    Ok(())
}

/// Answers the last of the server's errors.
fn tell_votes(askers: Vec<Asker>, replies: &mut Reader<'_>) -> RedisResult<Option<RedisError>> {
    let mut behind = replies.clone();
    behind.skip(2 * askers.len())?;
    let time = behind.next()?;
    let standing = behind.next()?;
    let mut holders = Reader::elements(standing);
    let mut seen = None;
    for asker in askers {
        let (taken, counted) = (replies.next()?, replies.next()?);
        let holder = holders.as_mut().map(Reader::next).transpose()?.unwrap_or(standing);
        let Teller::Vote(tellings) = asker.teller else {
            continue;
        };
        for (telling, reply) in tellings.into_iter().zip([taken, counted, time, holder]) {
            let reply = resp::value(reply)?.extract_error();
            if let Err(error) = &reply {
                seen = Some(error.clone());
            }
            telling.tell(reply);
        }
    }
    Ok(seen)
}

/// Answers the server's error.
fn tell_frees(askers: Vec<Asker>, answer: Value) -> RedisResult<Option<RedisError>> {
    match answer {
        Value::Int(freed) if freed == askers.len() as i64 => {
            askers.into_iter().for_each(|asker| asker.tell(Ok(Outcome::Freed(1))));
        }
        Value::Array(answers) if answers.len() == askers.len() => {
            for (asker, answer) in askers.into_iter().zip(answers) {
                let Value::Int(answer) = answer else {
                    return Err(resp::nonsense());
                };
                asker.tell(Ok(Outcome::Freed(answer)));
            }
        }
        Value::ServerError(error) => {
            let error = RedisError::from(error);
            // It may be the fault of one of many, or of a script that is not known.
            let is_shared = askers.len() > 1 || error.kind() == redis::ServerErrorKind::NoScript.into();
            for asker in askers {
                asker.tell(if is_shared {
                    Ok(Outcome::Freed(ALONE))
                } else {
                    Err(error.clone())
                });
            }
            return Ok(Some(error));
        }
        _ => return Err(resp::nonsense()),
    }
    Ok(None)
}
