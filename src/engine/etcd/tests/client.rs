//! The client, before servers that are slow, wrong or hostile.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::*;
use crate::engine::entries::{self, Record};
use crate::engine::etcd::client::messages::{
    Header, KeyValue, LeaseRequest, LeaseResponse, OpAnswer, RangeResponse, ResponseOp, TxnResponse,
};
use crate::engine::etcd::client::{Client, Failure};
use crate::engine::etcd::layout::Layout;
use crate::engine::{Acquired, Engine, EngineExt};
use crate::error::EngineError;
use prost::Message;

/// What a server answers: the HTTP status, the content type, the body, and the trailers; without any, the stream stays open. `None`: it
/// never answers.
pub(super) type Answer = Option<(u16, &'static str, Vec<u8>, Option<Vec<(&'static str, String)>>)>;

/// Starts a server that speaks HTTP/2. `answer` gets the path and the token of a request.
pub(super) async fn server(answer: impl Fn(&str, Option<&str>) -> Answer + Send + Sync + 'static) -> String {
    let answer = Arc::new(answer);
    listening(move |socket| {
        let answer = answer.clone();
        async move {
            let mut connection = h2::server::handshake(socket).await.unwrap();
            let mut open = Vec::new();
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                let token = request
                    .headers()
                    .get("token")
                    .map(|token| token.to_str().unwrap().to_owned());
                let Some((status, kind, body, trailers)) = answer(request.uri().path(), token.as_deref()) else {
                    tokio::spawn(async move {
                        let _kept = (respond, request);
                        std::future::pending::<()>().await;
                    });
                    continue;
                };
                let head = Response::builder()
                    .status(status)
                    .header("content-type", kind)
                    .body(())
                    .unwrap();
                let mut stream = respond.send_response(head, false).unwrap();
                stream.send_data(Bytes::from(body), trailers.is_none()).unwrap();
                if let Some(trailers) = trailers {
                    if trailers.is_empty() {
                        open.push(stream);
                        continue;
                    }
                    let mut map = HeaderMap::new();
                    for (name, value) in trailers {
                        map.insert(name, value.parse().unwrap());
                    }
                    stream.send_trailers(map).unwrap();
                }
            }
        }
    })
    .await
}

/// Listens, and serves each connection. Returns the address.
pub(super) async fn listening<F>(serve: impl Fn(TcpStream) -> F + Send + 'static) -> String
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(serve(socket));
        }
    });
    address
}

pub(super) fn client(url: &str) -> Client {
    Client::new(EtcdConfig::parse(url, &Settings::default()).unwrap().servers)
}

trait Of {
    fn of(self, op: &'static str) -> EngineError;
}

impl Of for Failure {
    fn of(self, op: &'static str) -> EngineError {
        entries::Failure::from(self).of("etcd", op)
    }
}

pub(super) async fn call(client: &Client) -> Result<LeaseResponse, Failure> {
    client.call("/service/method", &LeaseRequest { id: 7 }, None).await
}

pub(super) const GRPC: &str = "application/grpc";

pub(super) fn ok() -> Option<Vec<(&'static str, String)>> {
    Some(vec![("grpc-status", "0".into())])
}

/// A frame with a lease of 5 s.
fn lease() -> Vec<u8> {
    vec![0, 0, 0, 0, 4, 0x10, 7, 0x18, 5]
}

#[tokio::test]
async fn wrong_answers_are_errors() {
    let pages = || -> Vec<(Answer, &'static str, bool)> {
        let failed = vec![
            ("grpc-status", "14".into()),
            ("grpc-message", "etcdserver: no leader".into()),
        ];
        let huge = [&[0, 0xff, 0xff, 0xff, 0xff][..], &[0; 100]].concat();
        vec![
            (
                Some((404, "text/html", b"<html>".to_vec(), None)),
                "HTTP status 404",
                false,
            ),
            (
                Some((502, "text/html", b"<html>".to_vec(), None)),
                "a proxy answered 502",
                true,
            ),
            (
                Some((200, "text/html", b"<html>".to_vec(), None)),
                "does not speak gRPC",
                false,
            ),
            (Some((200, GRPC, lease(), None)), "no status", true),
            (Some((200, GRPC, Vec::new(), ok())), "no message", true),
            (Some((200, GRPC, lease()[..7].to_vec(), ok())), "no message", true),
            (Some((200, GRPC, vec![1, 0, 0, 0, 0], ok())), "compressed", true),
            (
                Some((200, GRPC, vec![0, 0, 0, 0, 1, 0xff], ok())),
                "invalid message",
                true,
            ),
            (Some((200, GRPC, huge, ok())), "16 MiB", true),
            (Some((200, GRPC, Vec::new(), Some(failed))), "no leader", true),
        ]
    };
    for (index, (_, text, is_retryable)) in pages().into_iter().enumerate() {
        let address = server(move |_, _| pages().swap_remove(index).0).await;
        let error = call(&client(&format!("etcd://{address}")))
            .await
            .unwrap_err()
            .of("acquire");
        let message = error.to_string();
        assert!(message.contains(text) && message.contains(&address), "{message}");
        assert_eq!(error.retryable, is_retryable, "{message}");
        assert!(error.may_be_executed);
    }
}

#[tokio::test]
async fn a_server_that_does_not_speak_http2_is_an_error() {
    for greeting in [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], b"\xff\x00\xff", b""] {
        let address = listening(move |mut socket| async move {
            let _ = socket.write_all(greeting).await;
            let mut buffer = [0; 1024];
            while greeting.is_empty() && matches!(socket.read(&mut buffer).await, Ok(1..)) && buffer[0] != b'P' {}
        })
        .await;
        let error = call(&client(&format!("etcd://{address}")))
            .await
            .unwrap_err()
            .of("connect");
        assert!(error.retryable, "{error}");
    }
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let closed = socket.local_addr().unwrap();
    let error = call(&client(&format!("etcd://{closed}")))
        .await
        .unwrap_err()
        .of("connect");
    assert!(
        !error.may_be_executed && error.to_string().contains("cannot connect"),
        "{error}"
    );
}

/// A member that accepts connections and never answers is left for another one.
#[tokio::test]
async fn a_silent_member_is_left() {
    let silent = listening(|mut socket| async move {
        let mut buffer = [0; 1024];
        while matches!(socket.read(&mut buffer).await, Ok(1..)) {}
    })
    .await;
    // It answers probes, and no requests.
    let stuck = server(|path, _| path.contains("Health").then(|| (200, GRPC, lease(), ok()))).await;
    let live = server(|_, _| Some((200, GRPC, lease(), ok()))).await;
    for other in [silent, stuck] {
        let client = client(&format!("etcd://{other},{live}"));
        let started = Instant::now();
        let answer = loop {
            match call(&client).await {
                Ok(answer) => break answer,
                Err(failure) => {
                    let error = failure.of("acquire");
                    assert!(
                        error.retryable && error.to_string().contains("did not answer") || !error.may_be_executed,
                        "{error}"
                    );
                }
            }
            assert!(started.elapsed() < Duration::from_secs(30));
        };
        assert_eq!((answer.id, answer.ttl), (7, 5));
        assert!(call(&client).await.is_ok());
    }
}

/// The only member is not left because an answer is late, but when it does not answer probes.
#[tokio::test]
async fn the_only_member_may_answer_late() {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let address = server(move |path, _| {
        let is_probe = path.contains("Health");
        if !is_probe && counted.fetch_add(1, SeqCst) == 0 {
            return None;
        }
        Some((200, GRPC, lease(), ok()))
    })
    .await;
    let client = client(&format!("etcd://{address}"));
    let first = tokio::time::timeout(Duration::from_secs(3), call(&client)).await;
    assert!(first.is_err(), "it waits for the answer: {first:?}");
    assert!(call(&client).await.is_ok());
    assert_eq!(count.load(SeqCst), 2);
}

/// A service may start while members have no leader.
#[tokio::test]
async fn a_connect_tries_each_member() {
    let without_leader = || {
        server(|_, _| {
            let failed = vec![
                ("grpc-status", "14".into()),
                ("grpc-message", "etcdserver: no leader".into()),
            ];
            Some((200, GRPC, Vec::new(), Some(failed)))
        })
    };
    let live = server(|_, _| Some((200, GRPC, frame(&[]), ok()))).await;
    // The first one is chosen at random.
    for _ in 0..6 {
        let (one, other) = (without_leader().await, without_leader().await);
        opened(&format!("etcd://{one},{other},{live}"), "p/").await;
    }
}

#[tokio::test]
async fn an_expired_token_is_replaced_once() {
    let tokens = Arc::new(Mutex::new(vec!["c", "b", "a"]));
    let address = server(move |path, token| {
        let mut tokens = tokens.lock().unwrap();
        if path.ends_with("Authenticate") {
            assert_eq!(token, None);
            let token = tokens.pop().unwrap_or("z");
            return Some((200, GRPC, vec![0, 0, 0, 0, 3, 0x12, 1, token.as_bytes()[0]], ok()));
        }
        let failed = vec![
            ("grpc-status", "16".into()),
            ("grpc-message", "etcdserver: invalid auth token".into()),
        ];
        match token {
            Some("b") => Some((200, GRPC, lease(), ok())),
            _ => Some((200, GRPC, Vec::new(), Some(failed))),
        }
    })
    .await;
    let client = client(&format!("etcd://me:secret@{address}"));
    assert!(call(&client).await.is_ok());
    assert!(call(&client).await.is_ok());
}

/// The login was in the URL before the server had users.
#[tokio::test]
async fn a_server_that_gets_users_gets_a_login() {
    let has_users = Arc::new(AtomicBool::new(false));
    let on_server = has_users.clone();
    let address = server(move |path, token| {
        let failed = |code: &str, text: &str| {
            let trailers = vec![("grpc-status", code.to_owned()), ("grpc-message", text.to_owned())];
            Some((200, GRPC, Vec::new(), Some(trailers)))
        };
        match (path.ends_with("Authenticate"), on_server.load(SeqCst)) {
            (true, false) => failed("9", "etcdserver: authentication is not enabled"),
            (true, true) => Some((200, GRPC, vec![0, 0, 0, 0, 3, 0x12, 1, b'a'], ok())),
            (false, true) if token.is_none() => failed("3", "etcdserver: user name is empty"),
            _ => Some((200, GRPC, lease(), ok())),
        }
    })
    .await;
    let [with_login, without] = ["me:secret@", ""].map(|login| client(&format!("etcd://{login}{address}")));
    assert!(call(&with_login).await.is_ok() && call(&without).await.is_ok());
    has_users.store(true, SeqCst);
    assert!(call(&with_login).await.is_ok());
    let error = call(&without).await.unwrap_err().of("acquire");
    assert!(
        !error.retryable && error.to_string().contains("user name is empty"),
        "{error}"
    );
}

#[tokio::test]
async fn a_client_that_is_closed_opens_no_connection() {
    let address = server(|_, _| Some((200, GRPC, lease(), ok()))).await;
    let client = client(&format!("etcd://{address}"));
    assert!(call(&client).await.is_ok());
    client.close();
    let error = call(&client).await.unwrap_err().of("renew");
    assert!(error.to_string().contains("closed"), "{error}");
}

pub(super) fn frame(message: &[u8]) -> Vec<u8> {
    [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat()
}

/// etcd cancels a watch, as one whose revision was compacted, and leaves the stream open. The waiter finds in the next watch that it
/// is the oldest one.
#[tokio::test]
async fn a_watch_that_is_cancelled_is_opened_again() {
    let waiter = leases::claim("n", Duration::from_secs(30));
    let name = waiter.keys()[0].clone();
    let entry = |id: &str, revision| KeyValue {
        key: Layout("p/".into()).key(&name, id),
        value: Record::new(&waiter).to_json(),
        create_revision: revision,
        mod_revision: revision,
        lease: 7,
    };
    let (own, other) = (entry(waiter.owner.as_str(), 2), entry("other", 1));
    let range = move |kvs: &[&KeyValue]| RangeResponse {
        header: Some(Header {
            revision: 9,
            raft_term: 0,
        }),
        kvs: kvs.iter().copied().cloned().collect(),
        count: kvs.len() as i64,
        ..RangeResponse::default()
    };
    let watches = Arc::new(AtomicUsize::new(0));
    let address = server(move |path, _| {
        let answer = match path.rsplit('/').next().unwrap() {
            "Watch" => {
                let before = watches.fetch_add(1, SeqCst);
                // `watch_id` and `created`.
                let created = frame(&[0x10, before as u8 + 1, 0x18, 1]);
                // Of the first watch: `canceled`, `compact_revision` and `cancel_reason`.
                let cancelled = [&[0x10, 1, 0x20, 1, 0x28, 16, 0x32, 9][..], b"compacted"].concat();
                let body = match before {
                    0 => [created, frame(&cancelled)].concat(),
                    _ => created,
                };
                return Some((200, GRPC, body, Some(Vec::new())));
            }
            "LeaseGrant" | "LeaseKeepAlive" => lease()[5..].to_vec(),
            "Txn" => {
                let entered = OpAnswer::Txn(TxnResponse::default());
                let reads = [range(&[&other]), range(&[&own])].map(OpAnswer::Range);
                let responses = [entered].into_iter().chain(reads);
                TxnResponse {
                    header: Some(Header {
                        revision: 2,
                        raft_term: 0,
                    }),
                    responses: responses.map(|answer| ResponseOp { op: Some(answer) }).collect(),
                    succeeded: false,
                }
                .encode_to_vec()
            }
            _ if watches.load(SeqCst) < 2 => range(&[&other, &own]).encode_to_vec(),
            _ => range(&[&own]).encode_to_vec(),
        };
        Some((200, GRPC, frame(&answer), ok()))
    })
    .await;
    let engine = opened(&format!("etcd://{address}"), "p/").await;
    let mut subscription = engine.subscribe(&waiter, &waiter.keys()[0]).await.unwrap();
    assert!(matches!(
        engine.try_acquire(&waiter).await.unwrap(),
        Acquired::Held { .. }
    ));
    let handed_off = async {
        while subscription.take_hand_off().is_none() {
            subscription.changed().await
        }
    };
    tokio::time::timeout(Duration::from_secs(10), handed_off)
        .await
        .expect("the watch was not opened again");
}

/// A full server refuses the deletions of locks that have ended. Some of them at a time are repeated, less and less often, until their etcd
/// lease has expired.
#[tokio::test]
async fn deletions_that_fail_end_with_the_etcd_lease() {
    let (transactions, is_full) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (counted, on_server) = (transactions.clone(), is_full.clone());
    let address = server(move |path, _| {
        let answer = match path.rsplit('/').next().unwrap() {
            "LeaseGrant" | "LeaseKeepAlive" => vec![0x10, 7, 0x18, 2],
            "Txn" if on_server.load(SeqCst) => {
                counted.fetch_add(1, SeqCst);
                let failed = vec![
                    ("grpc-status", "8".into()),
                    ("grpc-message", "etcdserver: mvcc: database space exceeded".into()),
                ];
                return Some((200, GRPC, Vec::new(), Some(failed)));
            }
            "Txn" => TxnResponse {
                header: Some(Header {
                    revision: 2,
                    raft_term: 0,
                }),
                succeeded: true,
                ..TxnResponse::default()
            }
            .encode_to_vec(),
            _ => Vec::new(),
        };
        Some((200, GRPC, frame(&answer), ok()))
    })
    .await;
    let engine = opened(&format!("etcd://{address}"), "p/").await;
    for index in 0..100 {
        let mut claim = leases::claim(&format!("n{index}"), Duration::from_millis(900));
        claim.waiting = false;
        let answer = engine.try_acquire(&claim).await.unwrap();
        assert!(matches!(answer, Acquired::Granted { .. }), "{answer:?}");
    }
    is_full.store(true, SeqCst);
    tokio::time::sleep(Duration::from_secs(4)).await;
    let before = transactions.load(SeqCst);
    assert!((50..400).contains(&before), "{before} transactions for 100 locks");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(transactions.load(SeqCst), before, "the etcd lease has expired");
}
