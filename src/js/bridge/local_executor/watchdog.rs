//! Polls ready calls, ready tasks and sockets on the I/O thread while the user's code blocks the JavaScript thread.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::LocalExecutor;
use crate::event_loop::Socket;

/// The interval between two checks of the JavaScript thread. Ready work waits for at most two intervals.
const WATCH: Duration = Duration::from_millis(20);
/// The interval of its checks while it sleeps, if receivers wait for messages: a waiter has at least a second for a hand-off.
const LISTEN: Duration = Duration::from_millis(250);

#[derive(Default)]
pub(super) struct Watchdog {
    is_running: AtomicBool,
    is_asleep: AtomicBool,
    woken: Notify,
    sockets: Mutex<Vec<Weak<dyn Socket>>>,
}

impl Watchdog {
    /// Wakes the watchdog if it sleeps. Called when there is work for the JavaScript thread.
    pub(super) fn wake(&self) {
        if self.is_asleep.load(SeqCst) && self.is_asleep.swap(false, SeqCst) {
            self.woken.notify_one();
        }
    }

    #[cfg(test)]
    pub(super) fn is_asleep(&self) -> bool {
        self.is_asleep.load(SeqCst)
    }

    /// Adds a socket, and removes those that no longer exist.
    pub(super) fn add(&self, socket: Weak<dyn Socket>) {
        let mut sockets = self.sockets.lock();
        sockets.retain(|socket| socket.strong_count() > 0);
        sockets.push(socket);
        drop(sockets);
        self.wake();
    }

    /// Returns the sockets that are watched now.
    fn watched(&self) -> Vec<Arc<dyn Socket>> {
        let sockets = self.sockets.lock();
        let open = sockets.iter().filter_map(Weak::upgrade);
        open.filter(|socket| socket.is_watched()).collect()
    }
}

impl LocalExecutor {
    /// Starts the watchdog unless it is running.
    pub(super) fn watch(self: &Arc<Self>) {
        if !self.watchdog.is_running.swap(true, Relaxed) {
            self.runtime.spawn(watch(Arc::downgrade(self)).boxed());
        }
    }
}

async fn watch(executor: Weak<LocalExecutor>) {
    let mut ticks = 0;
    loop {
        tokio::time::sleep(WATCH).await;
        let Some(executor) = executor.upgrade() else { return };
        let watchdog = &executor.watchdog;
        let watched = watchdog.watched();
        let now = executor.ticks.load(Relaxed);
        if now == ticks && (executor.has_ready() || !watched.is_empty()) {
            executor.poll_ready();
            for socket in watched {
                socket.readable();
                socket.flush();
            }
            executor.poll_ready();
            // The tasks that this woke run before the watchdog sleeps, and do not wake it.
            tokio::task::yield_now().await;
        }
        watchdog.is_asleep.store(true, SeqCst);
        // Work that was added before `is_asleep` was set did not wake the watchdog.
        let watched = watchdog.watched();
        if watched.is_empty() && !executor.has_ready() {
            watchdog.woken.notified().await;
        } else if !executor.has_ready() && !watched.iter().any(|socket| socket.is_busy()) {
            let _ = tokio::time::timeout(LISTEN, watchdog.woken.notified()).await;
        }
        watchdog.is_asleep.store(false, SeqCst);
        ticks = executor.ticks.load(Relaxed);
    }
}
