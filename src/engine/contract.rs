//! The contract of an engine as plain functions, stamped out once per engine by [`contract_tests`].
//!
//! Each case gets two connections to one store (`a` and `b`, two "processes") under names of its own.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Acquired, Released, Renewed, SharedEngine};
use crate::model::{Claim, Fence, Key, OwnerToken, Process, Ttl};

/// Stamps out every case for one engine. The argument is an async closure from a fresh prefix (to keep this test's names
/// apart in a shared store) to `Option<(SharedEngine, SharedEngine)>`: two connections to one store, or `None` when the
/// store cannot be had here (the closure says so, and fails where `CI` is set).
macro_rules! contract_tests {
    ($open:expr) => {
        $crate::engine::contract::contract_tests!(@each $open;
            one_holder, only_the_owner_releases, expiry_frees_at_once, acquire_is_idempotent_by_owner,
            renewal_extends_and_never_shortens, renewal_never_recreates, a_stale_holder_cannot_touch_its_successor,
            fences_grow_across_everything, fences_grow_in_rapid_succession, several_names_are_all_or_nothing,
            several_names_share_one_fence_and_one_fate, force_release_frees_anybody, inspect_tells_who_and_how_long,
            list_takes_the_prefix_literally, odd_names_are_kept_apart, a_ttl_of_one_millisecond, long_ttl,
            a_kept_name_stays_busy, a_change_after_subscribing_is_not_missed, a_kept_release_wakes_waiters,
            retry_after_is_bounded_by_the_lease, claims_racing_for_one_name_never_overlap,
            overlapping_sets_never_deadlock, renewal_racing_release_leaves_nothing, a_dropped_call_leaves_no_harm,
            waiters_are_served_in_order, a_try_never_passes_the_queue, a_dead_waiter_is_passed_over,
            giving_up_leaves_the_queue, a_set_does_not_block_names_it_does_not_wait_on,
        );
    };
    (@each $open:expr; $($case:ident),* $(,)?) => {
        $(
            #[tokio::test]
            async fn $case() {
                let prefix = format!("t{}:", $crate::model::OwnerToken::fresh().as_str());
                if let Some((a, b)) = ($open)(prefix).await {
                    $crate::engine::contract::$case($crate::engine::contract::Stores { a, b }).await;
                }
            }
        )*
    };
}
pub(crate) use contract_tests;

/// Two connections to one store.
pub(crate) struct Stores {
    pub a: SharedEngine,
    pub b: SharedEngine,
}

const LONG: Duration = Duration::from_secs(30);
/// A ttl that is short for a test, and long against the hiccups of a busy machine.
const SHORT: Duration = Duration::from_millis(400);

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn claim(names: &[&str], ttl: Duration) -> Claim {
    let keys: Vec<Key> = names.iter().map(|name| key(name)).collect();
    Claim::new(
        &keys,
        OwnerToken::fresh(),
        Ttl::new(ttl).unwrap(),
        Arc::new(Process::current()),
    )
}

fn waiting(names: &[&str], ttl: Duration) -> Claim {
    let mut claim = claim(names, ttl);
    claim.waiting = true;
    claim
}

async fn take(engine: &SharedEngine, claim: &Claim) -> Fence {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Granted { fence } => fence,
        held => panic!("expected a grant of {:?}, got {held:?}", claim.keys()),
    }
}

/// The busy answer: which name, and when to try again.
async fn busy(engine: &SharedEngine, claim: &Claim) -> (Key, Option<Duration>) {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Held { key, retry_after } => (key, retry_after),
        granted => panic!("expected busy for {:?}, got {granted:?}", claim.keys()),
    }
}

async fn free(engine: &SharedEngine, claim: &Claim) -> Released {
    engine.release(claim, Duration::ZERO).await.unwrap()
}

async fn sleep(duration: Duration) {
    tokio::time::sleep(duration).await;
}

/// Promise 1: while one holds, nobody else is granted; once it is free, the next is.
pub(crate) async fn one_holder(s: Stores) {
    let (first, second) = (claim(&["n"], LONG), claim(&["n"], LONG));
    take(&s.a, &first).await;
    assert_eq!(busy(&s.b, &second).await.0, key("n"));
    assert_eq!(
        busy(&s.a, &second).await.0,
        key("n"),
        "the same process is no exception"
    );
    assert_eq!(free(&s.a, &first).await, Released::Freed);
    take(&s.b, &second).await;
    assert_eq!(busy(&s.a, &first).await.0, key("n"));
    assert_eq!(free(&s.b, &second).await, Released::Freed);
}

/// Promise 3.
pub(crate) async fn only_the_owner_releases(s: Stores) {
    let (holder, stranger) = (claim(&["n"], LONG), claim(&["n"], LONG));
    take(&s.a, &holder).await;
    assert_eq!(free(&s.b, &stranger).await, Released::NotHeld);
    assert_eq!(s.b.renew(&stranger, stranger.ttl).await.unwrap(), Renewed::Lost);
    busy(&s.b, &stranger).await;
    assert_eq!(
        free(&s.b, &holder).await,
        Released::Freed,
        "the owner is known by its token, not by its connection"
    );
    assert_eq!(
        free(&s.a, &holder).await,
        Released::NotHeld,
        "a second release frees nothing"
    );
    let never = claim(&["never-taken"], LONG);
    assert_eq!(free(&s.a, &never).await, Released::NotHeld);
}

/// Promise 1: a lease past its end is free at once, not when some clean-up comes round.
pub(crate) async fn expiry_frees_at_once(s: Stores) {
    let (first, second) = (claim(&["n"], SHORT), claim(&["n"], LONG));
    take(&s.a, &first).await;
    let granted = Instant::now();
    busy(&s.b, &second).await;
    sleep(SHORT + Duration::from_millis(30)).await;
    take(&s.b, &second).await;
    assert!(
        granted.elapsed() < SHORT + Duration::from_secs(20),
        "this machine is too slow for the test to mean anything"
    );
    assert_eq!(free(&s.a, &first).await, Released::NotHeld);
    busy(&s.a, &claim(&["n"], LONG)).await;
    free(&s.b, &second).await;
}

/// Promise 3: a retry after a lost reply does not block itself, keeps its fence, and gets a full ttl.
pub(crate) async fn acquire_is_idempotent_by_owner(s: Stores) {
    let ours = claim(&["n", "m"], Duration::from_secs(2));
    let fence = take(&s.a, &ours).await;
    sleep(Duration::from_millis(1200)).await;
    assert_eq!(take(&s.b, &ours).await, fence);
    sleep(Duration::from_millis(1200)).await;
    busy(&s.b, &claim(&["n"], LONG)).await;
    busy(&s.b, &claim(&["m"], LONG)).await;
    assert_eq!(free(&s.a, &ours).await, Released::Freed);
}

/// A renewal adds time; one that is carried out late must not take time away.
pub(crate) async fn renewal_extends_and_never_shortens(s: Stores) {
    let ours = claim(&["n"], SHORT);
    take(&s.a, &ours).await;
    assert_eq!(s.a.renew(&ours, Ttl::clamped(LONG)).await.unwrap(), Renewed::Extended);
    assert_eq!(s.a.renew(&ours, Ttl::clamped(SHORT)).await.unwrap(), Renewed::Extended);
    sleep(SHORT + Duration::from_millis(30)).await;
    busy(&s.b, &claim(&["n"], LONG)).await;
    let info = s.b.inspect(&key("n")).await.unwrap().unwrap();
    assert!(info.remaining.unwrap() > Duration::from_secs(20), "{info:?}");
    free(&s.a, &ours).await;
}

/// Promise 7: what vanished stays away.
pub(crate) async fn renewal_never_recreates(s: Stores) {
    let expired = claim(&["n"], Duration::from_millis(60));
    take(&s.a, &expired).await;
    sleep(Duration::from_millis(90)).await;
    assert_eq!(s.a.renew(&expired, Ttl::clamped(LONG)).await.unwrap(), Renewed::Lost);
    assert_eq!(s.b.inspect(&key("n")).await.unwrap(), None);

    let forced = claim(&["m", "o"], LONG);
    take(&s.a, &forced).await;
    assert!(s.b.force_release(&key("m")).await.unwrap());
    assert_eq!(s.a.renew(&forced, Ttl::clamped(LONG)).await.unwrap(), Renewed::Lost);
    assert_eq!(s.b.inspect(&key("m")).await.unwrap(), None);
    assert_eq!(free(&s.a, &forced).await, Released::NotHeld, "not all of it was held");
    take(&s.b, &claim(&["m", "o"], SHORT)).await;
}

/// The gist's worst fault: a holder that outlived its lease frees whoever came after it.
pub(crate) async fn a_stale_holder_cannot_touch_its_successor(s: Stores) {
    let (stale, successor) = (claim(&["n"], Duration::from_millis(60)), claim(&["n"], LONG));
    take(&s.a, &stale).await;
    sleep(Duration::from_millis(90)).await;
    let fence = take(&s.b, &successor).await;
    assert_eq!(free(&s.a, &stale).await, Released::NotHeld);
    assert_eq!(s.a.renew(&stale, stale.ttl).await.unwrap(), Renewed::Lost);
    assert_eq!(s.a.release(&stale, LONG).await.unwrap(), Released::NotHeld);
    let info = s.a.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!(info.fence, Some(fence));
    assert_eq!(free(&s.b, &successor).await, Released::Freed);
}

/// Promise 4.
pub(crate) async fn fences_grow_across_everything(s: Stores) {
    let mut last = Fence(0);
    let mut grows = |fence: Fence, how: &str| {
        assert!(fence > last, "{how}: {fence:?} after {last:?}");
        assert!(fence.0 < 1 << 53, "{how}: {fence:?} does not fit a double");
        last = fence;
    };
    let released = claim(&["n"], LONG);
    grows(take(&s.a, &released).await, "first");
    free(&s.a, &released).await;
    let expiring = claim(&["n"], Duration::from_millis(40));
    grows(take(&s.b, &expiring).await, "after a release");
    sleep(Duration::from_millis(70)).await;
    grows(take(&s.a, &claim(&["n"], LONG)).await, "after an expiry");
    s.b.force_release(&key("n")).await.unwrap();
    let set = claim(&["m", "n"], LONG);
    grows(take(&s.b, &set).await, "after a forced release, within a set");
    free(&s.b, &set).await;
    let kept = claim(&["n"], LONG);
    grows(take(&s.a, &kept).await, "after a set");
    s.a.release(&kept, Duration::from_millis(40)).await.unwrap();
    sleep(Duration::from_millis(70)).await;
    grows(take(&s.b, &claim(&["n"], SHORT)).await, "after a kept release");
}

/// Promise 4, where clocks are coarse: many holders within one tick.
pub(crate) async fn fences_grow_in_rapid_succession(s: Stores) {
    let mut last = Fence(0);
    for round in 0..200 {
        let engine = if round % 2 == 0 { &s.a } else { &s.b };
        let ours = claim(&["n"], LONG);
        let fence = take(engine, &ours).await;
        assert!(fence > last, "round {round}: {fence:?} after {last:?}");
        last = fence;
        assert_eq!(free(engine, &ours).await, Released::Freed);
    }
}

pub(crate) async fn several_names_are_all_or_nothing(s: Stores) {
    let middle = claim(&["b"], LONG);
    take(&s.a, &middle).await;
    let set = claim(&["c", "a", "b"], LONG);
    assert_eq!(busy(&s.b, &set).await.0, key("b"));
    for name in ["a", "c"] {
        assert_eq!(
            s.a.inspect(&key(name)).await.unwrap(),
            None,
            "{name} was left behind by a busy try"
        );
    }
    free(&s.a, &middle).await;
    take(&s.b, &set).await;
    for name in ["a", "b", "c"] {
        busy(&s.a, &claim(&[name], LONG)).await;
    }
    assert_eq!(free(&s.b, &set).await, Released::Freed);
    take(&s.a, &claim(&["a", "b", "c"], SHORT)).await;
}

pub(crate) async fn several_names_share_one_fence_and_one_fate(s: Stores) {
    // Take `b` a few times, so that its last fence is ahead of that of `a`.
    for _ in 0..3 {
        let ours = claim(&["b"], LONG);
        take(&s.a, &ours).await;
        free(&s.a, &ours).await;
    }
    let set = claim(&["a", "b"], SHORT);
    let fence = take(&s.a, &set).await;
    for name in ["a", "b"] {
        assert_eq!(
            s.b.inspect(&key(name)).await.unwrap().unwrap().fence,
            Some(fence),
            "{name}"
        );
    }
    assert_eq!(s.a.renew(&set, Ttl::clamped(LONG)).await.unwrap(), Renewed::Extended);
    sleep(SHORT).await;
    for name in ["a", "b"] {
        busy(&s.b, &claim(&[name], LONG)).await;
    }
    assert_eq!(free(&s.a, &set).await, Released::Freed);
    for name in ["a", "b"] {
        assert!(take(&s.b, &claim(&[name], SHORT)).await > fence, "{name}");
    }
}

pub(crate) async fn force_release_frees_anybody(s: Stores) {
    let holder = claim(&["n"], LONG);
    assert!(!s.b.force_release(&key("n")).await.unwrap());
    take(&s.a, &holder).await;
    assert!(s.b.force_release(&key("n")).await.unwrap());
    assert_eq!(s.a.inspect(&key("n")).await.unwrap(), None);
    take(&s.b, &claim(&["n"], Duration::from_millis(30))).await;
    sleep(Duration::from_millis(50)).await;
    assert!(
        !s.a.force_release(&key("n")).await.unwrap(),
        "an expired lock is nobody's"
    );
}

pub(crate) async fn inspect_tells_who_and_how_long(s: Stores) {
    assert_eq!(s.a.inspect(&key("n")).await.unwrap(), None);
    let metadata = r#"{"job":"18:00 «report»","n":[1,2]}"#;
    let mut ours = claim(&["n"], LONG);
    ours.metadata = Some(metadata.into());
    let fence = take(&s.a, &ours).await;
    let info = s.b.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!(info.name, "n");
    assert_eq!(info.fence, Some(fence));
    let remaining = info.remaining.unwrap();
    assert!(
        remaining <= LONG && remaining > LONG - Duration::from_secs(10),
        "{remaining:?}"
    );
    let holder = info.holder.unwrap();
    assert_eq!(holder.process, Process::current());
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_millis() as u64;
    assert!(
        holder.since_ms.abs_diff(now) < 60_000,
        "{} is not about {now}",
        holder.since_ms
    );
    assert_eq!(info.metadata.as_deref(), Some(metadata));
    s.a.renew(&ours, Ttl::clamped(LONG * 2)).await.unwrap();
    let renewed = s.b.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!(
        renewed.metadata.as_deref(),
        Some(metadata),
        "a renewal keeps the metadata"
    );
    assert_eq!(
        renewed.holder.unwrap().since_ms,
        holder.since_ms,
        "a renewal keeps the time of the grant"
    );
    free(&s.a, &ours).await;
    let without = claim(&["n"], SHORT);
    take(&s.b, &without).await;
    assert_eq!(
        s.a.inspect(&key("n")).await.unwrap().unwrap().metadata,
        None,
        "the next holder's metadata is its own"
    );
}

pub(crate) async fn list_takes_the_prefix_literally(s: Stores) {
    let names = [
        "a*b", "a*c", "axb", "a%b", "a_b", "a[x]b", "a?b", "a.b", "a\\b", "b", "é1", "é2",
    ];
    for name in names {
        take(&s.a, &claim(&[name], LONG)).await;
    }
    let short = claim(&["a*gone"], Duration::from_millis(30));
    take(&s.a, &short).await;
    sleep(Duration::from_millis(60)).await;
    let listed = |prefix: &'static str| {
        let b = s.b.clone();
        async move {
            b.list(prefix)
                .await
                .unwrap()
                .into_iter()
                .map(|info| info.name)
                .collect::<Vec<_>>()
        }
    };
    assert_eq!(listed("a*").await, ["a*b", "a*c"]);
    assert_eq!(listed("a%").await, ["a%b"]);
    assert_eq!(listed("a_").await, ["a_b"]);
    assert_eq!(listed("a[").await, ["a[x]b"]);
    assert_eq!(listed("a?").await, ["a?b"]);
    assert_eq!(listed("a.").await, ["a.b"]);
    assert_eq!(listed("a\\").await, ["a\\b"]);
    assert_eq!(listed("é").await, ["é1", "é2"]);
    assert_eq!(listed("nothing").await, Vec::<String>::new());
    let mut all: Vec<&str> = names.to_vec();
    all.sort_unstable();
    assert_eq!(listed("").await, all);
}

/// Names are compared byte by byte.
pub(crate) async fn odd_names_are_kept_apart(s: Stores) {
    let long_one = "x".repeat(512);
    let long_two = format!("{}y", "x".repeat(511));
    let names: Vec<&str> = vec![
        "a", "A", "á", "a\u{301}", " a", "a ", "a\n", "a\r\n", "a\0", "a\0b", "{a}", "{}", "{}a", "a{", "a}", "}a{",
        "{a}b", "*", "**", "$a", ".a", "a.b", "日本", "💥", "ß", "SS", "ſ", "'", "\"", "\\", "%", "_", "1", "01",
        &long_one, &long_two,
    ];
    let mut fences = BTreeSet::new();
    let claims: Vec<Claim> = names.iter().map(|name| claim(&[name], LONG)).collect();
    for ours in &claims {
        fences.insert(take(&s.a, ours).await.0);
    }
    let listed: BTreeSet<String> = s.b.list("").await.unwrap().into_iter().map(|info| info.name).collect();
    assert_eq!(
        listed,
        names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>()
    );
    for (name, ours) in names.iter().zip(&claims) {
        busy(&s.b, &claim(&[name], LONG)).await;
        assert_eq!(s.b.renew(ours, ours.ttl).await.unwrap(), Renewed::Extended, "{name:?}");
    }
    let all = claim(&names, LONG);
    busy(&s.b, &all).await;
    for (name, ours) in names.iter().zip(&claims) {
        assert_eq!(free(&s.b, ours).await, Released::Freed, "{name:?}");
        assert_eq!(s.a.inspect(&key(name)).await.unwrap(), None, "{name:?}");
    }
    take(&s.a, &all).await;
    assert_eq!(free(&s.a, &all).await, Released::Freed);
}

pub(crate) async fn a_ttl_of_one_millisecond(s: Stores) {
    let mut last = Fence(0);
    for _ in 0..20 {
        let fence = take(&s.a, &claim(&["n"], Duration::from_millis(1))).await;
        assert!(fence > last);
        last = fence;
        sleep(Duration::from_millis(5)).await;
    }
    take(&s.b, &claim(&["n"], SHORT)).await;
}

/// The longest ttl there is: no store may overflow, or forget its fence before the lease ends.
pub(crate) async fn long_ttl(s: Stores) {
    let ours = claim(&["n"], crate::model::MAX_TTL);
    take(&s.a, &ours).await;
    let (_, retry_after) = busy(&s.b, &claim(&["n"], LONG)).await;
    assert!(retry_after.is_none_or(|after| after <= crate::model::MAX_TTL));
    let info = s.b.inspect(&key("n")).await.unwrap().unwrap();
    assert!(
        info.remaining.unwrap() > crate::model::MAX_TTL - Duration::from_secs(60),
        "{info:?}"
    );
    assert_eq!(s.a.renew(&ours, ours.ttl).await.unwrap(), Renewed::Extended);
    assert_eq!(free(&s.a, &ours).await, Released::Freed);
}

/// `minHoldMs`: a release that keeps the name busy, after which the owner owns nothing.
pub(crate) async fn a_kept_name_stays_busy(s: Stores) {
    let ours = claim(&["n", "m"], LONG);
    take(&s.a, &ours).await;
    let released = Instant::now();
    assert_eq!(s.a.release(&ours, SHORT).await.unwrap(), Released::Freed);
    let (_, retry_after) = busy(&s.b, &claim(&["n"], LONG)).await;
    assert!(retry_after.unwrap() <= SHORT, "{retry_after:?}");
    busy(&s.b, &claim(&["m"], LONG)).await;
    assert_eq!(
        s.a.renew(&ours, ours.ttl).await.unwrap(),
        Renewed::Lost,
        "the owner has let go"
    );
    assert_eq!(free(&s.a, &ours).await, Released::NotHeld, "the owner has let go");
    if released.elapsed() < SHORT {
        busy(&s.b, &claim(&["n"], LONG)).await;
    }
    sleep(SHORT.saturating_sub(released.elapsed()) + Duration::from_millis(30)).await;
    take(&s.b, &claim(&["n", "m"], SHORT)).await;
}

/// What wakes a waiter is not missed between the subscription and the wait. The safety net of a test: 5 s.
async fn woken(subscription: &mut Box<dyn super::Subscription>) {
    tokio::time::timeout(Duration::from_secs(5), subscription.changed())
        .await
        .expect("no wake-up within 5 s");
}

/// The trap: a wake-up between the failed try and the subscription.
pub(crate) async fn a_change_after_subscribing_is_not_missed(s: Stores) {
    let (holder, waiter) = (claim(&["n"], LONG), waiting(&["n"], LONG));
    take(&s.a, &holder).await;
    let mut subscription = s.b.subscribe(&waiter, &key("n")).await.unwrap();
    busy(&s.b, &waiter).await;
    free(&s.a, &holder).await;
    sleep(Duration::from_millis(50)).await;
    woken(&mut subscription).await;
    take(&s.b, &waiter).await;
    let next = waiting(&["n"], LONG);
    let mut subscription = s.a.subscribe(&next, &key("n")).await.unwrap();
    busy(&s.a, &next).await;
    assert!(s.b.force_release(&key("n")).await.unwrap());
    woken(&mut subscription).await;
    take(&s.a, &next).await;
    free(&s.a, &next).await;
}

pub(crate) async fn a_kept_release_wakes_waiters(s: Stores) {
    let (holder, waiter) = (claim(&["n"], LONG), waiting(&["n"], LONG));
    take(&s.a, &holder).await;
    let mut subscription = s.b.subscribe(&waiter, &key("n")).await.unwrap();
    busy(&s.b, &waiter).await;
    s.a.release(&holder, SHORT).await.unwrap();
    woken(&mut subscription).await;
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match s.b.try_acquire(&waiter).await.unwrap() {
            Acquired::Granted { .. } => break,
            Acquired::Held { retry_after, .. } => {
                assert!(
                    retry_after.unwrap() <= SHORT,
                    "the shorter lease is not seen: {retry_after:?}"
                );
                assert!(Instant::now() < deadline, "still busy");
                sleep(retry_after.unwrap().min(Duration::from_millis(50))).await;
            }
        }
    }
    free(&s.b, &waiter).await;
}

/// Nobody needs to be told of an expiry: the busy answer says when it will be.
pub(crate) async fn retry_after_is_bounded_by_the_lease(s: Stores) {
    take(&s.a, &claim(&["n"], SHORT)).await;
    for ours in [claim(&["n"], LONG), waiting(&["n"], LONG)] {
        let (_, retry_after) = busy(&s.b, &ours).await;
        assert!(retry_after.unwrap() <= SHORT, "{retry_after:?}");
        free(&s.b, &ours).await;
    }
}

/// Promise 1 under load: an unprotected counter.
pub(crate) async fn claims_racing_for_one_name_never_overlap(s: Stores) {
    const TASKS: usize = 8;
    const ROUNDS: usize = 10;
    let counter = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for task in 0..TASKS {
        let engine = if task % 2 == 0 { s.a.clone() } else { s.b.clone() };
        let counter = counter.clone();
        tasks.push(tokio::spawn(async move {
            for _ in 0..ROUNDS {
                let ours = claim(&["n"], LONG);
                while !matches!(engine.try_acquire(&ours).await.unwrap(), Acquired::Granted { .. }) {
                    sleep(Duration::from_millis(fastrand::u64(1..8))).await;
                }
                let seen = counter.load(std::sync::atomic::Ordering::SeqCst);
                sleep(Duration::from_millis(1)).await;
                counter.store(seen + 1, std::sync::atomic::Ordering::SeqCst);
                assert_eq!(free(&engine, &ours).await, Released::Freed);
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(counter.load(std::sync::atomic::Ordering::SeqCst), TASKS * ROUNDS);
}

pub(crate) async fn overlapping_sets_never_deadlock(s: Stores) {
    let sets: [&[&str]; 4] = [&["a", "b"], &["b", "c"], &["c", "a"], &["c", "b", "a"]];
    let mut tasks = Vec::new();
    for (task, set) in sets.into_iter().enumerate() {
        let engine = if task % 2 == 0 { s.a.clone() } else { s.b.clone() };
        tasks.push(tokio::spawn(async move {
            for _ in 0..5 {
                let ours = waiting(set, LONG);
                while !matches!(engine.try_acquire(&ours).await.unwrap(), Acquired::Granted { .. }) {
                    sleep(Duration::from_millis(fastrand::u64(1..8))).await;
                }
                sleep(Duration::from_millis(1)).await;
                assert_eq!(free(&engine, &ours).await, Released::Freed);
            }
        }));
    }
    let all = async {
        for task in tasks {
            task.await.unwrap();
        }
    };
    tokio::time::timeout(Duration::from_secs(30), all)
        .await
        .expect("a deadlock");
}

pub(crate) async fn renewal_racing_release_leaves_nothing(s: Stores) {
    for _ in 0..20 {
        let ours = claim(&["n"], LONG);
        take(&s.a, &ours).await;
        let (renewed, released) = tokio::join!(s.b.renew(&ours, ours.ttl), s.a.release(&ours, Duration::ZERO));
        renewed.unwrap();
        assert_eq!(released.unwrap(), Released::Freed);
        assert_eq!(
            s.a.inspect(&key("n")).await.unwrap(),
            None,
            "a renewal re-created the lock"
        );
    }
}

/// A caller that goes away in the middle of a call leaves at most what it asked for, which its owner token can release.
pub(crate) async fn a_dropped_call_leaves_no_harm(s: Stores) {
    for round in 0..20u64 {
        let ours = claim(&["n"], LONG);
        let _ = tokio::time::timeout(Duration::from_micros(round * 40), s.a.try_acquire(&ours)).await;
        // Whatever is still on its way has arrived after this.
        sleep(Duration::from_millis(10)).await;
        free(&s.a, &ours).await;
        assert_eq!(s.b.inspect(&key("n")).await.unwrap(), None, "round {round}");
    }
    let last = claim(&["n"], LONG);
    take(&s.a, &last).await;
    free(&s.a, &last).await;
}

/// Promise 5, for stores that keep a queue.
pub(crate) async fn waiters_are_served_in_order(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let holder = claim(&["n"], LONG);
    take(&s.a, &holder).await;
    let waiters: Vec<Claim> = (0..6).map(|_| waiting(&["n"], LONG)).collect();
    for (i, waiter) in waiters.iter().enumerate() {
        busy(if i % 2 == 0 { &s.a } else { &s.b }, waiter).await;
    }
    free(&s.a, &holder).await;
    for (i, waiter) in waiters.iter().enumerate() {
        for late in waiters[i + 1..].iter().rev() {
            busy(&s.b, late).await;
        }
        take(if i % 2 == 0 { &s.a } else { &s.b }, waiter).await;
        assert_eq!(free(&s.b, waiter).await, Released::Freed);
    }
    take(&s.a, &claim(&["n"], SHORT)).await;
}

pub(crate) async fn a_try_never_passes_the_queue(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let (holder, waiter) = (claim(&["n"], LONG), waiting(&["n"], LONG));
    take(&s.a, &holder).await;
    busy(&s.b, &waiter).await;
    free(&s.a, &holder).await;
    busy(&s.a, &claim(&["n"], LONG)).await;
    busy(&s.a, &claim(&["m", "n"], LONG)).await;
    take(&s.b, &waiter).await;
    free(&s.b, &waiter).await;
    take(&s.a, &claim(&["n"], SHORT)).await;
}

/// The first in the queue dies: the next is served when its place lapses, and it was told when that is.
pub(crate) async fn a_dead_waiter_is_passed_over(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let (holder, dead, next) = (claim(&["n"], LONG), waiting(&["n"], SHORT), waiting(&["n"], LONG));
    take(&s.a, &holder).await;
    busy(&s.b, &dead).await;
    busy(&s.a, &next).await;
    free(&s.a, &holder).await;
    let started = Instant::now();
    let (_, retry_after) = busy(&s.a, &next).await;
    assert!(retry_after.unwrap() <= SHORT, "{retry_after:?}");
    sleep(SHORT + Duration::from_millis(50)).await;
    take(&s.a, &next).await;
    assert!(started.elapsed() < Duration::from_secs(20));
    // The one that was only slow comes back to its place, in front of whoever came after it.
    let late = waiting(&["n"], LONG);
    busy(&s.a, &late).await;
    busy(&s.b, &dead).await;
    free(&s.a, &next).await;
    busy(&s.a, &late).await;
    take(&s.b, &dead).await;
    free(&s.b, &dead).await;
    take(&s.a, &late).await;
}

pub(crate) async fn giving_up_leaves_the_queue(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let (holder, quitter, next) = (claim(&["n"], LONG), waiting(&["n"], LONG), waiting(&["n"], LONG));
    take(&s.a, &holder).await;
    busy(&s.b, &quitter).await;
    let mut subscription = s.b.subscribe(&next, &key("n")).await.unwrap();
    busy(&s.b, &next).await;
    free(&s.a, &holder).await;
    assert_eq!(free(&s.b, &quitter).await, Released::NotHeld);
    woken(&mut subscription).await;
    take(&s.b, &next).await;
}

/// A set waits on one name at a time, and keeps its place in the order of arrival when it moves.
pub(crate) async fn a_set_does_not_block_names_it_does_not_wait_on(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let (on_a, on_b) = (claim(&["a"], LONG), claim(&["b"], LONG));
    take(&s.a, &on_a).await;
    take(&s.a, &on_b).await;
    let set = waiting(&["a", "b"], LONG);
    let mut told = s.b.subscribe(&set, &key("a")).await.unwrap();
    assert_eq!(busy(&s.b, &set).await.0, key("a"));
    let late_on_b = waiting(&["b"], LONG);
    busy(&s.a, &late_on_b).await;
    free(&s.a, &on_a).await;
    woken(&mut told).await;
    assert_eq!(
        busy(&s.b, &set).await.0,
        key("b"),
        "the set moves on to the next busy name"
    );
    let passing = claim(&["a"], LONG);
    take(&s.a, &passing).await;
    free(&s.a, &passing).await;
    free(&s.a, &on_b).await;
    busy(&s.a, &late_on_b).await;
    take(&s.b, &set).await;
    free(&s.b, &set).await;
    take(&s.a, &late_on_b).await;
}
