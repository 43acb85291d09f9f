//! The tests of the engine, which each dialect runs with [`server_tests`] on its own server, and what the tests of dialects need.

mod calls;
mod connections;
mod distant;
mod locked;
mod proxy;
mod queue;
mod rows;
mod shares;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

pub(in crate::engine::sql) use self::calls::*;
pub(in crate::engine::sql) use self::connections::*;
pub(in crate::engine::sql) use self::distant::*;
pub(in crate::engine::sql) use self::locked::*;
pub(in crate::engine::sql) use self::proxy::Proxy;
pub(in crate::engine::sql) use self::queue::*;
pub(in crate::engine::sql) use self::rows::*;
pub(in crate::engine::sql) use self::shares::*;
use super::{ServerEngine, Session};
pub(in crate::engine::sql) use crate::engine::sql::calls::Wakeup;
use crate::engine::{Acquired, Engine, EngineExt, Released, Settings, Subscription};
use crate::model::{Claim, Fence, Key, OwnerToken, Process, Ttl};

/// Declares the tests of the engine for the `TestDatabase` of a dialect.
macro_rules! server_tests {
    ($database:ty) => {
        $crate::engine::sql::server::tests::server_tests!(@each $database;
            // calls.rs
            calls_at_the_same_time_share_statements, other_calls_do_not_wait_for_attempts, a_release_follows_an_abandoned_attempt,
            two_releases_of_a_name_at_once_have_their_own_answers, a_locked_row_delays_only_the_calls_for_its_name,
            the_holder_does_not_wait_for_an_attempt_that_found_a_locked_row, a_locked_row_rejects_no_other_call_when_callers_are_dropped, many_locked_rows_delay_other_calls_once,
            claims_are_released_beside_one_with_a_locked_row, a_locked_row_before_a_waiter_delays_no_other_call_for_long, an_uncommitted_row_delays_other_calls_once,
            many_uncommitted_rows_do_not_block_other_calls, a_burst_for_a_locked_row_delays_other_calls_once, a_release_that_waits_delays_no_renewal,
            // connections.rs
            an_attempt_that_waits_for_a_connection_is_not_sent_when_it_is_dropped, each_connection_is_opened_again_when_it_ends_alone,
            new_connections_that_hang_delay_no_call, calls_share_the_connections_that_are_allowed, idle_connections_are_closed,
            silent_connections_delay_no_new_one, a_connection_with_a_late_answer_is_used_while_new_ones_hang, a_call_that_gets_no_connection_is_told_which_there_are,
            // distant.rs
            callers_with_a_short_timeout_do_not_fail_the_calls_of_others, a_statement_to_a_distant_server_takes_all_calls,
            // locked.rs
            a_locked_row_costs_the_calls_beside_it_few_packets, names_beside_a_locked_one_are_not_recorded_as_locked,
            a_renewal_goes_before_attempts_that_find_locked_rows, waiters_of_a_locked_name_keep_their_order,
            // queue.rs
            a_check_counts_the_waiters_ahead, positions_that_expired_long_ago_are_removed_with_the_next_change,
            a_waiter_behind_a_dead_process_is_served_when_its_hand_off_ends, an_attempt_at_the_end_of_a_lease_does_not_pass_the_queue,
            waiters_whose_event_loop_hangs_for_their_ttl_lose_their_positions, waiters_behind_others_poll_rarely,
            // rows.rs
            a_transaction_reads_only_rows_that_it_has_locked, fencing_tokens_grow_when_the_clock_steps_back, a_sweep_removes_old_rows_of_free_names, a_sweep_reads_each_row_once, a_page_of_a_list_reads_a_limited_number_of_rows,
            the_engine_sweeps, one_process_sweeps_in_each_interval, dropped_tables_are_created_again_with_a_warning,
            many_names_with_large_metadata_are_granted_together,
            // shares.rs
            a_share_whose_renewal_is_not_committed_is_held, a_waiter_is_granted_when_the_share_of_a_dead_holder_ends,
            a_waiter_behind_a_dead_heavy_one_is_granted, a_waiter_that_leaves_hands_off_to_those_behind_it,
            a_release_grants_more_waiters_than_one_transaction,
            a_sweep_removes_ended_shares_and_then_their_name,
        );
    };
    (@each $database:ty; $($case:ident),* $(,)?) => {
        $(
            #[tokio::test]
            async fn $case() {
                if let Some(mut database) = <$database>::create().await {
                    $crate::engine::sql::server::tests::$case(&mut database).await;
                }
            }
        )*
    };
}
pub(in crate::engine::sql) use server_tests;

/// A database of one test, and a connection of another program to it.
pub(in crate::engine::sql) trait TestDatabase {
    fn url(&self) -> &str;

    /// Opens an engine, through a proxy if the URL is that of one.
    async fn open_with(&self, url: &str, settings: &Settings) -> Arc<ServerEngine>;

    /// The number of packets of a login to the server.
    const LOGIN_PACKETS: usize;

    /// The query string of a URL that makes waiters poll.
    const POLLING: &str;

    /// Executes statements as the other program.
    async fn execute(&mut self, text: &str);

    /// Returns the number that the other program reads.
    async fn number(&mut self, text: &str) -> i64;

    /// Returns the number of statements of engines that wait for a lock.
    async fn blocked(&mut self) -> i64;

    /// Returns the ids of the connections of engines.
    async fn connections(&mut self) -> Vec<i64>;

    /// Ends a connection.
    async fn end(&mut self, connection: i64);

    /// Returns the expression of a time in the past.
    fn ago(seconds: u64) -> String;

    /// Returns the expression of a time in the future.
    fn after(ms: u64) -> String;

    async fn open(&self, url: &str) -> Arc<ServerEngine> {
        self.open_with(url, &Settings::default()).await
    }

    async fn engine(&self) -> Arc<ServerEngine> {
        self.open(self.url()).await
    }
}

/// Returns the server of an engine as that of its dialect.
#[cfg(feature = "postgres")]
pub(in crate::engine::sql) fn server_of<S: super::Server>(engine: &ServerEngine) -> Arc<S> {
    let server: Arc<dyn Any + Send + Sync> = engine.waiters.server.clone();
    server.downcast().unwrap()
}

/// Returns a connection as one of its dialect.
pub(in crate::engine::sql) fn session_of<S: Session>(session: Box<dyn Session>) -> S {
    let session: Box<dyn Any> = session;
    *session.downcast().unwrap()
}

pub(in crate::engine::sql) const LONG: Duration = Duration::from_secs(30);

/// Returns the URL of a server. `None`: there is none; the test is skipped, or fails if `CI` is set.
pub(in crate::engine::sql) fn url_of(variable: &str) -> Option<String> {
    let url = std::env::var(variable).ok();
    if url.is_none() {
        assert!(std::env::var_os("CI").is_none(), "{variable} is not set");
        println!("skipped: {variable} is not set");
    }
    url
}

pub(in crate::engine::sql) fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

pub(in crate::engine::sql) fn claim(names: &[&str]) -> Claim {
    let keys: Vec<Key> = names.iter().map(|name| key(name)).collect();
    let process = Arc::new(Process::current());
    Claim::new(&keys, OwnerToken::fresh(), Ttl::clamped(LONG), process)
}

pub(in crate::engine::sql) fn waiting(names: &[&str]) -> Claim {
    let mut claim = claim(names);
    claim.waiting = true;
    claim
}

pub(in crate::engine::sql) async fn acquire(engine: &Arc<impl Engine>, claim: &Claim) {
    let acquired = engine.try_acquire(claim).await.unwrap();
    assert!(matches!(acquired, Acquired::Granted { .. }), "{acquired:?}");
}

pub(in crate::engine::sql) async fn busy(engine: &Arc<impl Engine>, claim: &Claim) {
    let acquired = engine.try_acquire(claim).await.unwrap();
    assert!(matches!(acquired, Acquired::Held { .. }), "{acquired:?}");
}

/// Makes an attempt. One that finds a locked row counts as one that finds a busy name.
pub(in crate::engine::sql) async fn is_granted(engine: &Arc<impl Engine>, claim: &Claim) -> bool {
    match engine.try_acquire(claim).await {
        Err(error) if error.is_locked => false,
        outcome => matches!(outcome.unwrap(), Acquired::Granted { .. }),
    }
}

pub(in crate::engine::sql) async fn release(engine: &Arc<impl Engine>, claim: &Claim) -> Released {
    engine.release(claim, Duration::ZERO).await.unwrap()
}

/// Makes an attempt, and returns the fencing token of its grant.
pub(in crate::engine::sql) async fn fence(engine: &Arc<impl Engine>, claim: &Claim) -> Fence {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Granted { fence } => fence,
        held @ Acquired::Held { .. } => panic!("{held:?}"),
    }
}

/// Waits for a notification, for 10 s at most.
pub(in crate::engine::sql) async fn notified(subscription: &mut Box<dyn Subscription>) {
    let changed = tokio::time::timeout(Duration::from_secs(10), subscription.changed());
    changed.await.expect("no notification");
}

/// Moves the clock of the runtime, which the timers of engines use. No call may be under way: it would have no answer in time.
pub(in crate::engine::sql) async fn advance(by: Duration) {
    tokio::time::pause();
    tokio::time::advance(by).await;
    tokio::time::resume();
}

/// Waits until a condition holds, for 10 s at most.
pub(in crate::engine::sql) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let check = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let checked = tokio::time::timeout(Duration::from_secs(10), check).await;
    checked.unwrap_or_else(|_| panic!("not within 10 s: {what}"));
}

/// Makes an attempt in a task.
pub(in crate::engine::sql) fn attempting(
    engine: &Arc<ServerEngine>,
    ours: &Claim,
) -> tokio::task::JoinHandle<crate::engine::Result<Acquired>> {
    let (engine, ours) = (engine.clone(), ours.clone());
    tokio::spawn(async move { engine.try_acquire(&ours).await })
}
