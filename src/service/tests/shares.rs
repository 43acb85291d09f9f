//! Shares of a name: refused where the store has none, and what the service shows of several holders.

use super::*;
use crate::engine::memory::MemoryEngine;
use crate::model::{Fence, Share};
use crate::service::EventSink;

fn on_memory(events: Option<EventSink>) -> Locks {
    let engine = MemoryEngine::named(OwnerToken::fresh().as_str());
    Locks::new(engine, STORE_TIMEOUT, Arc::new(StallDetector::default()), events)
}

fn shared(name: &str) -> Names {
    key(name).shared().into()
}

fn share(permits: u32, limit: u32, ttl: u64, wait: u64) -> AcquireOptions {
    AcquireOptions {
        share: Share::new(permits, limit),
        report_holder: true,
        ..options(ttl, wait)
    }
}

async fn take_share(locks: &Locks, name: &str, options: AcquireOptions) -> Arc<Lease> {
    match locks.acquire(shared(name), options, None).await.unwrap() {
        Outcome::Acquired(lease) => lease,
        other => panic!("expected {name} to be granted, got {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_without_shares_gets_no_request() {
    let (engine, locks) = service_with(false, 0);
    let name = key("n").shared();
    let errors = [
        locks
            .acquire(shared("n"), share(1, 5, 1000, 1000), None)
            .await
            .map(drop),
        locks.inspect(&name).await.map(drop),
        locks.force_release(&name).await.map(drop),
    ];
    for error in errors {
        let error = error.unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.message.contains("a MongoDB replica set, etcd"), "{error}");
        assert!(
            error
                .message
                .ends_with("a standalone MongoDB and a Redis quorum keep none"),
            "{error}"
        );
    }
    assert!(!held_in_store(&engine, "n").await);
    assert_eq!(locks.stats(), crate::service::Stats::default());
}

#[tokio::test(start_paused = true)]
async fn a_share_is_not_transferred() {
    let locks = on_memory(None);
    let lease = take_share(&locks, "n", share(1, 2, 30_000, 0)).await;
    let owner = OwnerToken::parse(lease.token()).unwrap();
    let names = [key("n").shared()];
    let error = locks
        .restore(&names, owner, Fence(1), options(1000, 0))
        .await
        .unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument);
    assert!(lease.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_busy_call_names_the_share_whose_lease_ends_first() {
    let locks = on_memory(None);
    let ttls = [20_000, 3000, 60_000];
    let mut leases = Vec::new();
    for ttl in ttls {
        leases.push(take_share(&locks, "n", share(1, 3, ttl, 0)).await);
    }
    // A lease of the same process on the lock of the same text is not one of the holders.
    take(&locks, "n", options(1000, 0)).await;
    let outcome = locks.acquire(shared("n"), share(1, 3, 1000, 0), None).await.unwrap();
    let Outcome::Busy(Some(busy)) = outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!((busy.others, busy.is_own, busy.name.is_shared()), (2, true, true));
    let info = busy.info.unwrap().unwrap();
    assert_eq!(info.fence, Some(leases[1].fence()));
    assert!(info.remaining.unwrap() <= ms(3000), "{info:?}");

    let found = locks.inspect(&key("n").shared()).await.unwrap();
    let fences: Vec<_> = found.iter().map(|info| info.fence.unwrap()).collect();
    assert_eq!(fences, leases.iter().map(|lease| lease.fence()).collect::<Vec<_>>());
    assert_eq!(locks.inspect(&key("n")).await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_events_of_a_share_have_it() {
    let events: Arc<std::sync::Mutex<Vec<_>>> = Arc::default();
    let seen = events.clone();
    let locks = on_memory(Some(Arc::new(move |event| seen.lock().unwrap().push(event))));
    let lease = take_share(&locks, "n", share(2, 3, 1000, 0)).await;
    locks.acquire(shared("n"), share(3, 3, 1000, 100), None).await.unwrap();
    locks.release(&lease).await.unwrap();
    take(&locks, "n", options(1000, 0)).await;
    let seen = events.lock().unwrap();
    let shares: Vec<_> = seen
        .iter()
        .map(|event| (format!("{:?}", event.kind), event.share.map(Share::permits)))
        .collect();
    let of = |kind: &str, permits| (kind.to_owned(), permits);
    let expected = [
        of("Acquired", Some(2)),
        of("Waiting", Some(3)),
        of("Timeout", Some(3)),
        of("Released", Some(2)),
        of("Acquired", None),
    ];
    assert_eq!(shares, expected);
}

#[tokio::test(start_paused = true)]
async fn a_lost_share_says_what_it_was() {
    let locks = on_memory(None);
    let kinds = [
        (Share::READER, "r", "the read lock \"r\" is lost: "),
        (Share::WRITER, "w", "the write lock \"w\" is lost: "),
        (Share::new(1, 5).unwrap(), "s", "the permit of \"s\" is lost: "),
    ];
    for (share, name, start) in kinds {
        let options = AcquireOptions {
            share: Some(share),
            renew: false,
            ..options(1000, 0)
        };
        let lease = take_share(&locks, name, options).await;
        tokio::time::sleep(ms(1001)).await;
        let loss = lease.loss().unwrap();
        assert!(loss.message.starts_with(start), "{loss}");
    }
}
