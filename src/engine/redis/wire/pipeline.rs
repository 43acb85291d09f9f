//! Batches: the commands of several calls, built during one tick of the event loop.
//!
//! Calls of one kind share their commands. Releases are written first, so that their names are free for the acquisitions of
//! the same tick. Requests of one owner keep their order. Any other request on the connection closes the batches before it. A
//! single call is a batch of one.

use redis::{Cmd, RedisResult};
use tokio::sync::oneshot;

use super::call::{BatchRelease, Outcome};
use super::in_flight::{BatchedCall, ReplyTo, SentBatch};
use super::reply_sink::ReplyHandle;
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
    /// Runs a script in an attempt to acquire it.
    Script,
}

impl Kind {
    pub(super) const ALL: [Kind; 5] = [Kind::Release, Kind::Check, Kind::Acquire, Kind::Vote, Kind::Script];

    /// Whether its calls are attempts to acquire, whose number is limited.
    pub(super) fn is_attempt(self) -> bool {
        matches!(self, Kind::Check | Kind::Acquire | Kind::Script)
    }

    /// Whether a dropped call is not sent.
    pub(super) fn is_cancellable(self) -> bool {
        self != Kind::Release
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
    /// Companion keys, or whole commands.
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

    pub(super) fn kind(&self) -> Kind {
        self.kind
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
        self.calls.iter().any(|call| call.owner.as_ref() == Some(owner))
    }

    fn join(&mut self, claim: &Claim, reply_to: ReplyTo) {
        let owner = Some(claim.owner.clone());
        self.calls.push(BatchedCall { owner, reply_to });
    }

    fn call(&mut self, claim: &Claim) -> oneshot::Receiver<RedisResult<Outcome>> {
        let (sender, outcome) = oneshot::channel();
        self.join(claim, ReplyTo::Call(sender));
        outcome
    }

    pub(super) fn add_check(&mut self, layout: &Layout, claim: &Claim) -> oneshot::Receiver<RedisResult<Outcome>> {
        let (lock, []) = self.room.keys(layout, claim.keys()[0].as_str(), []);
        resp::word(&mut self.locks, &[lock]);
        self.call(claim)
    }

    pub(super) fn add_acquisition(
        &mut self,
        layout: &Layout,
        claim: &Claim,
    ) -> oneshot::Receiver<RedisResult<Outcome>> {
        let (lock, [queue]) = self.room.keys(layout, claim.keys()[0].as_str(), [Part::Queue]);
        resp::word(&mut self.locks, &[lock]);
        resp::word(&mut self.first, &[queue]);
        set(&mut self.second, lock, claim.owner.as_str(), claim);
        self.call(claim)
    }

    /// Adds a command of the caller.
    pub(super) fn add_script(&mut self, cmd: &Cmd) -> oneshot::Receiver<RedisResult<Outcome>> {
        cmd.write_packed_command(&mut self.second);
        let (sender, outcome) = oneshot::channel();
        let (owner, reply_to) = (None, ReplyTo::Call(sender));
        self.calls.push(BatchedCall { owner, reply_to });
        outcome
    }

    /// Removes dropped attempts. Returns their number.
    pub(super) fn remove_cancelled(&mut self) -> usize {
        if !self.kind.is_cancellable() || !self.calls.iter().any(BatchedCall::is_gone) {
            return 0;
        }
        let gone: Vec<bool> = self.calls.iter().map(BatchedCall::is_gone).collect();
        // Each call has one word in each of the first two parts that its kind uses, and one command or two in the last.
        let commands = if self.kind == Kind::Vote { 2 } else { 1 };
        for (part, count) in [(&mut self.locks, 1), (&mut self.first, 1), (&mut self.second, commands)] {
            let (mut kept, mut at) = (Vec::with_capacity(part.len()), 0);
            for gone in &gone {
                let length = resp::length_of(&part[at..], count).ok().flatten().unwrap_or(0);
                if !gone {
                    kept.extend_from_slice(&part[at..at + length]);
                }
                at += length;
            }
            *part = kept;
        }
        let calls = std::mem::take(&mut self.calls);
        for (call, gone) in calls.into_iter().zip(&gone) {
            match gone {
                true => call.discard(),
                false => self.calls.push(call),
            }
        }
        gone.len() - self.calls.len()
    }

    /// Restores a batch from the commands that [`Batch::write`] wrote.
    ///
    /// # Errors
    /// When they are not such commands.
    pub(super) fn restore(sent: SentBatch, commands: &[u8]) -> RedisResult<Self> {
        let words = |command| -> RedisResult<Vec<u8>> {
            let mut words = Reader::elements(command).ok_or_else(resp::nonsense)?;
            words.skip(1)?;
            Ok(words.rest().to_vec())
        };
        let mut batch = Batch::new(sent.kind);
        let mut commands = Reader::new(commands);
        let count = sent.calls.len();
        let own = match sent.kind {
            Kind::Release | Kind::Check => 0,
            Kind::Acquire | Kind::Script => count,
            Kind::Vote => 2 * count,
        };
        if sent.kind == Kind::Acquire {
            batch.first = words(commands.next()?)?;
        }
        for _ in 0..own {
            batch.second.extend_from_slice(commands.next()?);
        }
        if matches!(sent.kind, Kind::Acquire | Kind::Vote) {
            // `INCRBY` or `TIME`.
            commands.skip(1)?;
        }
        if sent.kind != Kind::Script {
            batch.locks = words(commands.next()?)?;
        }
        batch.calls = sent.calls;
        Ok(batch)
    }

    /// Adds a vote with `value` as the value of the lock key, and `floor` as the fencing token.
    pub(super) fn add_vote(&mut self, layout: &Layout, claim: &Claim, value: &str, floor: u64, handle: ReplyHandle) {
        let (lock, [counter]) = self.room.keys(layout, claim.keys()[0].as_str(), [Part::Counter]);
        resp::word(&mut self.locks, &[lock]);
        set(&mut self.second, lock, value, claim);
        let mut digits = itoa::Buffer::new();
        let words = ["ZADD", counter, "GT", "CH", digits.format(floor), "last"];
        resp::write(&mut self.second, &words);
        self.join(claim, ReplyTo::Vote(handle));
    }

    /// Adds a release. `more` follows the owner's token, after a colon.
    pub(super) fn add_release(
        &mut self,
        layout: &Layout,
        release: &'static BatchRelease,
        claim: &Claim,
        more: Option<&str>,
    ) -> oneshot::Receiver<RedisResult<Outcome>> {
        let (lock, [first, second]) = self.room.keys(layout, claim.keys()[0].as_str(), release.parts);
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
        self.release = Some(release);
        self.call(claim)
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
            Kind::Script => out.extend_from_slice(&self.second),
        }
        if !matches!(self.kind, Kind::Release | Kind::Script) {
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
