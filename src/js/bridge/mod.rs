//! The one bridge between a Rust future and a promise.
//!
//! # Behavior
//! Each JavaScript environment (the main thread, a worker) has one native I/O thread with a current-thread runtime. The two
//! threads exchange calls and results in batches (`shared.rs`).
//!
//! The event loop is kept alive while calls are in progress (except for those in the background) and jobs run, and by nothing else:
//! leases, events and pings never keep a process from exiting.
//!
//! - `call.rs`: a call. `deferred.rs`: the native end of a promise. `shared.rs`: the inbox and the outbox. `runtime.rs`: the I/O thread's
//!   runtime.
//! - `local_executor.rs`, `uv_loop/`: calls on the JavaScript thread. `leases.rs`: leases by number. `notifier.rs`, `questions.rs`: from
//!   the native core to JavaScript.
//!
//! A panic becomes a rejection with `LOCK_STORE`. A clean-up hook joins the I/O thread before the environment ends.

mod call;
pub(super) mod deferred;
pub(super) mod leases;
mod local_executor;
mod memory;
pub(super) mod notifier;
pub(super) mod questions;
mod runtime;
mod shared;
#[cfg(unix)]
mod uv_loop;
#[cfg(not(unix))]
#[path = "uv_loop/unsupported.rs"]
mod uv_loop;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::panic::AssertUnwindSafe;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;

use futures_util::FutureExt;
use napi::bindgen_prelude::{ToNapiValue, Unknown};
use napi::{Env, JsValue, sys};
use tokio_util::sync::CancellationToken;

use self::call::Job;
use self::deferred::Deferred;
use self::leases::Leases;
use self::local_executor::{LocalExecutor, NodeEventLoop};
use self::memory::{Burst, return_memory};
use self::shared::{Delivery, Reference, Shared};
use self::uv_loop::UvLoop;
use crate::error::{EngineError, LockError, is_passing};
use crate::event_loop::EventLoop;
use crate::service::Locks;

/// The JavaScript thread's end of the bridge.
pub(super) struct Bridge {
    shared: Arc<Shared>,
    function: sys::napi_threadsafe_function,
    in_progress: Cell<usize>,
    /// Number of those that do not keep the event loop alive.
    in_background: Cell<usize>,
    /// The services of which a job of `using` runs.
    with_jobs: Cell<u32>,
    burst: Burst,
    thread: RefCell<Option<JoinHandle<()>>>,
    /// The calls whose futures are polled on this thread.
    executor: Arc<LocalExecutor>,
    uv_loop: Option<UvLoop>,
    /// The leases with a number in JavaScript.
    pub(super) leases: RefCell<Leases>,
    /// The acquisitions that JavaScript may cancel, by ticket.
    pub(super) cancellations: RefCell<HashMap<u64, CancellationToken>>,
}

thread_local! {
    /// The bridges of this thread's environments. The first call in an environment creates its bridge. An addon that is loaded
    /// again (by a test runner that clears the module cache) has a separate environment on the same thread.
    static BRIDGES: RefCell<Vec<(sys::napi_env, Rc<Bridge>)>> = RefCell::default();
}

fn bridge_of(env: sys::napi_env) -> Option<Rc<Bridge>> {
    BRIDGES.with_borrow(|bridges| {
        bridges
            .iter()
            .find(|(of, _)| *of == env)
            .map(|(_, bridge)| bridge.clone())
    })
}

impl Bridge {
    /// Returns the bridge of this environment. The first call creates it and its I/O thread.
    pub(super) fn get(env: &Env) -> Result<Rc<Bridge>, LockError> {
        if let Some(bridge) = bridge_of(env.raw()) {
            return Ok(bridge);
        }
        let bridge = Bridge::start(env)?;
        BRIDGES.with_borrow_mut(|bridges| bridges.push((env.raw(), bridge.clone())));
        Ok(bridge)
    }

    /// Returns the token that `cancel` cancels by this ticket.
    pub(super) fn cancellation(&self, ticket: u64) -> CancellationToken {
        let token = CancellationToken::new();
        self.cancellations.borrow_mut().insert(ticket, token.clone());
        token
    }

    /// Returns the bridge of this environment, unless it has none or is being torn down.
    pub(super) fn existing(env: &Env) -> Option<Rc<Bridge>> {
        bridge_of(env.raw())
    }

    fn start(env: &Env) -> Result<Rc<Bridge>, LockError> {
        super::pin_library();
        super::debug::start();
        let runtime = runtime::create().map_err(not_started)?;
        let function = wake_function(env).map_err(|error| failed("start", &error.reason))?;
        let shared = Shared::new(function);
        let executor = LocalExecutor::new(runtime.handle().clone(), shared.clone());
        let io_shared = shared.clone();
        let thread = std::thread::Builder::new().name("holdfast-io".into()).spawn(move || {
            runtime.block_on(io_shared.serve());
            // A lookup of a host name may block a helper thread: the process does not wait for it.
            runtime.shutdown_background();
        });
        let thread = thread.map_err(|error| {
            // SAFETY: the last use of the function.
            unsafe { sys::napi_release_threadsafe_function(function, sys::ThreadsafeFunctionReleaseMode::abort) };
            not_started(error)
        })?;
        let bridge = Rc::new(Bridge {
            shared,
            function,
            in_progress: Cell::new(0),
            in_background: Cell::new(0),
            with_jobs: Cell::new(0),
            burst: Burst::default(),
            thread: RefCell::new(Some(thread)),
            executor,
            uv_loop: UvLoop::find(env),
            leases: RefCell::default(),
            cancellations: RefCell::default(),
        });
        // SAFETY: the hook runs on this thread, once, when the environment goes away.
        unsafe { sys::napi_add_env_cleanup_hook(env.raw(), Some(tear_down), env.raw().cast()) };
        Ok(bridge)
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Runs `work` on this thread (`local_executor.rs`) or on the I/O thread, and then `settle` on this thread. Keeps the event loop
    /// alive until then, unless it `is_in_background`.
    pub(super) fn call<T: Send + 'static>(
        &self,
        env: &Env,
        is_in_background: bool,
        work: impl Future<Output = Result<T, LockError>> + Send + 'static,
        settle: impl FnOnce(&Env, &Rc<Bridge>, Result<T, LockError>) + Send + 'static,
    ) {
        if is_in_background {
            self.in_background.set(self.in_background.get() + 1);
        } else if self.in_progress.get() == self.in_background.get() {
            self.reference(env);
        }
        self.start_job(call::new(work, settle, is_in_background));
    }

    fn start_job(&self, job: Job) {
        let in_progress = self.in_progress.get() + 1;
        self.in_progress.set(in_progress);
        self.burst.began(in_progress);
        if self.uv_loop.as_ref().is_some_and(UvLoop::is_active) {
            return self.executor.start(job);
        }
        self.shared.submit(job);
    }

    /// Keeps the event loop alive while jobs of a service run: the first one begins, or the last one has ended.
    pub(super) fn keep_alive(&self, env: &Env, is_running: bool) {
        if is_running {
            self.with_jobs.set(self.with_jobs.get() + 1);
            return self.reference(env);
        }
        self.with_jobs.set(self.with_jobs.get().saturating_sub(1));
        self.unreference_if_idle(env);
    }

    fn unreference_if_idle(&self, env: &Env) {
        if self.with_jobs.get() == 0 && self.in_progress.get() == self.in_background.get() {
            // SAFETY: as in `reference`.
            unsafe { sys::napi_unref_threadsafe_function(env.raw(), self.function) };
        }
    }

    /// Makes the event loop wait for the threadsafe function. Has no effect when it does so already.
    fn reference(&self, env: &Env) {
        // SAFETY: the function is live until `tear_down`, after which this thread runs no JavaScript.
        unsafe { sys::napi_ref_threadsafe_function(env.raw(), self.function) };
    }

    /// Returns a promise for `work`, which is settled with the result of `make`. Keeps the event loop alive as [`Bridge::call`] does.
    pub(super) fn promise<'env, T: Send + 'static, V: ToNapiValue>(
        &self,
        env: &'env Env,
        is_in_background: bool,
        work: impl Future<Output = Result<T, LockError>> + Send + 'static,
        make: impl FnOnce(&Env, &Rc<Bridge>, Result<T, LockError>) -> Result<V, LockError> + Send + 'static,
    ) -> napi::Result<Unknown<'env>> {
        let (deferred, promise) = Deferred::new(env)?;
        self.call(env, is_in_background, work, move |env, bridge, result| {
            deferred.settle(env, make(env, bridge, result));
        });
        Ok(promise)
    }

    /// Returns a promise for a call of a service. `make` converts its result.
    pub(super) fn answer<'env, T: Send + 'static, V: ToNapiValue>(
        &self,
        env: &'env Env,
        locks: &Locks,
        work: impl Future<Output = Result<T, LockError>> + Send + 'static,
        make: impl FnOnce(&Rc<Bridge>, T) -> Result<V, LockError> + Send + 'static,
    ) -> napi::Result<Unknown<'env>> {
        let locks = locks.clone();
        self.promise(env, false, work, move |env, bridge, result| {
            hold_process(env, bridge, &locks);
            make(bridge, result?)
        })
    }

    /// Returns the event loop, for an engine whose socket it can poll.
    pub(super) fn event_loop(&self) -> Option<Arc<dyn EventLoop>> {
        if self.uv_loop.is_some() {
            return Some(NodeEventLoop::new(self.executor.clone(), &self.shared));
        }
        None
    }

    /// Whether this thread has a future to poll or a task to run.
    pub(super) fn has_ready(&self) -> bool {
        self.executor.has_ready() || self.shared.has_deliveries()
    }

    /// Records replies, of which some are to calls in the background. After the last other one the event loop is not kept alive any more.
    fn replied(&self, env: &Env, replies: usize, in_background: usize) {
        let in_progress = self.in_progress.get() - replies;
        self.in_progress.set(in_progress);
        self.in_background.set(self.in_background.get() - in_background);
        if replies > in_background {
            self.unreference_if_idle(env);
        }
        if self.burst.has_ended(in_progress) {
            self.return_memory();
        }
    }

    /// Returns the memory of a burst to the system, later and on another thread.
    fn return_memory(&self) {
        self.executor.spawn(return_memory());
    }
}

/// Creates the error of a failure in this library.
pub(super) fn failed(op: &'static str, why: &str) -> LockError {
    LockError::store(EngineError::new("holdfast", op, false, why))
}

/// Creates the error of a runtime or a thread that was not created.
fn not_started(error: std::io::Error) -> LockError {
    LockError::store(EngineError::new("holdfast", "start", is_passing(&error), error))
}

/// Creates the threadsafe function that wakes the event loop. It does not keep the event loop alive.
fn wake_function(env: &Env) -> napi::Result<sys::napi_threadsafe_function> {
    let name = env.create_string("holdfast")?;
    let mut function = ptr::null_mut();
    // SAFETY: `env` is the live environment of this thread; the function is released in `tear_down`.
    napi::check_status!(unsafe {
        sys::napi_create_threadsafe_function(
            env.raw(),
            ptr::null_mut(),
            ptr::null_mut(),
            name.raw(),
            0,
            1,
            ptr::null_mut(),
            None,
            ptr::null_mut(),
            Some(on_wake),
            &mut function,
        )
    })?;
    // SAFETY: the function was created just now.
    unsafe { sys::napi_unref_threadsafe_function(env.raw(), function) };
    Ok(function)
}

/// Keeps the process alive while claims are released in the background. Otherwise a process with nothing else to do would
/// exit and leave a lock without a caller.
pub(super) fn hold_process(env: &Env, bridge: &Bridge, locks: &Locks) {
    if let Some(released) = locks.background_releases() {
        bridge.call(env, false, released.map(Ok), |_, _, _| {});
    }
}

/// Settles all promises that are ready. Runs on the event loop after [`Shared::wake`].
unsafe extern "C" fn on_wake(raw: sys::napi_env, _: sys::napi_value, _: *mut c_void, _: *mut c_void) {
    if raw.is_null() {
        return;
    }
    let Some(bridge) = bridge_of(raw) else {
        return;
    };
    bridge.shared.woke_up();
    bridge.executor.run_ready();
    settle_ready(&Env::from_raw(raw), &bridge);
}

/// Settles all promises that are ready, on the JavaScript thread. Returns whether there were any.
pub(super) fn settle_ready(env: &Env, bridge: &Rc<Bridge>) -> bool {
    let (raw, shared) = (env.raw(), &bridge.shared);
    let deliveries = shared.take_deliveries();
    let any = !deliveries.is_empty();
    let (mut replies, mut in_background) = (0, 0);
    for delivery in deliveries {
        let mut scope = ptr::null_mut();
        // SAFETY: opened and closed in pairs on this thread; a long batch would accumulate handles.
        unsafe { sys::napi_open_handle_scope(raw, &mut scope) };
        // A panic must neither unwind into Node nor stop the rest of the batch.
        let ran = std::panic::catch_unwind(AssertUnwindSafe(|| match delivery {
            Delivery::Reply(call) => {
                replies += 1;
                in_background += usize::from(call.is_in_background());
                call.settle(env, bridge);
            }
            Delivery::Notice(task) => task(env, bridge),
        }));
        if ran.is_err() {
            tracing::error!("a bug in holdfast: a reply could not be delivered");
        }
        // SAFETY: as above.
        unsafe { sys::napi_close_handle_scope(raw, scope) };
    }
    for Reference(reference) in shared.take_discarded() {
        // SAFETY: the owner of a reference adds it to the list once, when the owner is dropped.
        unsafe { sys::napi_delete_reference(raw, reference) };
    }
    bridge.replied(env, replies, in_background);
    any
}

/// Ends the bridge with its environment. No call may reach the environment afterwards, and the I/O thread must have left the code
/// of this library before the end of a worker unloads it.
unsafe extern "C" fn tear_down(env: *mut c_void) {
    let ended = BRIDGES.with_borrow_mut(|bridges| {
        let at = bridges.iter().position(|(of, _)| *of == env.cast())?;
        Some(bridges.swap_remove(at))
    });
    let Some((_, bridge)) = ended else { return };
    bridge.executor.end();
    if let Some(uv_loop) = &bridge.uv_loop {
        uv_loop.end();
    }
    bridge.shared.stop();
    if let Some(thread) = bridge.thread.take() {
        // A thread that panicked has ended as well.
        let _ = thread.join();
    }
    bridge.shared.clear();
    // The end of the sockets may have woken tasks.
    bridge.executor.end();
    // SAFETY: the last use of the function.
    unsafe { sys::napi_release_threadsafe_function(bridge.function, sys::ThreadsafeFunctionReleaseMode::abort) };
}
