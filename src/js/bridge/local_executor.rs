//! Executor of the calls that run on the JavaScript thread. Node's event loop polls the socket of the engine (`uv_loop.rs`), so
//! that a call to the store needs no hop between threads.
//!
//! # Behavior
//! A call starts on the JavaScript thread: its future is polled at once. When this thread wakes it (a reply that the event loop
//! read), it is polled here in the same tick, and its promise is settled at the end of the tick. When another thread wakes it
//! (a timer, a push, a renewal), it moves to the I/O thread and stays there, because the user's code never blocks that thread.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Weak};
use std::task::{Context, Wake, Waker};
use std::thread::ThreadId;

use parking_lot::Mutex;
use slab::Slab;
use tokio::runtime::Handle;

use super::call::{self, Job};
use super::shared::{Delivery, Shared};
use crate::event_loop::{EventLoop, Socket};

/// The calls of one environment whose futures are polled on its thread.
pub(super) struct LocalExecutor {
    thread: ThreadId,
    runtime: Handle,
    shared: Arc<Shared>,
    ready: Mutex<VecDeque<Arc<Call>>>,
    /// The calls whose future is on this thread. Their wakers own them, and the future may own a waker.
    here: Mutex<Slab<Weak<Call>>>,
}

/// A call in progress.
struct Call {
    state: Mutex<State>,
    executor: Arc<LocalExecutor>,
    /// Its index in `here`.
    index: usize,
}

struct State {
    /// `None` while the call is polled, and after it has ended or moved to the I/O thread.
    job: Option<Job>,
    /// Another thread woke the call while it was polled here.
    moves: bool,
    /// The call is in the queue of ready calls.
    queued: bool,
}

impl LocalExecutor {
    /// Creates the executor of the current thread. `runtime` is that of the I/O thread.
    pub(super) fn new(runtime: Handle, shared: Arc<Shared>) -> Arc<Self> {
        Arc::new(LocalExecutor {
            thread: std::thread::current().id(),
            runtime,
            shared,
            ready: Mutex::default(),
            here: Mutex::default(),
        })
    }

    fn is_here(&self) -> bool {
        std::thread::current().id() == self.thread
    }

    /// Starts a call on this thread.
    pub(super) fn start(self: &Arc<Self>, job: Job) {
        let state = Mutex::new(State {
            job: Some(job),
            moves: false,
            queued: false,
        });
        let call = {
            let mut here = self.here.lock();
            let entry = here.vacant_entry();
            let (executor, index) = (self.clone(), entry.key());
            let call = Arc::new(Call { state, executor, index });
            entry.insert(Arc::downgrade(&call));
            call
        };
        call.poll();
    }

    /// Runs work on the I/O thread.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(work);
    }

    fn run_on_io_thread(&self, job: Job) {
        self.spawn(call::run(job, self.shared.clone()));
    }

    /// Drops every call that is still here, at the end of the environment.
    pub(super) fn end(&self) {
        let here: Vec<_> = self.here.lock().drain().collect();
        for call in here {
            let job = call.upgrade().and_then(|call| call.state.lock().job.take());
            drop(job);
        }
        self.ready.lock().clear();
    }

    /// Whether a call is ready to be polled here.
    pub(super) fn has_ready(&self) -> bool {
        !self.ready.lock().is_empty()
    }

    /// Polls the calls that this thread woke. Returns whether there were any.
    pub(super) fn run_ready(&self) -> bool {
        let mut any = false;
        loop {
            let next = self.ready.lock().pop_front();
            let Some(call) = next else { return any };
            any = true;
            call.state.lock().queued = false;
            call.poll();
        }
    }
}

impl Call {
    /// Polls the future. A call that another thread woke in the meantime moves to the I/O thread.
    fn poll(self: &Arc<Self>) {
        let Some(mut job) = self.state.lock().job.take() else {
            return;
        };
        let waker = Waker::from(self.clone());
        // Timers and tasks belong to the I/O thread.
        let entered = self.executor.runtime.enter();
        let polled = job.as_mut().poll(&mut Context::from_waker(&waker));
        drop(entered);
        if polled.is_ready() {
            self.leave();
            return self.executor.shared.deliver(Delivery::Reply(job));
        }
        let mut state = self.state.lock();
        if std::mem::take(&mut state.moves) {
            drop(state);
            self.leave();
            self.executor.run_on_io_thread(job);
        } else {
            state.job = Some(job);
        }
    }

    /// Removes the call from those whose future is here.
    fn leave(&self) {
        self.executor.here.lock().try_remove(self.index);
    }
}

impl Wake for Call {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if self.executor.is_here() {
            if !std::mem::replace(&mut state.queued, true) {
                self.executor.ready.lock().push_back(self.clone());
            }
        } else if let Some(job) = state.job.take() {
            drop(state);
            self.leave();
            self.executor.run_on_io_thread(job);
        } else {
            state.moves = true;
        }
    }
}

/// Node's event loop, for engines.
pub(super) struct NodeEventLoop {
    executor: Arc<LocalExecutor>,
    shared: Weak<Shared>,
}

impl fmt::Debug for NodeEventLoop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeEventLoop")
    }
}

impl NodeEventLoop {
    pub(super) fn new(executor: Arc<LocalExecutor>, shared: &Arc<Shared>) -> Arc<Self> {
        let shared = Arc::downgrade(shared);
        Arc::new(NodeEventLoop { executor, shared })
    }
}

impl EventLoop for NodeEventLoop {
    fn is_here(&self) -> bool {
        self.executor.is_here()
    }

    fn serve(&self, socket: Arc<dyn Socket>) {
        let Some(shared) = self.shared.upgrade() else { return };
        shared.notice(move |_, bridge| {
            if let Some(uv_loop) = &bridge.uv_loop {
                uv_loop.serve(bridge, socket);
            }
        });
    }
}

/// These tests need no Node: the executor calls no function of Node-API.
#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;
    use std::thread;
    use std::time::{Duration, Instant};

    use tokio::runtime::{Builder, Runtime};

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

    #[test]
    fn a_ready_future_ends_at_its_start() {
        let io = io_runtime();
        let executor = executor(&io);
        let gate = Gate::default();
        gate.open();
        executor.start(gate.job());
        assert_eq!(gate.polled_here(1), [true]);
        assert!(!executor.has_ready());
        assert!(executor.here.lock().is_empty());
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
        assert!(executor.here.lock().is_empty());
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
        assert!(executor.here.lock().is_empty());
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
        assert!(executor.here.lock().is_empty());
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
}
