//! The contract of an engine as plain functions, stamped out once per engine by [`contract_tests`].
//!
//! Each case gets two connections to one store (`a` and `b`, two "processes") under names of its own.

mod fences;
mod leases;
mod names;
mod queue;
mod races;
mod renewals;
mod transfer;
mod waking;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Acquired, Released, Renewed, SharedEngine};
use crate::model::{Claim, Fence, Key, OwnerToken, Process, Ttl};

/// The time limit of a page of `list` in tests.
pub(crate) const PAGE: Duration = Duration::from_secs(5);

pub(crate) use fences::*;
pub(crate) use leases::*;
pub(crate) use names::*;
pub(crate) use queue::*;
pub(crate) use races::*;
pub(crate) use renewals::*;
pub(crate) use transfer::*;
pub(crate) use waking::*;

/// Stamps out every case for one engine. The argument is an async closure from a fresh prefix (to keep this test's names
/// apart in a shared store) to `Option<(SharedEngine, SharedEngine)>`: two connections to one store, or `None` when the
/// store cannot be had here (the closure says so, and fails where `CI` is set).
macro_rules! contract_tests {
    ($open:expr) => {
        $crate::engine::contract::contract_tests!(@each $open;
            one_holder, only_the_owner_releases, expiry_frees_at_once, acquire_is_idempotent_by_owner,
            a_late_retry_takes_nothing_away,
            renewal_extends_and_never_shortens, renewal_never_recreates, a_stale_holder_cannot_touch_its_successor,
            fences_grow_across_everything, fences_grow_in_rapid_succession, several_names_are_all_or_nothing,
            several_names_share_one_fence_and_one_fate, force_release_frees_anybody, inspect_tells_who_and_how_long,
            list_takes_the_prefix_literally, odd_names_are_kept_apart, a_ttl_of_one_millisecond, long_ttl,
            a_kept_name_stays_busy, a_change_after_subscribing_is_not_missed, a_kept_release_wakes_waiters,
            retry_after_is_bounded_by_the_lease, claims_racing_for_one_name_never_overlap,
            overlapping_sets_never_deadlock, renewal_racing_release_leaves_nothing, a_dropped_call_leaves_no_harm,
            waiters_are_served_in_order, a_try_never_passes_the_queue, a_dead_waiter_is_passed_over,
            giving_up_leaves_the_queue, a_set_does_not_block_names_it_does_not_wait_on,
            a_transfer_changes_the_owner_and_nothing_else, a_transfer_is_idempotent,
            a_transfer_of_what_is_gone_changes_nothing, a_transfer_of_several_names_is_all_or_nothing,
            a_transfer_extends_and_never_shortens, transfers_racing_for_one_lease_have_one_winner,
            a_transfer_racing_a_forced_release_leaves_one_owner, a_transferred_lock_wakes_its_waiters,
            many_renewals_have_an_answer_each, renewals_of_several_names_are_all_or_nothing,
            renewals_together_have_their_own_ttls, no_renewals_at_all,
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
const SHORT: Duration = Duration::from_millis(800);

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

/// What wakes a waiter is not missed between the subscription and the wait. The safety net of a test: 5 s.
async fn woken(subscription: &mut Box<dyn super::Subscription>) {
    tokio::time::timeout(Duration::from_secs(5), subscription.changed())
        .await
        .expect("no wake-up within 5 s");
}
