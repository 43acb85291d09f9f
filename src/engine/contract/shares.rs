//! Shares: semaphores and read/write locks, in stores that have them.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use parking_lot::Mutex;

use super::*;
use crate::engine::{EngineExt, Read, Subscription};
use crate::model::{LockInfo, MAX_PERMITS, Share};

fn shared(name: &str) -> Key {
    key(name).shared()
}

/// Creates a claim on `permits` of the name `n`, within `limit`.
fn share(permits: u32, limit: u32) -> Claim {
    let mut claim = claim_of("n", LONG);
    claim.share = Share::new(permits, limit);
    claim
}

fn waiting_share(permits: u32, limit: u32) -> Claim {
    let mut claim = share(permits, limit);
    claim.waiting = true;
    claim
}

fn claim_of(name: &str, ttl: Duration) -> Claim {
    let ttl = Ttl::new(ttl).unwrap();
    let process = Arc::new(Process::current());
    let mut claim = Claim::new(&[shared(name)], OwnerToken::fresh(), ttl, process);
    claim.share = Share::new(1, 1);
    claim
}

async fn holders(engine: &SharedEngine, name: &str) -> Vec<LockInfo> {
    let (key, waits_for_token) = (&shared(name), true);
    engine.read(Read::Name { key, waits_for_token }).await.unwrap()
}

/// Returns the permits in use of the name `n`.
async fn used(engine: &SharedEngine) -> u32 {
    let holders = holders(engine, "n").await;
    holders.iter().map(|info| info.share.unwrap().permits()).sum()
}

/// A waiter with a subscription, as the service has it.
struct Waiter<'s> {
    engine: &'s SharedEngine,
    claim: Claim,
    subscription: Box<dyn Subscription>,
    /// Whether the store has made it a holder, without an attempt.
    is_handed: bool,
}

/// Enters the queue.
async fn enter(engine: &SharedEngine, claim: Claim) -> Waiter<'_> {
    let subscription = engine.subscribe(&claim, &shared("n")).await.unwrap();
    busy(engine, &claim).await;
    Waiter {
        engine,
        claim,
        subscription,
        is_handed: false,
    }
}

impl Waiter<'_> {
    /// Waits for the grant, by a hand-off or an attempt after a notification.
    async fn granted(&mut self) -> Fence {
        loop {
            woken(&mut self.subscription).await;
            if let Some(hand_off) = self.subscription.take_hand_off() {
                self.is_handed = true;
                return hand_off.fence;
            }
            if let Acquired::Granted { fence } = self.engine.try_acquire(&self.claim).await.unwrap() {
                return fence;
            }
        }
    }

    /// Checks that an attempt finds the name busy.
    async fn is_busy(&self) {
        busy(self.engine, &self.claim).await;
    }

    async fn release(&self) -> Released {
        release(self.engine, &self.claim).await
    }
}

pub(crate) async fn shares_are_granted_up_to_the_limit(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    let holders = [share(2, 5), share(1, 5), share(2, 5)];
    for (index, claim) in holders.iter().enumerate() {
        acquire(if index == 1 { &s.b } else { &s.a }, claim).await;
    }
    assert_eq!(used(&s.b).await, 5);
    let one_more = share(1, 5);
    let (name, retry_after) = busy(&s.b, &one_more).await;
    assert_eq!(name, shared("n"));
    assert!(
        retry_after.is_none_or(|after| after <= LONG + CLOCK_ERROR),
        "{retry_after:?}"
    );
    assert_eq!(release(&s.b, &holders[1]).await, Released::Freed);
    assert_eq!(release(&s.b, &holders[1]).await, Released::NotHeld);
    acquire(&s.b, &one_more).await;
    busy(&s.a, &share(1, 5)).await;
    for claim in [&holders[0], &holders[2], &one_more] {
        assert_eq!(release(&s.a, claim).await, Released::Freed);
    }
    assert_eq!(used(&s.b).await, 0);
}

pub(crate) async fn the_smallest_limit_of_the_holders_counts(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    // The claim with the smaller limit is the later one.
    let (large, small) = (share(2, 3), share(1, 2));
    acquire(&s.a, &large).await;
    busy(&s.b, &small).await;
    release(&s.a, &large).await;
    // It is the holder.
    acquire(&s.b, &small).await;
    busy(&s.a, &large).await;
    let second = share(1, 9);
    acquire(&s.a, &second).await;
    busy(&s.a, &share(1, 9)).await;
    release(&s.b, &small).await;
    // Only the limits of those that hold count.
    acquire(&s.b, &share(8, 9)).await;
    busy(&s.a, &share(1, MAX_PERMITS)).await;
}

pub(crate) async fn a_heavy_waiter_is_not_overtaken(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    let (first, second) = (share(1, 3), share(1, 3));
    acquire(&s.a, &first).await;
    acquire(&s.b, &second).await;
    let mut heavy = enter(&s.b, waiting_share(3, 3)).await;
    let mut light = enter(&s.a, waiting_share(1, 3)).await;
    busy(&s.a, &share(1, 3)).await;
    release(&s.a, &first).await;
    light.is_busy().await;
    busy(&s.a, &share(1, 3)).await;
    release(&s.a, &second).await;
    heavy.granted().await;
    light.is_busy().await;
    assert_eq!(heavy.release().await, Released::Freed);
    light.granted().await;
}

pub(crate) async fn a_release_grants_all_first_waiters_that_fit(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    let holder = share(5, 5);
    acquire(&s.a, &holder).await;
    let mut first = enter(&s.a, waiting_share(2, 5)).await;
    let mut second = enter(&s.b, waiting_share(1, 5)).await;
    // Of the same process as the first one.
    let mut third = enter(&s.a, waiting_share(1, 5)).await;
    let mut heavy = enter(&s.a, waiting_share(2, 5)).await;
    let light = enter(&s.b, waiting_share(1, 5)).await;
    release(&s.b, &holder).await;
    let one = first.granted().await;
    if first.is_handed {
        assert_eq!(used(&s.a).await, 4, "in one step");
    }
    let fences = [one, second.granted().await, third.granted().await];
    assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
    heavy.is_busy().await;
    light.is_busy().await;
    first.release().await;
    assert!(heavy.granted().await > fences[2]);
}

pub(crate) async fn readers_share_a_name_and_a_writer_does_not(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    let of = |share, waiting| {
        let mut claim = claim_of("n", LONG);
        (claim.share, claim.waiting) = (Some(share), waiting);
        claim
    };
    let readers: Vec<Claim> = (0..3).map(|_| of(Share::READER, false)).collect();
    for reader in &readers {
        acquire(&s.a, reader).await;
    }
    let mut writer = enter(&s.b, of(Share::WRITER, true)).await;
    let mut behind = enter(&s.a, of(Share::READER, true)).await;
    let mut last = enter(&s.b, of(Share::READER, true)).await;
    for reader in &readers {
        behind.is_busy().await;
        release(&s.a, reader).await;
    }
    let written = writer.granted().await;
    last.is_busy().await;
    assert_eq!(used(&s.a).await, MAX_PERMITS);
    writer.release().await;
    assert!(behind.granted().await > written);
    assert!(last.granted().await > written);
}

/// Against the lock, where a free name cannot have waiters: a waiter for several permits leaves, and the one behind it fits.
pub(crate) async fn a_waiter_that_leaves_grants_those_behind_it(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    acquire(&s.a, &share(1, 2)).await;
    let heavy = enter(&s.a, waiting_share(2, 2)).await;
    let mut light = enter(&s.b, waiting_share(1, 2)).await;
    light.is_busy().await;
    assert_eq!(heavy.release().await, Released::NotHeld);
    let in_use = used(&s.a).await;
    light.granted().await;
    if light.is_handed {
        assert_eq!(in_use, 2, "in one step");
    }
}

pub(crate) async fn the_permits_of_a_dead_holder_return(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    let mut dead = share(2, 2);
    dead.ttl = Ttl::new(SHORT).unwrap();
    acquire(&s.a, &dead).await;
    let (_, retry_after) = busy(&s.b, &share(1, 2)).await;
    assert!(
        retry_after.is_none_or(|after| after <= SHORT + CLOCK_ERROR),
        "{retry_after:?}"
    );
    expiry(&s, SHORT + Duration::from_millis(50)).await;
    let (one, other) = (share(1, 2), share(1, 2));
    acquire(&s.b, &one).await;
    acquire(&s.a, &other).await;
    assert_eq!(used(&s.a).await, 2);
    // A late renewal and a late release change nothing.
    assert_eq!(s.a.renew(&dead, Ttl::clamped(LONG)).await.unwrap(), Renewed::Lost);
    assert_eq!(release(&s.a, &dead).await, Released::NotHeld);
    assert_eq!(used(&s.b).await, 2);
}

pub(crate) async fn shares_are_renewed_and_never_shortened(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    let mut claims: Vec<Claim> = (0..70).map(|_| share(1, 100)).collect();
    claims.iter_mut().for_each(|claim| claim.ttl = Ttl::clamped(LONG / 2));
    for claim in &claims {
        acquire(&s.a, claim).await;
    }
    assert_eq!(release(&s.b, &claims[7]).await, Released::Freed);
    let answers = renew_all(&s.a, &claims, LONG).await;
    let later = renew_all(&s.b, &claims, SHORT).await;
    for (index, (first, second)) in answers.into_iter().zip(later).enumerate() {
        let expected = if index == 7 { Renewed::Lost } else { Renewed::Extended };
        assert_eq!((first, second), (expected, expected), "{index}");
    }
    let holders = holders(&s.b, "n").await;
    assert_eq!(holders.len(), 69, "a renewal does not re-create a share");
    // Where a lease ends with a session of the server, it may be shorter.
    let shortest = if s.a.describe().longest_lease.is_some() {
        SHORT
    } else {
        LONG / 2
    };
    for info in holders {
        assert!(info.remaining.unwrap() > shortest, "{:?}", info.remaining);
    }
}

async fn renew_all(engine: &SharedEngine, claims: &[Claim], ttl: Duration) -> Vec<Renewed> {
    let ttl = Ttl::clamped(ttl);
    let renewals: Vec<_> = claims
        .iter()
        .map(|claim| crate::engine::Renewal { claim, ttl })
        .collect();
    let mut answers = vec![None; claims.len()];
    let mut answer = |index: usize, renewed: crate::engine::Result<Renewed>| answers[index] = Some(renewed.unwrap());
    engine.renew_all(&renewals, &mut answer).await;
    answers.into_iter().map(Option::unwrap).collect()
}

pub(crate) async fn the_tokens_of_shares_grow(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    let mut last = Fence::NONE;
    for round in 0..6 {
        let claims = [share(1, 2), share(1, 2)];
        for claim in &claims {
            let fence = acquire(if round % 2 == 0 { &s.a } else { &s.b }, claim).await;
            assert!(fence > last, "{fence:?} after {last:?}");
            // The reply was lost: the attempt is repeated.
            assert_eq!(acquire(&s.a, claim).await, fence);
            last = fence;
        }
        assert_eq!(used(&s.b).await, 2);
        for claim in &claims {
            assert_eq!(release(&s.a, claim).await, Released::Freed);
        }
    }
}

pub(crate) async fn a_shared_name_is_not_a_lock_of_the_same_name(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    let (lock, shared_one) = (claim(&["n"], LONG), claim_of("n", LONG));
    let (longer, other) = (claim_of("nn", LONG), claim(&["nn"], LONG));
    for claim in [&lock, &shared_one, &longer, &other] {
        acquire(&s.a, claim).await;
    }
    for claim in [&lock, &shared_one, &longer, &other] {
        let mut again = claim.clone();
        again.replace_owner();
        busy(&s.b, &again).await;
    }
    let listed = s.b.list("", PAGE).await.unwrap();
    let names: Vec<&str> = listed.iter().map(|info| info.name.as_str()).collect();
    assert_eq!(names, ["n", "nn"], "shared names are not listed");
    assert!(s.b.force_release(&shared("n")).await.unwrap());
    assert!(!s.b.force_release(&shared("n")).await.unwrap());
    assert_eq!(s.a.renew(&shared_one, shared_one.ttl).await.unwrap(), Renewed::Lost);
    for claim in [&lock, &longer, &other] {
        assert_eq!(release(&s.a, claim).await, Released::Freed);
    }
}

pub(crate) async fn a_forced_release_ends_all_shares(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    let claims = [share(1, 3), share(2, 3)];
    acquire(&s.a, &claims[0]).await;
    acquire(&s.b, &claims[1]).await;
    let mut waiter = enter(&s.b, waiting_share(3, 3)).await;
    assert!(s.a.force_release(&shared("n")).await.unwrap());
    waiter.granted().await;
    for claim in &claims {
        assert_eq!(s.a.renew(claim, claim.ttl).await.unwrap(), Renewed::Lost);
    }
    assert_eq!(used(&s.a).await, 3);
}

pub(crate) async fn the_holders_of_shares_are_read(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    let (mut one, other) = (share(2, 4), share(1, 3));
    one.metadata = Some(r#"{"why":"test"}"#.into());
    let fences = [acquire(&s.a, &one).await, acquire(&s.b, &other).await];
    let waiter = enter(&s.a, waiting_share(3, 3)).await;
    let mut found = holders(&s.b, "n").await;
    found.sort_by_key(|info| info.fence);
    assert_eq!(found.iter().filter_map(|info| info.fence).collect::<Vec<_>>(), fences);
    let shares: Vec<_> = found.iter().filter_map(|info| info.share).collect();
    assert_eq!(shares, [one.share.unwrap(), other.share.unwrap()]);
    assert_eq!(found[0].metadata.as_deref(), one.metadata.as_deref());
    assert_eq!(found[1].metadata, None);
    for info in &found {
        assert_eq!((info.name.as_str(), info.waiting), ("n", Some(1)));
        assert_eq!(info.holder.as_ref().unwrap().process, Process::current());
        assert!(info.remaining.unwrap() <= LONG + CLOCK_ERROR, "{info:?}");
    }
    waiter.release().await;
}

/// A waiter with metadata makes an attempt after its notification, and no other claim takes the permits before.
pub(crate) async fn permits_are_kept_for_a_waiter_with_metadata(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    let holder = share(2, 2);
    acquire(&s.a, &holder).await;
    let mut claim = waiting_share(2, 2);
    claim.metadata = Some("1".into());
    let mut waiter = enter(&s.b, claim).await;
    release(&s.a, &holder).await;
    busy(&s.a, &share(1, 2)).await;
    waiter.granted().await;
    assert_eq!(holders(&s.a, "n").await[0].metadata.as_deref(), Some("1"));
    assert_eq!(waiter.release().await, Released::Freed);
    acquire(&s.a, &share(2, 2)).await;
}

pub(crate) async fn a_kept_share_stays_in_use(s: Stores) {
    if !s.a.describe().has_shares {
        return;
    }
    let holder = share(1, 1);
    acquire(&s.a, &holder).await;
    let mut waiter = enter(&s.b, waiting_share(1, 1)).await;
    let released = s.a.release(&holder, SHORT).await.unwrap();
    let began = Instant::now();
    assert_eq!(released, Released::Freed);
    assert_eq!(release(&s.a, &holder).await, Released::NotHeld);
    busy(&s.a, &share(1, 1)).await;
    assert_eq!(used(&s.a).await, 1);
    sleep(SHORT.saturating_sub(began.elapsed())).await;
    let grant = async {
        while !is_granted(waiter.engine, &waiter.claim).await {
            if let Ok(()) = tokio::time::timeout(Duration::from_millis(50), waiter.subscription.changed()).await
                && waiter.subscription.take_hand_off().is_some()
            {
                break;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(10), grant).await.unwrap();
}

/// Promise 1 under load: never more permits in use than the smallest limit, and no token twice.
pub(crate) async fn shares_racing_for_a_name_stay_within_the_limit(s: Stores) {
    const TASKS: usize = 8;
    const ROUNDS: usize = 6;
    if !s.a.describe().has_shares {
        return;
    }
    let (in_use, tokens) = (Arc::new(AtomicU32::new(0)), Arc::new(Mutex::new(BTreeSet::new())));
    let mut tasks = Vec::new();
    for task in 0..TASKS {
        let engine = if task % 2 == 0 { s.a.clone() } else { s.b.clone() };
        let (in_use, tokens) = (in_use.clone(), tokens.clone());
        tasks.push(tokio::spawn(async move {
            let permits = 1 + task as u32 % 3;
            for _ in 0..ROUNDS {
                let ours = waiting_share(permits, 4);
                let fence = loop {
                    match engine.try_acquire(&ours).await {
                        Ok(Acquired::Granted { fence }) => break fence,
                        Ok(Acquired::Held { .. }) => {}
                        Err(error) => assert!(error.is_locked, "{error:?}"),
                    }
                    sleep(Duration::from_millis(fastrand::u64(1..8))).await;
                };
                let used = in_use.fetch_add(permits, SeqCst) + permits;
                assert!(used <= 4, "{used} permits in use");
                assert!(tokens.lock().insert(fence), "{fence:?} twice");
                sleep(Duration::from_millis(1)).await;
                in_use.fetch_sub(permits, SeqCst);
                assert_eq!(release(&engine, &ours).await, Released::Freed);
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert!(holders(&s.a, "n").await.is_empty());
    let last = acquire(&s.a, &share(1, 1)).await;
    assert!(tokens.lock().iter().all(|token| *token < last));
}
