//! Executor of the calls that run on the JavaScript thread. Node's event loop serves the socket of the engine (`uv_loop.rs`), so
//! that a call to the store and back takes no hop between threads.
//!
//! # Behavior
//! A call starts on the JavaScript thread: its future is polled at once. When this thread wakes it (a reply that the event loop
//! read), it is polled here in the same tick, and its promise is settled at the end of the tick. When another thread wakes it
//! (a timer, a push, a renewal), it moves to the I/O thread and stays there: the code of the user never blocks that thread.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Wake, Waker};
use std::thread::ThreadId;

use slab::Slab;
use tokio::runtime::Handle;

use super::bridge::{Job, Shared, lock};
use crate::event_loop::{EventLoop, Socket};

/// The calls of one environment whose futures are polled on its thread.
pub(super) struct LocalExecutor {
    thread: ThreadId,
    runtime: Handle,
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
    /// `None` while it is polled, and once it has moved to the I/O thread or ended.
    job: Option<Job>,
    /// Another thread woke it while it was polled here.
    moves: bool,
    /// It is in the queue of ready calls.
    queued: bool,
}

impl LocalExecutor {
    pub(super) fn new(runtime: Handle) -> Arc<Self> {
        Arc::new(LocalExecutor {
            thread: std::thread::current().id(),
            runtime,
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
            let mut here = lock(&self.here);
            let entry = here.vacant_entry();
            let (executor, index) = (self.clone(), entry.key());
            let call = Arc::new(Call { state, executor, index });
            entry.insert(Arc::downgrade(&call));
            call
        };
        call.poll();
    }

    /// Drops every call that is still here. The environment has ended, and will not poll them.
    pub(super) fn end(&self) {
        let here: Vec<_> = lock(&self.here).drain().collect();
        for call in here {
            let job = call.upgrade().and_then(|call| lock(&call.state).job.take());
            drop(job);
        }
        lock(&self.ready).clear();
    }

    /// Whether a call is ready to be polled here.
    pub(super) fn has_ready(&self) -> bool {
        !lock(&self.ready).is_empty()
    }

    /// Polls the calls that this thread woke. Returns whether there were any.
    pub(super) fn run_ready(&self) -> bool {
        let mut any = false;
        loop {
            let next = lock(&self.ready).pop_front();
            let Some(call) = next else { return any };
            any = true;
            lock(&call.state).queued = false;
            call.poll();
        }
    }
}

impl Call {
    fn poll(self: &Arc<Self>) {
        let Some(mut job) = lock(&self.state).job.take() else {
            return;
        };
        let waker = Waker::from(self.clone());
        // Timers and tasks belong to the I/O thread.
        let entered = self.executor.runtime.enter();
        let polled = job.as_mut().poll(&mut Context::from_waker(&waker));
        drop(entered);
        if polled.is_ready() {
            return self.leave();
        }
        let mut state = lock(&self.state);
        if std::mem::take(&mut state.moves) {
            drop(state);
            self.leave();
            self.executor.runtime.spawn(job);
        } else {
            state.job = Some(job);
        }
    }

    /// Removes it from the calls whose future is here.
    fn leave(&self) {
        lock(&self.executor.here).try_remove(self.index);
    }
}

impl Wake for Call {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        if self.executor.is_here() {
            if !std::mem::replace(&mut state.queued, true) {
                lock(&self.executor.ready).push_back(self.clone());
            }
        } else if let Some(job) = state.job.take() {
            drop(state);
            self.leave();
            self.executor.runtime.spawn(job);
        } else {
            state.moves = true;
        }
    }
}

/// Node's event loop, as engines see it.
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
