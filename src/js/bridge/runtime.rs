//! The runtime of the I/O thread, with helper threads that do not end while they are idle.
//!
//! Helper threads resolve host names. tokio ends idle ones after 10 s, and panics if it needs the first one and cannot create it,
//! for example in a container with a limit for threads. So one is created at the start, and none ends: where no other one can be
//! created, a lookup waits for it.

use std::io;
use std::panic::catch_unwind;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

/// The maximum number of helper threads. A lookup may block one for many seconds.
const MAX_HELPERS: usize = 64;

const NO_THREAD: &str = "no thread can be created; raise the limit (pids.max of the container, ulimit -u)";

/// Creates the runtime and its first helper thread.
pub(super) fn create() -> io::Result<Runtime> {
    let runtime = Builder::new_current_thread()
        .enable_all()
        .thread_keep_alive(Duration::MAX)
        .max_blocking_threads(MAX_HELPERS)
        .build()?;
    let handle = runtime.handle().clone();
    match catch_unwind(move || drop(handle.spawn_blocking(|| ()))) {
        Ok(()) => Ok(runtime),
        Err(_) => Err(io::Error::new(io::ErrorKind::WouldBlock, NO_THREAD)),
    }
}
