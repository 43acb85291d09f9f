//! A connection and its driver, with a peer in memory.

use std::io;
use std::pin::Pin;
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::task::JoinHandle;

use super::in_flight::tests::claims;
use super::*;
use crate::engine::core::stream::Replies;
use crate::event_loop::Socket;

const ROOM: usize = 64 * 1024;

/// A connection, its peer, and the count of replies that the event loop waits for.
struct Setup {
    wire: Arc<Wire>,
    peer: DuplexStream,
    replies: Replies,
    driver: JoinHandle<()>,
}

/// Creates a connection whose socket takes `room` bytes. `handle` receives the pushes.
fn setup(room: usize, handle: impl Fn(Push) + Send + Sync + 'static) -> Setup {
    let (ours, peer) = tokio::io::duplex(room);
    setup_on(Box::new(ours), peer, handle)
}

fn setup_on(io: Box<dyn Io>, peer: DuplexStream, handle: impl Fn(Push) + Send + Sync + 'static) -> Setup {
    let replies = Replies::default();
    let opened = Opened {
        io,
        tls_records: u64::MAX,
        replies: replies.clone(),
        version: Some(7),
    };
    let wire = Wire::new(opened, Arc::new(Health::new()), Layout::new("lock:", true), None);
    let driver = tokio::spawn(drive(Arc::downgrade(&wire), handle));
    Setup {
        wire,
        peer,
        replies,
        driver,
    }
}

/// Returns what arrives at the peer until it waits.
async fn received(peer: &mut DuplexStream) -> String {
    let mut bytes = Vec::new();
    while let Ok(Ok(1..)) = tokio::time::timeout(Duration::from_millis(20), peer.read_buf(&mut bytes)).await {}
    String::from_utf8(bytes).unwrap()
}

fn ping() -> Cmd {
    redis::cmd("PING")
}

/// An event loop that may have another thread.
#[derive(Debug, Default)]
struct TestLoop {
    is_elsewhere: AtomicBool,
}

impl EventLoop for TestLoop {
    fn is_here(&self) -> bool {
        !self.is_elsewhere.load(Relaxed)
    }

    fn serve(&self, _: Arc<dyn Socket>) {}

    fn spawn(&self, _: Pin<Box<dyn Future<Output = ()> + Send>>) {}

    fn watch(&self, _: Weak<dyn Socket>) {}
}

#[tokio::test]
async fn the_event_loop_awaits_the_replies_of_its_own_thread() {
    let (io, _peer) = tokio::io::duplex(ROOM);
    let (replies, test_loop) = (Replies::default(), Arc::new(TestLoop::default()));
    let opened = Opened {
        io: Box::new(io),
        tls_records: u64::MAX,
        replies: replies.clone(),
        version: Some(7),
    };
    let event_loop: Arc<dyn EventLoop> = test_loop.clone();
    let wire = Wire::new(
        opened,
        Arc::new(Health::new()),
        Layout::new("lock:", true),
        Some(event_loop),
    );
    let (cmd, mut calls) = (ping(), Vec::new());
    for (is_elsewhere, is_awaited) in [(true, false), (true, false), (false, true), (true, true)] {
        test_loop.is_elsewhere.store(is_elsewhere, Relaxed);
        let mut call = Box::pin(wire.call(&cmd, false, None));
        assert!(futures_util::poll!(&mut call).is_pending());
        calls.push(call);
        assert!(replies.are_pending());
        assert_eq!(replies.are_awaited(), is_awaited);
    }
    wire.end();
    assert!(!replies.are_pending() && !replies.are_awaited());
}

#[tokio::test]
async fn the_calls_of_one_tick_are_written_together_and_answered_in_order() {
    let Setup {
        wire,
        mut peer,
        replies,
        driver: _driver,
    } = setup(ROOM, |_| {});
    let cmd = ping();
    let mut calls = Box::pin(join_all((0..3).map(|_| wire.call(&cmd, false, None))));
    assert!(futures_util::poll!(&mut calls).is_pending());
    assert!(replies.are_pending());
    let mut bytes = vec![0; 1000];
    let count = peer.read(&mut bytes).await.unwrap();
    assert_eq!(count, 3 * cmd.get_packed_command().len(), "one write");
    peer.write_all(b":1\r\n:2\r\n-ERR no\r\n").await.unwrap();
    let answers = calls.await;
    assert_eq!(answers[..2], [Ok(Value::Int(1)), Ok(Value::Int(2))]);
    assert!(answers[2].is_err());
    tokio::task::yield_now().await;
    assert!(!replies.are_pending());
}

#[tokio::test]
async fn a_call_that_is_dropped_in_its_tick_is_never_sent() {
    let mut setup = setup(ROOM, |_| {});
    let (cmd, claim) = (ping(), claims(1).remove(0));
    {
        let mut call = Box::pin(setup.wire.call(&cmd, false, None));
        let mut attempt = Box::pin(setup.wire.request(&claim, Request::Acquire));
        let mut by_script = Box::pin(setup.wire.call(&cmd, false, Some(&|| {})));
        assert!(futures_util::poll!(&mut call).is_pending() && futures_util::poll!(&mut attempt).is_pending());
        assert!(futures_util::poll!(&mut by_script).is_pending());
        assert_eq!(setup.wire.attempts.available_permits(), ATTEMPTS - 2);
    }
    setup.wire.caller_left();
    assert_eq!(received(&mut setup.peer).await, "");
    assert_eq!(setup.wire.attempts.available_permits(), ATTEMPTS);
}

#[tokio::test]
async fn a_command_follows_the_earlier_requests_of_its_tick() {
    let mut setup = setup(ROOM, |_| {});
    let (cmd, claim) = (ping(), claims(1).remove(0));
    let sink: Arc<dyn ReplySink> = Arc::<Sink>::default();
    for to_sink in [false, true] {
        let mut attempt = Box::pin(setup.wire.request(&claim, Request::Acquire));
        let mut call = Box::pin(setup.wire.call(&cmd, false, None));
        assert!(futures_util::poll!(&mut attempt).is_pending());
        match to_sink {
            true => setup.wire.call_to_sink(&sink, 0, &cmd),
            false => assert!(futures_util::poll!(&mut call).is_pending()),
        }
        let sent = received(&mut setup.peer).await;
        assert!(sent.contains("PING") && sent.find("MGET") < sent.find("PING"), "{sent}");
    }
}

#[tokio::test]
async fn an_attempt_by_script_returns_its_permit_and_only_its_refusal_ends_plain_commands() {
    let mut setup = setup(ROOM, |_| {});
    let cmd = ping();
    setup.wire.note_grant(&Value::Int(1), Moment::now());
    for (attempt, is_seeded) in [(None, true), (Some(&(|| {}) as &(dyn Fn() + Sync)), false)] {
        let mut call = Box::pin(setup.wire.call(&cmd, false, attempt));
        assert!(futures_util::poll!(&mut call).is_pending());
        let permits = ATTEMPTS - usize::from(attempt.is_some());
        assert_eq!(setup.wire.attempts.available_permits(), permits);
        setup.peer.write_all(b"-NOPERM no\r\n").await.unwrap();
        assert!(call.await.is_err());
        assert_eq!(
            (setup.wire.attempts.available_permits(), setup.wire.is_seeded()),
            (ATTEMPTS, is_seeded)
        );
    }
}

#[tokio::test]
async fn asking_and_its_command_are_one_request() {
    let mut setup = setup(8, |_| {});
    let (first, cmd) = (redis::cmd("FIRST"), ping());
    let mut before = Box::pin(setup.wire.call(&first, false, None));
    let mut dropped = Box::pin(setup.wire.call(&cmd, true, None));
    let mut kept = Box::pin(setup.wire.call(&cmd, true, None));
    for call in [
        &mut before as &mut (dyn Future<Output = _> + Unpin),
        &mut dropped,
        &mut kept,
    ] {
        assert!(futures_util::poll!(call).is_pending());
    }
    // The socket has taken a part of the first request.
    tokio::task::yield_now().await;
    drop(dropped);
    setup.wire.caller_left();
    let sent = received(&mut setup.peer).await;
    assert_eq!(sent.matches("ASKING\r\n*1\r\n$4\r\nPING").count(), 1, "{sent}");
    setup.peer.write_all(b"+FIRST\r\n+OK\r\n").await.unwrap();
    setup.peer.write_all(b"+PONG\r\n").await.unwrap();
    let (before, kept) = tokio::join!(before, kept);
    assert_eq!(before.unwrap(), Value::SimpleString("FIRST".into()));
    assert_eq!(kept.unwrap(), Value::SimpleString("PONG".into()));
}

/// Counts its replies.
#[derive(Default)]
struct Sink(AtomicUsize);

impl ReplySink for Sink {
    fn on_reply(self: Arc<Self>, _: usize, reply: RedisResult<Value>) {
        assert!(reply.is_err());
        self.0.fetch_add(1, Relaxed);
    }
}

#[tokio::test]
async fn the_end_of_a_connection_rejects_each_call_once_and_later_calls_too() {
    for ends_here in [false, true] {
        let setup = setup(ROOM, |_| {});
        let (sink, claim) = (Arc::<Sink>::default(), claims(1).remove(0));
        let as_sink: Arc<dyn ReplySink> = sink.clone();
        let cmd = ping();
        let mut call = Box::pin(setup.wire.call(&cmd, false, None));
        assert!(futures_util::poll!(&mut call).is_pending());
        setup.wire.call_to_sink(&as_sink, 0, &cmd);
        tokio::task::yield_now().await;
        // Not sent yet.
        let (value, floor) = ("value", 1);
        setup
            .wire
            .request_to_sink(&as_sink, 3, &claim, &Request::Vote { value, floor });
        match ends_here {
            true => setup.wire.end(),
            false => drop(setup.peer),
        }
        assert!(call.await.is_err());
        setup.driver.await.unwrap();
        assert_eq!(sink.0.load(Relaxed), 2);
        assert!(setup.wire.call(&cmd, false, None).await.is_err());
        assert!(setup.wire.request(&claim, Request::Acquire).await.is_err());
        setup.wire.call_to_sink(&as_sink, 0, &cmd);
        assert_eq!(sink.0.load(Relaxed), 3);
        assert!(!setup.replies.are_pending());
    }
}

#[tokio::test]
async fn the_driver_may_be_the_last_owner() {
    let owned: Arc<Mutex<Option<Arc<Wire>>>> = Arc::default();
    let last = owned.clone();
    let mut setup = setup(ROOM, move |_| drop(last.lock().unwrap().take()));
    *owned.lock().unwrap() = Some(setup.wire);
    tokio::task::yield_now().await;
    setup
        .peer
        .write_all(b">3\r\n$7\r\nmessage\r\n$1\r\na\r\n$1\r\nb\r\n")
        .await
        .unwrap();
    setup.driver.await.unwrap();
    assert_eq!(setup.peer.read(&mut [0; 8]).await.unwrap(), 0, "the socket is closed");
}

#[tokio::test]
async fn a_connection_that_nothing_refers_to_is_closed() {
    let mut setup = setup(ROOM, |_| {});
    tokio::task::yield_now().await;
    drop(setup.wire);
    setup.driver.await.unwrap();
    assert_eq!(setup.peer.read(&mut [0; 8]).await.unwrap(), 0);
}

#[tokio::test]
async fn a_peer_that_sends_without_end_does_not_stop_other_tasks() {
    let mut setup = setup(256, |_| {});
    let flood = tokio::spawn(async move {
        while setup
            .peer
            .write_all(&b">2\r\n$4\r\nnone\r\n:1\r\n".repeat(8))
            .await
            .is_ok()
        {}
    });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    setup.wire.end();
    setup.driver.await.unwrap();
    flood.await.unwrap();
}

#[tokio::test]
async fn a_long_reply_is_read_in_parts_and_its_buffer_is_released() {
    let mut setup = setup(ROOM, |_| {});
    let cmd = ping();
    let reply = format!("*2\r\n:1\r\n${}\r\n{}\r\n", 10 * ROOM, "x".repeat(10 * ROOM));
    let (answer, _) = tokio::join!(
        setup.wire.call(&cmd, false, None),
        setup.peer.write_all(reply.as_bytes())
    );
    assert!(matches!(answer.unwrap(), Value::Array(fields) if fields.len() == 2));
    let state = setup.wire.state();
    assert_eq!((state.input.len(), state.filled), (ROOM, 0));
}

/// A stream that counts how often its end is announced: TLS sends what it holds before that.
struct Announcing(DuplexStream, Arc<AtomicUsize>);

impl AsyncRead for Announcing {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, into)
    }
}

impl AsyncWrite for Announcing {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.1.fetch_add(1, Relaxed);
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

#[tokio::test]
async fn requests_that_the_socket_has_not_taken_at_the_end_are_not_sent() {
    for (room, announced) in [(8, 0), (ROOM, 1)] {
        let (ours, peer) = tokio::io::duplex(room);
        let announcements = Arc::<AtomicUsize>::default();
        let mut setup = setup_on(Box::new(Announcing(ours, announcements.clone())), peer, |_| {});
        let cmd = ping();
        let mut call = Box::pin(setup.wire.call(&cmd, false, None));
        assert!(futures_util::poll!(&mut call).is_pending());
        tokio::task::yield_now().await;
        setup.wire.end();
        assert!(call.await.is_err());
        setup.driver.await.unwrap();
        assert_eq!(announcements.load(Relaxed), announced);
        let mut sent = Vec::new();
        setup.peer.read_to_end(&mut sent).await.unwrap();
        assert_eq!(sent.len(), room.min(cmd.get_packed_command().len()));
    }
}

#[tokio::test]
async fn a_session_of_tls_1_2_ends_before_rustls_discards_requests() {
    let mut setup = setup(ROOM, |_| {});
    setup.wire.state().tls_records = 2;
    let cmd = ping();
    for is_dead in [false, true] {
        let (answer, _) = tokio::join!(setup.wire.call(&cmd, false, None), setup.peer.write_all(b"+PONG\r\n"));
        answer.unwrap();
        // The next call opens another connection, and those in flight receive their replies.
        assert_eq!(setup.wire.health.is_dead(), is_dead);
    }
}
