//! Node's event loop (libuv): sends requests and settles promises before the loop sleeps, and reads a socket when data arrives.
//!
//! libuv's functions are resolved at run time. Where a runtime does not export them, outside of Node ([`runs_in_node`]), and on
//! Windows, there is no [`UvLoop`], and all calls run on the I/O thread instead of the local executor.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use napi::bindgen_prelude::{JsObjectValue, Object};
use napi::{Env, JsValue, sys};

use super::{Bridge, settle_ready};
use crate::event_loop::{AdaptiveSpin, Socket};

type Handle = *mut c_void;
type OnClose = unsafe extern "C" fn(Handle);
type OnPoll = unsafe extern "C" fn(Handle, c_int, c_int);
type OnPrepare = unsafe extern "C" fn(Handle);

/// The functions of libuv that are needed here (libuv's manual, "uv_poll_t", "uv_prepare_t" and "uv_loop_t").
struct Uv {
    handle_size: unsafe extern "C" fn(c_int) -> usize,
    poll_init: unsafe extern "C" fn(*mut c_void, Handle, c_int) -> c_int,
    poll_start: unsafe extern "C" fn(Handle, c_int, OnPoll) -> c_int,
    prepare_init: unsafe extern "C" fn(*mut c_void, Handle) -> c_int,
    prepare_start: unsafe extern "C" fn(Handle, OnPrepare) -> c_int,
    set_data: unsafe extern "C" fn(Handle, *mut c_void),
    unref: unsafe extern "C" fn(Handle),
    backend_fd: unsafe extern "C" fn(*const c_void) -> c_int,
    backend_timeout: unsafe extern "C" fn(*const c_void) -> c_int,
    close: unsafe extern "C" fn(Handle, Option<OnClose>),
}

/// How long the loop busy-polls for replies before it sleeps.
const BUSY_POLL: Duration = Duration::from_micros(75);

/// How many times a tick polls what is ready, and how many ticks run in a row, before the loop continues with its other handles.
const TICKS_AT_ONCE: usize = 8;

/// `UV_POLL` and `UV_PREPARE` of `uv_handle_type`, and `UV_READABLE` and `UV_WRITABLE`, which libuv 1.x does not change.
const POLL: c_int = 8;
const PREPARE: c_int = 9;
const READABLE: c_int = 1;
const WRITABLE: c_int = 2;

impl Uv {
    /// Resolves the functions. `None`: the process does not export them.
    fn find() -> Option<Self> {
        /// # Safety
        /// `T` is the type of the function of that name.
        unsafe fn function<T: Copy>(name: &std::ffi::CStr) -> Option<T> {
            // SAFETY: the name ends with a null.
            let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            // SAFETY: a function pointer is as large as an address.
            (!address.is_null()).then(|| unsafe { std::mem::transmute_copy(&address) })
        }
        // SAFETY: the types are those of libuv's headers.
        unsafe {
            Some(Uv {
                handle_size: function(c"uv_handle_size")?,
                poll_init: function(c"uv_poll_init")?,
                poll_start: function(c"uv_poll_start")?,
                prepare_init: function(c"uv_prepare_init")?,
                prepare_start: function(c"uv_prepare_start")?,
                set_data: function(c"uv_handle_set_data")?,
                unref: function(c"uv_unref")?,
                backend_fd: function(c"uv_backend_fd")?,
                backend_timeout: function(c"uv_backend_timeout")?,
                close: function(c"uv_close")?,
            })
        }
    }

    /// Allocates the memory of a handle.
    fn handle(&self, kind: c_int) -> Handle {
        // SAFETY: the size is libuv's own.
        unsafe { libc::calloc(1, (self.handle_size)(kind)) }
    }
}

/// The event loop of one environment.
pub(super) struct UvLoop {
    uv: Uv,
    env: sys::napi_env,
    uv_loop: *mut c_void,
    context: sys::napi_async_context,
    prepare: Cell<Handle>,
    polls: RefCell<Vec<Handle>>,
    busy_poll: RefCell<AdaptiveSpin>,
}

/// The data of a poll handle.
struct PollData {
    bridge: Rc<Bridge>,
    socket: Arc<dyn Socket>,
    /// Whether libuv also polls until the socket takes more.
    awaits_space: Cell<bool>,
}

impl PollData {
    /// # Safety
    /// The poll handle is not closed while the reference is used.
    unsafe fn of<'a>(poll: Handle) -> &'a Self {
        // SAFETY: `serve` has set the data of a handle on the list.
        unsafe { &*data(poll).cast() }
    }
}

impl UvLoop {
    /// Returns the event loop of the environment. `None`: the runtime is not Node, or does not export libuv.
    pub(super) fn find(env: &Env) -> Option<Self> {
        if !runs_in_node(env) {
            return None;
        }
        let uv = Uv::find()?;
        let (mut uv_loop, mut context) = (ptr::null_mut(), ptr::null_mut());
        let (resource, name) = (Object::new(env).ok()?, env.create_string("holdfast").ok()?);
        // SAFETY: `env` is the live environment of this thread; the context is destroyed in `end`.
        let found = unsafe {
            sys::napi_get_uv_event_loop(env.raw(), &mut uv_loop) == sys::Status::napi_ok
                && sys::napi_async_init(env.raw(), resource.raw(), name.raw(), &mut context) == sys::Status::napi_ok
        };
        found.then(|| UvLoop {
            uv,
            env: env.raw(),
            uv_loop: uv_loop.cast(),
            context,
            prepare: Cell::new(ptr::null_mut()),
            polls: RefCell::default(),
            busy_poll: RefCell::default(),
        })
    }

    /// Whether the loop runs [`tick`] before it sleeps.
    pub(super) fn is_active(&self) -> bool {
        !self.prepare.get().is_null()
    }

    /// Starts to run [`tick`] each time before the loop sleeps.
    pub(super) fn activate(&self, bridge: &Rc<Bridge>) {
        if self.is_active() {
            return;
        }
        // SAFETY: the handle is libuv's, created and used on the loop's thread; it lives until its close callback. Its data points to a
        // leaked `Rc`, which that callback reclaims.
        unsafe {
            let prepare = self.uv.handle(PREPARE);
            (self.uv.prepare_init)(self.uv_loop, prepare);
            (self.uv.set_data)(prepare, Rc::into_raw(bridge.clone()).cast_mut().cast());
            (self.uv.prepare_start)(prepare, on_prepare);
            (self.uv.unref)(prepare);
            self.prepare.set(prepare);
        }
        bridge.shared().check_outbox_before_sleep();
    }

    /// Polls the socket until one of its methods returns `false`.
    pub(super) fn serve(&self, bridge: &Rc<Bridge>, socket: Arc<dyn Socket>) {
        self.activate(bridge);
        // SAFETY: as in `activate`; the data points to a leaked box.
        unsafe {
            let poll = self.uv.handle(POLL);
            if (self.uv.poll_init)(self.uv_loop, poll, socket.descriptor()) != 0 {
                libc::free(poll);
                return socket.end();
            }
            let served = PollData {
                bridge: bridge.clone(),
                socket: socket.clone(),
                awaits_space: Cell::new(false),
            };
            (self.uv.set_data)(poll, Box::into_raw(Box::new(served)).cast());
            (self.uv.poll_start)(poll, READABLE, on_poll);
            (self.uv.unref)(poll);
            self.polls.borrow_mut().push(poll);
            if !socket.readable() {
                self.drop_poll(poll);
            }
        }
    }

    /// Sends the requests that were buffered since the last tick.
    fn flush(&self) {
        let polls = self.polls.borrow().clone();
        for poll in polls {
            // SAFETY: a handle on the list has not been closed.
            let served = unsafe { PollData::of(poll) };
            if !served.socket.flush() {
                self.drop_poll(poll);
                continue;
            }
            let is_blocked = served.socket.is_blocked();
            if is_blocked != served.awaits_space.replace(is_blocked) {
                let events = if is_blocked { READABLE | WRITABLE } else { READABLE };
                // SAFETY: as above. A second start replaces the events (libuv's manual, `uv_poll_start`).
                unsafe { (self.uv.poll_start)(poll, events, on_poll) };
            }
        }
    }

    /// Busy-polls for replies for a short time if requests are in flight and the loop has nothing else to do.
    ///
    /// # Behavior
    /// Ends at any other event of the loop: the descriptor of libuv becomes readable (libuv's manual, `uv_backend_fd`).
    fn busy_poll(&self) {
        let polls = self.polls.borrow();
        // SAFETY: a handle on the list has not been closed.
        let served = |poll: &Handle| unsafe { PollData::of(*poll) };
        let mut awaiting = polls
            .iter()
            .map(|poll| &served(poll).socket)
            .filter(|socket| socket.awaits());
        let mut busy_poll = self.busy_poll.borrow_mut();
        let Some(socket) = awaiting.next().filter(|_| busy_poll.should_spin()) else {
            return;
        };
        // SAFETY: the loop is alive, and this is its thread.
        let (fd, timeout) = unsafe {
            (
                (self.uv.backend_fd)(self.uv_loop),
                (self.uv.backend_timeout)(self.uv_loop),
            )
        };
        // A loop with a due timer or other work does not sleep.
        if fd < 0 || timeout == 0 {
            return;
        }
        let (events, revents) = (libc::POLLIN, 0);
        let mut ready = [fd, socket.descriptor()].map(|fd| libc::pollfd { fd, events, revents });
        let started = Instant::now();
        // SAFETY: two valid entries.
        while unsafe { libc::poll(ready.as_mut_ptr(), 2, 0) } == 0 {
            if started.elapsed() >= BUSY_POLL {
                return busy_poll.record(false);
            }
        }
        // Another event of the loop is not a result of the spin.
        if ready[1].revents != 0 {
            busy_poll.record(true);
        }
    }

    /// Closes a poll handle.
    fn drop_poll(&self, poll: Handle) {
        let mut polls = self.polls.borrow_mut();
        if let Some(at) = polls.iter().position(|known| *known == poll) {
            polls.swap_remove(at);
            // SAFETY: it was on the list, so it is closed once.
            unsafe { (self.uv.close)(poll, Some(on_poll_closed)) };
        }
    }

    /// Closes every handle. The loop runs their close callbacks in one more tick.
    pub(super) fn end(&self) {
        for poll in std::mem::take(&mut *self.polls.borrow_mut()) {
            // SAFETY: as in `flush`.
            let served = unsafe { PollData::of(poll) };
            served.socket.end();
            // SAFETY: as in `drop_poll`.
            unsafe { (self.uv.close)(poll, Some(on_poll_closed)) };
        }
        // SAFETY: created in `find`, and this is its last use.
        unsafe { sys::napi_async_destroy(self.env, self.context) };
        let prepare = self.prepare.replace(ptr::null_mut());
        if !prepare.is_null() {
            // SAFETY: closed once.
            unsafe { (self.uv.close)(prepare, Some(on_prepare_closed)) };
        }
    }
}

/// Other runtimes with Node-API, by their entry in `process.versions`.
///
/// Bun exports libuv's functions, and most of them abort the process. Deno's event loop is not libuv's. Electron runs libuv's loop
/// only when a descriptor or a timer of that loop is ready: after a call from an event of Chromium, [`on_prepare`] may run much later.
const OTHER_RUNTIMES: [&str; 3] = ["bun", "deno", "electron"];

/// Whether Node runs the event loop: [`on_prepare`] then runs after every call.
fn runs_in_node(env: &Env) -> bool {
    let versions = env
        .get_global()
        .and_then(|global| global.get_named_property::<Object>("process"))
        .and_then(|process| process.get_named_property::<Object>("versions"));
    versions.is_ok_and(|versions| {
        OTHER_RUNTIMES
            .iter()
            .all(|runtime| versions.has_named_property(runtime).is_ok_and(|has| !has))
    })
}

/// One tick: polls the ready calls and settles their promises.
fn tick(bridge: &Rc<Bridge>, uv_loop: &UvLoop) {
    bridge.executor.run_ready();
    // Nothing to settle: a renewal was answered, for example.
    if !bridge.has_ready() {
        return;
    }
    let env = Env::from_raw(uv_loop.env);
    let mut handles = ptr::null_mut();
    let mut scope = ptr::null_mut();
    // SAFETY: on the loop's thread, outside of JavaScript; opened and closed in pairs.
    unsafe {
        sys::napi_open_handle_scope(uv_loop.env, &mut handles);
        sys::napi_open_callback_scope(uv_loop.env, ptr::null_mut(), uv_loop.context, &mut scope);
    }
    for _ in 0..TICKS_AT_ONCE {
        if !(bridge.executor.run_ready() | settle_ready(&env, bridge)) {
            break;
        }
    }
    // SAFETY: as above. Closing the scope runs the microtasks, as after every callback of Node.
    unsafe {
        sys::napi_close_callback_scope(uv_loop.env, scope);
        sys::napi_close_handle_scope(uv_loop.env, handles);
    }
}

/// Runs `work`, and logs a panic.
fn catch_panic(work: impl FnOnce()) {
    // A panic must not unwind into libuv.
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err() {
        tracing::error!("a bug in holdfast: a tick of the event loop panicked");
    }
}

/// Reads a socket when data arrives, and runs a tick. The flush at its end writes what the socket has room for. With a negative
/// status libuv has stopped polling the socket: the peer has reset the connection.
unsafe extern "C" fn on_poll(poll: Handle, status: c_int, _: c_int) {
    catch_panic(|| {
        // SAFETY: the handle has not been closed.
        let served = unsafe { PollData::of(poll) };
        let bridge = served.bridge.clone();
        let Some(uv_loop) = &bridge.uv_loop else { return };
        let mut open = served.socket.readable();
        if status < 0 {
            served.socket.end();
            open = false;
        }
        tick(&bridge, uv_loop);
        if !open {
            uv_loop.drop_poll(poll);
        }
        uv_loop.flush();
    });
}

/// Runs ticks before the loop sleeps, sends requests, and busy-polls.
unsafe extern "C" fn on_prepare(prepare: Handle) {
    catch_panic(|| {
        // SAFETY: the data of the prepare handle, which owns one reference to the bridge.
        let bridge = unsafe {
            let bridge = data(prepare).cast::<Bridge>();
            Rc::increment_strong_count(bridge);
            Rc::from_raw(bridge)
        };
        let Some(uv_loop) = &bridge.uv_loop else { return };
        // The microtasks of a tick may make more calls ready. The loop sleeps after this callback.
        for _ in 0..TICKS_AT_ONCE {
            if !bridge.has_ready() {
                break;
            }
            tick(&bridge, uv_loop);
        }
        if bridge.has_ready() {
            bridge.shared().wake();
        }
        uv_loop.flush();
        uv_loop.busy_poll();
    });
}

/// Returns a handle's data: the first field of every handle (libuv's manual, `uv_handle_t.data`).
///
/// # Safety
/// The close callback of the handle has not ended.
unsafe fn data(handle: Handle) -> *mut c_void {
    // SAFETY: the handle lives until its close callback.
    unsafe { *handle.cast::<*mut c_void>() }
}

unsafe extern "C" fn on_poll_closed(poll: Handle) {
    // SAFETY: boxed in `serve`, and allocated by `handle`; a handle is closed once.
    unsafe {
        drop(Box::from_raw(data(poll).cast::<PollData>()));
        libc::free(poll);
    }
}

unsafe extern "C" fn on_prepare_closed(prepare: Handle) {
    // SAFETY: the reference that `activate` leaked, and the memory that `handle` allocated.
    unsafe {
        drop(Rc::from_raw(data(prepare).cast::<Bridge>()));
        libc::free(prepare);
    }
}
