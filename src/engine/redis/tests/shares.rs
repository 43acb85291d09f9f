//! Shared names: their keys, and what no release announces.

use super::*;
use crate::engine::{HandOff, Read, Renewed, WAITER_LIVENESS};
use crate::model::{LockInfo, Share};

const HOLDERS: &str = "holdfast:shared:lock:n";
const QUEUE: &str = "holdfast:queue:{holdfast:shared:lock:n}";

pub(super) fn share(name: &str, permits: u32, limit: u32) -> Claim {
    let process = Arc::new(Process::current());
    let mut claim = Claim::new(&[key(name).shared()], OwnerToken::fresh(), Ttl::clamped(LONG), process);
    claim.share = Share::new(permits, limit);
    claim
}

fn waiting_share(permits: u32, limit: u32) -> Claim {
    let mut claim = share("n", permits, limit);
    claim.waiting = true;
    claim
}

fn short(mut claim: Claim, ttl_ms: u64) -> Claim {
    claim.ttl = Ttl::clamped(Duration::from_millis(ttl_ms));
    claim
}

pub(super) async fn holders(engine: &RedisEngine, name: &str) -> Vec<LockInfo> {
    let (key, waits_for_token) = (&key(name).shared(), true);
    Engine::read(engine, Read::Name { key, waits_for_token }).await.unwrap()
}

async fn granted(subscription: &mut Box<dyn Subscription>) -> HandOff {
    notified(subscription).await;
    subscription.take_hand_off().expect("a grant")
}

/// Returns the ttl of each key but that of the last token.
async fn ttls(other: &mut OtherClient) -> Vec<i64> {
    let mut ttls = Vec::new();
    for key in other.run::<Vec<String>>("KEYS *").await {
        if key != "holdfast:last" {
            ttls.push(other.run(&format!("PTTL {key}")).await);
        }
    }
    ttls
}

#[tokio::test]
async fn the_keys_of_a_shared_name_end_with_its_last_lease() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let (long, brief) = (share("n", 1, 2), short(share("n", 1, 2), 500));
    acquire(&ours, &long).await;
    acquire(&ours, &brief).await;
    let ttl = other.run::<i64>(&format!("PTTL {HOLDERS}")).await;
    assert!((20_000..=30_000).contains(&ttl), "the longest lease: {ttl}");
    let waiter = waiting_share(2, 2);
    let _subscription = enqueue(&theirs, &waiter).await;
    let ttls_of_all = ttls(&mut other).await;
    assert_eq!(ttls_of_all.len(), 2, "{ttls_of_all:?}");
    assert!(
        ttls_of_all.iter().all(|ttl| (1..=70_000).contains(ttl)),
        "{ttls_of_all:?}"
    );
    release(&ours, &long).await;
    assert_eq!(
        theirs.release(&waiter, Duration::ZERO).await.unwrap(),
        Released::NotHeld
    );
    assert!(ttls(&mut other).await.iter().all(|ttl| *ttl > 0));
    // A renewal makes the key last longer, and the end of the others is not counted.
    assert_eq!(
        ours.renew(&brief, Ttl::clamped(2 * LONG)).await.unwrap(),
        Renewed::Extended
    );
    assert!(other.run::<i64>(&format!("PTTL {HOLDERS}")).await > 50_000);
    release(&ours, &brief).await;
    let last = short(share("n", 1, 2), 100);
    acquire(&ours, &last).await;
    eventually("nothing but the last token", async || ttls(&mut other).await.is_empty()).await;
}

/// No caller makes a request: the heartbeat of the waiters' process finds the end of the lease.
#[tokio::test]
async fn the_end_of_a_dead_holders_lease_grants_all_waiters_that_fit() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs) = (server.engine().await, server.engine().await);
    // The one whose lease ends later leaves a permit free.
    let (dead, lives) = (short(share("n", 2, 3), 600), share("n", 1, 3));
    acquire(&ours, &dead).await;
    acquire(&ours, &lives).await;
    let waiters = [waiting_share(1, 3), waiting_share(1, 3), waiting_share(1, 3)];
    let mut subscriptions = Vec::new();
    for waiter in &waiters {
        subscriptions.push(enqueue(&theirs, waiter).await);
    }
    let began = tokio::time::Instant::now();
    let first = granted(&mut subscriptions[0]).await;
    let second = granted(&mut subscriptions[1]).await;
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert!(second.fence > first.fence);
    assert!(subscriptions[2].take_hand_off().is_none());
    assert_eq!(holders(&ours, "n").await.len(), 3);
    release(&theirs, &waiters[0]).await;
    granted(&mut subscriptions[2]).await;
}

/// A dead waiter in front that would not fit does not block those behind it for longer than its process counts as alive.
#[tokio::test]
async fn a_dead_heavy_waiter_is_skipped() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    acquire(&ours, &share("n", 1, 2)).await;
    let till = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_millis()
        + 1000;
    let dead = format!("00000000000000dd:{}:2/2", OwnerToken::fresh().as_str());
    let members = format!("ZADD {QUEUE} 1 {dead} -{till} 00000000000000dd");
    assert_eq!(other.run::<i64>(&members).await, 2);
    let light = waiting_share(1, 2);
    let mut subscription = enqueue(&ours, &light).await;
    let began = tokio::time::Instant::now();
    granted(&mut subscription).await;
    assert!(began.elapsed() < WAITER_LIVENESS, "{:?}", began.elapsed());
}

/// More of them than one round of the script reads.
#[tokio::test]
async fn one_release_grants_a_hundred_readers() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let of = |share, waiting| {
        let mut claim = waiting_share(1, 1);
        (claim.share, claim.waiting) = (Some(share), waiting);
        claim
    };
    let writer = of(Share::WRITER, false);
    acquire(&ours, &writer).await;
    let readers: Vec<Claim> = (0..100).map(|_| of(Share::READER, true)).collect();
    let mut subscriptions = Vec::new();
    for reader in &readers {
        subscriptions.push(enqueue(&theirs, reader).await);
    }
    let next = of(Share::WRITER, true);
    let mut behind = enqueue(&ours, &next).await;
    let before = other.scripts().await;
    release(&ours, &writer).await;
    let held = holders(&ours, "n").await;
    assert_eq!((held.len(), held[0].waiting), (100, Some(1)));
    let ran = other.scripts().await - before;
    // Each script is sent twice: the server does not know it.
    assert!(ran <= 5, "one release, one inspection, and a heartbeat: {ran}");
    let mut last = Fence::NONE;
    for subscription in &mut subscriptions {
        let fence = granted(subscription).await.fence;
        assert!(fence > last);
        last = fence;
    }
    for reader in &readers {
        assert!(behind.take_hand_off().is_none());
        release(&theirs, reader).await;
    }
    assert!(granted(&mut behind).await.fence > last);
}

/// A waiter that its process does not know any more: its permits go to the next one.
#[tokio::test]
async fn permits_of_a_waiter_that_left_unnoticed_are_handed_on() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let (holder, lost, next) = (share("n", 1, 1), waiting_share(1, 1), waiting_share(1, 1));
    acquire(&ours, &holder).await;
    let subscription = enqueue(&theirs, &lost).await;
    let mut behind = enqueue(&ours, &next).await;
    theirs.waiters.known.leave(&lost.owner);
    drop(subscription);
    release(&ours, &holder).await;
    granted(&mut behind).await;
    let held: Vec<String> = other.run(&format!("ZRANGE {HOLDERS} 0 -1")).await;
    assert!(held.len() == 1 && held[0].contains(next.owner.as_str()), "{held:?}");
}

#[tokio::test]
async fn a_server_without_the_scripts_gets_them() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (holder, waiter) = (share("n", 1, 1), waiting_share(1, 1));
    acquire(&ours, &holder).await;
    let mut subscription = enqueue(&ours, &waiter).await;
    for _ in 0..2 {
        other.run::<()>("SCRIPT FLUSH").await;
        assert_eq!(ours.renew(&holder, holder.ttl).await.unwrap(), Renewed::Extended);
    }
    other.run::<()>("SCRIPT FLUSH").await;
    release(&ours, &holder).await;
    granted(&mut subscription).await;
    other.run::<()>("SCRIPT FLUSH").await;
    assert_eq!(holders(&ours, "n").await.len(), 1);
    assert!(ours.force_release(&key("n").shared()).await.unwrap());
}

/// Locks and shares of one process are renewed and released together: each gets its own answer.
#[tokio::test]
async fn locks_and_shares_share_calls() {
    let Some(server) = Server::start(&[]).await else { return };
    let ours = server.engine().await;
    let claims = [
        claim("n"),
        share("n", 1, 2),
        claim("m"),
        share("m", 2, 2),
        share("n", 1, 2),
    ];
    for claim in &claims {
        acquire(&ours, claim).await;
    }
    release(&ours, &claims[3]).await;
    let extended = super::renewal::renew_all(&ours, &claims, LONG).await;
    let extended: Vec<bool> = extended
        .into_iter()
        .map(|answer| answer.unwrap() == Renewed::Extended)
        .collect();
    assert_eq!(extended, [true, true, true, false, true]);
    let mut freed = vec![None; claims.len()];
    let refs: Vec<&Claim> = claims.iter().collect();
    ours.release_all(&refs, Duration::ZERO, &mut |index, answer| {
        freed[index] = Some(answer.unwrap() == Released::Freed);
    })
    .await;
    assert_eq!(freed, [true, true, true, false, true].map(Some));
}

/// The token of a metadata text is no owner.
#[tokio::test]
async fn a_token_in_the_metadata_of_another_share_is_not_mistaken() {
    let Some(server) = Server::start(&[]).await else { return };
    let ours = server.engine().await;
    let (mut first, second) = (share("n", 1, 2), share("n", 1, 2));
    first.metadata = Some(format!("\"{} {}\\n\"", second.owner.as_str(), second.owner.as_str()).into());
    acquire(&ours, &first).await;
    let fence = acquire(&ours, &second).await;
    assert_eq!(acquire(&ours, &second).await, fence);
    release(&ours, &second).await;
    assert_eq!(ours.release(&second, Duration::ZERO).await.unwrap(), Released::NotHeld);
    let held = holders(&ours, "n").await;
    assert_eq!(held.len(), 1);
    assert_eq!(held[0].metadata, first.metadata.as_deref().map(str::to_owned));
}
