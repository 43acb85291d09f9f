//! The turns of Node's event loop: before it sleeps, what was asked for is sent and what is ready is settled, and a socket is
//! read when something has come.
//!
//! libuv's functions are looked up at run time. A runtime that does not export them (or Windows, for now) has no turns to
//! offer; its calls have no home (`home.rs`) and all go to the I/O thread.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use napi::{Env, sys};

use super::promise::{Bridge, settle_ready};
use super::value::{Answer, object, string};
use crate::event_loop::{AdaptiveSpin, Socket};

type Handled = *mut c_void;
type OnClose = unsafe extern "C" fn(Handled);
type OnPoll = unsafe extern "C" fn(Handled, c_int, c_int);
type OnPrepare = unsafe extern "C" fn(Handled);

/// The functions of libuv that are needed here (libuv's manual, "uv_poll_t", "uv_prepare_t" and "uv_loop_t").
struct Uv {
    handle_size: unsafe extern "C" fn(c_int) -> usize,
    poll_init: unsafe extern "C" fn(*mut c_void, Handled, c_int) -> c_int,
    poll_start: unsafe extern "C" fn(Handled, c_int, OnPoll) -> c_int,
    prepare_init: unsafe extern "C" fn(*mut c_void, Handled) -> c_int,
    prepare_start: unsafe extern "C" fn(Handled, OnPrepare) -> c_int,
    set_data: unsafe extern "C" fn(Handled, *mut c_void),
    get_data: unsafe extern "C" fn(Handled) -> *mut c_void,
    unref: unsafe extern "C" fn(Handled),
    backend_fd: unsafe extern "C" fn(*const c_void) -> c_int,
    backend_timeout: unsafe extern "C" fn(*const c_void) -> c_int,
    close: unsafe extern "C" fn(Handled, Option<OnClose>),
}

/// How long the loop looks out for answers before it sleeps.
const LOOK_OUT: Duration = Duration::from_micros(75);

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
                backend_fd: function(c"uv_backend_fd")?,
                backend_timeout: function(c"uv_backend_timeout")?,
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
    look_out: RefCell<AdaptiveSpin>,
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
            look_out: RefCell::default(),
        })
    }

    /// Whether a turn comes before the loop sleeps.
    pub(super) fn come(&self) -> bool {
        !self.prepare.get().is_null()
    }

    pub(super) fn serve(&self, bridge: &Rc<Bridge>, socket: Arc<dyn Socket>) {
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

    /// Looks out for answers for a moment, where some are under way and the loop has nothing else to do.
    ///
    /// # Behavior
    /// Whatever is ready in the loop ends it (a descriptor of libuv's own becomes readable then; libuv's manual,
    /// `uv_backend_fd`), so that nothing else has to wait.
    fn look_out(&self) {
        let polls = self.polls.borrow();
        // SAFETY: a handle on the list has not been closed.
        let served = |poll: &Handled| unsafe { &*(self.uv.get_data)(*poll).cast::<Served>() };
        let mut awaiting = polls
            .iter()
            .map(|poll| &served(poll).socket)
            .filter(|socket| socket.awaits());
        let mut look_out = self.look_out.borrow_mut();
        let Some(socket) = awaiting.next().filter(|_| look_out.should_spin()) else {
            return;
        };
        // SAFETY: the loop is alive, and this is its thread.
        let (fd, timeout) = unsafe {
            (
                (self.uv.backend_fd)(self.uv_loop),
                (self.uv.backend_timeout)(self.uv_loop),
            )
        };
        // A loop with a timer that is due, or with something else to do, does not sleep.
        if fd < 0 || timeout == 0 {
            return;
        }
        let (events, revents) = (libc::POLLIN, 0);
        let mut ready = [fd, socket.descriptor()].map(|fd| libc::pollfd { fd, events, revents });
        let started = Instant::now();
        // SAFETY: two valid entries.
        while unsafe { libc::poll(ready.as_mut_ptr(), 2, 0) } == 0 {
            if started.elapsed() >= LOOK_OUT {
                return look_out.record(false);
            }
        }
        // Something else that is ready tells nothing of the store.
        if ready[1].revents != 0 {
            look_out.record(true);
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
        turns.look_out();
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
