//! Calls that run on the JavaScript thread: their futures are polled here, and an engine's socket is served by Node's own
//! event loop, so that a call to the store and back takes no hop between threads.
//!
//! # Behavior
//! A call begins on the JavaScript thread: its future is polled at once. When something on this thread makes it ready again (a
//! reply that the event loop read), it is polled here in the same turn, and its promise is settled at the end of it. When
//! anything else does (a timer, a push, a renewal), it moves to the I/O thread and stays there: that one is never blocked
//! by the user's code.
//!
//! libuv's functions are looked up at run time. A runtime that does not export them (or Windows, for now) has no home for
//! calls, and they all go to the I/O thread.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Wake, Waker};
use std::thread::ThreadId;

use napi::{Env, sys};
use tokio::runtime::Handle;

use super::promise::{Bridge, Job, Shared, lock, settle_ready};
use super::value::{Answer, object, string};
use crate::event_loop::{EventLoop, Socket};

/// The calls of one environment that are at home on its thread.
pub(super) struct Calls {
    thread: ThreadId,
    runtime: Handle,
    ready: Mutex<VecDeque<Arc<Call>>>,
    /// Those whose future is here. Each is kept by whatever will wake it, which the future itself may hold.
    here: Mutex<HashMap<u64, Weak<Call>>>,
    last_number: AtomicU64,
}

/// A call under way.
struct Call {
    /// `None` while it is polled, and once it has moved away or ended.
    job: Mutex<Place>,
    calls: Arc<Calls>,
    number: u64,
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
            last_number: AtomicU64::new(0),
        })
    }

    fn is_here(&self) -> bool {
        std::thread::current().id() == self.thread
    }

    /// Begins a call on this thread.
    pub(super) fn begin(self: &Arc<Self>, job: Job) {
        let place = Place {
            job: Some(job),
            moves: false,
            listed: false,
        };
        let call = Arc::new(Call {
            job: Mutex::new(place),
            calls: self.clone(),
            number: self.last_number.fetch_add(1, Relaxed),
        });
        lock(&self.here).insert(call.number, Arc::downgrade(&call));
        if !call.poll() {
            lock(&self.here).remove(&call.number);
        }
    }

    /// Drops every call that is still here: nobody will come round to it any more.
    pub(super) fn end(&self) {
        for call in std::mem::take(&mut *lock(&self.here)).into_values() {
            let job = call.upgrade().and_then(|call| lock(&call.job).job.take());
            drop(job);
        }
        lock(&self.ready).clear();
    }

    /// Polls whatever has become ready on this thread. Answers whether anything had.
    pub(super) fn go_on(&self) -> bool {
        let mut any = false;
        loop {
            let next = lock(&self.ready).pop_front();
            let Some(call) = next else { return any };
            any = true;
            lock(&call.job).listed = false;
            if !call.poll() {
                lock(&self.here).remove(&call.number);
            }
        }
    }
}

impl Call {
    /// Answers whether it stays here.
    fn poll(self: &Arc<Self>) -> bool {
        let Some(mut job) = lock(&self.job).job.take() else {
            return false;
        };
        let waker = Waker::from(self.clone());
        // Timers and tasks are the I/O thread's.
        let entered = self.calls.runtime.enter();
        let polled = job.as_mut().poll(&mut Context::from_waker(&waker));
        drop(entered);
        if polled.is_ready() {
            return false;
        }
        let mut place = lock(&self.job);
        if std::mem::take(&mut place.moves) {
            drop(place);
            self.calls.runtime.spawn(job);
            return false;
        }
        place.job = Some(job);
        true
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
            lock(&self.calls.here).remove(&self.number);
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

type Handled = *mut c_void;
type OnClose = unsafe extern "C" fn(Handled);
type OnPoll = unsafe extern "C" fn(Handled, c_int, c_int);
type OnPrepare = unsafe extern "C" fn(Handled);

/// The functions of libuv that are needed here (libuv's manual, "uv_poll_t" and "uv_prepare_t").
struct Uv {
    handle_size: unsafe extern "C" fn(c_int) -> usize,
    poll_init: unsafe extern "C" fn(*mut c_void, Handled, c_int) -> c_int,
    poll_start: unsafe extern "C" fn(Handled, c_int, OnPoll) -> c_int,
    prepare_init: unsafe extern "C" fn(*mut c_void, Handled) -> c_int,
    prepare_start: unsafe extern "C" fn(Handled, OnPrepare) -> c_int,
    set_data: unsafe extern "C" fn(Handled, *mut c_void),
    get_data: unsafe extern "C" fn(Handled) -> *mut c_void,
    unref: unsafe extern "C" fn(Handled),
    close: unsafe extern "C" fn(Handled, Option<OnClose>),
}

/// How many turns in a row keep the loop from everything else.
const TURNS_AT_ONCE: usize = 8;

/// `UV_POLL` and `UV_PREPARE` of `uv_handle_type`, and `UV_READABLE`, which libuv 1.x does not change.
const POLL: c_int = 8;
const PREPARE: c_int = 9;
const READABLE: c_int = 1;

impl Uv {
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
                get_data: function(c"uv_handle_get_data")?,
                unref: function(c"uv_unref")?,
                close: function(c"uv_close")?,
            })
        }
    }

    /// Room for a handle.
    fn handle(&self, kind: c_int) -> Handled {
        // SAFETY: the size is libuv's own.
        unsafe { libc::calloc(1, (self.handle_size)(kind)) }
    }
}

/// The turns of one environment's event loop.
pub(super) struct Turns {
    uv: Uv,
    env: sys::napi_env,
    uv_loop: *mut c_void,
    context: sys::napi_async_context,
    prepare: Cell<Handled>,
    polls: RefCell<Vec<Handled>>,
}

/// What a poll handle belongs to.
struct Served {
    bridge: Rc<Bridge>,
    socket: Arc<dyn Socket>,
}

impl Turns {
    /// `None` where there is no libuv to ask.
    pub(super) fn find(env: &Env) -> Option<Self> {
        let uv = Uv::find()?;
        let (mut uv_loop, mut context) = (ptr::null_mut(), ptr::null_mut());
        let made = (|| -> Answer<bool> {
            let (resource, name) = (object(env)?, string(env, "holdfast")?);
            // SAFETY: `env` is the live environment of this thread; the context is given back in `end`.
            Ok(unsafe {
                sys::napi_get_uv_event_loop(env.raw(), &mut uv_loop) == sys::Status::napi_ok
                    && sys::napi_async_init(env.raw(), resource, name, &mut context) == sys::Status::napi_ok
            })
        })();
        made.is_ok_and(|made| made).then(|| Turns {
            uv,
            env: env.raw(),
            uv_loop: uv_loop.cast(),
            context,
            prepare: Cell::new(ptr::null_mut()),
            polls: RefCell::default(),
        })
    }

    /// Whether a turn comes before the loop sleeps.
    pub(super) fn come(&self) -> bool {
        !self.prepare.get().is_null()
    }

    fn serve(&self, bridge: &Rc<Bridge>, socket: Arc<dyn Socket>) {
        // SAFETY: the handles are libuv's, made and used on the loop's thread; they live until `on_close`. What their
        // data points to is a leaked `Rc` or box, taken back there.
        unsafe {
            if self.prepare.get().is_null() {
                let prepare = self.uv.handle(PREPARE);
                (self.uv.prepare_init)(self.uv_loop, prepare);
                (self.uv.set_data)(prepare, Rc::into_raw(bridge.clone()).cast_mut().cast());
                (self.uv.prepare_start)(prepare, on_prepare);
                (self.uv.unref)(prepare);
                self.prepare.set(prepare);
                bridge.looks();
            }
            let poll = self.uv.handle(POLL);
            if (self.uv.poll_init)(self.uv_loop, poll, socket.descriptor()) != 0 {
                libc::free(poll);
                return socket.end();
            }
            let served = Served {
                bridge: bridge.clone(),
                socket,
            };
            (self.uv.set_data)(poll, Box::into_raw(Box::new(served)).cast());
            (self.uv.poll_start)(poll, READABLE, on_poll);
            (self.uv.unref)(poll);
            self.polls.borrow_mut().push(poll);
        }
    }

    /// Sends what was asked for since the last turn.
    fn flush(&self) {
        let polls = self.polls.borrow().clone();
        for poll in polls {
            // SAFETY: a handle on the list has not been closed.
            let served = unsafe { &*(self.uv.get_data)(poll).cast::<Served>() };
            if !served.socket.flush() {
                self.drop_poll(poll);
            }
        }
    }

    fn drop_poll(&self, poll: Handled) {
        let mut polls = self.polls.borrow_mut();
        if let Some(at) = polls.iter().position(|known| *known == poll) {
            polls.swap_remove(at);
            // SAFETY: it was on the list, and so is closed once.
            unsafe { (self.uv.close)(poll, Some(on_poll_closed)) };
        }
    }

    /// Closes every handle. The loop turns once more, for their memory.
    pub(super) fn end(&self) {
        for poll in std::mem::take(&mut *self.polls.borrow_mut()) {
            // SAFETY: as in `flush`.
            let served = unsafe { &*(self.uv.get_data)(poll).cast::<Served>() };
            served.socket.end();
            // SAFETY: as in `drop_poll`.
            unsafe { (self.uv.close)(poll, Some(on_poll_closed)) };
        }
        // SAFETY: made in `find`, and nothing uses it any more.
        unsafe { sys::napi_async_destroy(self.env, self.context) };
        let prepare = self.prepare.replace(ptr::null_mut());
        if !prepare.is_null() {
            // SAFETY: closed once.
            unsafe { (self.uv.close)(prepare, Some(on_prepare_closed)) };
        }
    }
}

/// One turn: what has become ready goes on, its promises are settled, and what that leads to is sent.
fn turn(bridge: &Rc<Bridge>, turns: &Turns) {
    let env = Env::from_raw(turns.env);
    let mut handles = ptr::null_mut();
    let mut scope = ptr::null_mut();
    // SAFETY: on the loop's thread, outside of JavaScript; opened and closed in pairs.
    unsafe {
        sys::napi_open_handle_scope(turns.env, &mut handles);
        sys::napi_open_callback_scope(turns.env, ptr::null_mut(), turns.context, &mut scope);
    }
    while bridge.calls.go_on() | settle_ready(&env, bridge) {}
    // SAFETY: as above. Closing the scope runs what the promises lead to, as after every callback of Node's.
    unsafe {
        sys::napi_close_callback_scope(turns.env, scope);
        sys::napi_close_handle_scope(turns.env, handles);
    }
}

fn guarded(work: impl FnOnce()) {
    // A panic must not unwind into libuv.
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err() {
        tracing::error!("a bug in holdfast: a turn of the event loop panicked");
    }
}

unsafe extern "C" fn on_poll(poll: Handled, _: c_int, _: c_int) {
    guarded(|| {
        let Some(uv) = Uv::data(poll) else { return };
        // SAFETY: the data of a poll handle, until it is closed.
        let served = unsafe { &*uv.cast::<Served>() };
        let bridge = served.bridge.clone();
        let Some(turns) = &bridge.turns else { return };
        let open = served.socket.readable();
        turn(&bridge, turns);
        if !open {
            turns.drop_poll(poll);
        }
        turns.flush();
    });
}

unsafe extern "C" fn on_prepare(prepare: Handled) {
    guarded(|| {
        let Some(data) = Uv::data(prepare) else { return };
        // SAFETY: the data of the prepare handle, which keeps one count of the bridge.
        let bridge = unsafe {
            Rc::increment_strong_count(data.cast::<Bridge>());
            Rc::from_raw(data.cast::<Bridge>())
        };
        let Some(turns) = &bridge.turns else { return };
        // What a turn leads to may be ready at once, too, and the loop sleeps next.
        for _ in 0..TURNS_AT_ONCE {
            if !bridge.has_ready() {
                break;
            }
            turn(&bridge, turns);
        }
        if bridge.has_ready() {
            bridge.shared().ring();
        }
        turns.flush();
    });
}

impl Uv {
    /// A handle's data: the first field of every handle (libuv's manual, `uv_handle_t.data`).
    fn data(handle: Handled) -> Option<*const c_void> {
        // SAFETY: the handle lives until its close callback.
        let data = unsafe { *handle.cast::<*const c_void>() };
        (!data.is_null()).then_some(data)
    }
}

unsafe extern "C" fn on_poll_closed(poll: Handled) {
    if let Some(data) = Uv::data(poll) {
        // SAFETY: boxed in `serve`; a handle is closed once.
        drop(unsafe { Box::from_raw(data.cast_mut().cast::<Served>()) });
    }
    // SAFETY: allocated by `handle`.
    unsafe { libc::free(poll) };
}

unsafe extern "C" fn on_prepare_closed(prepare: Handled) {
    if let Some(data) = Uv::data(prepare) {
        // SAFETY: the count that `serve` gave away.
        drop(unsafe { Rc::from_raw(data.cast::<Bridge>()) });
    }
    // SAFETY: allocated by `handle`.
    unsafe { libc::free(prepare) };
}

impl Calls {
    /// Whether anything waits to be polled here.
    pub(super) fn any_ready(&self) -> bool {
        !lock(&self.ready).is_empty()
    }
}
