//! What looks after a lane whose thread is blocked.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use super::Lane;
use crate::clock::Moment;
use crate::event_loop::Socket;

/// A call that has waited for so long is looked after by the watchdog.
pub(super) const STALE: Duration = Duration::from_millis(20);
/// How often the watchdog looks while the lane is in use.
const WATCH: Duration = Duration::from_millis(25);
/// The watchdog sleeps when nothing was asked for so long.
const IDLE: Duration = Duration::from_secs(2);

/// Looks after a lane whose thread does not.
pub(super) async fn watch(lane: Weak<Lane>, stirred: Arc<Notify>) {
    let mut used = Moment::now();
    loop {
        tokio::time::sleep(WATCH).await;
        let sleepy = {
            let Some(lane) = lane.upgrade().filter(|lane| lane.is_open()) else {
                return;
            };
            let (waits, stale) = {
                let mut state = lane.state();
                state.repeat_records();
                let waits = !state.is_idle();
                (waits, waits && state.since.elapsed() >= STALE)
            };
            if stale {
                lane.flush();
                lane.readable();
            }
            if lane.health.is_lost(lane.patience) {
                lane.end();
            }
            if waits {
                used = Moment::now();
            }
            let sleepy = used.elapsed() >= IDLE;
            lane.asleep.store(sleepy, Relaxed);
            // Between the look and the sleep a call may have come, and seen the watchdog awake.
            let state = lane.state();
            sleepy && state.is_idle()
        };
        if sleepy {
            stirred.notified().await;
            used = Moment::now();
        }
    }
}
