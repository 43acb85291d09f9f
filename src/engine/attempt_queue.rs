//! The queue of attempts to acquire that an engine has not begun yet. An engine limits how many attempts are in progress, so that
//! the driver and the servers have no long queues.
//!
//! The queue is first in, first out until the oldest attempt has waited for [`OVERLOAD`]; then the newest goes first. After a
//! stall the queue is full of attempts that are about to time out. In the order of arrival each of them would be sent shortly
//! before its timeout, and so would every later attempt while the load lasts. (Facebook's "adaptive LIFO": Maurer, "Fail at
//! Scale", ACM Queue 13(8), 2015.)

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::OVERLOAD;

/// Issues tickets for attempts, and keeps the queue for them.
#[derive(Debug)]
pub(super) struct AttemptQueue(Mutex<State>);

#[derive(Debug)]
struct State {
    free: usize,
    arrivals: u64,
    waiting: BTreeMap<u64, Waiting>,
}

#[derive(Debug)]
struct Waiting {
    since: Instant,
    ticket: oneshot::Sender<()>,
}

/// The right to make one attempt. Dropping it passes the right to the next attempt.
#[derive(Debug)]
pub(super) struct Ticket(Arc<AttemptQueue>);

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.pass_on();
    }
}

/// A position in the queue. Dropping it leaves the queue.
struct Position {
    queue: Arc<AttemptQueue>,
    arrival: u64,
    has_ticket: bool,
}

impl Drop for Position {
    fn drop(&mut self) {
        if !self.has_ticket && self.queue.0.lock().waiting.remove(&self.arrival).is_none() {
            // The ticket was assigned to this position: pass it on.
            self.queue.pass_on();
        }
    }
}

impl AttemptQueue {
    /// Creates a queue with `size` tickets.
    pub(super) fn new(size: usize) -> Arc<Self> {
        Arc::new(AttemptQueue(Mutex::new(State {
            free: size,
            arrivals: 0,
            waiting: BTreeMap::new(),
        })))
    }

    /// Waits for a ticket. Dropping the future leaves the queue.
    pub(super) async fn ticket(self: &Arc<Self>) -> Ticket {
        let (assigned, mut position) = {
            let mut state = self.0.lock();
            if state.free > 0 {
                state.free -= 1;
                return Ticket(self.clone());
            }
            let (ticket, assigned) = oneshot::channel();
            let arrival = state.arrivals;
            state.arrivals += 1;
            let since = Instant::now();
            state.waiting.insert(arrival, Waiting { since, ticket });
            let position = Position {
                queue: self.clone(),
                arrival,
                has_ticket: false,
            };
            (assigned, position)
        };
        // The queue keeps the sender until it uses it.
        let _ = assigned.await;
        position.has_ticket = true;
        Ticket(self.clone())
    }

    /// Passes a ticket to the next attempt.
    fn pass_on(&self) {
        let mut state = self.0.lock();
        let is_late = |(_, oldest): (&u64, &Waiting)| oldest.since.elapsed() > OVERLOAD;
        let next = match state.waiting.first_key_value().is_some_and(is_late) {
            true => state.waiting.pop_last(),
            false => state.waiting.pop_first(),
        };
        match next {
            // A position that is dropped at this moment passes the ticket on.
            Some((_, next)) => drop(next.ticket.send(())),
            None => state.free += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn enter(
        queue: &Arc<AttemptQueue>,
        number: u32,
        order: &Arc<Mutex<Vec<u32>>>,
    ) -> tokio::task::JoinHandle<()> {
        let (queue, order) = (queue.clone(), order.clone());
        let task = tokio::spawn(async move {
            let _ticket = queue.ticket().await;
            order.lock().push(number);
        });
        tokio::task::yield_now().await;
        task
    }

    async fn order_after(wait: Duration) -> Vec<u32> {
        let (queue, order) = (AttemptQueue::new(1), Arc::default());
        let first = queue.ticket().await;
        let tasks = [
            enter(&queue, 1, &order).await,
            enter(&queue, 2, &order).await,
            enter(&queue, 3, &order).await,
        ];
        tasks[1].abort();
        tokio::time::advance(wait).await;
        drop(first);
        for task in tasks {
            let _ = task.await;
        }
        assert_eq!(queue.0.lock().free, 1);
        order.lock().clone()
    }

    #[tokio::test(start_paused = true)]
    async fn the_order_is_that_of_arrival_until_attempts_are_late() {
        assert_eq!(order_after(Duration::from_millis(100)).await, [1, 3]);
        assert_eq!(order_after(Duration::from_millis(600)).await, [3, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_ticket_of_a_dropped_attempt_goes_to_the_next() {
        let queue = AttemptQueue::new(1);
        let first = queue.ticket().await;
        let mut dropped = Box::pin(queue.ticket());
        assert!(
            tokio::time::timeout(Duration::from_millis(1), &mut dropped)
                .await
                .is_err()
        );
        drop(first);
        drop(dropped);
        assert_eq!(queue.0.lock().free, 1);
        queue.ticket().await;
    }
}
