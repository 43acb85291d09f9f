use std::sync::{Arc, Mutex};

use tokio::sync::oneshot::Receiver;

use super::super::call::{BatchRelease, Request};
use super::super::reply_sink::{ReplyHandle, ReplySink};
use super::super::state::{Opened, State};
use super::*;
use crate::engine::core::stream::Replies;
use crate::engine::redis::connection::liveness::Health;
use crate::engine::redis::keys::{CHANNEL_PREFIX, Layout, Part};
use crate::engine::redis::scripts;
use crate::model::{Claim, Key, Process, Ttl};

pub(in super::super) static RELEASE: BatchRelease = BatchRelease {
    script: || &scripts::RELEASE,
    last: None,
    parts: [Part::Queue, Part::Fence],
    to: CHANNEL_PREFIX,
};

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

/// Returns the state of a connection whose peer has closed it.
pub(in super::super) fn state() -> State {
    let opened = Opened {
        io: Box::new(tokio::io::empty()),
        tls_records: u64::MAX,
        replies: Replies::default(),
        version: Some(7),
    };
    State::new(
        opened,
        Arc::new(tokio::sync::Semaphore::new(0)),
        Arc::new(Health::new()),
    )
}

fn bulk(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

type Outcome = Receiver<RedisResult<Value>>;

/// The release of a waiter.
pub(in super::super) const RELEASED: Request<'static> = Request::Release {
    release: &RELEASE,
    more: Some("process"),
};

/// Adds the request of a call to a batch.
pub(in super::super) fn ask(state: &mut State, claim: &Claim, request: &Request<'_>) -> Outcome {
    let (reply_to, outcome) = ReplyTo::call();
    state.add(&Layout::new("lock:", true), claim, request, reply_to);
    outcome
}

/// Returns the batch of these requests.
fn sent(claims: &[Claim], request: &Request<'_>) -> (InFlight, Vec<Outcome>) {
    let mut state = state();
    let outcomes = claims.iter().map(|claim| ask(&mut state, claim, request)).collect();
    assert!(state.unsealed() > 0);
    state.seal();
    assert_eq!((state.unsealed(), state.waiting.len()), (0, 1));
    (state.waiting.pop_front().unwrap(), outcomes)
}

/// However the stream is cut, no outcome is passed on before all replies are there.
fn whole(sent: &InFlight, replies: &str) -> usize {
    let stream = format!("{replies}:1\r\n");
    for cut in 0..replies.len() {
        let length = resp::length_of(&stream.as_bytes()[..cut], sent.commands());
        assert_eq!(length.unwrap(), None, "{cut}");
    }
    let length = resp::length_of(stream.as_bytes(), sent.commands()).unwrap();
    assert_eq!(length, Some(replies.len()));
    replies.len()
}

#[test]
fn each_of_many_has_its_own_token_and_outcome() {
    let claims = claims(4);
    let (sent, mut outcomes) = sent(&claims, &Request::Acquire);
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
    let report = sent.deliver(replies.as_bytes()).unwrap();
    assert!(report.sink_calls == 0 && !report.is_unknown && report.error.is_none());
    let mut outcome = |i: usize| outcomes[i].try_recv().unwrap();
    assert_eq!(outcome(0), Ok(Value::Int(1_763_000_000_000_001)));
    let Ok(Value::Array(busy)) = outcome(1) else { panic!() };
    assert_eq!(busy[1], Value::BulkString(b"somebody".to_vec()));
    assert!(outcome(2).is_err());
    let Ok(Value::Array(displaced)) = outcome(3) else {
        panic!()
    };
    assert_eq!(displaced[1..3], [Value::Nil, Value::Int(1_763_000_000_000_004)]);
    assert_eq!(displaced[3], Value::BulkString(b"a successor".to_vec()));
}

#[test]
fn an_error_for_all_is_an_answer_for_each() {
    let claims = claims(2);
    let (sent, mut outcomes) = sent(&claims, &Request::Acquire);
    let replies = "-NOPERM a\r\n$-1\r\n$-1\r\n-NOPERM b\r\n-NOPERM c\r\n";
    whole(&sent, replies);
    sent.deliver(replies.as_bytes()).unwrap();
    for outcome in &mut outcomes {
        let Ok(Ok(Value::Array(replies))) = outcome.try_recv() else {
            panic!()
        };
        assert!(matches!(
            replies[..],
            [Value::Nil, Value::Nil, Value::ServerError(_), Value::Nil]
        ));
    }
    let (sent, mut outcomes) = self::sent(&claims, &Request::Check);
    sent.deliver(b"-NOPERM a\r\n").unwrap();
    for outcome in &mut outcomes {
        assert_eq!(outcome.try_recv().unwrap(), Ok(Value::Boolean(false)));
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
        let (sent, mut outcomes) = sent(&claims, &RELEASED);
        whole(&sent, reply);
        let report = sent.deliver(reply.as_bytes()).unwrap();
        assert_eq!(report.is_unknown, reply.starts_with("-NOSCRIPT"));
        for (outcome, expected) in outcomes.iter_mut().zip(expected) {
            match outcome.try_recv().unwrap() {
                Ok(Value::Int(answer)) => assert_eq!(Some(answer), expected, "{reply}"),
                other => assert!(expected.is_none() && other.is_err(), "{reply}"),
            }
        }
    }
}

#[derive(Default)]
struct Received(Mutex<Vec<(usize, RedisResult<Value>)>>);

impl ReplySink for Received {
    fn on_reply(self: Arc<Self>, number: usize, reply: RedisResult<Value>) {
        self.0.lock().unwrap().push((number, reply));
    }
}

#[test]
fn a_vote_receives_each_reply_in_order_or_an_error() {
    let claims = claims(2);
    let (mut state, layout) = (state(), Layout::new("lock:", true));
    let received: Arc<Received> = Arc::default();
    let (value, floor) = ("value", 7);
    let vote = |state: &mut State, claim: &Claim, last: usize| {
        let reply_to = ReplyTo::Sink(ReplyHandle::new(received.clone(), last));
        state.add(&layout, claim, &Request::Vote { value, floor }, reply_to);
    };
    vote(&mut state, &claims[0], 13);
    vote(&mut state, &claims[1], 23);
    state.seal();
    let sent = state.waiting.pop_front().unwrap();
    let replies = "$-1\r\n:1\r\n-READONLY x\r\n:0\r\n*0\r\n*2\r\n$5\r\nvalue\r\n$-1\r\n";
    whole(&sent, replies);
    let report = sent.deliver(replies.as_bytes()).unwrap();
    assert!(report.sink_calls == 2 && report.error.is_some());
    let replies_received = std::mem::take(&mut *received.0.lock().unwrap());
    let numbers: Vec<usize> = replies_received.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, [10, 11, 12, 13, 20, 21, 22, 23]);
    let replies: Vec<Option<Value>> = replies_received.into_iter().map(|(_, reply)| reply.ok()).collect();
    let (value, time) = (Value::BulkString(b"value".to_vec()), Value::Array(Vec::new()));
    assert_eq!(
        replies[..4],
        [Some(Value::Nil), Some(Value::Int(1)), Some(time.clone()), Some(value)]
    );
    assert_eq!(replies[4..], [None, Some(Value::Int(0)), Some(time), Some(Value::Nil)]);

    vote(&mut state, &claims[0], 3);
    drop(state);
    let replies_received = std::mem::take(&mut *received.0.lock().unwrap());
    assert!(matches!(replies_received[..], [(3, Err(_))]));
}

#[test]
fn replies_that_make_no_sense_are_an_error() {
    let claims = claims(2);
    for replies in [":3\r\n", "*1\r\n:1\r\n", "*2\r\n:1\r\n+OK\r\n", "$-1\r\n"] {
        let (sent, mut outcomes) = sent(&claims, &RELEASED);
        assert!(sent.deliver(replies.as_bytes()).is_err(), "{replies}");
        assert!(outcomes[1].try_recv().is_err(), "{replies}: no outcome is delivered");
    }
    let (sent, _outcomes) = sent(&claims, &Request::Acquire);
    assert!(sent.deliver(b":0\r\n$-1\r\n$-1\r\n:9\r\n*1\r\n$1\r\nx\r\n").is_err());
}
