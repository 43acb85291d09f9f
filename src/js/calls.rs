//! What the methods of `LockService` have in common: from checked arguments to a settled promise.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use napi::Env;
use tokio_util::sync::CancellationToken;

use super::abort::Abortable;
use super::connect::millis;
use super::lock::{Lock, parsed};
use super::options::{EXECUTE, Options, callback, name, names, text, ttl_seconds};
use super::promise::{Bridge, Deferred};
use super::run::{OnLoss, Run};
use super::service::LockService;
use super::value::{
    Answer, Context, Kept, Kind, Thrown, Value, bigint, describe, kind, null, number, object, set, string, undefined,
};
use crate::error::LockError;
use crate::model::{Fence, Key, LockInfo, OwnerToken};
use crate::service::{AcquireOptions, Lease, Locks, Outcome, Wait};

/// Settles the promise with the lease, or with `None` when the names were busy.
pub(super) type Settle = Box<dyn FnOnce(&Env, &Rc<Bridge>, &Locks, Deferred, Option<Arc<Lease>>) + Send>;

/// An acquisition whose promise is pending.
struct PendingAcquisition {
    locks: Locks,
    names: Vec<Key>,
    options: AcquireOptions,
    abort: Option<CancellationToken>,
    abortable: Abortable,
    started: Instant,
    settle: Settle,
}

impl LockService {
    /// Starts `work` and settles a new promise with what `make` makes of its result.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        env: &Env,
        work: impl Future<Output = std::result::Result<T, LockError>> + Send + 'static,
        make: impl FnOnce(&Env, T) -> Answer<Value> + Send + 'static,
    ) -> Value {
        let (deferred, promise) = Deferred::new(env);
        let locks = self.locks.clone();
        self.bridge.call(env, work, move |env, result| {
            if let Ok(bridge) = Bridge::get(env) {
                linger(env, &bridge, &locks);
            }
            let answer = result.map_err(Thrown::Lock).and_then(|result| make(env, result));
            deferred.settle(env, answer);
        });
        promise
    }

    /// Takes the names; the caller's signal may settle the promise before that.
    pub(super) fn take(
        &self,
        env: &Env,
        names: Vec<Key>,
        options: AcquireOptions,
        signal: Option<Value>,
        settle: Settle,
    ) -> Answer<Value> {
        let (deferred, promise) = Deferred::new(env);
        let abort = signal.is_some().then(CancellationToken::new);
        let abortable = match Abortable::new(env, &self.bridge, deferred, signal.zip(abort.as_ref())) {
            Ok(abortable) => abortable,
            Err((deferred, thrown)) => {
                deferred.settle(env, Err(thrown));
                return Ok(promise);
            }
        };
        let acquisition = PendingAcquisition {
            locks: self.locks.clone(),
            names,
            options,
            abort,
            abortable,
            started: Instant::now(),
            settle,
        };
        acquisition.begin(env, &self.bridge);
        Ok(promise)
    }

    /// The rejection of a wait that ended busy.
    pub(super) fn timeout(first: &str, wait: Wait) -> LockError {
        let waited = match wait {
            Wait::For(wait) => format!("{} ms", wait.as_millis()),
            Wait::No | Wait::Forever => "0 ms".into(),
        };
        LockError::timeout(first, format!("the lock {first:?} was still busy after {waited}"))
    }

    pub(super) fn execute(&self, env: &Env, first: Value, second: Value, third: Value) -> Answer<Value> {
        let gist = AcquireOptions {
            wait: Wait::No,
            renew: false,
            ..self.defaults.clone()
        };
        let (key, options, signal, function) = if kind(env, first) == Kind::Object {
            let options = Options::new(env, "options", first, EXECUTE)?;
            let key = match options.get("name")? {
                Some(value) => name(env, value)?,
                None => return Err(LockError::invalid("name", "must be a string", "undefined").into()),
            };
            (key, options.acquire(&gist)?, options.signal()?, second)
        } else {
            let key = name(env, first)?;
            let short = kind(env, third) == Kind::Undefined && kind(env, second) == Kind::Function;
            let mut options = gist;
            if !short && kind(env, second) != Kind::Undefined {
                options.ttl = ttl_seconds(env, second)?;
            }
            (key, options, None, if short { second } else { third })
        };
        let function = callback(env, "fn", function)?;
        self.run(env, vec![key], options, signal, function, OnLoss::PassOn)
    }

    pub(super) fn run(
        &self,
        env: &Env,
        names: Vec<Key>,
        options: AcquireOptions,
        signal: Option<Value>,
        function: Value,
        on_loss: OnLoss,
    ) -> Answer<Value> {
        let function = Kept::new(env, self.bridge.shared(), function)?;
        let context = Context::current(env, self.bridge.shared())?;
        let (first, wait) = (names[0].clone(), options.wait);
        let settle: Settle = Box::new(move |env, bridge, locks, deferred, outcome| match outcome {
            Some(lease) => {
                let run = Run {
                    bridge: bridge.clone(),
                    locks: locks.clone(),
                    lease,
                    on_loss,
                    deferred,
                };
                match function.value(env) {
                    Ok(function) => run.start(env, &context, function),
                    Err(thrown) => run.fail(env, thrown),
                }
            }
            None if on_loss == OnLoss::PassOn => deferred.settle(env, Ok(undefined(env))),
            None => deferred.settle(env, Err(Self::timeout(first.as_str(), wait).into())),
        });
        self.take(env, names, options, signal, settle)
    }

    pub(super) fn restored(&self, env: &Env, json: Value) -> Answer<Value> {
        let json = if kind(env, json) == Kind::String {
            let source = text(env, "json", json)?;
            parsed(env, &source)
                .map_err(|_| LockError::invalid("json", "must be what Lock.toJSON() gave", "other text"))?
        } else {
            json
        };
        if kind(env, json) != Kind::Object {
            return Err(LockError::invalid("json", "must be what Lock.toJSON() gave", describe(env, json)).into());
        }
        let fields = ["names", "token", "fencingToken", "ttlMs", "renew", "metadata"];
        let options = Options::new(env, "json", json, &fields)?;
        let missing =
            |field: &str| LockError::invalid("json", "must be what Lock.toJSON() gave", format!("no {field}"));
        let keys = names(env, options.get("names")?.ok_or_else(|| missing("names"))?)?;
        let owner = OwnerToken::parse(&options.text("token")?.ok_or_else(|| missing("token"))?)?;
        let fence = options.text("fencingToken")?.ok_or_else(|| missing("fencingToken"))?;
        let Ok(fence) = fence.parse().map(Fence) else {
            return Err(
                LockError::invalid("fencingToken", "must be a whole number as text", format!("{fence:?}")).into(),
            );
        };
        let options = options.acquire(&self.defaults)?;
        let (deferred, promise) = Deferred::new(env);
        let locks = self.locks.clone();
        let theirs = self.locks.clone();
        self.bridge.call(
            env,
            async move { locks.restore(&keys, owner, fence, options).await },
            move |env, restored| {
                let lock = restored
                    .map_err(Thrown::Lock)
                    .and_then(|lease| Lock::instance(env, &Bridge::get(env)?, &theirs, lease));
                deferred.settle(env, lock);
            },
        );
        Ok(promise)
    }
}

impl PendingAcquisition {
    fn begin(self, env: &Env, bridge: &Rc<Bridge>) {
        let acquiring = self
            .locks
            .acquire(&self.names, self.options.clone(), self.abort.clone());
        bridge.call(env, acquiring, move |env, outcome| self.received(env, outcome));
    }

    /// Returns the options with the rest of the wait. `None`: the wait is over.
    fn rest(&self) -> Option<AcquireOptions> {
        let wait = match self.options.wait {
            Wait::No => return None,
            Wait::Forever => Wait::Forever,
            Wait::For(wait) => Wait::For(
                wait.checked_sub(self.started.elapsed())
                    .filter(|left| !left.is_zero())?,
            ),
        };
        Some(AcquireOptions {
            wait,
            ..self.options.clone()
        })
    }

    fn received(mut self, env: &Env, outcome: std::result::Result<Outcome, LockError>) {
        let Ok(bridge) = Bridge::get(env) else { return };
        let lease = match outcome {
            // The lease ended before the event loop received it: do not return it, and start no job under it.
            Ok(Outcome::Acquired(lease)) if !lease.is_held() => {
                if self.locks.is_closed() {
                    Err(LockError::closed())
                } else if let Some(rest) = self.rest() {
                    self.options = AcquireOptions {
                        resumed: Some(lease.arrival()),
                        ..rest
                    };
                    return self.begin(env, &bridge);
                } else {
                    Ok(None)
                }
            }
            Ok(Outcome::Acquired(lease)) => Ok(Some(lease)),
            Ok(Outcome::Busy) => Ok(None),
            // The signal has settled the promise.
            Ok(Outcome::Aborted) => Ok(None),
            Err(error) => Err(error),
        };
        let locks = self.locks;
        let deferred = self.abortable.disarm(env, &bridge);
        linger(env, &bridge, &locks);
        match (deferred, lease) {
            (Some(deferred), Ok(lease)) => (self.settle)(env, &bridge, &locks, deferred, lease),
            (Some(deferred), Err(error)) => deferred.settle(env, Err(error.into())),
            // The abort settled the promise before the grant arrived: release the lease.
            (None, Ok(Some(lease))) => {
                bridge.call(env, locks.release(&lease), move |env, _| {
                    if let Ok(bridge) = Bridge::get(env) {
                        linger(env, &bridge, &locks);
                    }
                });
            }
            (None, _) => {}
        }
    }
}

/// Keeps the process alive while claims are released in the background. Otherwise a process with nothing else to do would
/// exit and leave a lock without a caller.
pub(super) fn linger(env: &Env, bridge: &Bridge, locks: &Locks) {
    if let Some(released) = locks.background_releases() {
        let released = async move {
            released.await;
            Ok(())
        };
        bridge.call(env, released, |_, _| {});
    }
}

/// A `LockInfo` as JavaScript sees it.
pub(super) fn info_object(env: &Env, info: &LockInfo) -> Answer<Value> {
    let result = object(env)?;
    set(env, result, "name", string(env, &info.name)?)?;
    let remaining = match info.remaining {
        Some(remaining) => millis(env, remaining)?,
        None => number(env, f64::INFINITY)?,
    };
    set(env, result, "remainingMs", remaining)?;
    let fence = info.fence.map_or_else(|| Ok(null(env)), |fence| bigint(env, fence.0))?;
    set(env, result, "fencingToken", fence)?;
    let holder = match &info.holder {
        Some(held) => {
            let holder = object(env)?;
            set(env, holder, "host", string(env, &held.process.host)?)?;
            set(env, holder, "pid", number(env, f64::from(held.process.pid))?)?;
            set(env, holder, "since", date(env, held.since_ms)?)?;
            holder
        }
        None => null(env),
    };
    set(env, result, "holder", holder)?;
    // Another tool may have written something else than JSON.
    let metadata = info.metadata.as_deref().and_then(|json| parsed(env, json).ok());
    set(env, result, "metadata", metadata.unwrap_or_else(|| null(env)))?;
    Ok(result)
}

fn date(env: &Env, ms: u64) -> Answer<Value> {
    let mut value = std::ptr::null_mut();
    // SAFETY: `env` is the live environment of this thread.
    unsafe { napi::sys::napi_create_date(env.raw(), ms as f64, &mut value) };
    Ok(value)
}
