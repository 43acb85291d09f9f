//! Shares of a name whose claims wait, on a real server.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};

use crate::engine::entries::EntryEngine;
use crate::engine::{Acquired, Engine, EngineExt, Read, Released};
use crate::model::{Claim, Fence, Key, OwnerToken, Process, Share, Sums, Ttl};

fn shared() -> Key {
    Key::new("n").unwrap().shared()
}

fn share(permits: u32, limit: u32, waiting: bool) -> Claim {
    let ttl = Ttl::clamped(Duration::from_secs(30));
    let mut claim = Claim::new(&[shared()], OwnerToken::fresh(), ttl, Arc::new(Process::current()));
    claim.share = Share::new(permits, limit);
    claim.waiting = waiting;
    claim
}

/// Waits for a grant, as the service does.
async fn granted(engine: &EntryEngine, claim: &Claim) -> Fence {
    let mut subscription = engine.subscribe(claim, &shared()).await.unwrap();
    loop {
        if let Acquired::Granted { fence } = engine.try_acquire(claim).await.unwrap() {
            return fence;
        }
        subscription.changed().await;
        if let Some(hand_off) = subscription.take_hand_off() {
            return hand_off.fence;
        }
    }
}

/// Some claims leave while they wait. No other one misses its grant.
pub(in crate::engine) async fn waiters_stay_within_their_limits(engines: [&EntryEngine; 2]) {
    const TASKS: usize = 12;
    const ROUNDS: usize = 8;
    let (held, tokens) = (Mutex::new(HashMap::new()), Mutex::new(HashSet::new()));
    let tasks = (0..TASKS).map(async |task| {
        let engine = engines[task % 2];
        for _ in 0..ROUNDS {
            let limit = fastrand::u32(2..=5);
            let claim = share(fastrand::u32(1..=limit), limit, true);
            let leaves = fastrand::u8(..4) == 0;
            let patience = Duration::from_millis(if leaves { fastrand::u64(..20) } else { 20_000 });
            match timeout(patience, granted(engine, &claim)).await {
                Ok(fence) => {
                    held.lock().insert(claim.owner.clone(), claim.share.unwrap());
                    let sums: Sums = held.lock().values().copied().collect();
                    assert!(sums.is_within_limits(), "{held:?}");
                    assert!(tokens.lock().insert(fence), "{fence:?} twice");
                    sleep(Duration::from_millis(fastrand::u64(..5))).await;
                    held.lock().remove(&claim.owner);
                }
                Err(_) => assert!(leaves, "no grant beside {held:?}"),
            }
            engine.release(&claim, Duration::ZERO).await.unwrap();
        }
    });
    join_all(tasks).await;
    let (key, waits_for_token) = (&shared(), true);
    let left = engines[0].read(Read::Name { key, waits_for_token }).await.unwrap();
    assert_eq!(left, []);
}

/// More readers than one read of the entries has.
pub(in crate::engine) async fn a_writer_waits_for_many_readers(engines: [&EntryEngine; 2]) {
    const READERS: usize = 66;
    let reader = |waiting| {
        let mut claim = share(1, 1, waiting);
        claim.share = Some(Share::READER);
        claim
    };
    let readers: Vec<Claim> = (0..READERS).map(|index| reader(index % 2 == 0)).collect();
    let mut last = Fence::NONE;
    for reader in &readers {
        let fence = timeout(Duration::from_secs(10), granted(engines[0], reader))
            .await
            .unwrap();
        assert!(fence > last, "{fence:?} after {last:?}");
        last = fence;
    }
    let mut writer = share(1, 1, true);
    writer.share = Some(Share::WRITER);
    let is_held = |acquired| matches!(acquired, Acquired::Held { .. });
    assert!(is_held(engines[1].try_acquire(&writer).await.unwrap()));
    assert!(
        is_held(engines[0].try_acquire(&reader(false)).await.unwrap()),
        "it waits"
    );
    let (key, waits_for_token) = (&shared(), false);
    let holders = engines[1].read(Read::Name { key, waits_for_token }).await.unwrap();
    assert_eq!(holders.len(), READERS);
    assert!(holders.iter().all(|info| info.waiting == Some(1)), "{holders:?}");
    assert!(engines[1].force_release(key).await.unwrap());
    let fence = timeout(Duration::from_secs(10), granted(engines[1], &writer))
        .await
        .unwrap();
    assert!(fence > last);
    assert_eq!(
        engines[1].release(&writer, Duration::ZERO).await.unwrap(),
        Released::Freed
    );
}
