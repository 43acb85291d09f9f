//! These tests need no Node: the executor calls no function of Node-API.

use std::future::poll_fn;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};

use super::super::call;
use super::*;
use crate::error::LockError;

/// Creates the runtime of the I/O thread.
fn io_runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).build().unwrap()
}

fn executor(io: &Runtime) -> Arc<LocalExecutor> {
    // No thread wakes the event loop.
    LocalExecutor::new(io.handle().clone(), Shared::new(std::ptr::null_mut()))
}

/// A future that is pending until it is opened, and records the threads that poll it.
#[derive(Clone, Default)]
struct Gate(Arc<Mutex<GateState>>);

#[derive(Default)]
struct GateState {
    is_open: bool,
    waker: Option<Waker>,
    polls: Vec<ThreadId>,
}

impl Gate {
    fn poll(&self, context: &Context<'_>) -> Poll<Result<(), LockError>> {
        let mut state = self.0.lock();
        state.polls.push(thread::current().id());
        state.waker = Some(context.waker().clone());
        if state.is_open {
            Poll::Ready(Ok(()))
        } else {
            Poll::Pending
        }
    }

    fn job(&self) -> Job {
        let gate = self.clone();
        call::new(poll_fn(move |context| gate.poll(context)), |_, _, _| {}, false)
    }

    fn open(&self) {
        self.0.lock().is_open = true;
    }

    fn wake(&self) {
        let waker = self.0.lock().waker.clone();
        waker.unwrap().wake();
    }

    fn wake_on_another_thread(&self) {
        let gate = self.clone();
        thread::spawn(move || gate.wake()).join().unwrap();
    }

    /// Waits for a number of polls, and returns whether each was on this thread.
    fn polled_here(&self, count: usize) -> Vec<bool> {
        let started = Instant::now();
        while self.0.lock().polls.len() < count && started.elapsed() < Duration::from_secs(60) {
            thread::sleep(Duration::from_millis(1));
        }
        let this = thread::current().id();
        self.0.lock().polls.iter().map(|thread| *thread == this).collect()
    }
}

/// Waits until a condition holds: the I/O thread may be in the middle of a poll.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(60), "not within 60 s: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until no call is in progress.
fn until_ended(executor: &LocalExecutor) {
    until("the end of the calls", || {
        executor.run_ready();
        executor.calls.lock().is_empty()
    });
}

#[test]
fn a_ready_future_ends_at_its_start() {
    let io = io_runtime();
    let executor = executor(&io);
    let gate = Gate::default();
    gate.open();
    executor.start(gate.job());
    assert_eq!(gate.polled_here(1), [true]);
    assert!(!executor.has_ready());
    assert!(executor.calls.lock().is_empty());
}

#[test]
fn a_call_that_this_thread_wakes_is_polled_here() {
    let io = io_runtime();
    let executor = executor(&io);
    let gate = Gate::default();
    executor.start(gate.job());
    assert!(!executor.run_ready());
    gate.wake();
    gate.wake();
    assert!(executor.has_ready());
    assert_eq!(gate.polled_here(1), [true]);
    assert!(executor.run_ready());
    assert_eq!(gate.polled_here(2), [true, true]);
    assert!(!executor.has_ready());

    gate.open();
    gate.wake();
    assert!(executor.run_ready());
    assert_eq!(gate.polled_here(3), [true, true, true]);
    assert!(executor.calls.lock().is_empty());
}

#[test]
fn a_call_that_another_thread_wakes_moves_to_the_io_thread() {
    let io = io_runtime();
    let executor = executor(&io);
    let gate = Gate::default();
    executor.start(gate.job());
    gate.open();
    gate.wake_on_another_thread();
    assert_eq!(gate.polled_here(2), [true, false]);
    assert!(!executor.has_ready());
    until_ended(&executor);
}

#[test]
fn a_call_that_another_thread_wakes_during_its_poll_moves_after_the_poll() {
    let io = io_runtime();
    let executor = executor(&io);
    let gate = Gate::default();
    let polled = gate.clone();
    let future = poll_fn(move |context| {
        let result = polled.poll(context);
        if result.is_pending() {
            polled.open();
            polled.wake_on_another_thread();
        }
        result
    });
    executor.start(call::new(future, |_, _, _| {}, false));
    assert_eq!(gate.polled_here(2), [true, false]);
    assert!(!executor.has_ready());
    until_ended(&executor);
}

#[test]
fn a_call_that_this_thread_wakes_again_comes_back() {
    let io = io_runtime();
    let executor = executor(&io);
    let gate = Gate::default();
    executor.start(gate.job());
    gate.wake_on_another_thread();
    assert_eq!(gate.polled_here(2), [true, false]);
    gate.open();
    gate.wake();
    // If the I/O thread is still at the end of its poll, it polls once more.
    until_ended(&executor);
    assert_eq!(gate.polled_here(3).len(), 3);
}

#[test]
fn a_call_that_both_threads_wake_ends_once_and_no_wake_up_is_lost() {
    let io = io_runtime();
    for _ in 0..200 {
        let executor = executor(&io);
        let gate = Gate::default();
        executor.start(gate.job());
        let other = gate.clone();
        let thread = thread::spawn(move || {
            (0..20).for_each(|_| other.wake());
            other.open();
            other.wake();
        });
        for _ in 0..20 {
            gate.wake();
            executor.run_ready();
        }
        thread.join().unwrap();
        until_ended(&executor);
        let mut deliveries = 0;
        until("the result", || {
            deliveries += executor.shared.take_deliveries().len();
            deliveries > 0
        });
        assert_eq!(deliveries, 1);
    }
}

#[test]
fn the_end_drops_a_call_that_the_io_thread_polls() {
    let io = io_runtime();
    let executor = executor(&io);
    let gate = Gate::default();
    let (polled, this, meanwhile) = (gate.clone(), thread::current().id(), executor.clone());
    let future = poll_fn(move |context| {
        let result = polled.poll(context);
        if thread::current().id() != this {
            meanwhile.end();
        }
        result
    });
    executor.start(call::new(future, |_, _, _| {}, false));
    gate.wake_on_another_thread();
    assert_eq!(gate.polled_here(2), [true, false]);
    // The gate is in the future, too.
    until("the future is dropped", || Arc::strong_count(&gate.0) == 1);
}

#[test]
fn the_end_drops_the_calls_that_are_here() {
    let io = io_runtime();
    let executor = executor(&io);
    let gates = [Gate::default(), Gate::default()];
    for gate in &gates {
        executor.start(gate.job());
    }
    gates[0].wake();
    executor.end();
    assert!(!executor.has_ready());
    for gate in &gates {
        // The future is dropped although the gate still has its waker.
        assert_eq!(Arc::strong_count(&gate.0), 1);
    }
}
