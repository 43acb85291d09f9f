//! The caller's event loop, which can poll the sockets and the tasks of an engine.
//!
//! A switch between two threads costs more than everything else in a call. A call from a thread with an event loop (Node's) saves two
//! switches when the socket is written and read on that thread.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Weak};

use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;

/// An event loop.
pub trait EventLoop: Send + Sync + fmt::Debug {
    /// Whether the current thread is the loop's own.
    fn is_here(&self) -> bool;

    /// Polls a socket soon, and until a method of the socket returns `false`. Calls [`Socket::readable`] once at the beginning: with
    /// TLS, data may have been read with the handshake. May be called on any thread.
    fn serve(&self, socket: Arc<dyn Socket>);

    /// Polls a future until it ends: on the loop's own thread when that thread wakes it, and otherwise on the thread of the runtime, also
    /// while the loop's thread is blocked. Called within the runtime, on any thread.
    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>);

    /// Calls [`Socket::readable`] and [`Socket::flush`] of a socket on the thread of the runtime, too, while [`Socket::is_watched`] returns
    /// `true` and the loop's thread is blocked or asleep.
    fn watch(&self, socket: Weak<dyn Socket>);
}

/// Handle of a task that an event loop polls, or the runtime if there is no event loop. Dropping the handle does not cancel the task.
#[derive(Debug)]
pub struct Task {
    cancelled: CancellationToken,
    ended: CancellationToken,
}

impl Task {
    /// Starts a task. Called within the runtime.
    pub fn spawn(event_loop: Option<&dyn EventLoop>, future: impl Future<Output = ()> + Send + 'static) -> Self {
        let (cancelled, ended) = (CancellationToken::new(), CancellationToken::new());
        let (cancelling, ending) = (cancelled.clone(), ended.clone().drop_guard());
        // Boxed: the code of a task exists once, and not for each kind of work.
        let future = future.boxed();
        let work = async move {
            let _ending = ending;
            let _ = cancelling.run_until_cancelled(future).await;
        };
        match event_loop {
            Some(event_loop) => event_loop.spawn(work.boxed()),
            None => _ = tokio::spawn(work),
        }
        Task { cancelled, ended }
    }

    /// Cancels the task. Its future is dropped at the next poll of the task.
    pub fn cancel(&self) {
        self.cancelled.cancel();
    }

    /// Whether the task has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    /// Waits for the end of the task.
    pub async fn ended(&self) {
        self.ended.cancelled().await;
    }
}

/// Runs a step of a task. `None`: it panicked, for example in a driver. The task can then drop what the step used, and continue.
pub async fn unless_it_panics<T>(step: Pin<&mut (dyn Future<Output = T> + Send + '_)>) -> Option<T> {
    AssertUnwindSafe(step).catch_unwind().await.ok()
}

/// Decides whether the loop busy-polls for a reply before it sleeps.
///
/// # Behavior
/// A core takes about as long to sleep and wake up as a nearby store to reply, so that busy-polling costs nothing when the reply
/// arrives in time. A missed reply means that the store is far away, or that the machine has no idle core: the loop then
/// does not spin for two ticks, and for twice as many with each further miss.
#[derive(Debug, Default)]
pub struct AdaptiveSpin {
    /// The number of misses in a row, up to a maximum.
    misses: u32,
    /// The number of ticks without a spin that remain.
    skipped_ticks: u32,
}

/// The longest pause is two to the power of this, in ticks.
const MAX_MISSES: u32 = 12;

impl AdaptiveSpin {
    /// Whether the loop spins in this tick. Called once per tick with pending replies, before the loop sleeps.
    pub fn should_spin(&mut self) -> bool {
        let should_spin = self.skipped_ticks == 0;
        self.skipped_ticks = self.skipped_ticks.saturating_sub(1);
        should_spin
    }

    /// Records whether a reply arrived during a spin.
    pub fn record(&mut self, found_reply: bool) {
        if found_reply {
            self.misses = 0;
        } else {
            self.misses = (self.misses + 1).min(MAX_MISSES);
            self.skipped_ticks = 1 << self.misses;
        }
    }
}

/// A socket that an event loop polls. The loop calls the methods on its own thread. With [`EventLoop::watch`] the thread of the runtime
/// calls [`Socket::readable`] and [`Socket::flush`], too. The methods must not block.
pub trait Socket: Send + Sync {
    /// Returns the file descriptor. It stays open while the socket exists.
    #[cfg(unix)]
    fn descriptor(&self) -> std::os::fd::RawFd;

    /// Wakes the task that reads. Called when data has arrived. `false`: the loop stops polling the socket.
    fn readable(&self) -> bool;

    /// Wakes the task that waits to write, before the loop sleeps. `false`: the loop stops polling the socket.
    fn flush(&self) -> bool;

    /// Whether replies to requests of the loop's own thread are pending.
    fn awaits(&self) -> bool;

    /// Whether any replies are pending, or the socket did not take all buffered requests.
    fn is_busy(&self) -> bool;

    /// Whether the thread of the runtime reads and flushes the socket while the loop's thread is blocked ([`EventLoop::watch`]).
    fn is_watched(&self) -> bool;

    /// Whether the socket did not take all buffered requests. The loop calls [`Socket::flush`] when it takes more.
    fn is_blocked(&self) -> bool;

    /// Called when the loop has stopped polling the socket.
    fn end(&self);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of spins in some ticks with the same result.
    fn count_spins(spin: &mut AdaptiveSpin, ticks: usize, found_reply: bool) -> usize {
        let mut count = 0;
        for _ in 0..ticks {
            if spin.should_spin() {
                count += 1;
                spin.record(found_reply);
            }
        }
        count
    }

    #[test]
    fn the_loop_spins_in_every_tick_for_a_fast_store_and_rarely_for_a_slow_one() {
        let mut spin = AdaptiveSpin::default();
        assert_eq!(count_spins(&mut spin, 1000, true), 1000);
        assert_eq!(count_spins(&mut spin, 10_000, false), 13);
        assert!(count_spins(&mut spin, 10 << MAX_MISSES, false) <= 10);
        // The store gets faster: the next spin finds a reply, and the pauses end.
        let ticks = 1 << MAX_MISSES;
        assert!(count_spins(&mut spin, ticks, true) <= ticks);
        assert_eq!(count_spins(&mut spin, 1000, true), 1000);
    }
}
