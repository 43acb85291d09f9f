//! Sessions: their end, their evidence, lost connections, and logins.

use super::proxy::{Mode, Proxy};
use super::*;
use crate::engine::entries::{self, Store};
use crate::engine::{EngineExt, RESERVATION};

const SESSION: Duration = Duration::from_secs(4);

async fn open_short(url: &str, prefix: &str) -> Opened {
    let settings = Settings {
        key_prefix: Some(prefix.to_owned()),
        session_timeout: Some(SESSION),
        ..Settings::default()
    };
    open_with(url, &settings).await
}

/// A lease ends for its process before the server ends the session, and a new session has a new lock.
#[tokio::test]
async fn a_session_that_ends_takes_its_locks_with_it() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let proxy = Proxy::start(&url).await;
    let (engine, other) = (open_short(&proxy.url, &prefix).await, open(&url, &prefix).await);
    assert_eq!(engine.describe().longest_lease, Some(SESSION / 2));
    let (held, waiter) = (claim(&["n"], SESSION / 2), waiting(&["m"], LONG));
    acquire(&engine, &held).await;
    acquire(&other, &claim(&["m"], LONG)).await;
    let mut subscription = engine.subscribe(&waiter, &key("m")).await.unwrap();
    busy(&engine, &waiter).await;
    let session = engine.store.client.state();
    proxy.set(Mode::Holds);
    let began = Moment::now();
    let renewed = engine.renew(&held, held.ttl).await;
    assert!(renewed.is_err_and(|error| error.retryable), "no answer");
    // The evidence is used up before the server gives the name to another one.
    let until = engine.store.client.state().until;
    assert!(until < began + SESSION, "{:?} of {SESSION:?}", until.remaining());
    let next = claim(&["n"], LONG);
    while !matches!(other.try_acquire(&next).await.unwrap(), Acquired::Granted { .. }) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(until.is_past(), "two holders for {:?}", until.remaining());
    proxy.set(Mode::Forwards);
    while engine.store.client.state().id == session.id {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(engine.renew(&held, held.ttl).await.unwrap(), Renewed::Lost);
    assert_eq!(engine.release(&held, Duration::ZERO).await.unwrap(), Released::NotHeld);
    woken(&mut subscription).await;
    busy(&engine, &waiter).await;
    assert_eq!(
        other.inspect(&key("m")).await.unwrap().unwrap().waiting,
        Some(1),
        "it is in the queue again"
    );
}

/// A connection that breaks moves the session: locks and positions stay.
#[tokio::test]
async fn a_session_moves_to_another_connection() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let proxy = Proxy::start(&url).await;
    let (engine, other) = (open(&proxy.url, &prefix).await, open(&url, &prefix).await);
    let held = claim(&["n"], LONG);
    let fence = acquire(&engine, &held).await;
    let (holder, waiter) = (claim(&["m"], LONG), waiting(&["m"], LONG));
    acquire(&other, &holder).await;
    let mut subscription = engine.subscribe(&waiter, &key("m")).await.unwrap();
    busy(&engine, &waiter).await;
    for _ in 0..3 {
        proxy.set(Mode::Closed);
        tokio::time::sleep(Duration::from_millis(200)).await;
        proxy.set(Mode::Forwards);
        let began = std::time::Instant::now();
        while engine.renew(&held, held.ttl).await.is_err() {
            assert!(began.elapsed() < Duration::from_secs(10), "the session does not move");
        }
    }
    assert_eq!(acquire(&engine, &held).await, fence);
    // The watch is opened again.
    other.release(&holder, Duration::ZERO).await.unwrap();
    handed_off(&mut subscription).await;
    assert_eq!(other.inspect(&key("n")).await.unwrap().unwrap().fence, Some(fence));
}

/// The server of the next connection may lag behind the one that has sent an event: its state gives no token for it.
#[tokio::test]
async fn a_token_is_read_on_the_connection_of_its_event() {
    let Some(url) = url() else { return };
    let proxy = Proxy::start(&url).await;
    let engine = open(&proxy.url, &prefix()).await;
    let store = &engine.store;
    let held = claim(&["n"], LONG);
    let fence = acquire(&engine, &held).await;
    let seen = store.read(held.keys(), Some(&held.owner)).await.unwrap();
    let entry = seen[0].own.as_ref().unwrap();
    let revision = store.revisions.next();
    assert_eq!(store.token(entry, revision).await.unwrap(), Some(fence));
    proxy.set(Mode::Closed);
    tokio::time::sleep(Duration::from_millis(200)).await;
    proxy.set(Mode::Forwards);
    let token = loop {
        if let Ok(token) = store.token(entry, revision).await {
            break token;
        }
    };
    assert_eq!(token, None);
    assert_eq!(store.token(entry, store.revisions.next()).await.unwrap(), Some(fence));
}

/// A release while the waiter has no connection: the next connection shows it.
#[tokio::test]
async fn a_release_during_an_outage_is_found_after_it() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let proxy = Proxy::start(&url).await;
    let (engine, other) = (open(&proxy.url, &prefix).await, open(&url, &prefix).await);
    let (holder, waiter) = (claim(&["n"], LONG), waiting(&["n"], LONG));
    acquire(&other, &holder).await;
    let mut subscription = engine.subscribe(&waiter, &key("n")).await.unwrap();
    busy(&engine, &waiter).await;
    proxy.set(Mode::Closed);
    other.release(&holder, Duration::ZERO).await.unwrap();
    proxy.set(Mode::Forwards);
    handed_off(&mut subscription).await;
}

/// Replies are lost, and the requests are repeated: one entry is left, and it has the lock.
#[tokio::test]
async fn repeated_attempts_leave_one_entry() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let proxy = Proxy::start(&url).await;
    let (engine, other) = (open(&proxy.url, &prefix).await, open(&url, &prefix).await);
    for names in [&["n"][..], &["n", "o"]] {
        let ours = claim(names, LONG);
        proxy.set(Mode::LosesReplies);
        let lost = engine.try_acquire(&ours).await;
        assert!(
            lost.as_ref()
                .is_err_and(|error| error.retryable && error.may_be_executed),
            "{lost:?}"
        );
        // The server closes a connection whose session has moved.
        proxy.set(Mode::Forwards);
        let fence = loop {
            match engine.try_acquire(&ours).await {
                Ok(Acquired::Granted { fence }) => break fence,
                Ok(held) => panic!("busy by its own entry: {held:?}"),
                Err(error) => assert!(error.retryable, "{error}"),
            }
        };
        for name in names {
            let info = other.inspect(&key(name)).await.unwrap().unwrap();
            assert_eq!((info.waiting, info.fence), (Some(0), Some(fence)), "{name}");
        }
        assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
        let (gone, left) = (claim(names, LONG), claim(names, LONG));
        proxy.set(Mode::LosesReplies);
        assert!(engine.try_acquire(&gone).await.is_err());
        proxy.set(Mode::Forwards);
        while engine.release(&gone, Duration::ZERO).await.is_err() {}
        assert_eq!(
            other.list("", PAGE).await.unwrap(),
            [],
            "a release of an attempt without an answer"
        );
        acquire(&other, &left).await;
        other.release(&left, Duration::ZERO).await.unwrap();
    }
}

/// The server raises a session timeout that is too short.
#[tokio::test]
async fn the_session_timeout_is_that_of_the_server() {
    let Some(url) = url() else { return };
    let asked = Duration::from_millis(1);
    let settings = Settings {
        key_prefix: Some(prefix()),
        session_timeout: Some(asked),
        ..Settings::default()
    };
    let engine = open_with(&url, &settings).await;
    let longest = engine.describe().longest_lease.unwrap();
    assert!(longest > 100 * asked, "{longest:?}");
    let ours = claim(&["n"], longest);
    acquire(&engine, &ours).await;
    assert_eq!(engine.renew(&ours, ours.ttl).await.unwrap(), Renewed::Extended);
}

/// A distant server.
#[tokio::test]
async fn a_server_may_be_distant() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let proxy = Proxy::start(&url).await;
    proxy.set(Mode::Delays(Duration::from_millis(60)));
    let engine = open(&proxy.url, &prefix).await;
    let ours = claim(&["n"], Duration::from_secs(5));
    acquire(&engine, &ours).await;
    let end = Moment::now() + Duration::from_secs(7);
    while !end.is_past() {
        assert_eq!(engine.renew(&ours, ours.ttl).await.unwrap(), Renewed::Extended);
        let left = engine.store.client.state().until.remaining();
        assert!(left > RESERVATION, "{left:?}");
        tokio::time::sleep(Duration::from_millis(700)).await;
    }
    assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
}

/// Nodes of a login are closed to others, and the error says what to do.
#[tokio::test]
async fn a_login_closes_its_nodes_to_others() {
    let Some(url) = url() else { return };
    let (scheme, hosts) = url.split_once("://").unwrap();
    let chroot = format!("/t{}/locks", OwnerToken::fresh().as_str());
    let with_login = format!("{scheme}://us%3Aer:p%40w@{hosts}{chroot}");
    let engine = open(&with_login, "").await;
    let ours = claim(&["n"], LONG);
    acquire(&engine, &ours).await;
    let same = open(&with_login, "").await;
    busy(&same, &claim(&["n"], LONG)).await;
    let other = open(&format!("{scheme}://us%3Aer:other@{hosts}{chroot}"), "").await;
    let error = other.try_acquire(&claim(&["n"], LONG)).await.unwrap_err();
    assert!(
        !error.retryable && error.to_string().contains("NoAuth (-102)"),
        "{error}"
    );
    assert!(error.to_string().contains("create, read, write and delete"), "{error}");
    assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
}

/// A close deletes the entries at once.
#[tokio::test]
async fn a_close_ends_the_session() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let (engine, other) = (open(&url, &prefix).await, open(&url, &prefix).await);
    acquire(&engine, &claim(&["n"], LONG)).await;
    engine.close().await;
    acquire(&other, &claim(&["n"], LONG)).await;
    let error = engine.try_acquire(&claim(&["o"], LONG)).await.unwrap_err();
    assert!(error.to_string().contains("closed"), "{error}");
    let dropped = open(&url, &prefix).await;
    acquire(&dropped, &claim(&["m"], LONG)).await;
    drop(dropped);
    let next = waiting(&["m"], LONG);
    let mut subscription = other.subscribe(&next, &key("m")).await.unwrap();
    if let Acquired::Held { .. } = other.try_acquire(&next).await.unwrap() {
        woken(&mut subscription).await;
    }
}

/// A request that the server would refuse with the end of the connection is not sent.
#[tokio::test]
async fn too_large_a_request_is_an_error() {
    let Some(url) = url() else { return };
    let engine = open(&url, &prefix()).await;
    let mut large = claim(&["n"], LONG);
    large.metadata = Some("x".repeat(1 << 20).into());
    let error = engine.try_acquire(&large).await.unwrap_err();
    assert!(
        !error.retryable && error.to_string().contains("jute.maxbuffer"),
        "{error}"
    );
    acquire(&engine, &claim(&["n"], LONG)).await;
}

#[tokio::test]
async fn an_entry_that_is_being_deleted_holds_nothing() {
    let Some(url) = url() else { return };
    let engine = open(&url, &prefix()).await;
    entries::tests::an_entry_that_is_being_deleted_holds_nothing(&engine).await;
}

#[tokio::test]
async fn a_retry_with_a_new_entry_has_a_new_token() {
    let Some(url) = url() else { return };
    let engine = open(&url, &prefix()).await;
    entries::tests::a_retry_with_a_new_entry_has_a_new_token(&engine).await;
}

#[tokio::test]
async fn a_lease_that_ends_while_it_is_written_is_deleted() {
    let Some(url) = url() else { return };
    let engine = open(&url, &prefix()).await;
    entries::tests::a_lease_that_ends_while_it_is_written_is_deleted(&engine).await;
}

#[tokio::test]
async fn waiters_stay_within_their_limits() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let [a, b] = [open(&url, &prefix).await, open(&url, &prefix).await];
    entries::tests::shares::waiters_stay_within_their_limits([&a, &b]).await;
}

#[tokio::test]
async fn a_writer_waits_for_many_readers() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let [a, b] = [open(&url, &prefix).await, open(&url, &prefix).await];
    entries::tests::shares::a_writer_waits_for_many_readers([&a, &b]).await;
}
