//! The event loop of whoever calls, for an engine that wants its socket served there.
//!
//! A hop between two threads costs more than everything else in a call. Where calls come from a thread that has an event
//! loop of its own (Node's), a socket that is written and read on that thread saves two of them.

use std::fmt;
use std::sync::Arc;

/// An event loop.
pub trait EventLoop: Send + Sync + fmt::Debug {
    /// Whether the current thread is the loop's own.
    fn is_here(&self) -> bool;

    /// Has a socket served, from soon on and until it says that it has ended. May be called on any thread.
    #[cfg(unix)]
    fn serve(&self, socket: Arc<dyn Socket>);
}

/// A socket that an event loop serves. Its methods are called on the loop's thread, and must not block.
#[cfg(unix)]
pub trait Socket: Send + Sync {
    /// The descriptor. It stays open for as long as the socket lives.
    fn descriptor(&self) -> std::os::fd::RawFd;

    /// There is something to read. Answers whether the socket is still of use.
    fn readable(&self) -> bool;

    /// The loop is about to sleep: what is to be sent goes out now. Answers whether the socket is still of use.
    fn flush(&self) -> bool;

    /// Whether answers are under way: there will be something to read soon.
    fn awaits(&self) -> bool;

    /// The loop does not serve it (any more).
    fn end(&self);
}
