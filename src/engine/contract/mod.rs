//! The contract of an engine, as test cases that [`contract_tests`] instantiates for each engine.
//!
//! Each case gets two connections to one store (`a` and `b`, two "processes") and a prefix of its own.

mod fences;
mod kept;
mod leases;
mod names;
mod queue;
mod races;
mod renewals;
mod shares;
mod transfer;
mod waking;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Acquired, Released, Renewed, SharedEngine};
use crate::engine::EngineExt;
use crate::model::{Claim, Fence, Key, OwnerToken, Process, Ttl};

/// Borrows claims for a call of an engine.
pub(crate) fn refs<C: std::borrow::Borrow<Claim>>(claims: &[C]) -> Vec<&Claim> {
    claims.iter().map(|claim| claim.borrow()).collect()
}

/// The timeout of a page of `list` in tests.
pub(crate) const PAGE: Duration = Duration::from_secs(5);

pub(crate) use fences::*;
pub(crate) use kept::*;
pub(crate) use leases::*;
pub(crate) use names::*;
pub(crate) use queue::*;
pub(crate) use races::*;
pub(crate) use renewals::*;
pub(crate) use shares::*;
pub(crate) use transfer::*;
pub(crate) use waking::*;

/// Creates the tests of all cases for one engine. The argument is an async closure. It gets a new prefix, which separates the
/// test's names in a shared store, and returns `Option<(SharedEngine, SharedEngine)>`: two connections to one store. `None`: the
/// store is not available on this machine. (The closure prints that, and fails if `CI` is set.)
///
/// `except …` is for stores where the order of entries is the lock: a process whose entry was removed enters at the end of the queue,
/// and so does a set that moves on to another name.
macro_rules! contract_tests {
    ($open:expr) => {
        $crate::engine::contract::contract_tests!(@each $open; a_slow_waiter_keeps_its_position, a_set_keeps_its_number);
        $crate::engine::contract::contract_tests!($open; except a_slow_waiter_keeps_its_position, a_set_keeps_its_number);
    };
    ($open:expr; except a_slow_waiter_keeps_its_position, a_set_keeps_its_number) => {
        $crate::engine::contract::contract_tests!(@each $open;
            one_holder, only_the_owner_releases, an_expired_name_is_free_at_once, acquire_is_idempotent_by_owner,
            a_late_retry_does_not_shorten_the_lease,
            renewal_extends_and_never_shortens, renewal_never_recreates_a_lock, a_former_holder_cannot_change_its_successors_lease,
            fencing_tokens_grow_with_each_grant, fencing_tokens_grow_within_one_clock_tick, several_names_are_all_or_nothing,
            several_names_share_one_fencing_token_and_one_lease, force_release_releases_any_owner, inspect_returns_holder_and_remaining_time,
            waiting_calls_are_counted, list_takes_the_prefix_literally, unusual_names_are_distinct, a_ttl_of_one_millisecond, the_maximum_ttl,
            a_kept_name_stays_busy, a_name_stays_busy_from_its_own_release, a_kept_name_outlasts_its_process, a_change_after_subscribing_is_not_missed, a_kept_release_wakes_waiters,
            retry_after_is_bounded_by_the_lease, claims_racing_for_one_name_never_overlap,
            overlapping_sets_never_deadlock, renewal_racing_release_leaves_nothing, a_dropped_call_has_no_side_effect,
            waiters_are_served_in_order, an_attempt_never_passes_the_queue, a_dead_waiter_is_skipped,
            a_release_by_a_waiter_removes_its_position, a_set_does_not_block_names_after_the_one_it_waits_on,
            a_set_is_served_while_other_callers_keep_its_names_busy, a_set_does_not_overtake_the_waiters_of_its_names, names_that_a_set_keeps_are_free_after_it,
            waiters_for_the_same_names_do_not_block_each_other,
            a_transfer_changes_the_owner_and_nothing_else, a_transfer_is_idempotent,
            a_transfer_of_a_lost_lease_changes_nothing, a_transfer_of_several_names_is_all_or_nothing,
            a_transfer_extends_and_never_shortens, transfers_racing_for_one_lease_have_one_winner,
            a_transfer_racing_a_forced_release_leaves_one_owner, a_transferred_lock_wakes_its_waiters,
            each_of_many_renewals_has_one_answer, renewals_of_several_names_are_all_or_nothing,
            renewals_of_one_call_have_different_ttls, renewals_of_one_lease_are_all_applied, an_empty_list_of_renewals,
            shares_are_granted_up_to_the_limit, the_smallest_limit_of_the_holders_counts, a_heavy_waiter_is_not_overtaken,
            a_release_grants_all_first_waiters_that_fit, readers_share_a_name_and_a_writer_does_not, a_waiter_that_leaves_grants_those_behind_it,
            the_permits_of_a_dead_holder_return, shares_are_renewed_and_never_shortened, the_tokens_of_shares_grow,
            a_shared_name_is_not_a_lock_of_the_same_name, a_forced_release_ends_all_shares, the_holders_of_shares_are_read,
            permits_are_kept_for_a_waiter_with_metadata, a_kept_share_stays_in_use, shares_racing_for_a_name_stay_within_the_limit,
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
/// How much longer than its ttl a lease may last, where its end is computed from an estimate of the server's clock.
const CLOCK_ERROR: Duration = Duration::from_millis(100);
/// A ttl that is short for a test, but longer than a machine stands still.
const SHORT: Duration = Duration::from_secs(2);

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

async fn acquire(engine: &SharedEngine, claim: &Claim) -> Fence {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Granted { fence } => fence,
        held => panic!("expected a grant of {:?}, got {held:?}", claim.keys()),
    }
}

/// Makes an attempt that must find a name busy. Returns the name and the time of the next attempt.
async fn busy(engine: &SharedEngine, claim: &Claim) -> (Key, Option<Duration>) {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Held { key, retry_after } => (key, retry_after),
        granted => panic!("expected busy for {:?}, got {granted:?}", claim.keys()),
    }
}

/// Repeats a call that found a locked row, as the service does: the process that has locked it may stand still.
async fn unlocked<T>(mut call: impl AsyncFnMut() -> super::Result<T>) -> T {
    loop {
        match call().await {
            Err(error) if error.is_locked => sleep(Duration::from_millis(10)).await,
            outcome => return outcome.unwrap(),
        }
    }
}

/// Releases a claim. Repeats a call that found a locked row.
async fn release(engine: &SharedEngine, claim: &Claim) -> Released {
    loop {
        match engine.release(claim, Duration::ZERO).await {
            Err(error) if error.is_locked => sleep(Duration::from_millis(10)).await,
            outcome => return outcome.unwrap(),
        }
    }
}

/// Makes an attempt. An attempt that found a locked row counts as one that found a busy name.
async fn is_granted(engine: &SharedEngine, claim: &Claim) -> bool {
    match engine.try_acquire(claim).await {
        Err(error) if error.is_locked => false,
        outcome => matches!(outcome.unwrap(), Acquired::Granted { .. }),
    }
}

/// Waits until a lease has expired. On etcd and ZooKeeper a live process ends its leases by requests, which a busy machine delays.
async fn expiry(s: &Stores, duration: Duration) {
    let is_requested = matches!(s.a.describe().name, "etcd" | "zookeeper");
    sleep(duration + Duration::from_millis(if is_requested { 1900 } else { 0 })).await;
}

/// Measures up to five rounds, until one is faster than `limit`. A machine that stands still makes a round slow, and a fault all of them.
#[allow(dead_code, reason = "not all stores have such tests")]
pub(crate) async fn one_is_faster(limit: Duration, mut round: impl AsyncFnMut() -> Duration) {
    let mut took = Vec::new();
    while took.len() < 5 {
        took.push(round().await);
        if took.last().is_some_and(|last| *last < limit) {
            return;
        }
    }
    panic!("none of {took:?} is below {limit:?}");
}

/// Repeats a round up to five times, until it succeeds. A machine that stands still fails a round, and a fault all of them. The round
/// gets its number, and returns what was wrong.
#[allow(dead_code, reason = "not all stores have such tests")]
pub(crate) async fn one_succeeds<E: std::fmt::Debug>(mut round: impl AsyncFnMut(usize) -> Result<(), E>) {
    let mut failures = Vec::new();
    while failures.len() < 5 {
        match round(failures.len()).await {
            Ok(()) => return,
            Err(failure) => failures.push(failure),
        }
    }
    panic!("all rounds failed: {failures:?}");
}

async fn sleep(duration: Duration) {
    tokio::time::sleep(duration).await;
}

/// Waits for a notification. It may have arrived before this call. The timeout is 5 s.
async fn woken(subscription: &mut Box<dyn super::Subscription>) {
    tokio::time::timeout(Duration::from_secs(5), subscription.changed())
        .await
        .expect("no wake-up within 5 s");
}
