//! Batches: the commands of several calls, built during one tick of the event loop.
//!
//! Calls of one kind share their commands. Releases are written first, so that their names are free for the acquisitions of
//! the same tick. Requests of one owner keep their order. Any other request on the connection closes the batches before it. A
//! single call is a batch of one.

use redis::RedisResult;

use super::call::{BatchRelease, Request};
use super::in_flight::{BatchedCall, SentBatch};
use super::reply_sink::ReplyTo;
use super::resp::{self, Reader};
use crate::engine::redis::keys::{KeyBuffer, LAST, Layout, Part};
use crate::model::{Claim, OwnerToken};

/// What a batch does for each of its names. Batches are written in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Releases it, by a script for many names.
    Release,
    /// Reads its holder.
    Check,
    /// Acquires it, by the plain commands of `ops/acquire_plain.rs`.
    Acquire,
    /// Votes for it, by the plain commands of a quorum.
    Vote,
}

impl Kind {
    pub(super) const ALL: [Kind; 4] = [Kind::Release, Kind::Check, Kind::Acquire, Kind::Vote];

    /// Whether its calls are attempts to acquire, whose number is limited.
    pub(super) fn is_attempt(self) -> bool {
        matches!(self, Kind::Check | Kind::Acquire)
    }
}

impl Request<'_> {
    /// Returns the kind of its batch.
    pub(super) fn kind(&self) -> Kind {
        match self {
            Request::Check => Kind::Check,
            Request::Acquire => Kind::Acquire,
            Request::Vote { .. } => Kind::Vote,
            Request::Release { .. } => Kind::Release,
        }
    }
}

/// A batch that is being built.
pub(super) struct Batch {
    kind: Kind,
    release: Option<&'static BatchRelease>,
    calls: Vec<BatchedCall>,
    room: KeyBuffer,
    // The parts of the commands that differ from name to name.
    locks: Vec<u8>,
    /// Companion keys.
    first: Vec<u8>,
    /// Companion keys, or whole commands: those of a call one after the other.
    second: Vec<u8>,
    owners: Vec<u8>,
    /// The server may not know the script.
    is_unknown: bool,
}

impl Batch {
    pub(super) fn new(kind: Kind) -> Self {
        Batch {
            kind,
            release: None,
            calls: Vec::new(),
            room: KeyBuffer::default(),
            locks: Vec::new(),
            first: Vec::new(),
            second: Vec::new(),
            owners: Vec::new(),
            // The text of the script is sent at first: a call that is repeated without it would be executed after later requests.
            is_unknown: true,
        }
    }

    /// Returns its size in bytes.
    pub(super) fn size(&self) -> usize {
        self.locks.len() + self.first.len() + self.second.len() + self.owners.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Whether there is a call by this owner in it.
    pub(super) fn has(&self, owner: &OwnerToken) -> bool {
        self.calls.iter().any(|call| call.owner == *owner)
    }

    /// Adds a request of this kind.
    pub(super) fn add(&mut self, layout: &Layout, claim: &Claim, request: &Request<'_>, reply_to: ReplyTo) {
        let name = claim.keys()[0].as_str();
        match *request {
            Request::Check => {
                let (lock, []) = self.room.keys(layout, name, []);
                resp::word(&mut self.locks, &[lock]);
            }
            Request::Acquire => {
                let (lock, [queue]) = self.room.keys(layout, name, [Part::Queue]);
                resp::word(&mut self.locks, &[lock]);
                resp::word(&mut self.first, &[queue]);
                set(&mut self.second, lock, claim.owner.as_str(), claim);
            }
            Request::Vote { value, floor } => {
                let (lock, [counter]) = self.room.keys(layout, name, [Part::Counter]);
                resp::word(&mut self.locks, &[lock]);
                set(&mut self.second, lock, value, claim);
                let mut digits = itoa::Buffer::new();
                let words = ["ZADD", counter, "GT", "CH", digits.format(floor), "last"];
                resp::write(&mut self.second, &words);
            }
            Request::Release { release, more } => {
                let (lock, [first, second]) = self.room.keys(layout, name, release.parts);
                resp::word(&mut self.locks, &[lock]);
                resp::word(&mut self.first, &[first]);
                resp::word(&mut self.second, &[second]);
                match more {
                    None => resp::word(&mut self.owners, &[claim.owner.as_str()]),
                    Some(more) => resp::word(&mut self.owners, &[claim.owner.as_str(), ":", more]),
                }
                self.release = Some(release);
            }
        }
        let owner = claim.owner.clone();
        self.calls.push(BatchedCall { owner, reply_to });
    }

    /// Restores a batch other than of releases from the commands that [`Batch::write`] wrote, without the calls whose callers left.
    /// Returns the receivers of those, too.
    ///
    /// # Errors
    /// When they are not such commands.
    pub(super) fn restore(sent: SentBatch, commands: &[u8]) -> RedisResult<(Self, Vec<ReplyTo>)> {
        let gone: Vec<bool> = sent.calls.iter().map(|call| call.reply_to.is_gone()).collect();
        // Each call has `count` words or commands of these.
        let keep = |from: &mut Reader<'_>, count: usize, part: &mut Vec<u8>| -> RedisResult<()> {
            for gone in gone.iter().flat_map(|gone| std::iter::repeat_n(gone, count)) {
                let one = from.next()?;
                if !gone {
                    part.extend_from_slice(one);
                }
            }
            Ok(())
        };
        let keep_words = |command, part: &mut Vec<u8>| -> RedisResult<()> {
            let mut words = Reader::elements(command).ok_or_else(resp::nonsense)?;
            words.skip(1)?;
            keep(&mut words, 1, part)
        };
        let mut batch = Batch::new(sent.kind);
        let mut commands = Reader::new(commands);
        if sent.kind == Kind::Acquire {
            keep_words(commands.next()?, &mut batch.first)?;
        }
        if sent.kind != Kind::Check {
            let count = if sent.kind == Kind::Vote { 2 } else { 1 };
            keep(&mut commands, count, &mut batch.second)?;
            // `INCRBY` or `TIME`.
            commands.skip(1)?;
        }
        keep_words(commands.next()?, &mut batch.locks)?;
        let mut left = Vec::new();
        for (call, gone) in sent.calls.into_iter().zip(&gone) {
            match gone {
                true => left.push(call.reply_to),
                false => batch.calls.push(call),
            }
        }
        Ok((batch, left))
    }

    /// Writes the commands, and empties the batch.
    pub(super) fn write(&mut self, out: &mut Vec<u8>) -> SentBatch {
        let count = self.calls.len();
        let mut digits = itoa::Buffer::new();
        match self.kind {
            Kind::Check => {}
            Kind::Acquire => {
                resp::head(out, 1 + count);
                resp::word(out, &["EXISTS"]);
                out.extend_from_slice(&self.first);
                out.extend_from_slice(&self.second);
                resp::write(out, &["INCRBY", LAST, digits.format(count)]);
            }
            Kind::Vote => {
                out.extend_from_slice(&self.second);
                resp::write(out, &["TIME"]);
            }
            Kind::Release => self.write_script(out),
        }
        if self.kind != Kind::Release {
            resp::head(out, 1 + count);
            resp::word(out, &["MGET"]);
            out.extend_from_slice(&self.locks);
        }
        for part in [&mut self.locks, &mut self.first, &mut self.second, &mut self.owners] {
            part.clear();
        }
        SentBatch {
            kind: self.kind,
            calls: std::mem::take(&mut self.calls),
        }
    }

    fn write_script(&mut self, out: &mut Vec<u8>) {
        let Some(release) = self.release else { return };
        let (count, script) = (self.calls.len(), (release.script)());
        let (verb, script) = if std::mem::take(&mut self.is_unknown) {
            ("EVAL", script.source())
        } else {
            ("EVALSHA", script.sha())
        };
        let mut digits = itoa::Buffer::new();
        let keys = 3 * count + usize::from(release.last.is_some());
        resp::head(out, 3 + keys + 1 + count);
        for word in [verb, script, digits.format(keys)] {
            resp::word(out, &[word]);
        }
        for keys in [&self.locks, &self.first, &self.second] {
            out.extend_from_slice(keys);
        }
        if let Some(last) = release.last {
            resp::word(out, &[last]);
        }
        resp::word(out, &[release.to]);
        out.extend_from_slice(&self.owners);
    }

    /// The server does not know the script: the next batch contains its text.
    pub(super) fn is_unknown(&mut self) {
        self.is_unknown = true;
    }
}

/// Writes the command that acquires a free name.
fn set(out: &mut Vec<u8>, lock: &str, value: &str, claim: &Claim) {
    let mut ttl = itoa::Buffer::new();
    let ttl = ttl.format(claim.ttl.as_millis());
    resp::write(out, &["SET", lock, value, "PX", ttl, "NX", "GET"]);
}
