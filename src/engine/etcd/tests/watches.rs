//! The stream of all watches, before a server that numbers and refuses them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Response};
use prost::Message;
use tokio::net::TcpStream;

use super::client::{GRPC, client, frame, listening};
use crate::engine::entries;
use crate::engine::etcd::client::messages::{
    AuthenticateResponse, Event, KeyValue, WatchOp, WatchRequest, WatchResponse,
};
use crate::engine::etcd::client::{Client, Watch, Watches};

/// A server that refuses the watches of keys that begin with `refused`, for the reason behind that. It numbers the others from 0, and sends
/// each of them an event of its key. After the first login it has other users: it refuses requests with that token, and but for one
/// the watches of its stream.
#[derive(Default)]
struct Server {
    streams: AtomicUsize,
    logins: AtomicUsize,
    cancelled: AtomicUsize,
}

impl Server {
    async fn serve(self: Arc<Self>, socket: TcpStream) {
        let mut connection = h2::server::handshake(socket).await.unwrap();
        while let Some(Ok((request, respond))) = connection.accept().await {
            let is_old = request.headers().get("token").is_some_and(|token| token == "old");
            let this = self.clone();
            match request.uri().path().rsplit('/').next().unwrap() {
                "Watch" => _ = tokio::spawn(this.watch(request.into_body(), respond, is_old)),
                "method" => {
                    let mut trailers = HeaderMap::new();
                    let code = if is_old { "16" } else { "0" };
                    trailers.insert("grpc-status", code.parse().unwrap());
                    trailers.insert("grpc-message", "invalid auth token".parse().unwrap());
                    let mut stream = head(respond);
                    stream.send_data(frame(&[]).into(), false).unwrap();
                    stream.send_trailers(trailers).unwrap();
                }
                _ => {
                    let token = if this.logins.fetch_add(1, SeqCst) == 0 {
                        "old"
                    } else {
                        "new"
                    };
                    let answer = AuthenticateResponse { token: token.into() }.encode_to_vec();
                    let mut stream = head(respond);
                    stream.send_data(frame(&answer).into(), false).unwrap();
                    let mut trailers = HeaderMap::new();
                    trailers.insert("grpc-status", "0".parse().unwrap());
                    stream.send_trailers(trailers).unwrap();
                }
            }
        }
    }

    async fn watch(self: Arc<Self>, mut body: RecvStream, respond: SendResponse<Bytes>, is_old: bool) {
        self.streams.fetch_add(1, SeqCst);
        let (mut stream, mut input, mut created) = (head(respond), BytesMut::new(), 0);
        while let Some(Ok(bytes)) = body.data().await {
            body.flow_control().release_capacity(bytes.len()).unwrap();
            input.extend_from_slice(&bytes);
            while input.len() >= 5 && input.len() >= 5 + u32::from_be_bytes(input[1..5].try_into().unwrap()) as usize {
                let length = u32::from_be_bytes(input[1..5].try_into().unwrap()) as usize;
                input.advance(5);
                let op = WatchRequest::decode(input.split_to(length)).unwrap().op.unwrap();
                let WatchOp::Create(request) = op else {
                    self.cancelled.fetch_add(1, SeqCst);
                    continue;
                };
                let key = String::from_utf8(request.key.clone()).unwrap();
                let refused = key.strip_prefix("refused: ");
                let mut answer = WatchResponse {
                    created: true,
                    ..WatchResponse::default()
                };
                let is_old = is_old && created > 0;
                if let Some(reason) = refused.or(is_old.then_some("permission denied")) {
                    (answer.id, answer.canceled, answer.cancel_reason) = (-1, true, reason.into());
                } else {
                    answer.id = created;
                    created += 1;
                }
                stream.send_data(frame(&answer.encode_to_vec()).into(), false).unwrap();
                if !answer.canceled {
                    let kv = KeyValue {
                        key: request.key,
                        ..KeyValue::default()
                    };
                    let event = WatchResponse {
                        id: answer.id,
                        events: vec![Event { kind: 0, kv: Some(kv) }],
                        ..WatchResponse::default()
                    };
                    stream.send_data(frame(&event.encode_to_vec()).into(), false).unwrap();
                }
            }
        }
    }
}

fn head(mut respond: SendResponse<Bytes>) -> SendStream<Bytes> {
    let head = Response::builder().header("content-type", GRPC).body(()).unwrap();
    respond.send_response(head, false).unwrap()
}

async fn watches(login: &str) -> (Arc<Server>, Watches) {
    let (server, watches, _) = watches_of(login).await;
    (server, watches)
}

async fn watches_of(login: &str) -> (Arc<Server>, Watches, Arc<Client>) {
    let server = Arc::new(Server::default());
    let on_server = server.clone();
    let address = listening(move |socket| on_server.clone().serve(socket)).await;
    let (watches, changes) = Watches::new();
    let client = Arc::new(client(&format!("etcd://{login}{address}")));
    let serving = client.clone();
    tokio::spawn(async move { serving.serve_watches(changes).await });
    (server, watches, client)
}

/// Returns the key of the event that follows the creation.
async fn event_of(watch: &mut Watch) -> Result<String, String> {
    let text = |failure| entries::Failure::from(failure).text;
    let created = watch.next().await.map_err(text)?;
    assert!(created.created && created.events.is_empty());
    let mut message = watch.next().await.map_err(text)?;
    Ok(String::from_utf8(message.events.remove(0).kv.unwrap().key).unwrap())
}

#[tokio::test]
async fn a_watch_has_the_id_that_the_server_gives_it() {
    let (server, watches) = watches("").await;
    let mut all = ["a", "refused: permission denied", "b", "c"].map(|key| watches.open(key.into(), Vec::new()));
    // A watch that is closed before or during its creation.
    drop(watches.open("d".into(), Vec::new()));
    let mut last = watches.open("e".into(), Vec::new());
    let [a, refused, b, c] = &mut all;
    assert_eq!(event_of(a).await.unwrap(), "a");
    assert_eq!(event_of(b).await.unwrap(), "b");
    assert_eq!(event_of(c).await.unwrap(), "c");
    assert_eq!(event_of(&mut last).await.unwrap(), "e");
    let error = event_of(refused).await.unwrap_err();
    assert!(error.contains("permission denied"), "{error}");
    assert_eq!(server.streams.load(SeqCst), 1, "the other ones go on");
    drop(last);
    while server.cancelled.load(SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The users have changed, or authentication was enabled, since the login of the stream.
#[tokio::test]
async fn a_stream_with_an_old_login_is_opened_again() {
    let (server, watches) = watches("app:pw@").await;
    let mut refused = watches.open("refused: etcdserver: revision of auth store is old".into(), Vec::new());
    let mut other = watches.open("a".into(), Vec::new());
    for watch in [&mut refused, &mut other] {
        let error = event_of(watch).await.unwrap_err();
        assert!(error.contains("auth store is old"), "{error}");
    }
    let mut again = watches.open("a".into(), Vec::new());
    assert_eq!(event_of(&mut again).await.unwrap(), "a");
    assert_eq!((server.logins.load(SeqCst), server.streams.load(SeqCst)), (2, 2));
}

/// etcd 3.5.1 says of an old login only that it has no permission. A request has found that, and logged in again.
#[tokio::test]
async fn a_watch_that_is_refused_to_an_old_login_is_opened_with_the_new_one() {
    let (server, watches, client) = watches_of("app:pw@").await;
    let mut first = watches.open("a".into(), Vec::new());
    assert_eq!(event_of(&mut first).await.unwrap(), "a");
    let error = event_of(&mut watches.open("b".into(), Vec::new())).await.unwrap_err();
    assert!(error.contains("permission denied"), "{error}");
    super::client::call(&client).await.unwrap();
    let mut refused = watches.open("b".into(), Vec::new());
    for watch in [&mut refused, &mut first] {
        let error = watch.next().await.unwrap_err();
        let error = entries::Failure::from(error);
        assert!(error.passes && error.text.contains("permission denied"), "{error:?}");
    }
    let mut again = watches.open("b".into(), Vec::new());
    assert_eq!(event_of(&mut again).await.unwrap(), "b");
    assert_eq!((server.logins.load(SeqCst), server.streams.load(SeqCst)), (2, 2));
}

/// A balancer in front of a dead server accepts connections and is silent.
#[tokio::test]
async fn all_watches_fail_with_a_connection_that_hangs() {
    let address = listening(|socket| async move {
        let _kept = socket;
        std::future::pending::<()>().await;
    })
    .await;
    let (watches, changes) = Watches::new();
    let client = client(&format!("etcds://{address}"));
    tokio::spawn(async move { client.serve_watches(changes).await });
    let mut open = watches.open("first".into(), Vec::new());
    tokio::time::sleep(Duration::from_millis(100)).await;
    let mut others: Vec<Watch> = (0..10).map(|_| watches.open("other".into(), Vec::new())).collect();
    assert!(open.next().await.is_err());
    for other in &mut others {
        let failed = tokio::time::timeout(Duration::from_secs(3), other.next()).await;
        assert!(failed.expect("each of them waits for its own connection").is_err());
    }
}

#[tokio::test]
async fn a_server_that_closes_each_connection_gets_few_of_them() {
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = connections.clone();
    let address = listening(move |_| {
        counted.fetch_add(1, SeqCst);
        async {}
    })
    .await;
    let client = Arc::new(client(&format!("etcd://{address}")));
    let began = std::time::Instant::now();
    // 2 s, or longer on a slow machine.
    let is_over = || match connections.load(SeqCst) {
        0..4 => began.elapsed() > Duration::from_secs(20),
        _ => began.elapsed() > Duration::from_secs(2),
    };
    let calls = (0..20).map(|_| async {
        while !is_over() {
            assert!(super::client::call(&client).await.is_err());
        }
    });
    futures_util::future::join_all(calls).await;
    let (count, took) = (connections.load(SeqCst), began.elapsed());
    assert!(
        count >= 4 && (count as f64) < 20.0 * took.as_secs_f64(),
        "{count} connections in {took:?}"
    );
}
