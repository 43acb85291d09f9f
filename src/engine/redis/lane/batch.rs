//! What is asked for many names at once: the commands of several calls, put together while the event loop's turn goes on.
//!
//! Calls of one kind that are made one after the other share their commands; a call of another kind begins anew, so that
//! the server carries out everything in the order in which it was asked for. A call on its own is a batch of one.

use redis::{RedisError, RedisResult, Value};
use tokio::sync::oneshot;

use super::super::keys::{LAST, Layout, Part, Room};
use super::super::resp::{self, Reader};
use super::super::route::MAILBOXES;
use super::super::scripts::RELEASE_MANY;
use crate::model::{Claim, OwnerToken};

/// What a batch does for each of its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Kind {
    /// Looks who holds it.
    Look,
    /// Takes it, by the plain commands of `plain.rs`.
    Take,
    /// Lets go of it, by `release_many.lua`.
    Free,
}

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
    /// Whether it was this owner's.
    Freed(bool),
    /// The batch has no answer for this name: it has to be asked for by itself.
    Alone,
}

/// Who waits for what comes of one name.
struct Asker {
    owner: OwnerToken,
    sender: oneshot::Sender<RedisResult<Outcome>>,
}

impl Asker {
    fn tell(self, told: RedisResult<Outcome>) {
        // Who asked may have gone.
        let _ = self.sender.send(told);
    }
}

/// A batch that is being put together.
pub(super) struct Batch {
    kind: Kind,
    askers: Vec<Asker>,
    room: Room,
    // Of the commands, what differs from name to name.
    locks: Vec<u8>,
    queues: Vec<u8>,
    /// The companions, or whole commands.
    others: Vec<u8>,
    owners: Vec<u8>,
    /// The server has not known the script of late.
    is_unknown: bool,
}

/// A batch that was sent.
pub(in super::super) struct Sent {
    kind: Kind,
    askers: Vec<Asker>,
}

impl Batch {
    pub(super) fn new() -> Self {
        Batch {
            kind: Kind::Look,
            askers: Vec::new(),
            room: Room::default(),
            locks: Vec::new(),
            queues: Vec::new(),
            others: Vec::new(),
            owners: Vec::new(),
            is_unknown: false,
        }
    }

    /// How much there is of it, in bytes.
    pub(super) fn len(&self) -> usize {
        self.locks.len() + self.queues.len() + self.others.len() + self.owners.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.askers.is_empty()
    }

    /// Whether a call can join it.
    pub(super) fn takes(&self, kind: Kind, owner: &OwnerToken) -> bool {
        // Of two releases by one owner the second finds nothing, which one script for both could not tell.
        self.is_empty()
            || self.kind == kind && (kind != Kind::Free || self.askers.iter().all(|asker| asker.owner != *owner))
    }

    /// Adds a call. `place`: of an owner that may have a place in the queue, its process and its ttl as `queue.lua` has them, with
    /// a colon between them.
    pub(super) fn add(
        &mut self,
        kind: Kind,
        layout: &Layout,
        claim: &Claim,
        place: Option<&str>,
    ) -> oneshot::Receiver<RedisResult<Outcome>> {
        let (name, owner) = (claim.keys()[0].as_str(), claim.owner.as_str());
        self.kind = kind;
        let parts = [Part::Queue, Part::Fence];
        match kind {
            Kind::Look => {
                let (lock, []) = self.room.keys(layout, name, []);
                resp::word(&mut self.locks, &[lock]);
            }
            Kind::Take => {
                let (lock, [queue]) = self.room.keys(layout, name, [Part::Queue]);
                let mut ttl = itoa::Buffer::new();
                let ttl = ttl.format(claim.ttl.as_millis());
                resp::word(&mut self.locks, &[lock]);
                resp::word(&mut self.queues, &[queue]);
                resp::write(&mut self.others, &["SET", lock, owner, "PX", ttl, "NX", "GET"]);
            }
            Kind::Free => {
                let (lock, [queue, fence]) = self.room.keys(layout, name, parts);
                resp::word(&mut self.locks, &[lock]);
                resp::word(&mut self.queues, &[queue]);
                resp::word(&mut self.others, &[fence]);
                match place {
                    None => resp::word(&mut self.owners, &[owner]),
                    Some(place) => resp::word(&mut self.owners, &[owner, ":", place]),
                }
            }
        }
        let (sender, told) = oneshot::channel();
        let owner = claim.owner.clone();
        self.askers.push(Asker { owner, sender });
        told
    }

    /// Writes the commands, and begins anew.
    pub(super) fn write(&mut self, out: &mut Vec<u8>) -> Sent {
        let count = self.askers.len();
        match self.kind {
            Kind::Look => {
                resp::head(out, 1 + count);
                resp::word(out, &["MGET"]);
                out.extend_from_slice(&self.locks);
            }
            Kind::Take => {
                resp::head(out, 1 + count);
                resp::word(out, &["EXISTS"]);
                out.extend_from_slice(&self.queues);
                out.extend_from_slice(&self.others);
                let mut digits = itoa::Buffer::new();
                resp::write(out, &["INCRBY", LAST, digits.format(count)]);
                resp::head(out, 1 + count);
                resp::word(out, &["MGET"]);
                out.extend_from_slice(&self.locks);
            }
            Kind::Free => {
                let (verb, script) = if std::mem::take(&mut self.is_unknown) {
                    ("EVAL", RELEASE_MANY.source())
                } else {
                    ("EVALSHA", RELEASE_MANY.sha())
                };
                let mut digits = itoa::Buffer::new();
                resp::head(out, 3 + 3 * count + 1 + count);
                for word in [verb, script, digits.format(3 * count)] {
                    resp::word(out, &[word]);
                }
                for keys in [&self.locks, &self.queues, &self.others] {
                    out.extend_from_slice(keys);
                }
                resp::word(out, &[MAILBOXES]);
                out.extend_from_slice(&self.owners);
            }
        }
        for part in [&mut self.locks, &mut self.queues, &mut self.others, &mut self.owners] {
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

    /// How many replies there will be.
    fn replies(&self) -> usize {
        match self.kind {
            Kind::Look | Kind::Free => 1,
            Kind::Take => self.askers.len() + 3,
        }
    }

    /// How long the replies are together, when all of them have come.
    pub(super) fn length(&self, input: &[u8]) -> RedisResult<Option<usize>> {
        resp::length_of(input, self.replies())
    }

    /// Tells everybody what came of it. Answers whether the server knows the script.
    ///
    /// # Errors
    /// When the replies make no sense.
    pub(super) fn tell(self, replies: &[u8]) -> RedisResult<bool> {
        let mut replies = Reader::new(replies);
        match self.kind {
            Kind::Look => tell_looks(self.askers, replies.next()?)?,
            Kind::Take => tell_takes(self.askers, &mut replies)?,
            Kind::Free => return tell_frees(self.askers, resp::value(replies.next()?)?),
        }
        Ok(true)
    }
}

fn tell_looks(askers: Vec<Asker>, reply: &[u8]) -> RedisResult<()> {
    let Some(mut holders) = Reader::elements(reply) else {
        // A right that is missing may be missing for one of the names only.
        askers.into_iter().for_each(|asker| asker.tell(Ok(Outcome::NotHeld)));
        return Ok(());
    };
    for asker in askers {
        let is_held =
            resp::bulk(holders.next()?).is_some_and(|holder| !holder.starts_with(asker.owner.as_str().as_bytes()));
        asker.tell(Ok(if is_held { Outcome::Held } else { Outcome::NotHeld }));
    }
    Ok(())
}

fn tell_takes(askers: Vec<Asker>, replies: &mut Reader<'_>) -> RedisResult<()> {
    let queued = resp::value(replies.next()?)?;
    // The others are behind those of `SET`, which are looked at once more with them.
    let mut behind = replies.clone();
    for _ in &askers {
        behind.next()?;
    }
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
        let told = match (&queued, &fence) {
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
        asker.tell(told);
    }
    Ok(())
}

fn tell_frees(askers: Vec<Asker>, answer: Value) -> RedisResult<bool> {
    match answer {
        Value::Int(freed) if freed == askers.len() as i64 => {
            askers
                .into_iter()
                .for_each(|asker| asker.tell(Ok(Outcome::Freed(true))));
        }
        Value::Array(answers) if answers.len() == askers.len() => {
            for (asker, answer) in askers.into_iter().zip(answers) {
                asker.tell(Ok(match answer {
                    Value::Int(1) => Outcome::Freed(true),
                    Value::Int(0) => Outcome::Freed(false),
                    _ => Outcome::Alone,
                }));
            }
        }
        Value::ServerError(error) => {
            let error = RedisError::from(error);
            let is_unknown = error.kind() == redis::ServerErrorKind::NoScript.into();
            let is_alone = askers.len() == 1 && !is_unknown;
            for asker in askers {
                // The error of one name is not to be that of the others.
                asker.tell(if is_alone {
                    Err(error.clone())
                } else {
                    Ok(Outcome::Alone)
                });
            }
            return Ok(!is_unknown);
        }
        _ => return Err(resp::nonsense()),
    }
    Ok(true)
}
