//! The queue of attempts to acquire that an engine has not begun yet. An engine limits how many attempts are in progress, so that
//! the driver and the servers have no long queues. `overload_queue.rs` decides which one is next.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::overload_queue::OverloadQueue;
use crate::model::Key;

/// Issues permits for attempts, and keeps the queue for them.
#[derive(Debug)]
pub(super) struct AttemptQueue(Mutex<State>);

#[derive(Debug)]
struct State {
    free: usize,
    waiting: OverloadQueue<oneshot::Sender<Permit>>,
}

/// The right to make one attempt. Dropping it passes the right to the next attempt.
#[derive(Debug)]
pub(super) struct Permit(Arc<AttemptQueue>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.pass_on();
    }
}

impl AttemptQueue {
    /// Creates a queue with `size` permits.
    pub(super) fn new(size: usize) -> Arc<Self> {
        Arc::new(AttemptQueue(Mutex::new(State {
            free: size,
            waiting: OverloadQueue::default(),
        })))
    }

    /// Waits for the permit of an attempt with this first name. An attempt whose future was dropped gets none.
    pub(super) async fn permit(self: &Arc<Self>, name: &Key) -> Permit {
        let assigned = {
            let mut state = self.0.lock();
            if state.free > 0 {
                state.free -= 1;
                return Permit(self.clone());
            }
            state.drop_left();
            let (permit, assigned) = oneshot::channel();
            state.waiting.push(Instant::now(), name.clone(), permit);
            assigned
        };
        match assigned.await {
            Ok(permit) => permit,
            // The queue keeps the sender until it uses it.
            Err(_) => std::future::pending().await,
        }
    }

    /// Passes a permit to the next attempt.
    fn pass_on(self: &Arc<Self>) {
        let next = {
            let mut state = self.0.lock();
            state.drop_left();
            let next = std::iter::from_fn(|| state.waiting.pop()).find(|next| !next.is_closed());
            state.free += usize::from(next.is_none());
            next
        };
        // A permit whose attempt leaves the queue at this moment is dropped, and so passed on.
        drop(next.map(|next| next.send(Permit(self.clone()))));
    }
}

impl State {
    /// Removes the oldest attempts that have left the queue.
    fn drop_left(&mut self) {
        self.waiting.drop_oldest_while(oneshot::Sender::is_closed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::overload_queue::OVERLOAD;

    #[tokio::test(start_paused = true)]
    async fn attempts_for_one_name_keep_their_order_under_overload() {
        let (queue, order) = (AttemptQueue::new(1), Arc::new(Mutex::new(Vec::new())));
        let name = Key::new("n").unwrap();
        let first = queue.permit(&name).await;
        let mut tasks = Vec::new();
        for number in 0..4 {
            let (queue, order, name) = (queue.clone(), order.clone(), name.clone());
            tasks.push(tokio::spawn(async move {
                let _permit = queue.permit(&name).await;
                order.lock().push(number);
            }));
            tokio::task::yield_now().await;
        }
        tasks[1].abort();
        tokio::time::advance(2 * OVERLOAD).await;
        drop(first);
        for task in tasks {
            let _ = task.await;
        }
        assert_eq!(*order.lock(), [0, 2, 3]);
        assert_eq!(queue.0.lock().free, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_permit_of_a_dropped_attempt_goes_to_the_next() {
        let queue = AttemptQueue::new(1);
        let name = Key::new("n").unwrap();
        let first = queue.permit(&name).await;
        let mut dropped = Box::pin(queue.permit(&name));
        assert!(
            tokio::time::timeout(Duration::from_millis(1), &mut dropped)
                .await
                .is_err()
        );
        drop(first);
        drop(dropped);
        assert_eq!(queue.0.lock().free, 1);
        queue.permit(&name).await;
    }
}
