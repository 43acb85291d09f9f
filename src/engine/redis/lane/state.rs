//! What is sent, what is read, and who waits for it.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use redis::{Cmd, Value};

use super::super::asked::{Asked, Single};
use super::super::keys::LAST;
use super::super::plain::Record;
use super::super::resp;
use super::super::scripts::{RECORD, SEED};
use super::CHUNK;
use super::batch::{Batch, Kind};
use crate::clock::Moment;
use crate::model::OwnerToken;

/// How long tokens are drawn without a look at the server's clock.
const SEED_EVERY: Duration = Duration::from_secs(1);

// Where the batch of a kind is.
const FREES: usize = 0;
const LOOKS: usize = 1;
const TAKES: usize = 2;

pub(super) struct State {
    pub(super) out: Vec<u8>,
    /// How much of `out` was written already.
    pub(super) written: usize,
    /// What was read and is not taken up yet, as far as `filled`.
    pub(super) input: Vec<u8>,
    pub(super) filled: usize,
    pub(super) waiting: VecDeque<Asked>,
    /// What is still put together, in the order in which it goes out.
    batches: [Batch; 3],
    /// For how many calls there is no reply yet.
    pub(super) under_way: usize,
    /// The grants that inspection is to tell of, unless they are released first.
    pub(super) records: HashMap<OwnerToken, Record>,
    /// When the last token was last raised to the server's clock.
    pub(super) seeded: Option<Moment>,
    /// The server would not, the last time.
    pub(super) unseeded: bool,
    /// What was on its way to be written down when the lane ended.
    pub(super) lost_records: Vec<Cmd>,
    /// Since when the oldest call waits, or when a reply last came.
    pub(super) since: Moment,
}

impl State {
    pub(super) fn new() -> Self {
        State {
            out: Vec::with_capacity(4096),
            written: 0,
            input: vec![0; CHUNK],
            filled: 0,
            waiting: VecDeque::new(),
            batches: std::array::from_fn(|_| Batch::new()),
            under_way: 0,
            records: HashMap::new(),
            lost_records: Vec::new(),
            seeded: None,
            unseeded: false,
            since: Moment::now(),
        }
    }

    /// Whether there is nothing to send, and no reply to come.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way == 0 && self.records.is_empty()
    }

    /// There will be a reply.
    pub(super) fn wait(&mut self, asked: Single) {
        self.under_way += 1;
        self.waiting.push_back(asked.into());
    }

    /// The batch that a call of this kind joins.
    pub(super) fn begin(&mut self, kind: Kind, owner: &OwnerToken) -> &mut Batch {
        let place = match kind {
            Kind::Free => FREES,
            Kind::Look => LOOKS,
            Kind::Take | Kind::Vote => TAKES,
        };
        // A release goes behind what its owner has asked for before. Of two by one owner the second finds nothing, which one
        // script for both could not tell.
        let is_behind = kind == Kind::Free && self.batches.iter().any(|batch| batch.has(owner));
        if is_behind || self.batches[place].is_for_others(kind) {
            self.seal();
        }
        if kind == Kind::Take {
            self.seed();
        }
        self.under_way += 1;
        &mut self.batches[place]
    }

    /// What was put together so far is to be sent: whatever is asked for from here on is carried out after it.
    pub(super) fn seal(&mut self) {
        for batch in &mut self.batches {
            if !batch.is_empty() {
                let sent = batch.write(&mut self.out);
                self.waiting.push_back(Asked::Batch(sent));
            }
        }
    }

    /// How much is being put together, in bytes.
    pub(super) fn unsealed(&self) -> usize {
        self.batches.iter().map(Batch::size).sum()
    }

    /// The server does not know the script of the releases.
    pub(super) fn is_unknown(&mut self) {
        self.batches[FREES].is_unknown();
    }

    /// Has the last token raised to the server's clock, if that is some time ago.
    pub(super) fn seed(&mut self) {
        if self.seeded.is_none_or(|last| last.elapsed() >= SEED_EVERY) {
            self.seal();
            self.seeded = Some(Moment::now());
            // Once in a while, and so with its text: it is short.
            resp::write(&mut self.out, &["EVAL", SEED.source(), "1", LAST]);
            self.wait(Single::Seed);
        }
    }

    pub(super) fn answer(&mut self, asked: Single, reply: Value) {
        // Whoever asked may have gone.
        match asked {
            Single::Call(sender) => {
                let _ = sender.send(Ok(reply));
            }
            Single::Seed => {
                self.unseeded = !matches!(reply, Value::Int(_));
                if self.unseeded {
                    self.seeded = None;
                }
            }
            Single::Record(call) => {
                if let Value::ServerError(error) = reply
                    && error.kind() == Some(redis::ServerErrorKind::NoScript)
                {
                    // Of many that went out together the first takes the text along, which costs the server most of it.
                    let told = self
                        .waiting
                        .iter()
                        .any(|asked| matches!(asked, Asked::Single(Single::Source)));
                    if told {
                        self.seal();
                        call.write_packed_command(&mut self.out);
                        self.wait(Single::Record(call));
                    } else {
                        self.seal();
                        RECORD.with_source(&call).write_packed_command(&mut self.out);
                        self.wait(Single::Source);
                    }
                }
            }
            Single::Told(telling) => telling.tell(reply.extract_error()),
            Single::Source => {}
        }
    }
}
