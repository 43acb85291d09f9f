//! A batch that was sent: what its replies mean for each of those who asked.

use redis::{RedisError, RedisResult, Value};
use tokio::sync::oneshot;

use super::pipeline::Kind;
use super::reply_sink::Telling;
use super::resp::{self, Reader};
use crate::engine::redis::error::spoils_connection;
use crate::model::OwnerToken;

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
    /// The reply to a command of the caller.
    Answer(Value),
}

/// Who is told what came of one name.
pub(super) enum Teller {
    Call(oneshot::Sender<RedisResult<Outcome>>),
    /// Of a release by a quorum.
    Release(Telling),
    /// Of a vote: of each of its four replies, or that there is no last one.
    Vote(Telling),
}

pub(super) struct Asker {
    /// `None` for a command of the caller.
    pub(super) owner: Option<OwnerToken>,
    pub(super) teller: Teller,
}

impl Asker {
    /// Whether the caller was dropped, or does not need the request any more.
    pub(super) fn is_gone(&self) -> bool {
        match &self.teller {
            Teller::Call(sender) => sender.is_closed(),
            Teller::Release(telling) | Teller::Vote(telling) => telling.is_cancelled(),
        }
    }

    /// Drops the request without a reply.
    pub(super) fn discard(self) {
        if let Teller::Release(telling) | Teller::Vote(telling) = self.teller {
            telling.discard();
        }
    }

    fn owner(&self) -> Option<&[u8]> {
        self.owner.as_ref().map(|owner| owner.as_str().as_bytes())
    }

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

/// A batch that was sent.
pub(in super::super) struct Sent {
    pub(super) kind: Kind,
    pub(super) askers: Vec<Asker>,
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

impl Sent {
    /// For how many calls it was.
    pub(super) fn calls(&self) -> usize {
        self.askers.len()
    }

    /// Whether a call in it is to be removed, as long as it is not sent.
    pub(super) fn has_cancelled(&self) -> bool {
        self.kind.is_cancellable() && self.askers.iter().any(Asker::is_gone)
    }

    /// Returns the number of attempts to acquire among them.
    pub(super) fn attempts(&self) -> usize {
        if self.kind.is_attempt() { self.askers.len() } else { 0 }
    }

    /// Returns the number of commands, each of which has one reply.
    pub(in super::super) fn commands(&self) -> usize {
        let count = self.askers.len();
        match self.kind {
            Kind::Look | Kind::Free => 1,
            Kind::Script => count,
            Kind::Take => count + 3,
            Kind::Vote => 2 * count + 2,
        }
    }

    /// How long the replies are together, when all of them have come.
    pub(super) fn length(&self, input: &[u8]) -> RedisResult<Option<usize>> {
        resp::length_of(input, self.commands())
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
            Kind::Script => {
                for asker in self.askers {
                    let answer = resp::value(replies.next()?)?.extract_error();
                    asker.tell(answer.map(Outcome::Answer));
                }
            }
            Kind::Free => {
                learnt.error = tell_frees(self.askers, resp::value(replies.next()?)?)?;
                let unknown = redis::ServerErrorKind::NoScript.into();
                learnt.is_unknown = learnt.error.as_ref().is_some_and(|error| error.kind() == unknown);
            }
        }
        Ok(learnt)
    }
}

/// What a reply for all says for one after the other: its elements, or each time the whole of it where it is no array.
struct Shared<'a> {
    reply: &'a [u8],
    elements: Option<Reader<'a>>,
}

impl<'a> Shared<'a> {
    fn new(reply: &'a [u8]) -> Self {
        let elements = Reader::elements(reply);
        Shared { reply, elements }
    }

    fn next(&mut self) -> RedisResult<&'a [u8]> {
        self.elements.as_mut().map_or(Ok(self.reply), Reader::next)
    }
}

fn tell_looks(askers: Vec<Asker>, reply: &[u8]) -> RedisResult<()> {
    let mut holders = Shared::new(reply);
    for asker in askers {
        // Not where the reply is an error: a right that is missing may be missing for one of the names only.
        let holder = resp::bulk(holders.next()?);
        let is_held = holder.is_some_and(|holder| !asker.owner().is_some_and(|owner| holder.starts_with(owner)));
        asker.tell(Ok(if is_held { Outcome::Held } else { Outcome::NotHeld }));
    }
    Ok(())
}

fn tell_takes(askers: Vec<Asker>, replies: &mut Reader<'_>) -> RedisResult<()> {
    let is_shared = askers.len() > 1;
    let queued = resp::value(spared(replies.next()?, is_shared))?;
    let mut behind = replies.clone();
    behind.skip(askers.len())?;
    let last = resp::value(behind.next()?)?;
    let standing = spared(behind.next()?, is_shared);
    let mut holders = Shared::new(standing);
    let count = askers.len() as i64;
    for (asker, number) in askers.into_iter().zip(1..) {
        let held = replies.next()?;
        let holder = holders.next()?;
        let fence = match &last {
            Value::Int(last) => Value::Int(last - count + number),
            other => other.clone(),
        };
        let outcome = match (&queued, &fence) {
            (Value::Int(queued), Value::Int(fence))
                if held == resp::NIL && resp::bulk(holder).is_some_and(|holder| asker.owner() == Some(holder)) =>
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

/// An answer, or that there is none where it is an error and `is_shared`: a right that is missing for one of several names is not
/// to look like one that is missing for all.
fn spared(answer: &[u8], is_shared: bool) -> &[u8] {
    if is_shared && answer.starts_with(b"-") {
        resp::NIL
    } else {
        answer
    }
}

/// Answers one of the server's errors, one that means that the connection is of no use any more if there is such a one.
fn tell_votes(askers: Vec<Asker>, replies: &mut Reader<'_>) -> RedisResult<Option<RedisError>> {
    let mut behind = replies.clone();
    behind.skip(2 * askers.len())?;
    let time = behind.next()?;
    let standing = spared(behind.next()?, askers.len() > 1);
    let mut holders = Shared::new(standing);
    let mut seen: Option<RedisError> = None;
    for asker in askers {
        let (taken, counted) = (replies.next()?, replies.next()?);
        let holder = holders.next()?;
        let Teller::Vote(telling) = asker.teller else {
            continue;
        };
        let mut read = |reply| -> RedisResult<RedisResult<Value>> {
            let reply = resp::value(reply)?.extract_error();
            if let Err(error) = &reply
                && !seen.as_ref().is_some_and(spoils_connection)
            {
                seen = Some(error.clone());
            }
            Ok(reply)
        };
        for (before, reply) in [(3, taken), (2, counted), (1, time)] {
            telling.tell_before(before, read(reply)?);
        }
        telling.tell(read(holder)?);
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

#[cfg(test)]
pub(super) mod tests {
    use std::sync::{Arc, Mutex};

    use super::super::pipeline::Batch;
    use super::super::reply_sink::Told;
    use super::*;
    use crate::engine::redis::keys::Layout;
    use crate::engine::redis::ops::acquire_plain::FREEING;
    use crate::model::{Claim, Key, Process, Ttl};

    pub(in super::super) fn claims(count: usize) -> Vec<Claim> {
        let process = Arc::new(Process::current());
        let key = |i| [Key::new(&format!("n{i}")).unwrap()];
        let claim = |i| {
            Claim::new(
                &key(i),
                OwnerToken::fresh(),
                Ttl::clamped(std::time::Duration::MAX),
                process.clone(),
            )
        };
        (0..count).map(claim).collect()
    }

    fn bulk(text: &str) -> String {
        format!("${}\r\n{text}\r\n", text.len())
    }

    type Outcomes = Vec<oneshot::Receiver<RedisResult<Outcome>>>;

    fn sent(
        kind: Kind,
        claims: &[Claim],
        mut add: impl FnMut(&mut Batch, &Layout, &Claim) -> oneshot::Receiver<RedisResult<Outcome>>,
    ) -> (Sent, Outcomes) {
        let (mut batch, layout, mut out) = (Batch::new(kind), Layout::new("lock:"), Vec::new());
        let outcomes = claims.iter().map(|claim| add(&mut batch, &layout, claim)).collect();
        assert!(batch.size() > 0);
        let sent = batch.write(&mut out);
        assert!(batch.is_empty() && batch.size() == 0);
        (sent, outcomes)
    }

    /// Whatever the stream's cut, nobody is told before everything is there.
    fn whole(sent: &Sent, replies: &str) -> usize {
        let stream = format!("{replies}:1\r\n");
        for cut in 0..replies.len() {
            assert_eq!(sent.length(&stream.as_bytes()[..cut]).unwrap(), None, "{cut}");
        }
        let length = sent.length(stream.as_bytes()).unwrap();
        assert_eq!(length, Some(replies.len()));
        replies.len()
    }

    #[test]
    fn each_of_many_has_its_own_token_and_outcome() {
        let claims = claims(4);
        let (sent, mut outcomes) = sent(Kind::Take, &claims, |batch, layout, claim| batch.take(layout, claim));
        assert_eq!(sent.calls(), 4);
        let owner = |i: usize| claims[i].owner.as_str();
        let replies = [
            ":0\r\n$-1\r\n".to_owned(),
            bulk("somebody"),
            "-WRONGTYPE x\r\n$-1\r\n:1763000000000004\r\n*4\r\n".to_owned(),
            bulk(owner(0)) + &bulk("somebody") + "$-1\r\n" + &bulk("a successor"),
        ]
        .concat();
        whole(&sent, &replies);
        let learnt = sent.tell(replies.as_bytes()).unwrap();
        assert!(learnt.told == 0 && !learnt.is_unknown && learnt.error.is_none());
        let mut outcome = |i: usize| outcomes[i].try_recv().unwrap();
        assert!(matches!(
            outcome(0),
            Ok(Outcome::Taken {
                fence: 1_763_000_000_000_001,
                queued: false
            })
        ));
        let Ok(Outcome::Replies(busy)) = outcome(1) else {
            panic!()
        };
        assert_eq!(busy[1], Value::BulkString(b"somebody".to_vec()));
        assert!(outcome(2).is_err());
        let Ok(Outcome::Replies(displaced)) = outcome(3) else {
            panic!()
        };
        assert_eq!(displaced[1..3], [Value::Nil, Value::Int(1_763_000_000_000_004)]);
        assert_eq!(displaced[3], Value::BulkString(b"a successor".to_vec()));
    }

    #[test]
    fn an_error_for_all_is_an_answer_for_each() {
        let claims = claims(2);
        let (sent, mut outcomes) = sent(Kind::Take, &claims, |batch, layout, claim| batch.take(layout, claim));
        let replies = "-NOPERM a\r\n$-1\r\n$-1\r\n-NOPERM b\r\n-NOPERM c\r\n";
        whole(&sent, replies);
        sent.tell(replies.as_bytes()).unwrap();
        for outcome in &mut outcomes {
            let Ok(Ok(Outcome::Replies(replies))) = outcome.try_recv() else {
                panic!()
            };
            assert!(matches!(
                *replies,
                [Value::Nil, Value::Nil, Value::ServerError(_), Value::Nil]
            ));
        }
        let (sent, mut outcomes) = self::sent(Kind::Look, &claims, |batch, layout, claim| batch.look(layout, claim));
        sent.tell(b"-NOPERM a\r\n").unwrap();
        for outcome in &mut outcomes {
            assert!(matches!(outcome.try_recv(), Ok(Ok(Outcome::NotHeld))));
        }
    }

    #[test]
    fn a_release_that_fails_is_tried_by_itself_unless_it_was() {
        for (count, reply, expected) in [
            (2, ":2\r\n", [Some(1), Some(1)]),
            (2, "*2\r\n:0\r\n:-1\r\n", [Some(0), Some(ALONE)]),
            (2, "-OOM x\r\n", [Some(ALONE), Some(ALONE)]),
            (1, "-OOM x\r\n", [None, None]),
            (1, "-NOSCRIPT x\r\n", [Some(ALONE), None]),
        ] {
            let claims = claims(count);
            let (sent, mut outcomes) = sent(Kind::Free, &claims, |batch, layout, claim| {
                batch.free(layout, &FREEING, claim, None)
            });
            whole(&sent, reply);
            let learnt = sent.tell(reply.as_bytes()).unwrap();
            assert_eq!(learnt.is_unknown, reply.starts_with("-NOSCRIPT"));
            for (outcome, expected) in outcomes.iter_mut().zip(expected) {
                match outcome.try_recv().unwrap() {
                    Ok(Outcome::Freed(answer)) => assert_eq!(Some(answer), expected, "{reply}"),
                    other => assert!(expected.is_none() && other.is_err(), "{reply}"),
                }
            }
        }
    }

    #[derive(Default)]
    struct Heard(Mutex<Vec<(usize, RedisResult<Value>)>>);

    impl Told for Heard {
        fn told(self: Arc<Self>, number: usize, reply: RedisResult<Value>) {
            self.0.lock().unwrap().push((number, reply));
        }
    }

    #[test]
    fn a_vote_is_told_of_each_reply_in_order_and_of_none_when_there_is_none() {
        let claims = claims(2);
        let (mut batch, layout, mut out) = (Batch::new(Kind::Vote), Layout::new("lock:"), Vec::new());
        let heard: Arc<Heard> = Arc::default();
        for (claim, first) in claims.iter().zip([10, 20]) {
            batch.vote(&layout, claim, "value", 7, Telling::new(heard.clone(), first + 3));
        }
        let sent = batch.write(&mut out);
        let replies = "$-1\r\n:1\r\n-READONLY x\r\n:0\r\n*0\r\n*2\r\n$5\r\nvalue\r\n$-1\r\n";
        whole(&sent, replies);
        let learnt = sent.tell(replies.as_bytes()).unwrap();
        assert!(learnt.told == 2 && learnt.error.is_some());
        let told = std::mem::take(&mut *heard.0.lock().unwrap());
        let numbers: Vec<usize> = told.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, [10, 11, 12, 13, 20, 21, 22, 23]);
        let replies: Vec<Option<Value>> = told.into_iter().map(|(_, reply)| reply.ok()).collect();
        let (value, time) = (Value::BulkString(b"value".to_vec()), Value::Array(Vec::new()));
        assert_eq!(
            replies[..4],
            [Some(Value::Nil), Some(Value::Int(1)), Some(time.clone()), Some(value)]
        );
        assert_eq!(replies[4..], [None, Some(Value::Int(0)), Some(time), Some(Value::Nil)]);

        batch.vote(&layout, &claims[0], "value", 7, Telling::new(heard.clone(), 3));
        drop(batch);
        let told = std::mem::take(&mut *heard.0.lock().unwrap());
        assert!(matches!(told[..], [(3, Err(_))]));
    }

    #[test]
    fn replies_that_make_no_sense_are_an_error() {
        let claims = claims(2);
        for replies in [":3\r\n", "*1\r\n:1\r\n", "*2\r\n:1\r\n+OK\r\n", "$-1\r\n"] {
            let (sent, mut outcomes) = sent(Kind::Free, &claims, |batch, layout, claim| {
                batch.free(layout, &FREEING, claim, None)
            });
            assert!(sent.tell(replies.as_bytes()).is_err(), "{replies}");
            assert!(outcomes[1].try_recv().is_err(), "{replies}: nobody is told");
        }
        let (sent, _outcomes) = sent(Kind::Take, &claims, |batch, layout, claim| batch.take(layout, claim));
        assert!(sent.tell(b":0\r\n$-1\r\n$-1\r\n:9\r\n*1\r\n$1\r\nx\r\n").is_err());
    }
}
