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
    waiting: OverloadQueue<oneshot::Sender<()>>,
}

/// The right to make one attempt. Dropping it passes the right to the next attempt.
#[derive(Debug)]
pub(super) struct Permit(Arc<AttemptQueue>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.pass_on();
    }
}

/// A position in the queue. Dropping it leaves the queue.
struct Position {
    queue: Arc<AttemptQueue>,
    arrival: u64,
    has_permit: bool,
}

impl Drop for Position {
    fn drop(&mut self) {
        if !self.has_permit && self.queue.0.lock().waiting.remove(self.arrival).is_none() {
            // The permit was assigned to this position: pass it on.
            self.queue.pass_on();
        }
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

    /// Waits for the permit of an attempt with this first name. Dropping the future leaves the queue.
    pub(super) async fn permit(self: &Arc<Self>, name: &Key) -> Permit {
        let (assigned, mut position) = {
            let mut state = self.0.lock();
            if state.free > 0 {
                state.free -= 1;
                return Permit(self.clone());
            }
            let (permit, assigned) = oneshot::channel();
            let position = Position {
                queue: self.clone(),
                arrival: state.waiting.push(Instant::now(), name.clone(), permit),
                has_permit: false,
            };
            (assigned, position)
        };
        // The queue keeps the sender until it uses it.
        let _ = assigned.await;
        position.has_permit = true;
        Permit(self.clone())
    }

    /// Passes a permit to the next attempt.
    fn pass_on(&self) {
        let mut state = self.0.lock();
        match state.waiting.pop() {
            // A position that is dropped at this moment passes the permit on.
            Some(next) => drop(next.send(())),
            None => state.free += 1,
        }
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
