//! The permits for the connections: calls use the connections that are open, and more are opened beside them.
//!
//! # Why
//! The driver opens a connection for a call that finds none free, and this call waits for that connection also where others
//! become free (mongodb 3.9.1, `cmap/worker.rs`: `check_out`). Behind a proxy whose new connections hang, the call fails,
//! although the open connections work. So there are as many permits as open connections. Where no permit is free, a task opens a
//! connection by a `ping`, and no call waits for it. (A ping may find a connection that is free although no permit is: a call
//! that has one sends nothing. If this lasts, another call gets a permit.) With no connection left there is one permit, whose
//! call opens one.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use mongodb::event::EventHandler;
use mongodb::event::cmap::CmapEvent;
use mongodb::options::ServerAddress;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::engine::mongodb::connection::checkouts;

/// How many connections are opened at once: as many as the driver opens, so that no opening waits in its queue.
const AT_ONCE: usize = 2;
/// How long a call waits before a connection is opened for it: most others end sooner.
const DELAY: Duration = Duration::from_millis(5);
/// If no call gets a permit for this long, the calls with permits count as using no connection.
const STANDSTILL: Duration = Duration::from_millis(250);
/// The pause after an opening that found a free connection.
const SHORT_PAUSE: Duration = Duration::from_millis(20);
/// The pause after an opening that failed.
const PAUSE: Duration = Duration::from_millis(100);

/// The connections that are open, from the events of the driver. Two clients may have connections of the same number: a client
/// that was replaced, and the next one.
#[derive(Default)]
pub(crate) struct OpenConnections(Mutex<Vec<(ServerAddress, u32)>>);

impl OpenConnections {
    /// Returns the handler for the events of the driver.
    pub(crate) fn handler(self: &Arc<Self>) -> EventHandler<CmapEvent> {
        let open = self.clone();
        EventHandler::callback(move |event| match event {
            CmapEvent::ConnectionReady(ready) => open.0.lock().push((ready.address, ready.connection_id)),
            CmapEvent::ConnectionClosed(closed) => open.remove(&(closed.address, closed.connection_id)),
            event => checkouts::count(&event),
        })
    }

    /// Removes a connection that was closed. One that never opened is not there.
    fn remove(&self, closed: &(ServerAddress, u32)) {
        let mut open = self.0.lock();
        if let Some(index) = open.iter().position(|connection| connection == closed) {
            open.swap_remove(index);
        }
    }
}

/// Opens a connection, or finds one that is free. Returns whether there is one. The future is never dropped before its end.
pub(crate) type Opening = Box<dyn Fn() -> BoxFuture<'static, bool> + Send + Sync>;

/// The permits for the connections of an engine.
pub(crate) struct Openings {
    open: Arc<OpenConnections>,
    max: usize,
    opening: Opening,
    permits: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Number of permits, given out or free.
    permits: usize,
    /// Number of connections without a permit, which change streams use.
    used_otherwise: usize,
    /// Number of permits beyond the open connections, for calls that have a permit and use no connection.
    idle: usize,
    /// Number of permits that were given out so far.
    given: u64,
    /// Number of calls that wait for a permit.
    waiting: usize,
    /// Number of tasks that open connections.
    openings: usize,
}

/// Counts a call that waits for a permit, until it is dropped.
struct Waiting<'a>(&'a Openings);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.state.lock().waiting -= 1;
    }
}

/// A connection that a change stream uses, until it is dropped.
pub(crate) struct UsedOtherwise(Arc<Openings>);

impl Drop for UsedOtherwise {
    fn drop(&mut self) {
        self.0.state.lock().used_otherwise -= 1;
        self.0.adjust();
    }
}

impl Openings {
    pub(crate) fn new(open: Arc<OpenConnections>, max: usize, opening: Opening) -> Arc<Self> {
        let openings = Openings {
            open,
            max,
            opening,
            permits: Arc::new(Semaphore::new(0)),
            state: Mutex::default(),
        };
        openings.adjust();
        Arc::new(openings)
    }

    /// Notes that one connection has no permit.
    pub(crate) fn use_otherwise(self: &Arc<Self>) -> UsedOtherwise {
        self.state.lock().used_otherwise += 1;
        UsedOtherwise(self.clone())
    }

    /// Waits for a connection. Dropping the future leaves the queue.
    pub(crate) async fn permit(self: &Arc<Self>) -> Option<OwnedSemaphorePermit> {
        self.adjust();
        loop {
            let permit = match self.permits.clone().try_acquire_owned() {
                Ok(permit) => permit,
                Err(_) => {
                    self.state.lock().waiting += 1;
                    let _waiting = Waiting(self);
                    self.open_more();
                    // The semaphore is never closed.
                    self.permits.clone().acquire_owned().await.ok()?
                }
            };
            let mut state = self.state.lock();
            if state.permits <= self.usable(&state) {
                state.given += 1;
                return Some(permit);
            }
            // Its connection was closed.
            state.permits -= 1;
            permit.forget();
        }
    }

    /// Returns the number of calls that may have a permit.
    fn usable(&self, state: &State) -> usize {
        (self.open_for_calls(state) + state.idle).clamp(1, self.max)
    }

    fn open_for_calls(&self, state: &State) -> usize {
        self.open.0.lock().len().saturating_sub(state.used_otherwise)
    }

    /// Adds permits for connections that were opened. Returns their number, and that of the permits given out so far.
    fn adjust(&self) -> (usize, u64) {
        let mut state = self.state.lock();
        let more = self.usable(&state).saturating_sub(state.permits);
        state.permits += more;
        self.permits.add_permits(more);
        (more, state.given)
    }

    /// Opens connections, in tasks, while calls wait.
    fn open_more(self: &Arc<Self>) {
        {
            let mut state = self.state.lock();
            if state.openings >= AT_ONCE || state.permits >= self.max {
                return;
            }
            state.openings += 1;
        }
        let openings = self.clone();
        tokio::spawn(
            async move {
                tokio::time::sleep(DELAY).await;
                // The number of permits given out, and since when it has not changed.
                let (mut given, mut since) = (openings.adjust().1, Instant::now());
                while openings.has_more_to_open() {
                    openings.adjust();
                    if !(openings.opening)().await {
                        tokio::time::sleep(PAUSE).await;
                    } else if openings.adjust().0 == 0 {
                        // The command found a free connection: for a moment, or because calls with permits use none.
                        tokio::time::sleep(SHORT_PAUSE).await;
                        let mut state = openings.state.lock();
                        if state.given != given || state.waiting == 0 {
                            (given, since) = (state.given, Instant::now());
                        } else if since.elapsed() >= STANDSTILL {
                            state.idle = (state.permits + 1).saturating_sub(openings.open_for_calls(&state));
                        }
                    }
                    openings.adjust();
                }
            }
            .boxed(),
        );
    }

    /// Whether a task opens another connection. If not, the task has ended.
    fn has_more_to_open(&self) -> bool {
        let mut state = self.state.lock();
        let has_more = state.waiting > 0 && state.permits < self.max;
        if !has_more {
            state.openings -= 1;
            // Not while a call waits: it has not taken its permit yet.
            if state.waiting == 0 {
                state.idle = 0;
            }
        }
        has_more
    }
}

#[cfg(test)]
impl OpenConnections {
    /// Returns connections that are always open.
    pub(crate) fn of(count: u32) -> Arc<Self> {
        let open = Arc::new(OpenConnections::default());
        open.0
            .lock()
            .extend((0..count).map(|id| (ServerAddress::default(), id)));
        open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn openings(open: &Arc<OpenConnections>, opening: impl Fn() + Send + Sync + 'static, hangs: bool) -> Arc<Openings> {
        let opening = Arc::new(opening);
        let opening = Box::new(move || {
            let opening = opening.clone();
            async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
                opening();
                true
            }
            .boxed()
        });
        Openings::new(open.clone(), 4, opening)
    }

    #[tokio::test(start_paused = true)]
    async fn calls_go_on_with_the_open_connections_while_new_ones_hang() {
        let openings = openings(&OpenConnections::of(2), || {}, true);
        let calls = (0..100).map(|_| async {
            let _permit = openings.permit().await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        });
        let began = tokio::time::Instant::now();
        futures_util::future::join_all(calls).await;
        assert_eq!(began.elapsed(), Duration::from_millis(500));
    }

    #[tokio::test(start_paused = true)]
    async fn connections_are_opened_while_calls_wait_and_lose_their_permits_when_they_are_closed() {
        let open = OpenConnections::of(0);
        let next = open.clone();
        let open_one = move || {
            let mut open = next.0.lock();
            let id = open.len() as u32;
            open.push((ServerAddress::default(), id));
        };
        let openings = openings(&open, open_one, false);
        let mut permits = Vec::new();
        for _ in 0..4 {
            permits.push(openings.permit().await);
        }
        let fifth = tokio::time::timeout(Duration::from_secs(60), openings.permit());
        assert!(fifth.await.is_err(), "the maximum");
        let stream = openings.use_otherwise();
        permits.clear();
        open.remove(&(ServerAddress::default(), 0));
        permits.push(openings.permit().await);
        assert!(openings.permits.available_permits() <= 1, "permits were removed");
        permits.clear();
        open.0.lock().clear();
        permits.push(openings.permit().await);
        assert_eq!(openings.permits.available_permits(), 0, "one is left");
        drop(stream);
    }

    /// The connections of a client that was replaced close later, and have the same numbers.
    #[test]
    fn connections_of_two_clients_may_have_the_same_number() {
        let open = OpenConnections::of(2);
        open.0.lock().extend(OpenConnections::of(2).0.lock().drain(..));
        (0..3).for_each(|id| open.remove(&(ServerAddress::default(), id)));
        assert_eq!(open.0.lock().len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn calls_that_use_no_connection_do_not_keep_others_from_one() {
        let openings = openings(&OpenConnections::of(1), || {}, false);
        let _first = openings.permit().await;
        for _ in 0..3 {
            let other = tokio::time::timeout(Duration::from_secs(1), openings.permit());
            std::mem::forget(other.await.expect("another permit"));
        }
    }
}
