//! The one bridge between a Rust future and a promise.
//!
//! # Behavior
//! Each JavaScript environment (the main thread, a worker) has one native I/O thread with a current-thread runtime.
//! Calls go there through an inbox that is drained once per wake-up; results come back through an outbox, and one
//! wake-up of the event loop settles every promise that is ready. A thread hop costs more than all the rest of a call,
//! so it is shared by whatever is ready at the same time.
//!
//! The event loop is held open while calls are outstanding, and by nothing else: leases, events and signs of life never
//! keep a process from exiting.

use std::cell::RefCell;
use std::ffi::c_void;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::ptr;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};

use futures_util::FutureExt;
use napi::{Env, sys};
use tokio::sync::Notify;

use super::abort::Groups;
#[cfg(unix)]
use super::home::{Calls, Home};
use super::memory::{Burst, return_memory};
#[cfg(unix)]
use super::turns::Turns;
use super::value::{Answer, Thrown, Value};
use crate::error::{EngineError, LockError};
use crate::event_loop::EventLoop;

pub(super) type Job = Pin<Box<dyn Future<Output = ()> + Send>>;
type Task = Box<dyn FnOnce(&Env) + Send>;

/// Work for the JavaScript thread.
enum Delivery {
    /// The answer to a call: the event loop was held open for it.
    Reply(Task),
    /// Anything else.
    Notice(Task),
}

/// What only the JavaScript thread may delete.
pub(super) enum Discarded {
    Reference(sys::napi_ref),
    Context(sys::napi_async_context),
}

// SAFETY: off the JavaScript thread it is only ever moved.
unsafe impl Send for Discarded {}

/// What the two threads share.
pub(super) struct Shared {
    inbox: Mutex<Vec<Job>>,
    arrived: Notify,
    outbox: Mutex<Vec<Delivery>>,
    ready: Notify,
    /// Whether the event loop has been woken and has not come round yet.
    signalled: AtomicBool,
    /// What to delete when the JavaScript thread comes round.
    discarded: Mutex<Vec<Discarded>>,
    /// `None` once the environment is being torn down; whoever calls it holds the lock.
    doorbell: Mutex<Option<Doorbell>>,
    stop: Notify,
    /// The JavaScript thread, and whether its event loop looks at the outbox before it sleeps.
    thread: ThreadId,
    turns: AtomicBool,
}

/// The threadsafe function that wakes the event loop.
struct Doorbell(sys::napi_threadsafe_function);

// SAFETY: Node-API lets any thread call a threadsafe function.
unsafe impl Send for Doorbell {}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn deliver(&self, delivery: Delivery) {
        lock(&self.outbox).push(delivery);
        if !(self.turns.load(Acquire) && std::thread::current().id() == self.thread) {
            self.ready.notify_one();
        }
    }

    /// Has `task` run on the JavaScript thread soon, without holding the event loop open for it.
    pub(super) fn notice(&self, task: impl FnOnce(&Env) + Send + 'static) {
        self.deliver(Delivery::Notice(Box::new(task)));
    }

    /// Has something deleted the next time the JavaScript thread comes round.
    pub(super) fn discard(&self, discarded: Discarded) {
        lock(&self.discarded).push(discarded);
    }

    /// Wakes the event loop, unless it has been woken and has not come round yet.
    pub(super) fn ring(&self) {
        if self.signalled.swap(true, AcqRel) {
            return;
        }
        if let Some(Doorbell(function)) = &*lock(&self.doorbell) {
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
}

/// The JavaScript thread's end of the bridge.
pub(super) struct Bridge {
    shared: Arc<Shared>,
    function: sys::napi_threadsafe_function,
    outstanding: RefCell<u32>,
    burst: Burst,
    thread: RefCell<Option<JoinHandle<()>>>,
    /// The calls that are at home on this thread.
    #[cfg(unix)]
    pub(super) calls: Arc<Calls>,
    #[cfg(unix)]
    pub(super) turns: Option<Turns>,
    /// The callers' abort signals.
    pub(super) signals: RefCell<Groups>,
}

thread_local! {
    /// The bridges of this thread's environments, made by the first call in each. An addon that is loaded again (a test
    /// runner that clears the module cache) gets an environment of its own on the same thread.
    static BRIDGES: RefCell<Vec<(sys::napi_env, Rc<Bridge>)>> = RefCell::default();
}

fn bridge_of(env: sys::napi_env) -> Option<Rc<Bridge>> {
    // There is one, as a rule.
    BRIDGES.with_borrow(|bridges| {
        bridges
            .iter()
            .find(|(of, _)| *of == env)
            .map(|(_, bridge)| bridge.clone())
    })
}

impl Bridge {
    /// The bridge of this environment; the first call starts its I/O thread.
    pub(super) fn get(env: &Env) -> Answer<Rc<Bridge>> {
        if let Some(bridge) = bridge_of(env.raw()) {
            return Ok(bridge);
        }
        let bridge = Bridge::start(env)?;
        BRIDGES.with_borrow_mut(|bridges| bridges.push((env.raw(), bridge.clone())));
        Ok(bridge)
    }

    /// Returns the bridge of this environment, unless it has none or is being torn down.
    pub(super) fn existing(env: &Env) -> Option<Rc<Bridge>> {
        bridge_of(env.raw())
    }

    fn start(env: &Env) -> Answer<Rc<Bridge>> {
        let failed = |why: &dyn std::fmt::Display| {
            Thrown::Lock(LockError::store(EngineError::new(
                "holdfast",
                "start",
                false,
                why.to_string(),
            )))
        };
        super::pin_library();
        let shared = Arc::new(Shared {
            inbox: Mutex::default(),
            arrived: Notify::new(),
            outbox: Mutex::default(),
            ready: Notify::new(),
            signalled: AtomicBool::new(false),
            discarded: Mutex::default(),
            doorbell: Mutex::new(None),
            stop: Notify::new(),
            thread: std::thread::current().id(),
            turns: AtomicBool::new(false),
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| failed(&error))?;
        let name = super::value::string(env, "holdfast")?;
        let mut function = ptr::null_mut();
        // SAFETY: `env` is the live environment of this thread; the function is given back in `tear_down`.
        let status = unsafe {
            sys::napi_create_threadsafe_function(
                env.raw(),
                ptr::null_mut(),
                ptr::null_mut(),
                name,
                0,
                1,
                ptr::null_mut(),
                None,
                ptr::null_mut(),
                Some(come_round),
                &mut function,
            )
        };
        if status != sys::Status::napi_ok {
            return Err(failed(&format!("Node-API status {status}")));
        }
        // SAFETY: the function was made just now.
        unsafe { sys::napi_unref_threadsafe_function(env.raw(), function) };
        *lock(&shared.doorbell) = Some(Doorbell(function));
        #[cfg(unix)]
        let calls = Calls::new(runtime.handle().clone());
        let theirs = shared.clone();
        let thread = std::thread::Builder::new()
            .name("holdfast-io".into())
            .spawn(move || {
                runtime.block_on(serve(theirs));
                // A look-up of a host name may be blocking a helper thread: the process does not wait for it.
                runtime.shutdown_background();
            })
            .map_err(|error| failed(&error))?;
        let bridge = Rc::new(Bridge {
            shared,
            function,
            outstanding: RefCell::new(0),
            burst: Burst::default(),
            thread: RefCell::new(Some(thread)),
            #[cfg(unix)]
            calls,
            #[cfg(unix)]
            turns: Turns::find(env),
            signals: RefCell::default(),
        });
        // SAFETY: the hook runs on this thread, once, when the environment goes away.
        unsafe { sys::napi_add_env_cleanup_hook(env.raw(), Some(tear_down), env.raw().cast()) };
        Ok(bridge)
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Runs `work` where it is at home (`home.rs`) or on the I/O thread, then `settle` on this one. The event loop stays
    /// open until then.
    pub(super) fn call<T: Send + 'static>(
        &self,
        env: &Env,
        work: impl Future<Output = Result<T, LockError>> + Send + 'static,
        settle: impl FnOnce(&Env, Result<T, LockError>) + Send + 'static,
    ) {
        let mut outstanding = self.outstanding.borrow_mut();
        if *outstanding == 0 {
            // SAFETY: the function is live until `tear_down`, after which this thread runs no JavaScript.
            unsafe { sys::napi_ref_threadsafe_function(env.raw(), self.function) };
        }
        #[cfg(unix)]
        let at_home = self.turns.as_ref().is_some_and(Turns::come);
        *outstanding += 1;
        self.burst.began(*outstanding);
        let shared = self.shared.clone();
        // Not an async block: that would keep room for the future twice, and a boxed future is moved as a whole.
        let job = AssertUnwindSafe(work).catch_unwind().map(move |outcome| {
            let result = outcome.unwrap_or_else(|panic| Err(panicked(&*panic)));
            shared.deliver(Delivery::Reply(Box::new(move |env| settle(env, result))));
        });
        let job: Job = Box::pin(job);
        #[cfg(unix)]
        if at_home {
            return self.calls.begin(job);
        }
        self.begin_on_io_thread(job);
    }

    fn begin_on_io_thread(&self, job: Job) {
        lock(&self.shared.inbox).push(job);
        self.shared.arrived.notify_one();
    }

    /// The event loop, for an engine that wants its socket served there.
    pub(super) fn event_loop(&self) -> Option<Arc<dyn EventLoop>> {
        #[cfg(unix)]
        if self.turns.is_some() {
            return Some(Home::new(self.calls.clone(), &self.shared));
        }
        None
    }

    /// Whether anything waits for this thread.
    #[cfg(unix)]
    pub(super) fn has_ready(&self) -> bool {
        self.calls.any_ready() || !lock(&self.shared.outbox).is_empty()
    }

    /// From now on the event loop looks at the outbox before it sleeps.
    #[cfg(unix)]
    pub(super) fn looks(&self) {
        self.shared.turns.store(true, Release);
    }

    fn replied(&self, env: &Env, replies: u32) {
        let mut outstanding = self.outstanding.borrow_mut();
        *outstanding -= replies;
        if replies > 0 && *outstanding == 0 {
            // SAFETY: as in `call`.
            unsafe { sys::napi_unref_threadsafe_function(env.raw(), self.function) };
        }
        if self.burst.is_over(*outstanding) {
            self.begin_on_io_thread(Box::pin(return_memory()));
        }
    }
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> LockError {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_default();
    LockError::store(EngineError::new(
        "holdfast",
        "call",
        false,
        format!("a bug in holdfast: {text}"),
    ))
}

/// The I/O thread's main loop.
async fn serve(shared: Arc<Shared>) {
    let deliveries = shared.clone();
    // The flusher runs after all tasks that were ready in the same pass: their results leave in one wake-up.
    tokio::spawn(async move {
        loop {
            deliveries.ready.notified().await;
            if !lock(&deliveries.outbox).is_empty() {
                deliveries.ring();
            }
        }
    });
    loop {
        tokio::select! {
            biased;
            () = shared.stop.notified() => return,
            () = shared.arrived.notified() => {}
        }
        let jobs = std::mem::take(&mut *lock(&shared.inbox));
        for job in jobs {
            tokio::spawn(job);
        }
    }
}

/// The event loop came round: settle everything that is ready.
unsafe extern "C" fn come_round(raw: sys::napi_env, _: Value, _: *mut c_void, _: *mut c_void) {
    if raw.is_null() {
        return;
    }
    let Some(bridge) = bridge_of(raw) else {
        return;
    };
    bridge.shared.signalled.store(false, Release);
    #[cfg(unix)]
    bridge.calls.go_on();
    settle_ready(&Env::from_raw(raw), &bridge);
}

/// Settles everything that is ready, on the JavaScript thread. Answers whether anything was.
pub(super) fn settle_ready(env: &Env, bridge: &Bridge) -> bool {
    let (raw, shared) = (env.raw(), &bridge.shared);
    let deliveries = std::mem::take(&mut *lock(&shared.outbox));
    let any = !deliveries.is_empty();
    let mut replies = 0;
    for delivery in deliveries {
        let mut scope = ptr::null_mut();
        // SAFETY: opened and closed in pairs on this thread; keeps a long batch from piling up handles.
        unsafe { sys::napi_open_handle_scope(raw, &mut scope) };
        let task = match delivery {
            Delivery::Reply(task) => {
                replies += 1;
                task
            }
            Delivery::Notice(task) => task,
        };
        // A panic must not unwind into Node, and must not keep the rest of the batch from its answers.
        if std::panic::catch_unwind(AssertUnwindSafe(|| task(env))).is_err() {
            tracing::error!("a bug in holdfast: an answer could not be delivered");
        }
        // SAFETY: as above.
        unsafe { sys::napi_close_handle_scope(raw, scope) };
    }
    for discarded in std::mem::take(&mut *lock(&shared.discarded)) {
        // SAFETY: each is put on the list once, by the owner that gave it up.
        unsafe {
            match discarded {
                Discarded::Reference(reference) => sys::napi_delete_reference(raw, reference),
                Discarded::Context(context) => sys::napi_async_destroy(raw, context),
            }
        };
    }
    bridge.replied(env, replies);
    any
}

/// The environment goes away: no call may reach it any more, and the I/O thread must have left this library's code
/// before a worker's end unloads it.
unsafe extern "C" fn tear_down(env: *mut c_void) {
    let ended = BRIDGES.with_borrow_mut(|bridges| {
        let at = bridges.iter().position(|(of, _)| *of == env.cast())?;
        Some(bridges.swap_remove(at))
    });
    let Some((_, bridge)) = ended else { return };
    #[cfg(unix)]
    {
        bridge.calls.end();
        if let Some(turns) = &bridge.turns {
            turns.end();
        }
    }
    *lock(&bridge.shared.doorbell) = None;
    bridge.shared.stop.notify_one();
    if let Some(thread) = bridge.thread.take() {
        // A thread that panicked is gone as well.
        let _ = thread.join();
    }
    lock(&bridge.shared.outbox).clear();
    lock(&bridge.shared.inbox).clear();
    // SAFETY: nobody has the function any more.
    unsafe { sys::napi_release_threadsafe_function(bridge.function, sys::ThreadsafeFunctionReleaseMode::abort) };
}

/// The two ends of a promise: this one settles it, once, on the JavaScript thread.
pub(super) struct Deferred(sys::napi_deferred);

// SAFETY: it travels through the I/O thread inside a task, and is used on the JavaScript thread only.
unsafe impl Send for Deferred {}

impl Deferred {
    /// A new promise.
    pub(super) fn new(env: &Env) -> (Self, Value) {
        let (mut deferred, mut promise) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: `env` is the live environment of this thread.
        unsafe { sys::napi_create_promise(env.raw(), &mut deferred, &mut promise) };
        (Deferred(deferred), promise)
    }

    /// A promise that is rejected already.
    pub(super) fn rejected(env: &Env, thrown: Thrown) -> Value {
        let (deferred, promise) = Deferred::new(env);
        deferred.settle(env, Err(thrown));
        promise
    }

    pub(super) fn settle(self, env: &Env, answer: Answer<Value>) {
        // SAFETY: a deferred is settled once: this takes it.
        unsafe {
            match answer {
                Ok(value) => sys::napi_resolve_deferred(env.raw(), self.0, value),
                Err(thrown) => sys::napi_reject_deferred(env.raw(), self.0, thrown.into_value(env)),
            }
        };
    }
}
