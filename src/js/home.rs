//! Calls that run on the JavaScript thread: their futures are polled here, and an engine's socket is served by Node's own
//! event loop (`turns.rs`), so that a call to the store and back takes no hop between threads.
//!
//! # Behavior
//! A call begins on the JavaScript thread: its future is polled at once. When something on this thread makes it ready again (a
//! reply that the event loop read), it is polled here in the same turn, and its promise is settled at the end of it. When
//! anything else does (a timer, a push, a renewal), it moves to the I/O thread and stays there: that one is never blocked
//! by the user's code.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Wake, Waker};
use std::thread::ThreadId;

use slab::Slab;
use tokio::runtime::Handle;

use super::promise::{Bridge, Job, Shared, lock};
use crate::event_loop::{EventLoop, Socket};

/// The calls of one environment that are at home on its thread.
pub(super) struct Calls {
    thread: ThreadId,
    runtime: Handle,
    ready: Mutex<VecDeque<Arc<Call>>>,
    /// Those whose future is here. Each is kept by whatever will wake it, which the future itself may hold.
    here: Mutex<Slab<Weak<Call>>>,
}

/// A call under way.
struct Call {
    /// `None` while it is polled, and once it has moved away or ended.
    job: Mutex<Place>,
    calls: Arc<Calls>,
    /// Its place among those that are here.
    place: usize,
}

struct Place {
    job: Option<Job>,
    /// It was woken on another thread while it was polled here.
    moves: bool,
    /// It is on the list of those that are ready.
    listed: bool,
}

impl Calls {
    pub(super) fn new(runtime: Handle) -> Arc<Self> {
        Arc::new(Calls {
            thread: std::thread::current().id(),
            runtime,
            ready: Mutex::default(),
            here: Mutex::default(),
        })
    }

    fn is_here(&self) -> bool {
        std::thread::current().id() == self.thread
    }

    /// Begins a call on this thread.
    pub(super) fn begin(self: &Arc<Self>, job: Job) {
        let job = Mutex::new(Place {
            job: Some(job),
            moves: false,
            listed: false,
        });
        let call = {
            let mut here = lock(&self.here);
            let entry = here.vacant_entry();
            let (calls, place) = (self.clone(), entry.key());
            let call = Arc::new(Call { job, calls, place });
            entry.insert(Arc::downgrade(&call));
            call
        };
        call.poll();
    }

    /// Drops every call that is still here: nobody will come round to it any more.
    pub(super) fn end(&self) {
        let here: Vec<_> = lock(&self.here).drain().collect();
        for call in here {
            let job = call.upgrade().and_then(|call| lock(&call.job).job.take());
            drop(job);
        }
        lock(&self.ready).clear();
    }

    /// Whether anything waits to be polled here.
    pub(super) fn any_ready(&self) -> bool {
        !lock(&self.ready).is_empty()
    }

    /// Polls whatever has become ready on this thread. Answers whether anything had.
    pub(super) fn go_on(&self) -> bool {
        let mut any = false;
        loop {
            let next = lock(&self.ready).pop_front();
            let Some(call) = next else { return any };
            any = true;
            lock(&call.job).listed = false;
            call.poll();
        }
    }
}

impl Call {
    fn poll(self: &Arc<Self>) {
        let Some(mut job) = lock(&self.job).job.take() else {
            return;
        };
        let waker = Waker::from(self.clone());
        // Timers and tasks are the I/O thread's.
        let entered = self.calls.runtime.enter();
        let polled = job.as_mut().poll(&mut Context::from_waker(&waker));
        drop(entered);
        if polled.is_ready() {
            return self.leave();
        }
        let mut place = lock(&self.job);
        if std::mem::take(&mut place.moves) {
            drop(place);
            self.leave();
            self.calls.runtime.spawn(job);
        } else {
            place.job = Some(job);
        }
    }

    /// Its future is here no more.
    fn leave(&self) {
        lock(&self.calls.here).try_remove(self.place);
    }
}

impl Wake for Call {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut place = lock(&self.job);
        if self.calls.is_here() {
            if !std::mem::replace(&mut place.listed, true) {
                lock(&self.calls.ready).push_back(self.clone());
            }
        } else if let Some(job) = place.job.take() {
            drop(place);
            self.leave();
            self.calls.runtime.spawn(job);
        } else {
            place.moves = true;
        }
    }
}

/// Node's event loop, as engines see it.
pub(super) struct Home {
    calls: Arc<Calls>,
    shared: Weak<Shared>,
}

impl fmt::Debug for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Home")
    }
}

impl Home {
    pub(super) fn new(calls: Arc<Calls>, shared: &Arc<Shared>) -> Arc<Self> {
        let shared = Arc::downgrade(shared);
        Arc::new(Home { calls, shared })
    }
}

impl EventLoop for Home {
    fn is_here(&self) -> bool {
        self.calls.is_here()
    }

    fn serve(&self, socket: Arc<dyn Socket>) {
        let Some(shared) = self.shared.upgrade() else { return };
        shared.notice(move |env| {
            if let Ok(bridge) = Bridge::get(env)
                && let Some(turns) = &bridge.turns
            {
                turns.serve(&bridge, socket);
            }
        });
    }
}
