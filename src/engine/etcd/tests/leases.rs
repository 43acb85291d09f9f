//! The etcd leases of entries: shared by locks, kept alive only when that is needed, and those of hand-offs.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use prost::Message;

use super::client::{GRPC, client, ok, server};
use super::*;
use crate::clock::Moment;
use crate::engine::contract::PAGE;
use crate::engine::contract::refs;
use crate::engine::entries::{self, Store, Stored};
use crate::engine::etcd::client::messages::{Header, LeaseRequest, LeaseResponse};
use crate::engine::etcd::leases::{Class, Leases};
use crate::engine::{Acquired, Engine, EngineExt, HandOff, RESERVATION, Released, Renewed};
use crate::model::{Claim, Key, OwnerToken, Process, Ttl};

pub(super) fn claim(name: &str, ttl: Duration) -> Claim {
    let keys = [Key::new(name).unwrap()];
    let process = Arc::new(Process::current());
    let mut claim = Claim::new(&keys, OwnerToken::fresh(), Ttl::clamped(ttl), process);
    claim.waiting = true;
    claim
}

/// Returns engines with a prefix of their own.
async fn engines<const N: usize>() -> Option<[Opened; N]> {
    let url = url()?;
    let prefix = format!("t{}/", OwnerToken::fresh().as_str());
    let mut engines = Vec::new();
    for _ in 0..N {
        engines.push(opened(&url, &prefix).await);
    }
    engines.try_into().ok()
}

async fn granted(engine: &Opened, claim: &Claim) {
    let answer = engine.try_acquire(claim).await.unwrap();
    assert!(matches!(answer, Acquired::Granted { .. }), "{answer:?}");
}

async fn oldest(engine: &Opened, claim: &Claim) -> Stored {
    let mut seen = engine.store.read(claim.keys(), None).await.unwrap();
    seen.remove(0).granted.remove(0)
}

const LONG: Duration = Duration::from_secs(30);

#[tokio::test]
async fn locks_of_a_class_share_an_etcd_lease() {
    let Some([a, b]) = engines().await else { return };
    let claims: Vec<Claim> = (0..4)
        .map(|i| claim(&format!("n{i}"), LONG - Duration::from_millis(500 * i)))
        .collect();
    for ours in &claims {
        granted(&a, ours).await;
    }
    let other = claim("other", LONG);
    granted(&b, &other).await;
    let short = claim("short", Duration::from_secs(3));
    granted(&a, &short).await;
    let mut leases = Vec::new();
    for claim in claims.iter().chain([&other, &short]) {
        leases.push(oldest(&a, claim).await.session);
    }
    assert!(leases[..4].iter().all(|lease| *lease == leases[0] && *lease != 0));
    assert!(
        leases[4] != leases[0] && leases[5] != leases[0],
        "of another process, and of another class"
    );
    let mut renewed = claims[0].clone();
    renewed.waiting = false;
    let before = oldest(&a, &renewed).await.version;
    assert_eq!(a.renew(&renewed, renewed.ttl).await.unwrap(), Renewed::Extended);
    assert_eq!(oldest(&a, &renewed).await.version, before, "a renewal writes nothing");
    // A longer ttl needs another class.
    assert_eq!(
        a.renew(&renewed, Ttl::clamped(LONG * 3)).await.unwrap(),
        Renewed::Extended
    );
    assert_ne!(oldest(&a, &renewed).await.session, leases[0]);
}

/// A hand-off lasts for a few seconds, and its first renewal writes the token and the etcd lease of the class.
#[tokio::test]
async fn a_hand_off_is_short_until_it_is_renewed() {
    let Some([a, b]) = engines().await else { return };
    let (holder, mut waiter) = (claim("n", LONG), claim("n", LONG));
    granted(&a, &holder).await;
    let mut subscription = b.subscribe(&waiter, &waiter.keys()[0]).await.unwrap();
    assert!(matches!(b.try_acquire(&waiter).await.unwrap(), Acquired::Held { .. }));
    assert!(subscription.is_reliable());
    let mut seen = b.store.read(waiter.keys(), Some(&waiter.owner)).await.unwrap();
    let of_waiters = seen.remove(0).own.unwrap();
    assert_eq!(a.release(&holder, Duration::ZERO).await.unwrap(), Released::Freed);
    let hand_off = tokio::time::timeout(Duration::from_secs(10), async {
        loop {
            subscription.changed().await;
            if let Some(hand_off) = subscription.take_hand_off() {
                return hand_off;
            }
        }
    });
    let HandOff { fence, until } = hand_off.await.unwrap();
    assert!(until.remaining() <= RESERVATION, "{:?}", until.remaining());
    let info = a.inspect_now(&waiter.keys()[0]).await.unwrap().unwrap();
    assert_eq!(info.fence, None, "it is not written yet");
    waiter.fence = Some(fence);
    assert_eq!(b.renew(&waiter, waiter.ttl).await.unwrap(), Renewed::Extended);
    let stored = oldest(&a, &waiter).await;
    assert!(stored.session != of_waiters.session && stored.position == of_waiters.position);
    assert_eq!(a.inspect(&waiter.keys()[0]).await.unwrap().unwrap().fence, Some(fence));
    assert_eq!(b.release(&waiter, Duration::ZERO).await.unwrap(), Released::Freed);
    // A token of the next grant is larger.
    let next = claim("n", LONG);
    let Acquired::Granted { fence: larger } = a.try_acquire(&next).await.unwrap() else {
        panic!("it is free")
    };
    assert!(larger > fence);
}

/// Waiters that enter together are served in the order of the calls, also for other processes.
#[tokio::test]
async fn waiters_that_enter_together_keep_their_order() {
    let Some([a, b]) = engines().await else { return };
    let holder = claim("n", LONG);
    granted(&a, &holder).await;
    let waiters: Vec<Arc<Claim>> = (0..64).map(|_| Arc::new(claim("n", LONG))).collect();
    let mut answers = 0;
    b.try_acquire_all(
        &refs(&waiters),
        &mut |_: usize, answer: crate::engine::Result<Acquired>| {
            assert!(matches!(answer.unwrap(), Acquired::Held { .. }));
            answers += 1;
        },
    )
    .await;
    assert_eq!(answers, 64);
    let key = &holder.keys()[0];
    assert_eq!(a.inspect(key).await.unwrap().unwrap().waiting, Some(64));
    assert_eq!(a.list("", PAGE).await.unwrap()[0].waiting, Some(64));
    assert_eq!(a.release(&holder, Duration::ZERO).await.unwrap(), Released::Freed);
    for waiter in &waiters {
        assert!(oldest(&a, waiter).await.is_of(&waiter.owner));
        granted(&b, waiter).await;
        assert_eq!(b.release(waiter, Duration::ZERO).await.unwrap(), Released::Freed);
    }
    assert_eq!(a.inspect(key).await.unwrap(), None);
}

/// A claim of several names keeps its entries only as long as it makes attempts.
#[tokio::test]
async fn attempts_of_a_set_extend_its_entries() {
    let Some([a, b]) = engines().await else { return };
    let holder = claim("b", LONG);
    granted(&a, &holder).await;
    let ttl = Duration::from_millis(1500);
    let keys = ["a", "b"].map(|name| Key::new(name).unwrap());
    let mut set = Claim::new(
        &keys,
        OwnerToken::fresh(),
        Ttl::clamped(ttl),
        Arc::new(Process::current()),
    );
    set.waiting = true;
    let started = Instant::now();
    while started.elapsed() < 2 * ttl {
        let Acquired::Held { key, .. } = b.try_acquire(&set).await.unwrap() else {
            panic!("b is held")
        };
        assert_eq!(key, keys[1]);
        tokio::time::sleep(ttl / 5).await;
    }
    let probe = claim("a", LONG);
    let mut probe = Claim::clone(&probe);
    probe.waiting = false;
    // One more attempt: the machine may have stood still.
    assert!(matches!(b.try_acquire(&set).await.unwrap(), Acquired::Held { .. }));
    assert!(
        matches!(a.try_acquire(&probe).await.unwrap(), Acquired::Held { .. }),
        "it is reserved"
    );
    assert_eq!(a.inspect(&keys[0]).await.unwrap(), None, "it has no holder");
    assert_eq!(a.list("", PAGE).await.unwrap().len(), 1);
    let ended = Instant::now();
    while !matches!(a.try_acquire(&probe).await.unwrap(), Acquired::Granted { .. }) {
        assert!(
            ended.elapsed() < Duration::from_secs(20),
            "the set makes no attempts any more"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The entries of a process disappear with its etcd leases. What it released leaves nothing, and neither does a close.
#[tokio::test]
async fn a_closed_engine_leaves_no_etcd_lease_without_entries() {
    let Some([a, b]) = engines().await else { return };
    let (released, kept) = (claim("released", LONG), claim("kept", Duration::from_secs(3)));
    granted(&a, &released).await;
    let lease = oldest(&b, &released).await.session;
    assert_eq!(a.release(&released, Duration::ZERO).await.unwrap(), Released::Freed);
    granted(&a, &kept).await;
    // Not the time of a class, by which a job would miss its next day.
    let keep = Duration::from_secs(23 * 3600);
    assert_eq!(a.release(&kept, keep).await.unwrap(), Released::Freed);
    a.close().await;
    let stays = oldest(&b, &kept).await;
    assert!(!stays.is_of(&kept.owner));
    let [of_released, of_kept] = [lease, stays.session];
    let time_to_live = async |id| {
        let path = "/etcdserverpb.Lease/LeaseTimeToLive";
        let answer: LeaseResponse = b.store.client.call(path, &LeaseRequest { id }, None).await.unwrap();
        answer.ttl
    };
    assert!(time_to_live(of_released).await <= 0, "revoked");
    let left = time_to_live(of_kept).await as u64;
    assert!(left <= keep.as_secs() && left > keep.as_secs() - 600, "{left} s");
    assert!(b.force_release(&kept.keys()[0]).await.unwrap());
    assert!(a.try_acquire(&released).await.is_err(), "it is closed");
}

#[tokio::test]
async fn an_entry_that_is_being_deleted_holds_nothing() {
    let Some([engine]) = engines().await else { return };
    entries::tests::an_entry_that_is_being_deleted_holds_nothing(&engine).await;
}

#[tokio::test]
async fn a_retry_with_a_new_entry_has_a_new_token() {
    let Some([engine]) = engines().await else { return };
    entries::tests::a_retry_with_a_new_entry_has_a_new_token(&engine).await;
}

#[tokio::test]
async fn a_lease_that_ends_while_it_is_written_is_deleted() {
    let Some([engine]) = engines().await else { return };
    entries::tests::a_lease_that_ends_while_it_is_written_is_deleted(&engine).await;
}

#[tokio::test]
async fn waiters_stay_within_their_limits() {
    let Some([a, b]) = engines().await else { return };
    entries::tests::shares::waiters_stay_within_their_limits([&a, &b]).await;
}

#[tokio::test]
async fn a_writer_waits_for_many_readers() {
    let Some([a, b]) = engines().await else { return };
    entries::tests::shares::a_writer_waits_for_many_readers([&a, &b]).await;
}

/// After an election a deposed leader may revoke etcd leases of the terms before, and answer requests for them.
#[tokio::test]
async fn an_answer_after_an_election_does_not_count() {
    let (term, elects, id) = (
        Arc::new(AtomicU64::new(5)),
        Arc::new(AtomicU64::new(0)),
        AtomicI64::new(0),
    );
    let (of_server, elected) = (term.clone(), elects.clone());
    let address = server(move |path, _| {
        // A member that answers the first request after an election may not know of it yet.
        let raft_term = of_server.fetch_add(elected.swap(0, SeqCst), SeqCst);
        let header = Some(Header { revision: 1, raft_term });
        let (id, ttl) = match path {
            path if path.contains("LeaseGrant") => (id.fetch_add(1, SeqCst) + 1, 3),
            path if path.contains("Lease") => (id.load(SeqCst), 3),
            _ => (0, 0),
        };
        let message = LeaseResponse { header, id, ttl }.encode_to_vec();
        Some((
            200,
            GRPC,
            [&[0, 0, 0, 0, message.len() as u8], &message[..]].concat(),
            ok(),
        ))
    })
    .await;
    let leases = Leases::new(Arc::new(client(&format!("etcd://{address}"))), b"p/".to_vec());
    let class = Class::Seconds(3);
    let lease = leases.get(class).await.unwrap();
    let granted_until = lease.ends();
    let later = || Moment::now() + Duration::from_millis(3100);
    assert!(leases.keep_until(&lease, later()).await.unwrap() && lease.ends() > granted_until);
    // An election during the request.
    elects.store(1, SeqCst);
    let kept_until = lease.ends();
    assert!(!leases.keep_until(&lease, later()).await.unwrap());
    assert_eq!((lease.ends(), leases.is_of_term(&lease)), (kept_until, false));
    let next = leases.get(class).await.unwrap();
    assert_eq!((next.id, leases.is_of_term(&next)), (2, true));
    // An election between the read of the term and the grant.
    term.store(7, SeqCst);
    assert!(!leases.keep_until(&next, later()).await.unwrap());
    elects.store(1, SeqCst);
    let last = leases.get(class).await.unwrap();
    assert_eq!((last.id, term.load(SeqCst), leases.is_of_term(&last)), (4, 8, true));
}
