//! Serves a fast path whose thread is blocked, and writes its deferred records.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use super::FastPath;
use crate::clock::Moment;
use crate::event_loop::Socket;

/// The watchdog serves the socket when a call has waited for this time.
pub(super) const STALE: Duration = Duration::from_millis(20);
/// The interval of the watchdog while the fast path is in use.
const WATCH: Duration = Duration::from_millis(25);
/// The watchdog sleeps after this time without requests.
const IDLE: Duration = Duration::from_secs(2);

/// Serves the socket whenever its own thread does not.
pub(super) async fn watch(fast_path: Weak<FastPath>, stirred: Arc<Notify>) {
    let mut used = Moment::now();
    loop {
        tokio::time::sleep(WATCH).await;
        let sleepy = {
            let Some(fast_path) = fast_path.upgrade().filter(|fast_path| fast_path.is_open()) else {
                return;
            };
            let (waits, stale, flush) = {
                let mut state = fast_path.state();
                state.repeat_records();
                let waits = !state.is_idle();
                let stale = waits && state.since.elapsed() >= STALE;
                let records = state.records.take_due();
                let flush = stale || !records.is_empty();
                state.write_records(records, &fast_path.layout);
                (waits, stale, flush)
            };
            if flush {
                fast_path.flush();
            }
            if stale {
                fast_path.readable();
            }
            if fast_path.health.is_lost(fast_path.silence_limit) {
                fast_path.end();
            }
            if waits {
                used = Moment::now();
            }
            let sleepy = used.elapsed() >= IDLE;
            fast_path.asleep.store(sleepy, Relaxed);
            // A call may have begun since the check above, while the watchdog counted as awake.
            let state = fast_path.state();
            sleepy && state.is_idle()
        };
        if sleepy {
            stirred.notified().await;
            used = Moment::now();
        }
    }
}
