//! The state that the JavaScript thread and the I/O thread of an environment share, and the I/O thread's main loop.
//!
//! # Behavior
//! Calls go to the I/O thread through an inbox that is drained once per wake-up. Results come back through an outbox, and one
//! wake-up of the event loop settles every promise that is ready. A thread hop costs more than the rest of a call, so all calls
//! that are ready at the same time share one.
//!
//! A call that has ended is pushed as a whole: its allocation holds the future, then the result. The flusher runs after all tasks that
//! were ready in the same pass, and calls one threadsafe function, unless an earlier call of it is pending.

use std::collections::HashMap;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::Acquire, Ordering::Release};
use std::thread::ThreadId;

use futures_util::FutureExt;
use napi::{Env, sys};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::Bridge;
use super::call::{self, Job};

type Task = Box<dyn FnOnce(&Env, &Rc<Bridge>) + Send>;

/// Work for the JavaScript thread.
pub(super) enum Delivery {
    /// A call that has ended, for which the event loop was kept alive.
    Reply(Job),
    /// Anything else.
    Notice(Task),
}

/// A reference to a JavaScript value. Only the JavaScript thread may delete it.
#[derive(Clone, Copy)]
pub(super) struct Reference(pub(super) sys::napi_ref);

// SAFETY: other threads only move it.
unsafe impl Send for Reference {}
// SAFETY: as above.
unsafe impl Sync for Reference {}

/// The questions to JavaScript without an answer, by number.
#[derive(Default)]
pub(super) struct Questions {
    pub last: u32,
    pub waiting: HashMap<u32, oneshot::Sender<Result<String, String>>>,
}

/// The threadsafe function that wakes the event loop.
struct LoopWaker(sys::napi_threadsafe_function);

// SAFETY: Node-API lets any thread call a threadsafe function.
unsafe impl Send for LoopWaker {}

/// The state that the two threads share.
pub(in crate::js) struct Shared {
    inbox: Mutex<Vec<Job>>,
    arrived: Notify,
    outbox: Mutex<Vec<Delivery>>,
    ready: Notify,
    /// Whether the event loop has been woken and has not run its callback yet.
    woken: AtomicBool,
    /// The references that the JavaScript thread deletes next time.
    discarded: Mutex<Vec<Reference>>,
    /// `None` once the environment is being torn down. A caller holds the lock.
    waker: Mutex<Option<LoopWaker>>,
    stop: Notify,
    /// The questions that JavaScript has not answered.
    pub(super) questions: Mutex<Questions>,
    /// The JavaScript thread, and whether its event loop checks the outbox before it sleeps.
    thread: ThreadId,
    checks_outbox: AtomicBool,
}

impl Shared {
    /// Creates the state on the JavaScript thread. `function` wakes its event loop, and is live until [`Shared::stop`].
    pub(super) fn new(function: sys::napi_threadsafe_function) -> Arc<Self> {
        Arc::new(Shared {
            inbox: Mutex::default(),
            arrived: Notify::new(),
            outbox: Mutex::default(),
            ready: Notify::new(),
            woken: AtomicBool::new(false),
            discarded: Mutex::default(),
            waker: Mutex::new(Some(LoopWaker(function))),
            stop: Notify::new(),
            questions: Mutex::default(),
            thread: std::thread::current().id(),
            checks_outbox: AtomicBool::new(false),
        })
    }

    /// Starts a future on the I/O thread.
    pub(super) fn submit(&self, job: Job) {
        self.inbox.lock().push(job);
        self.arrived.notify_one();
    }

    /// Runs a task on the JavaScript thread soon.
    pub(super) fn deliver(&self, delivery: Delivery) {
        self.outbox.lock().push(delivery);
        if !(self.checks_outbox.load(Acquire) && std::thread::current().id() == self.thread) {
            self.ready.notify_one();
        }
    }

    /// Runs `task` on the JavaScript thread soon, without keeping the event loop alive for it.
    pub(super) fn notice(&self, task: impl FnOnce(&Env, &Rc<Bridge>) + Send + 'static) {
        self.deliver(Delivery::Notice(Box::new(task)));
    }

    /// Deletes a reference the next time that the JavaScript thread runs tasks.
    pub(super) fn discard(&self, discarded: Reference) {
        self.discarded.lock().push(discarded);
    }

    /// Waits until the event loop has run the tasks that were delivered before, or until it ends.
    pub(in crate::js) async fn delivered(&self) {
        let (ran, has_run) = oneshot::channel();
        self.notice(move |_, _| {
            let _ = ran.send(());
        });
        let _ = has_run.await;
    }

    /// Wakes the event loop, unless it has been woken already.
    pub(super) fn wake(&self) {
        if self.woken.swap(true, AcqRel) {
            return;
        }
        if let Some(LoopWaker(function)) = &*self.waker.lock() {
            // SAFETY: the function is live while the lock holds `Some`.
            unsafe {
                sys::napi_call_threadsafe_function(
                    *function,
                    ptr::null_mut(),
                    sys::ThreadsafeFunctionCallMode::nonblocking,
                )
            };
        }
    }

    /// Records that the event loop runs its callback: the next [`Shared::wake`] wakes it again.
    pub(super) fn woke_up(&self) {
        self.woken.store(false, Release);
    }

    /// From now on the event loop checks the outbox before it sleeps.
    pub(super) fn check_outbox_before_sleep(&self) {
        self.checks_outbox.store(true, Release);
    }

    /// Whether the JavaScript thread has a task to run.
    pub(super) fn has_deliveries(&self) -> bool {
        !self.outbox.lock().is_empty()
    }

    /// Takes the tasks out of the outbox.
    pub(super) fn take_deliveries(&self) -> Vec<Delivery> {
        std::mem::take(&mut *self.outbox.lock())
    }

    /// Takes the references that the JavaScript thread must delete.
    pub(super) fn take_discarded(&self) -> Vec<Reference> {
        std::mem::take(&mut *self.discarded.lock())
    }

    /// Ends [`Shared::serve`]. The event loop is not woken any more.
    pub(super) fn stop(&self) {
        *self.waker.lock() = None;
        // Their callers get an error.
        self.questions.lock().waiting.clear();
        self.stop.notify_one();
    }

    /// Drops all futures and tasks, after the end of the I/O thread.
    pub(super) fn clear(&self) {
        self.outbox.lock().clear();
        self.inbox.lock().clear();
    }

    /// The I/O thread's main loop: spawns the futures of the inbox, and wakes the event loop for the outbox.
    pub(super) async fn serve(self: Arc<Self>) {
        let deliveries = self.clone();
        // The flusher runs after all tasks that were ready in the same pass: their results leave in one wake-up.
        tokio::spawn(FutureExt::boxed(async move {
            loop {
                deliveries.ready.notified().await;
                if !deliveries.outbox.lock().is_empty() {
                    deliveries.wake();
                }
            }
        }));
        loop {
            tokio::select! {
                biased;
                () = self.stop.notified() => return,
                () = self.arrived.notified() => {}
            }
            let jobs = std::mem::take(&mut *self.inbox.lock());
            for job in jobs {
                tokio::spawn(call::run(job, self.clone()));
            }
        }
    }
}
