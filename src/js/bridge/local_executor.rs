//! Executor of the calls and tasks that run on the JavaScript thread. Node's event loop polls the tasks of an engine and, where it
//! can, its sockets (`uv_loop/`), so that a call to the store needs no switch between threads.
//!
//! # Behavior
//! A call starts on the JavaScript thread: its future is polled at once. When this thread wakes it (a reply or a message that the
//! event loop read), it is polled here in the same tick, and its promise is settled at the end of the tick. When another thread
//! wakes it (a timer, a renewal), it is polled on the I/O thread, because the user's code never blocks
//! that thread.
//!
//! The same rules apply to the tasks of an engine. While the user's code blocks this thread, the I/O thread polls what is ready here
//! (`watchdog.rs`).
//!
//! Calls begin here once an engine uses Node's event loop (`event_loop.rs`): for a socket (Redis, PostgreSQL), or for a task (these,
//! MySQL, MariaDB). Their futures are boxed and moved on every call, so rare data has a separate box.

mod watchdog;

use std::collections::VecDeque;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::ThreadId;

use futures_util::FutureExt;
use parking_lot::Mutex;
use slab::Slab;
use tokio::runtime::Handle;

use self::watchdog::Watchdog;
use super::call::Job;
use super::shared::{Delivery, Shared};
use crate::event_loop::{EventLoop, Socket};

/// The calls and tasks of one environment whose futures are polled on its thread.
pub(super) struct LocalExecutor {
    thread: ThreadId,
    runtime: Handle,
    shared: Arc<Shared>,
    ready: Mutex<VecDeque<Arc<Call>>>,
    /// The number of ticks in which this thread polled what was ready.
    ticks: AtomicU64,
    watchdog: Watchdog,
    /// The calls and tasks in progress. Their wakers own them, and the future may own a waker.
    calls: Mutex<Slab<Weak<Call>>>,
}

/// The future of a call or of a task.
enum Work {
    Call(Job),
    /// A task of an engine.
    Task(Pin<Box<dyn Future<Output = ()> + Send>>),
}

impl Work {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        match self {
            Work::Call(job) => job.as_mut().poll(context),
            Work::Task(future) => future.as_mut().poll(context),
        }
    }
}

/// A call or a task in progress.
struct Call {
    state: Mutex<State>,
    executor: Arc<LocalExecutor>,
    /// Its index in `calls`.
    index: usize,
}

#[derive(Default)]
struct State {
    /// `None` while it is polled, and after it has ended.
    work: Option<Work>,
    /// It is to be polled on this thread, and on the I/O thread.
    queued: Queued,
    /// Both threads were to poll the call at the same time: the I/O thread polls it once more.
    again: bool,
    /// The environment has ended.
    has_ended: bool,
}

#[derive(Default)]
struct Queued {
    here: bool,
    on_io_thread: bool,
}

impl LocalExecutor {
    /// Creates the executor of the current thread. `runtime` is that of the I/O thread.
    pub(super) fn new(runtime: Handle, shared: Arc<Shared>) -> Arc<Self> {
        Arc::new(LocalExecutor {
            thread: std::thread::current().id(),
            runtime,
            shared,
            ready: Mutex::default(),
            ticks: AtomicU64::new(0),
            watchdog: Watchdog::default(),
            calls: Mutex::default(),
        })
    }

    fn is_here(&self) -> bool {
        std::thread::current().id() == self.thread
    }

    /// Starts a call on this thread.
    pub(super) fn start(self: &Arc<Self>, job: Job) {
        self.add(Work::Call(job)).poll();
    }

    fn add(self: &Arc<Self>, work: Work) -> Arc<Call> {
        let state = Mutex::new(State {
            work: Some(work),
            ..State::default()
        });
        let mut calls = self.calls.lock();
        let entry = calls.vacant_entry();
        let (executor, index) = (self.clone(), entry.key());
        let call = Arc::new(Call { state, executor, index });
        entry.insert(Arc::downgrade(&call));
        call
    }

    /// Runs work on the I/O thread.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(work.boxed());
    }

    /// Drops every call that is in progress, at the end of the environment.
    pub(super) fn end(&self) {
        let calls: Vec<_> = self.calls.lock().drain().collect();
        for call in calls.iter().filter_map(Weak::upgrade) {
            let mut state = call.state.lock();
            // The I/O thread drops a call that it polls now.
            state.has_ended = true;
            let work = state.work.take();
            drop(state);
            drop(work);
        }
        self.ready.lock().clear();
    }

    /// Whether a call is ready to be polled here.
    pub(super) fn has_ready(&self) -> bool {
        !self.ready.lock().is_empty()
    }

    /// Polls what this thread woke. Returns whether there was anything.
    pub(super) fn run_ready(&self) -> bool {
        self.ticks.fetch_add(1, Relaxed);
        self.poll_ready()
    }

    /// Polls each call that is ready now. What this wakes is polled the next time: a task may wake itself in each poll.
    fn poll_ready(&self) -> bool {
        let count = self.ready.lock().len();
        for _ in 0..count {
            let next = self.ready.lock().pop_front();
            let Some(call) = next else { break };
            call.state.lock().queued.here = false;
            call.poll();
        }
        count > 0
    }
}

impl Call {
    /// Polls the future, unless the other thread does.
    fn poll(self: &Arc<Self>) {
        let mut work = {
            let mut state = self.state.lock();
            let Some(work) = state.work.take() else {
                state.again = true;
                return;
            };
            work
        };
        let waker = Waker::from(self.clone());
        // Timers and tasks belong to the I/O thread.
        let entered = self.executor.runtime.enter();
        let polled = work.poll(&mut Context::from_waker(&waker));
        drop(entered);
        // The future may have sent a request, whose reply must not wait for a blocked thread.
        self.executor.watchdog.wake();
        if polled.is_ready() {
            self.executor.calls.lock().try_remove(self.index);
            if let Work::Call(job) = work {
                self.executor.shared.deliver(Delivery::Reply(job));
            }
            return;
        }
        let mut state = self.state.lock();
        if state.has_ended {
            drop(state);
            return drop(work);
        }
        state.work = Some(work);
        if std::mem::take(&mut state.again) {
            self.poll_on_io_thread(&mut state);
        }
    }

    fn poll_on_io_thread(self: &Arc<Self>, state: &mut State) {
        if !std::mem::replace(&mut state.queued.on_io_thread, true) {
            let call = self.clone();
            self.executor.spawn(async move {
                call.state.lock().queued.on_io_thread = false;
                call.poll();
            });
        }
    }
}

impl Wake for Call {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if !self.executor.is_here() {
            self.poll_on_io_thread(&mut state);
        } else if !std::mem::replace(&mut state.queued.here, true) {
            self.executor.ready.lock().push_back(self.clone());
            self.executor.watchdog.wake();
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

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        if let Some(shared) = self.shared.upgrade() {
            shared.notice(|_, bridge| {
                if let Some(uv_loop) = &bridge.uv_loop {
                    uv_loop.activate(bridge);
                }
            });
        }
        let work = async move {
            if AssertUnwindSafe(future).catch_unwind().await.is_err() {
                tracing::error!(
                    "a bug in holdfast: a task of an engine panicked; its service rejects every call: connect a new one"
                );
            }
        };
        self.executor.watch();
        // Not polled here: the caller may hold a lock.
        self.executor.add(Work::Task(Box::pin(work))).wake();
    }

    fn watch(&self, socket: Weak<dyn Socket>) {
        self.executor.watchdog.add(socket);
    }
}

#[cfg(test)]
mod tests;
