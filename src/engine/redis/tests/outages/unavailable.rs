//! Servers that are down, slow or silent, or that refuse writes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Condvar, Mutex};

use super::*;
use crate::engine::EngineExt;
use crate::error::EngineError;

/// A short store timeout, in which a machine that stands still can connect.
const SHORT: Duration = Duration::from_millis(1600);

/// A proxy between an engine and its server, which can delay requests and replies. (It uses threads, because the engine uses the
/// runtime of the test.)
struct Proxy {
    port: u16,
    state: Arc<(Mutex<Connections>, Condvar)>,
}

#[derive(Default)]
struct Connections {
    accepted: usize,
    /// The number of silent connections, from the first on.
    silent: usize,
    /// The delay of every reply.
    latency: Duration,
    /// A text of a request whose connection is held from then on, and the number of that connection.
    held_text: Option<&'static [u8]>,
    held: usize,
}

impl Proxy {
    fn before(server: &Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy {
            port: listener.local_addr().unwrap().port(),
            state: Arc::default(),
        };
        let (state, target) = (proxy.state.clone(), server.port);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(|client| client.ok()) {
                let mut connections = state.0.lock().unwrap();
                connections.accepted += 1;
                let number = connections.accepted;
                drop(connections);
                let Ok(server) = TcpStream::connect(("127.0.0.1", target)) else {
                    break;
                };
                let (from_client, to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let (state, requests) = (state.clone(), state.clone());
                std::thread::spawn(move || {
                    pump(from_client, to_server, |request| {
                        let mut now = requests.0.lock().unwrap();
                        let is_in = |text: &mut &[u8]| request.windows(text.len()).any(|part| part == *text);
                        if now.held_text.take_if(is_in).is_some() {
                            now.held = number;
                        }
                        drop(requests.1.wait_while(now, |now| number == now.held).unwrap())
                    })
                });
                std::thread::spawn(move || {
                    pump(server, client, |_| {
                        std::thread::sleep(state.0.lock().unwrap().latency);
                        drop(
                            state
                                .1
                                .wait_while(state.0.lock().unwrap(), |now| number <= now.silent)
                                .unwrap(),
                        )
                    })
                });
            }
        });
        proxy
    }

    fn silence_all_so_far(&self) {
        let mut connections = self.state.0.lock().unwrap();
        connections.silent = connections.accepted;
    }

    fn speak_again(&self) {
        self.state.0.lock().unwrap().silent = 0;
        self.state.1.notify_all();
    }

    /// Holds the next request with this text, and what follows on its connection.
    fn hold(&self, text: &'static str) {
        self.state.0.lock().unwrap().held_text = Some(text.as_bytes());
    }

    async fn has_held(&self) {
        while self.state.0.lock().unwrap().held == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    fn pass_on(&self) {
        self.state.0.lock().unwrap().held = 0;
        self.state.1.notify_all();
    }

    fn slow_down(&self, latency: Duration) {
        self.state.0.lock().unwrap().latency = latency;
    }

    fn accepted(&self) -> usize {
        self.state.0.lock().unwrap().accepted
    }

    /// Returns an engine with a short store timeout.
    async fn engine(&self) -> Arc<RedisEngine> {
        self.engine_with(Settings {
            store_timeout: SHORT,
            ..settings("lock:")
        })
        .await
    }

    async fn engine_with(&self, settings: Settings) -> Arc<RedisEngine> {
        let config = RedisConfig::parse(&format!("redis://127.0.0.1:{}", self.port), &settings).unwrap();
        RedisEngine::connect(config).await.unwrap()
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, hold: impl Fn(&[u8])) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        hold(&buffer[..count]);
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// The event loop's thread makes the attempt, and another one the release, as the service's task for abandoned claims does.
#[tokio::test]
async fn a_release_by_another_thread_follows_a_dropped_attempt() {
    let Some(server) = Server::start(&[]).await else { return };
    let proxy = Proxy::before(&server);
    let event_loop = cfg!(unix).then(TestLoop::here);
    let ours = proxy
        .engine_with(Settings {
            event_loop,
            ..settings("lock:")
        })
        .await;
    let warm = claim("warm");
    acquire(&ours, &warm).await;
    release(&ours, &warm).await;
    loop {
        let number = || ours.link().current().map(|connection| connection.generation);
        let before = number();
        let dropped = claim("n");
        proxy.hold("lock:n");
        tokio::select! {
            _ = ours.try_acquire(&dropped) => panic!("its request is held"),
            () = proxy.has_held() => {}
        }
        let (engine, runtime) = (ours.clone(), tokio::runtime::Handle::current());
        let released = tokio::task::spawn_blocking(move || runtime.block_on(engine.release(&dropped, Duration::ZERO)));
        tokio::time::sleep(Duration::from_millis(200)).await;
        proxy.pass_on();
        let released = released.await.unwrap().unwrap();
        // A machine that stands still ends the connection. Then the service repeats the release.
        if number() == before {
            assert_eq!(released, Released::Freed);
            assert_eq!(ours.inspect(&key("n")).await.unwrap(), None);
            return;
        }
        ours.force_release(&key("n")).await.unwrap();
    }
}

#[tokio::test]
async fn a_silent_connection_is_replaced_and_its_late_replies_still_count() {
    let Some(server) = Server::start(&[]).await else { return };
    // The machine may stand still for longer than the store timeout.
    one_succeeds(async |round| {
        let [lost, n, m] = ["lost", "n", "m"].map(|name| claim(&format!("{name}{round}")));
        let proxy = Proxy::before(&server);
        let ours = proxy.engine().await;
        let began = std::time::Instant::now();
        proxy.silence_all_so_far();
        // One call whose caller continues to wait, and no other call on the connection.
        let lost = tokio::spawn({
            let ours = ours.clone();
            async move { ours.try_acquire(&lost).await }
        });
        tokio::time::sleep(SHORT / 4).await;
        let is_answered = tokio::time::timeout(Duration::from_millis(50), ours.inspect(&key("n")))
            .await
            .is_ok();
        let accepted = proxy.accepted();
        if began.elapsed() >= SHORT {
            proxy.speak_again();
            return Err("the machine stood still");
        }
        assert!(!is_answered);
        assert_eq!(accepted, 1, "not yet");
        tokio::time::sleep(SHORT).await;
        let granted = ours.try_acquire(&n).await;
        let accepted = proxy.accepted();
        assert!(!lost.is_finished());
        proxy.speak_again();
        assert!(
            matches!(lost.await.unwrap().unwrap(), Acquired::Granted { .. }),
            "the late reply"
        );
        if granted.is_err_and(|error| error.retryable) {
            return Err("no answer on a new connection");
        }
        assert_eq!(accepted, 2, "a new connection");
        acquire(&ours, &m).await;
        assert_eq!(
            proxy.accepted(),
            2,
            "a late reply on the old connection does not affect the new one"
        );
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_call_that_was_dropped_without_a_reply_replaces_its_connection() {
    let Some(server) = Server::start(&[]).await else { return };
    let proxy = Proxy::before(&server);
    let ours = proxy.engine().await;
    proxy.silence_all_so_far();
    assert!(tokio::time::timeout(SHORT, ours.inspect(&key("n"))).await.is_err());
    ours.inspect(&key("n")).await.unwrap();
    assert_eq!(proxy.accepted(), 2);
}

#[tokio::test]
async fn subscribers_move_from_a_silent_connection_to_a_new_one() {
    let Some(server) = Server::start(&[]).await else { return };
    let proxy = Proxy::before(&server);
    let (ours, theirs) = (proxy.engine().await, server.engine().await);
    let holder = claim("n");
    acquire(&theirs, &holder).await;
    let mut subscription = enqueue(&ours, &waiting("n")).await;
    proxy.silence_all_so_far();
    assert!(tokio::time::timeout(SHORT, ours.inspect(&key("n"))).await.is_err());
    tokio::time::timeout(Duration::from_secs(5), subscription.changed())
        .await
        .expect("a notification after the change of connection");
    release(&theirs, &holder).await;
    tokio::time::timeout(Duration::from_secs(5), subscription.changed())
        .await
        .expect("a notification on the new connection");
    assert_eq!(proxy.accepted(), 2);
}

#[tokio::test]
async fn a_slow_answer_counts() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    other.run::<()>("CLIENT PAUSE 1200 ALL").await;
    let started = std::time::Instant::now();
    acquire(&ours, &claim("n")).await;
    assert!(started.elapsed() > Duration::from_secs(1));
}

#[tokio::test]
async fn service_resumes_after_an_outage_and_fences_grow() {
    let Some(mut server) = Server::start(&[]).await else {
        return;
    };
    let ours = server.engine().await;
    let before = acquire(&ours, &claim("n")).await;
    let mut subscription = enqueue(&ours, &waiting("n")).await;
    server.stop();
    let mut failed = 0;
    eventually("the outage is noticed", async || {
        match ours.try_acquire(&claim("n")).await {
            Ok(_) => false,
            Err(error) => {
                failed += 1;
                assert!(error.retryable, "{error}");
                error
                    .to_string()
                    .contains(&format!("no connection to 127.0.0.1:{}: ", server.port))
            }
        }
    })
    .await;
    assert!(failed > 0);
    server.restart().await;
    assert!(acquire(&ours, &claim("n")).await > before);
    tokio::time::timeout(Duration::from_secs(5), subscription.changed())
        .await
        .expect("a notification after the outage");
}

#[tokio::test]
async fn a_missing_server_is_an_error_within_the_time_limit() {
    let closed = TcpSocket::new_v4().unwrap();
    closed.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let free_port = closed.local_addr().unwrap().port();
    let config = |url: &str, limit| {
        RedisConfig::parse(
            url,
            &Settings {
                store_timeout: limit,
                ..Settings::default()
            },
        )
        .unwrap()
    };
    let refused = config(
        &format!("redis://:secret@127.0.0.1:{free_port}"),
        Duration::from_secs(5),
    );
    let error = RedisEngine::connect(refused).await.unwrap_err();
    assert!(error.retryable);
    let expected = format!("redis: connect failed: no connection to 127.0.0.1:{free_port}: ");
    assert!(error.to_string().starts_with(&expected), "{error}");

    // A server that accepts connections and never answers.
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://127.0.0.1:{}", mute.local_addr().unwrap().port());
    let started = std::time::Instant::now();
    let error = RedisEngine::connect(config(&url, Duration::from_millis(200)))
        .await
        .unwrap_err();
    assert!(error.retryable && error.to_string().ends_with("timed out"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(3));
}

/// Returns the error of an attempt.
async fn refusal(engine: &RedisEngine, code: &str) -> EngineError {
    let error = engine.try_acquire(&claim("n")).await.unwrap_err();
    assert!(error.to_string().contains(code), "{error}");
    error
}

#[tokio::test]
async fn a_server_that_refuses_writes_is_a_retryable_error() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);

    let first = ours.link().existing().await.unwrap().generation;
    other.run::<()>("REPLICAOF 127.0.0.1 1").await;
    assert!(refusal(&ours, "READONLY").await.retryable);
    assert!(
        ours.link().existing().await.is_none(),
        "the host name is resolved again, because it may belong to another server"
    );
    other.run::<()>("REPLICAOF NO ONE").await;
    acquire(&ours, &claim("after")).await;
    assert!(ours.link().existing().await.unwrap().generation > first);

    other.run::<()>("CONFIG SET maxmemory 1").await;
    assert!(refusal(&ours, "OOM").await.retryable);
    assert_eq!(
        other.run::<i64>("EXISTS lock:n holdfast:fence:{lock:n}").await,
        0,
        "the attempt changed nothing"
    );
    other.run::<()>("CONFIG SET maxmemory 0").await;

    other.run::<()>("CONFIG SET min-replicas-to-write 1").await;
    assert!(refusal(&ours, "NOREPLICAS").await.retryable);
    other.run::<()>("CONFIG SET min-replicas-to-write 0").await;

    other.run::<()>("CONFIG SET lua-time-limit 50").await;
    let mut spinner = server.other().await;
    let spinning = tokio::spawn(async move {
        let mut cmd = ::redis::cmd("EVAL");
        cmd.arg("while true do end").arg(0);
        let _: ::redis::RedisResult<()> = cmd.query_async(&mut spinner.0).await;
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(refusal(&ours, "BUSY").await.retryable);
    other.run::<()>("SCRIPT KILL").await;
    spinning.await.unwrap();
    acquire(&ours, &claim("n")).await;

    other.run::<()>("CONFIG SET maxclients 2").await;
    let config = RedisConfig::parse(&server.url(), &Settings::default()).unwrap();
    let error = RedisEngine::connect(config).await.unwrap_err();
    assert!(
        error.retryable && error.to_string().contains("max number of clients"),
        "{error}"
    );
}

#[tokio::test]
async fn callers_with_less_time_than_a_round_trip_do_not_replace_the_connection() {
    let Some(server) = Server::start(&[]).await else { return };
    let proxy = Proxy::before(&server);
    let latency = Duration::from_millis(200);
    proxy.slow_down(latency);
    let config = RedisConfig::parse(&format!("redis://127.0.0.1:{}", proxy.port), &settings("lock:")).unwrap();
    let ours = RedisEngine::connect(config).await.unwrap();
    let before = proxy.accepted();
    for _ in 0..20 {
        let (first, began) = (claim("n"), std::time::Instant::now());
        let attempt = tokio::time::timeout(Duration::from_millis(150), ours.try_acquire(&first)).await;
        assert!(attempt.is_err() || began.elapsed() >= latency, "no answer can be there");
    }
    assert_eq!(proxy.accepted(), before);
}
