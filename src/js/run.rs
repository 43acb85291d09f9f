//! Running the user's function under a lock: `acquireAndExecute` and `using`.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use napi::Env;

use super::calls::linger;
use super::error::{hide, to_js};
use super::lock::Lock;
use super::promise::{Bridge, Deferred};
use super::value::{Answer, Context, Kept, Kind, Thrown, Value, call, function, get, global, invoke, kind, undefined};
use crate::error::LockError;
use crate::service::{Lease, Locks, ReleaseOutcome};

/// What the promise says when the lease was lost while the function ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnLoss {
    /// `acquireAndExecute`: what the function returned or threw, as in the gist.
    PassOn,
    /// `using`: `LOCK_LOST`.
    Reject,
}

/// One run under way.
pub(super) struct Run {
    pub(super) bridge: Rc<Bridge>,
    pub(super) locks: Locks,
    pub(super) lease: Arc<Lease>,
    pub(super) on_loss: OnLoss,
    pub(super) deferred: Deferred,
}

/// What the user's function did.
enum Did {
    Return(Value),
    Throw(Value),
}

impl Run {
    /// Calls the function with the lock, waits for what it returns, releases, and settles the promise.
    pub(super) fn start(self, env: &Env, context: &Context, callback: Value) {
        let called = Lock::borrowed(env, &self.bridge, &self.locks, self.lease.clone())
            .and_then(|lock| context.enter(|| call(env, undefined(env), callback, &[lock])));
        match called {
            // A function that throws before it returns a promise releases, too.
            Err(thrown) => self.fail(env, thrown),
            Ok(value) if !matches!(kind(env, value), Kind::Object | Kind::Array | Kind::Function) => {
                self.finish(env, Did::Return(value));
            }
            Ok(value) => {
                let pending = Rc::new(Cell::new(Some(self)));
                if let Err(thrown) = settled(env, value, &pending)
                    && let Some(run) = pending.take()
                {
                    run.fail(env, thrown);
                }
            }
        }
    }

    /// Releases without having called the function.
    pub(super) fn fail(self, env: &Env, thrown: Thrown) {
        let value = thrown.into_value(env);
        self.finish(env, Did::Throw(value));
    }

    fn finish(self, env: &Env, did: Did) {
        let (value, threw) = match did {
            Did::Return(value) => (value, false),
            Did::Throw(value) => (value, true),
        };
        let kept = match Kept::wrapped(env, self.bridge.shared(), value) {
            Ok(kept) => kept,
            Err(thrown) => return self.deferred.settle(env, Err(thrown)),
        };
        let Run {
            bridge,
            locks,
            lease,
            on_loss,
            deferred,
        } = self;
        let released_before = lease.is_released();
        let loss = lease.loss();
        let released = locks.release(&lease);
        bridge.call(env, released, move |env, answer| {
            if let Ok(bridge) = Bridge::get(env) {
                linger(env, &bridge, &locks);
            }
            // A release that the store did not take goes on in the background; the job is done all the same.
            let gone = !released_before && matches!(answer, Ok(ReleaseOutcome::NotHeld));
            let loss = loss.or_else(|| gone.then(|| lost_at_release(&lease, locks.is_closed())));
            let answer = conclude(env, &kept, threw, loss.filter(|_| on_loss == OnLoss::Reject));
            deferred.settle(env, answer);
        });
    }
}

fn lost_at_release(lease: &Lease, closed: bool) -> LockError {
    let name = lease.names()[0].as_str();
    let why = if closed {
        "its LockService was closed"
    } else {
        "it was gone from the store when it was released"
    };
    LockError::lost(name, format!("the lock {name:?} is lost: {why}"))
}

fn conclude(env: &Env, kept: &Kept, threw: bool, loss: Option<LockError>) -> Answer<Value> {
    let value = kept.unwrapped(env)?;
    match loss {
        Some(loss) => {
            let error = to_js(env, &loss);
            if threw {
                hide(env, error, "cause", value);
            }
            Err(Thrown::Js(error))
        }
        None if threw => Err(Thrown::Js(value)),
        None => Ok(value),
    }
}

/// Has `pending` finished when the promise (or whatever has a `then`) that the function returned is settled.
fn settled(env: &Env, value: Value, pending: &Rc<Cell<Option<Run>>>) -> Answer<()> {
    let promise = invoke(env, global(env, "Promise")?, "resolve", &[value])?;
    let resume = |did: fn(Value) -> Did| {
        let pending = pending.clone();
        function(env, "", move |env, _, value| {
            if let Some(run) = pending.take() {
                run.finish(env, did(value));
            }
            Ok(undefined(env))
        })
    };
    let (on_return, on_throw) = (resume(Did::Return)?, resume(Did::Throw)?);
    let then = get(env, promise, "then")?;
    call(env, promise, then, &[on_return, on_throw]).map(|_| ())
}
