//! These tests need no Node: the executor calls no function of Node-API.

use std::future::poll_fn;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};

use super::super::call;
use super::*;
use crate::error::LockError;
use crate::event_loop::Task;

/// Creates the runtime of the I/O thread.
fn io_runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_time()
        .build()
        .unwrap()
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

/// A socket with pending replies, or one that only receives messages. It counts its reads, each of which wakes the task of the
/// connection.
#[derive(Default)]
struct TestSocket {
    listens: bool,
    is_unused: bool,
    reads: AtomicU64,
    task: Gate,
}

impl Socket for TestSocket {
    #[cfg(unix)]
    fn descriptor(&self) -> std::os::fd::RawFd {
        -1
    }

    fn readable(&self) -> bool {
        self.reads.fetch_add(1, Relaxed);
        let task = self.task.0.lock().waker.clone();
        if let Some(waker) = task {
            waker.wake();
        }
        true
    }

    fn flush(&self) -> bool {
        true
    }

    fn awaits(&self) -> bool {
        self.is_busy()
    }

    fn is_busy(&self) -> bool {
        !self.listens && !self.is_unused
    }

    fn is_watched(&self) -> bool {
        !self.is_unused
    }

    fn is_blocked(&self) -> bool {
        false
    }

    fn end(&self) {}
}

fn event_loop(executor: &Arc<LocalExecutor>) -> Arc<NodeEventLoop> {
    NodeEventLoop::new(executor.clone(), &executor.shared)
}

#[test]
fn a_task_is_polled_by_the_thread_that_wakes_it_and_not_by_spawn() {
    let io = io_runtime();
    let executor = executor(&io);
    let gate = Gate::default();
    let polled = gate.clone();
    let future = poll_fn(move |context| polled.poll(context).map(|_| ()));
    let task = Task::spawn(Some(&*event_loop(&executor)), future);
    assert!(executor.has_ready() && gate.0.lock().polls.is_empty());
    executor.run_ready();
    gate.wake_on_another_thread();
    assert_eq!(gate.polled_here(2), [true, false]);
    gate.open();
    gate.wake();
    assert!(!task.has_ended());
    until("the end of the task", || {
        executor.run_ready();
        task.has_ended()
    });
    // A task has no reply.
    assert!(
        executor
            .shared
            .take_deliveries()
            .iter()
            .all(|one| matches!(one, Delivery::Notice(_)))
    );
}

#[test]
fn a_task_that_wakes_itself_does_not_occupy_this_thread() {
    let io = io_runtime();
    let executor = executor(&io);
    let polls = Arc::new(AtomicU64::new(0));
    let counted = polls.clone();
    let future = poll_fn(move |context| {
        context.waker().wake_by_ref();
        match counted.fetch_add(1, Relaxed) {
            1000.. => Poll::Ready(()),
            _ => Poll::Pending,
        }
    });
    let _task = Task::spawn(Some(&*event_loop(&executor)), future);
    for _ in 0..10 {
        executor.run_ready();
    }
    // Otherwise the first call polls it until it ends.
    let polls = polls.load(Relaxed);
    assert!((1..1000).contains(&polls), "{polls}");
}

#[test]
fn a_cancelled_task_and_a_panicking_task_end() {
    let io = io_runtime();
    let executor = executor(&io);
    let event_loop = event_loop(&executor);
    let gate = Gate::default();
    let polled = gate.clone();
    let cancelled = Task::spawn(
        Some(&*event_loop),
        poll_fn(move |context| polled.poll(context).map(|_| ())),
    );
    let panicking = Task::spawn(Some(&*event_loop), async { panic!("as a bug would") });
    executor.run_ready();
    assert!(panicking.has_ended() && !cancelled.has_ended());
    cancelled.cancel();
    executor.run_ready();
    assert!(cancelled.has_ended());
    assert_eq!(Arc::strong_count(&gate.0), 1, "the future is dropped");
    assert!(executor.calls.lock().is_empty());
}

#[test]
fn the_io_thread_polls_tasks_and_sockets_of_a_blocked_thread() {
    let io = io_runtime();
    let executor = executor(&io);
    let socket = Arc::new(TestSocket::default());
    let gate = Gate::default();
    let polled = gate.clone();
    let event_loop = event_loop(&executor);
    let future = poll_fn(move |context| polled.poll(context).map(|_| ()));
    let _task = Task::spawn(Some(&*event_loop), future);
    // This thread is blocked from now on.
    assert_eq!(gate.polled_here(1), [false]);
    event_loop.watch(Arc::downgrade(&socket) as _);
    until("a read of the socket", || socket.reads.load(Relaxed) > 0);
    gate.wake();
    assert_eq!(gate.polled_here(2), [false, false]);
}

#[test]
fn the_io_thread_reads_no_socket_while_this_thread_ticks() {
    let io = io_runtime();
    let executor = executor(&io);
    let socket = Arc::new(TestSocket::default());
    executor.watch();
    event_loop(&executor).watch(Arc::downgrade(&socket) as _);
    let started = Instant::now();
    let mut longest = Duration::ZERO;
    while started.elapsed() < Duration::from_millis(200) {
        let tick = Instant::now();
        executor.run_ready();
        thread::sleep(Duration::from_millis(1));
        longest = longest.max(tick.elapsed());
    }
    // A machine that stands still stops this thread as the user's code does.
    if longest < Duration::from_millis(15) {
        assert_eq!(socket.reads.load(Relaxed), 0);
    }
}

/// Returns how often a runtime wakes up in a second, once its watchdog sleeps.
fn wakeups(io: &Runtime, socket: TestSocket) -> (u64, Arc<TestSocket>) {
    let executor = executor(io);
    let (event_loop, task) = (event_loop(&executor), socket.task.clone());
    let socket = Arc::new(socket);
    event_loop.watch(Arc::downgrade(&socket) as _);
    let driver = poll_fn(move |context| task.poll(context).map(|_| ()));
    let _task = Task::spawn(Some(&*event_loop), driver);
    executor.run_ready();
    until("the watchdog sleeps", || executor.watchdog.is_asleep());
    let parks = || io.metrics().worker_park_count(0);
    let before = parks();
    socket.reads.store(0, Relaxed);
    thread::sleep(Duration::from_secs(1));
    (parks() - before, socket)
}

#[test]
fn a_sleeping_watchdog_reads_a_socket_that_only_listens_a_few_times_per_second() {
    let io = io_runtime();
    let socket = TestSocket {
        listens: true,
        ..TestSocket::default()
    };
    let (_, socket) = wakeups(&io, socket);
    // Fewer on a machine that stands still.
    let reads = socket.reads.load(Relaxed);
    assert!((1..=5).contains(&reads), "{reads}");
}

#[test]
fn a_sleeping_watchdog_reads_a_socket_although_this_thread_ticks_now_and_then() {
    let io = io_runtime();
    let executor = executor(&io);
    let socket = Arc::new(TestSocket {
        listens: true,
        ..TestSocket::default()
    });
    executor.watch();
    event_loop(&executor).watch(Arc::downgrade(&socket) as _);
    until("the watchdog sleeps", || executor.watchdog.is_asleep());
    socket.reads.store(0, Relaxed);
    for _ in 0..20 {
        executor.run_ready();
        thread::sleep(Duration::from_millis(100));
    }
    assert!(socket.reads.load(Relaxed) > 0);
}

#[test]
fn the_io_thread_of_an_idle_process_sleeps() {
    let io = io_runtime();
    let socket = TestSocket {
        is_unused: true,
        ..TestSocket::default()
    };
    let (wakeups, socket) = wakeups(&io, socket);
    // It may go to sleep after the count has begun.
    assert!(wakeups <= 2 && socket.reads.load(Relaxed) == 0, "{wakeups}");
}

#[test]
fn work_wakes_a_sleeping_watchdog() {
    let io = io_runtime();
    let executor = executor(&io);
    executor.watch();
    until("the watchdog sleeps", || executor.watchdog.is_asleep());
    let gate = Gate::default();
    executor.start(gate.job());
    gate.wake();
    assert_eq!(gate.polled_here(2), [true, false]);
}
