//! `Lock`: a held lock as JavaScript sees it. Its types and documentation stand in `types.d.ts`.

use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use napi::bindgen_prelude::*;
use napi_derive::napi;

use super::calls::linger;
use super::options::ttl_ms;
use super::promise::{Bridge, Deferred};
use super::signal::{LossSignal, emit_warning};
use super::value::{self, Answer, Kept, Thrown, Value, array, bigint, boolean, number, object, set, string, undefined};
use crate::service::{Lease, Locks, ReleaseOutcome};

/// A held lock.
#[napi(custom_finalize)]
pub struct Lock {
    lease: Arc<Lease>,
    locks: Locks,
    bridge: Rc<Bridge>,
    signal: OnceCell<Kept>,
    /// Whether the user's code has to release the lock. `using` and `acquireAndExecute` release theirs.
    owns: bool,
}

impl ObjectFinalize for Lock {
    /// Warns, once per process, when a renewed lock is garbage collected while it is held.
    ///
    /// The lease goes on. A program may acquire a lock for its whole life and keep no reference to it; a release at a time
    /// that the garbage collector chooses would give the name to a second holder under it.
    fn finalize(self, env: Env) -> Result<()> {
        static WARNED: AtomicBool = AtomicBool::new(false);
        let is_dropped = self.owns && self.lease.is_renewed() && self.signal.get().is_none() && self.lease.is_held();
        if is_dropped
            && let Some(bridge) = Bridge::existing(&env)
            && !WARNED.swap(true, Relaxed)
        {
            let warning = format!(
                "the Lock of {:?} was garbage collected while it was held. It is renewed until this process ends or its \
                 LockService is closed. Keep a reference to the Lock and call release(), or use `await using` or using(). \
                 Later locks are not warned about.",
                self.lease.names()[0].as_str()
            );
            // JavaScript cannot run during garbage collection.
            bridge.shared().notice(move |env| emit_warning(env, &warning));
        }
        Ok(())
    }
}

/// Hands a raw value to napi's own return conversion.
pub(super) fn returned<'env>(env: &Env, answer: Answer<Value>) -> Result<Unknown<'env>> {
    match answer {
        // SAFETY: the value belongs to the handle scope of the running call.
        Ok(value) => unsafe { Unknown::from_napi_value(env.raw(), value) },
        Err(thrown) => {
            let value = thrown.into_value(env);
            // SAFETY: as above; napi passes a pending exception on.
            unsafe { napi::sys::napi_throw(env.raw(), value) };
            Err(Error::new(Status::PendingException, ""))
        }
    }
}

impl Lock {
    /// Creates a JavaScript object that owns a lease.
    pub(super) fn instance(env: &Env, bridge: &Rc<Bridge>, locks: &Locks, lease: Arc<Lease>) -> Answer<Value> {
        Lock::object(env, bridge, locks, lease, true)
    }

    /// Creates a JavaScript object for a lease that `using` or `acquireAndExecute` releases.
    pub(super) fn borrowed(env: &Env, bridge: &Rc<Bridge>, locks: &Locks, lease: Arc<Lease>) -> Answer<Value> {
        Lock::object(env, bridge, locks, lease, false)
    }

    fn object(env: &Env, bridge: &Rc<Bridge>, locks: &Locks, lease: Arc<Lease>, owns: bool) -> Answer<Value> {
        let unclaimed = (locks.clone(), lease.clone());
        let lock = Lock {
            lease,
            locks: locks.clone(),
            bridge: bridge.clone(),
            signal: OnceCell::new(),
            owns,
        };
        let made = lock.into_instance(env).and_then(|instance| {
            // SAFETY: the instance belongs to the open handle scope.
            unsafe { ClassInstance::to_napi_value(env.raw(), instance) }
        });
        made.map_err(|error| {
            // Nobody gets this lease: it must not be renewed for ever.
            let (locks, lease) = unclaimed;
            bridge.call(env, locks.release(&lease), |_, _| {});
            string(env, &error.reason).map_or_else(|thrown| thrown, Thrown::Js)
        })
    }

    /// Frees the lease; the promise gets what `settle` makes of the answer.
    fn free(
        &self,
        env: &Env,
        settle: impl FnOnce(&Env, std::result::Result<ReleaseOutcome, crate::error::LockError>) -> Answer<Value>
        + Send
        + 'static,
    ) -> Value {
        let (deferred, promise) = Deferred::new(env);
        let locks = self.locks.clone();
        self.bridge
            .call(env, self.locks.release(&self.lease), move |env, released| {
                if let Ok(bridge) = Bridge::get(env) {
                    linger(env, &bridge, &locks);
                }
                let answer = settle(env, released);
                deferred.settle(env, answer);
            });
        promise
    }
}

#[napi]
impl Lock {
    #[napi(constructor, skip_typescript)]
    pub fn refuse() -> Result<Self> {
        Err(Error::new(
            Status::GenericFailure,
            "a Lock comes from acquire, tryAcquire, using or restore of a LockService",
        ))
    }

    #[napi(getter, skip_typescript)]
    pub fn name<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        returned(env, string(env, self.lease.names()[0].as_str()))
    }

    #[napi(getter, skip_typescript)]
    pub fn names<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        returned(
            env,
            array(env, self.lease.names().iter().map(|name| string(env, name.as_str()))),
        )
    }

    #[napi(getter, skip_typescript)]
    pub fn token<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        returned(env, string(env, self.lease.token()))
    }

    #[napi(getter, skip_typescript)]
    pub fn fencing_token<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        returned(env, bigint(env, self.lease.fence().0))
    }

    #[napi(getter, skip_typescript)]
    pub fn remaining_ms(&self) -> f64 {
        self.lease.remaining().as_secs_f64() * 1000.0
    }

    #[napi(getter, skip_typescript)]
    pub fn is_held(&self) -> bool {
        self.lease.is_held()
    }

    #[napi(getter, skip_typescript)]
    pub fn signal<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        let answer = match self.signal.get() {
            Some(signal) => signal.value(env),
            None => LossSignal::signal_of(env, self.bridge.shared(), &self.lease).and_then(|signal| {
                let kept = Kept::new(env, self.bridge.shared(), signal)?;
                // Making a signal runs JavaScript, which may have asked for this one.
                self.signal.get_or_init(|| kept).value(env)
            }),
        };
        returned(env, answer)
    }

    #[napi(skip_typescript)]
    pub fn extend<'env>(&self, env: &'env Env, ttl: Unknown<'env>) -> Result<Unknown<'env>> {
        let ttl = match ttl_ms(env, ttl.raw()) {
            Ok(ttl) => ttl,
            Err(thrown) => return returned(env, Ok(Deferred::rejected(env, thrown))),
        };
        let (deferred, promise) = Deferred::new(env);
        let (locks, lease) = (self.locks.clone(), self.lease.clone());
        self.bridge.call(
            env,
            async move { locks.extend(&lease, ttl).await },
            move |env, extended| {
                deferred.settle(env, extended.map(|()| undefined(env)).map_err(Thrown::Lock));
            },
        );
        returned(env, Ok(promise))
    }

    #[napi(skip_typescript)]
    pub fn release<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        let promise = self.free(env, |env, released| Ok(boolean(env, released?.is_freed())));
        returned(env, Ok(promise))
    }

    /// A release that fails does not hide what the block did: it goes on in the background.
    #[napi(well_known_symbol = "asyncDispose", skip_typescript)]
    pub fn async_dispose<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        let promise = self.free(env, |env, _| Ok(undefined(env)));
        returned(env, Ok(promise))
    }

    /// What `console.log` shows; never the token, which is the right to release.
    #[napi(symbol_for = "nodejs.util.inspect.custom", skip_typescript)]
    pub fn inspected<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        let build = || {
            let shown = object(env)?;
            set(
                env,
                shown,
                "names",
                array(env, self.lease.names().iter().map(|name| string(env, name.as_str())))?,
            )?;
            set(env, shown, "fencingToken", bigint(env, self.lease.fence().0)?)?;
            set(env, shown, "isHeld", boolean(env, self.lease.is_held()))?;
            set(env, shown, "remainingMs", number(env, self.remaining_ms())?)?;
            Ok(shown)
        };
        returned(env, build())
    }

    #[napi(js_name = "toJSON", skip_typescript)]
    pub fn to_json<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        returned(env, json(env, &self.lease))
    }
}

fn json(env: &Env, lease: &Lease) -> Answer<Value> {
    let json = object(env)?;
    set(
        env,
        json,
        "names",
        array(env, lease.names().iter().map(|name| string(env, name.as_str())))?,
    )?;
    set(env, json, "token", string(env, lease.token())?)?;
    set(env, json, "fencingToken", string(env, &lease.fence().0.to_string())?)?;
    set(env, json, "ttlMs", number(env, lease.ttl().as_millis() as f64)?)?;
    set(env, json, "renew", boolean(env, lease.is_renewed()))?;
    if let Some(metadata) = lease.metadata() {
        set(env, json, "metadata", parsed(env, metadata)?)?;
    }
    Ok(json)
}

/// JSON text as a value.
pub(super) fn parsed(env: &Env, json: &str) -> Answer<Value> {
    value::invoke(env, value::global(env, "JSON")?, "parse", &[string(env, json)?])
}
