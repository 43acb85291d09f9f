//! A call: a future and what settles its promise, in one allocation.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::future::{CatchUnwind, MaybeDone, maybe_done};
use napi::Env;

use super::shared::{Delivery, Shared};
use super::{Bridge, failed};
use crate::error::LockError;

/// A future that runs on one of the two threads. Its result settles a promise on the JavaScript thread.
pub(super) trait Call: Future<Output = ()> + Send {
    /// Whether it does not keep the event loop alive.
    fn is_in_background(&self) -> bool;

    /// Settles the promise, after the end of the future.
    fn settle(self: Pin<Box<Self>>, env: &Env, bridge: &Rc<Bridge>);
}

pub(super) type Job = Pin<Box<dyn Call>>;

/// Runs a call on the I/O thread.
pub(super) async fn run(mut job: Job, shared: Arc<Shared>) {
    job.as_mut().await;
    shared.deliver(Delivery::Reply(job));
}

type Work<W> = CatchUnwind<AssertUnwindSafe<W>>;

struct Settling<W: Future, S> {
    /// The future, or its result. Pinned.
    work: MaybeDone<Work<W>>,
    /// Not pinned.
    settle: Option<S>,
    is_in_background: bool,
}

/// Creates a call. `is_in_background`: it does not keep the event loop alive. A panic in `work` is passed to `settle` as an error.
pub(super) fn new<T: Send + 'static>(
    work: impl Future<Output = Result<T, LockError>> + Send + 'static,
    settle: impl FnOnce(&Env, &Rc<Bridge>, Result<T, LockError>) + Send + 'static,
    is_in_background: bool,
) -> Job {
    let work = maybe_done(AssertUnwindSafe(work).catch_unwind());
    let settle = Some(settle);
    Box::pin(Settling {
        work,
        settle,
        is_in_background,
    })
}

impl<W: Future, S> Settling<W, S> {
    fn work(self: Pin<&mut Self>) -> Pin<&mut MaybeDone<Work<W>>> {
        // SAFETY: the field is never moved out of a pinned value, and there is no `Drop`.
        unsafe { self.map_unchecked_mut(|call| &mut call.work) }
    }

    fn take_settle(self: Pin<&mut Self>) -> Option<S> {
        // SAFETY: the field is not pinned, and nothing else is moved.
        unsafe { self.get_unchecked_mut() }.settle.take()
    }
}

impl<W: Future, S> Future for Settling<W, S> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.work().poll(context)
    }
}

impl<T, W, S> Call for Settling<W, S>
where
    T: Send,
    W: Future<Output = Result<T, LockError>> + Send,
    S: FnOnce(&Env, &Rc<Bridge>, Result<T, LockError>) + Send,
{
    fn is_in_background(&self) -> bool {
        self.is_in_background
    }

    fn settle(mut self: Pin<Box<Self>>, env: &Env, bridge: &Rc<Bridge>) {
        let outcome = self.as_mut().work().take_output();
        let settle = self.as_mut().take_settle();
        drop(self);
        if let (Some(outcome), Some(settle)) = (outcome, settle) {
            settle(env, bridge, outcome.unwrap_or_else(|panic| Err(panicked(&*panic))));
        }
    }
}

/// Creates the error of a panic.
fn panicked(panic: &(dyn Any + Send)) -> LockError {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_default();
    failed("call", &format!("a bug in holdfast: {text}"))
}
