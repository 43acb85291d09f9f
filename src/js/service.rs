//! `LockService` as JavaScript sees it. Its types and documentation stand in `types.d.ts`.
//!
//! Every method returns a promise and never throws: what is wrong with the arguments rejects it.

use std::rc::Rc;
use std::sync::Arc;

use napi::bindgen_prelude::*;
use napi_derive::napi;
use tokio_util::sync::CancellationToken;

use super::connect::{Request, millis};
use super::lock::{Lock, parsed, returned};
use super::options::{ACQUIRE, EXECUTE, Options, callback, name, names, text, ttl_seconds};
use super::promise::{Bridge, Deferred};
use super::run::{OnLoss, Run};
use super::signal::Abortable;
use super::value::{
    Answer, Kept, Kind, Thrown, Value, array, bigint, boolean, describe, kind, null, number, object, set, string,
    undefined,
};
use crate::error::LockError;
use crate::model::{Fence, Key, LockInfo, OwnerToken};
use crate::service::{AcquireOptions, Lease, Locks, Outcome, Wait};

/// A lock service over one store.
#[napi(custom_finalize)]
pub struct LockService {
    locks: Locks,
    bridge: Rc<Bridge>,
    defaults: AcquireOptions,
}

impl ObjectFinalize for LockService {}

/// The promise that `body` makes; one that is rejected already when `body` finds the arguments wrong.
fn promise<'env>(env: &Env, body: impl FnOnce() -> Answer<Value>) -> Result<Unknown<'env>> {
    let value = body().unwrap_or_else(|thrown| Deferred::rejected(env, thrown));
    returned(env, Ok(value))
}

/// What to do once the names are taken, or were busy.
type Settle = Box<dyn FnOnce(&Env, &Rc<Bridge>, &Locks, Deferred, std::result::Result<Arc<Lease>, u32>) + Send>;

impl LockService {
    /// Starts `work` and settles a new promise with what `make` makes of its result.
    fn ask<T: Send + 'static>(
        &self,
        env: &Env,
        work: impl Future<Output = std::result::Result<T, LockError>> + Send + 'static,
        make: impl FnOnce(&Env, T) -> Answer<Value> + Send + 'static,
    ) -> Value {
        let (deferred, promise) = Deferred::new(env);
        self.bridge.call(env, work, move |env, result| {
            let answer = result.map_err(Thrown::Lock).and_then(|result| make(env, result));
            deferred.settle(env, answer);
        });
        promise
    }

    /// Takes the names; the caller's signal may settle the promise before that.
    fn take(
        &self,
        env: &Env,
        names: Vec<Key>,
        options: AcquireOptions,
        signal: Option<Value>,
        settle: Settle,
    ) -> Answer<Value> {
        let (deferred, promise) = Deferred::new(env);
        let abort = CancellationToken::new();
        let abortable = match Abortable::new(env, self.bridge.shared(), deferred, signal, &abort) {
            Ok(abortable) => abortable,
            Err((deferred, thrown)) => {
                deferred.settle(env, Err(thrown));
                return Ok(promise);
            }
        };
        let locks = self.locks.clone();
        let theirs = self.locks.clone();
        self.bridge.call(
            env,
            async move { locks.acquire(&names, options, abort).await },
            move |env, outcome| {
                let deferred = abortable.disarm(env);
                let outcome = match outcome {
                    Ok(Outcome::Acquired(lease)) => Ok(lease),
                    Ok(Outcome::Busy { too_late }) => Err(too_late),
                    Ok(Outcome::Aborted) => return,
                    Err(error) => {
                        if let Some(deferred) = deferred {
                            deferred.settle(env, Err(error.into()));
                        }
                        return;
                    }
                };
                let Ok(bridge) = Bridge::get(env) else { return };
                match (deferred, outcome) {
                    (Some(deferred), outcome) => settle(env, &bridge, &theirs, deferred, outcome),
                    // Granted in the very moment of the abort: nobody knows of it, so it goes back.
                    (None, Ok(lease)) => bridge.call(env, async move { theirs.release(&lease).await }, |_, _| {}),
                    (None, Err(_)) => {}
                }
            },
        );
        Ok(promise)
    }

    /// The rejection of a wait that ended busy.
    fn timeout(first: &str, wait: Wait, too_late: u32) -> LockError {
        let waited = match wait {
            Wait::For(wait) => format!("{} ms", wait.as_millis()),
            Wait::No | Wait::Forever => "0 ms".into(),
        };
        let message = if too_late > 0 {
            format!(
                "the lock {first:?} was granted {too_late} times within {waited}, each time too late to be of use: its \
                 ttl is too short for this store"
            )
        } else {
            format!("the lock {first:?} was still busy after {waited}")
        };
        LockError::timeout(first, message)
    }

    fn execute(&self, env: &Env, first: Value, second: Value, third: Value) -> Answer<Value> {
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

    fn run(
        &self,
        env: &Env,
        names: Vec<Key>,
        options: AcquireOptions,
        signal: Option<Value>,
        function: Value,
        on_loss: OnLoss,
    ) -> Answer<Value> {
        let function = Kept::new(env, self.bridge.shared(), function)?;
        let (first, wait) = (names[0].clone(), options.wait);
        let settle: Settle = Box::new(move |env, bridge, locks, deferred, outcome| match outcome {
            Ok(lease) => {
                let run = Run {
                    bridge: bridge.clone(),
                    locks: locks.clone(),
                    lease,
                    on_loss,
                    deferred,
                };
                match function.value(env) {
                    Ok(function) => run.start(env, function),
                    Err(thrown) => run.deferred.settle(env, Err(thrown)),
                }
            }
            Err(_) if on_loss == OnLoss::PassOn => deferred.settle(env, Ok(undefined(env))),
            Err(too_late) => deferred.settle(env, Err(Self::timeout(first.as_str(), wait, too_late).into())),
        });
        self.take(env, names, options, signal, settle)
    }

    fn restored(&self, env: &Env, json: Value) -> Answer<Value> {
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

#[napi]
impl LockService {
    #[napi(skip_typescript)]
    pub fn connect<'env>(env: &'env Env, target: Unknown<'env>, options: Unknown<'env>) -> Result<Unknown<'env>> {
        promise(env, || {
            let bridge = Bridge::get(env)?;
            let request = Request::read(env, bridge.shared(), target.raw(), options.raw())?;
            let Request {
                config,
                settings,
                defaults,
                events,
                pulse,
            } = request;
            let (deferred, promise) = Deferred::new(env);
            let work = async move {
                let engine = crate::engine::connect(config, &settings).await?;
                Ok(Locks::new(engine, settings.store_timeout, pulse, events))
            };
            bridge.call(env, work, move |env, locks| {
                let service = locks.map_err(Thrown::Lock).and_then(|locks| {
                    let service = LockService {
                        locks,
                        bridge: Bridge::get(env)?,
                        defaults,
                    };
                    let made = service.into_instance(env).and_then(|instance| {
                        // SAFETY: the instance belongs to the open handle scope.
                        unsafe { ClassInstance::to_napi_value(env.raw(), instance) }
                    });
                    made.map_err(|error| string(env, &error.reason).map_or_else(|thrown| thrown, Thrown::Js))
                });
                deferred.settle(env, service);
            });
            Ok(promise)
        })
    }

    #[napi(skip_typescript)]
    pub fn acquire_lock<'env>(&self, env: &'env Env, lock: Unknown<'env>, ttl: Unknown<'env>) -> Result<Unknown<'env>> {
        promise(env, || {
            let key = name(env, lock.raw())?;
            let mut options = self.defaults.clone();
            if kind(env, ttl.raw()) != Kind::Undefined {
                options.ttl = ttl_seconds(env, ttl.raw())?;
            }
            let locks = self.locks.clone();
            Ok(self.ask(
                env,
                async move { locks.acquire_by_name(key, options).await },
                |env, held| Ok(boolean(env, held)),
            ))
        })
    }

    #[napi(skip_typescript)]
    pub fn release_lock<'env>(&self, env: &'env Env, lock: Unknown<'env>) -> Result<Unknown<'env>> {
        promise(env, || {
            let key = name(env, lock.raw())?;
            let locks = self.locks.clone();
            Ok(
                self.ask(env, async move { locks.release_by_name(&key).await }, |env, freed| {
                    Ok(boolean(env, freed))
                }),
            )
        })
    }

    #[napi(skip_typescript)]
    pub fn acquire_and_execute<'env>(
        &self,
        env: &'env Env,
        first: Unknown<'env>,
        second: Unknown<'env>,
        third: Unknown<'env>,
    ) -> Result<Unknown<'env>> {
        promise(env, || self.execute(env, first.raw(), second.raw(), third.raw()))
    }

    #[napi(skip_typescript)]
    pub fn acquire<'env>(&self, env: &'env Env, lock: Unknown<'env>, options: Unknown<'env>) -> Result<Unknown<'env>> {
        promise(env, || {
            let keys = names(env, lock.raw())?;
            let given = Options::new(env, "options", options.raw(), ACQUIRE)?;
            let options = given.acquire(&self.defaults)?;
            let (first, wait) = (keys[0].clone(), options.wait);
            let settle: Settle = Box::new(move |env, bridge, locks, deferred, outcome| {
                let answer = match outcome {
                    Ok(lease) => Lock::instance(env, bridge, locks, lease),
                    Err(too_late) => Err(Self::timeout(first.as_str(), wait, too_late).into()),
                };
                deferred.settle(env, answer);
            });
            self.take(env, keys, options, given.signal()?, settle)
        })
    }

    #[napi(skip_typescript)]
    pub fn try_acquire<'env>(
        &self,
        env: &'env Env,
        lock: Unknown<'env>,
        options: Unknown<'env>,
    ) -> Result<Unknown<'env>> {
        promise(env, || {
            let keys = names(env, lock.raw())?;
            let given = Options::new(env, "options", options.raw(), ACQUIRE)?;
            let options = AcquireOptions {
                wait: Wait::No,
                ..given.acquire(&self.defaults)?
            };
            let settle: Settle = Box::new(|env, bridge, locks, deferred, outcome| {
                let answer = match outcome {
                    Ok(lease) => Lock::instance(env, bridge, locks, lease),
                    Err(_) => Ok(null(env)),
                };
                deferred.settle(env, answer);
            });
            self.take(env, keys, options, given.signal()?, settle)
        })
    }

    #[napi(skip_typescript)]
    pub fn using<'env>(
        &self,
        env: &'env Env,
        lock: Unknown<'env>,
        second: Unknown<'env>,
        third: Unknown<'env>,
    ) -> Result<Unknown<'env>> {
        promise(env, || {
            let keys = names(env, lock.raw())?;
            let short = kind(env, second.raw()) == Kind::Function && kind(env, third.raw()) == Kind::Undefined;
            let (given, function) = if short {
                (undefined(env), second.raw())
            } else {
                (second.raw(), third.raw())
            };
            let given = Options::new(env, "options", given, ACQUIRE)?;
            let function = callback(env, "fn", function)?;
            self.run(
                env,
                keys,
                given.acquire(&self.defaults)?,
                given.signal()?,
                function,
                OnLoss::Reject,
            )
        })
    }

    #[napi(skip_typescript)]
    pub fn restore<'env>(&self, env: &'env Env, json: Unknown<'env>) -> Result<Unknown<'env>> {
        promise(env, || self.restored(env, json.raw()))
    }

    #[napi(skip_typescript)]
    pub fn inspect<'env>(&self, env: &'env Env, lock: Unknown<'env>) -> Result<Unknown<'env>> {
        promise(env, || {
            let key = name(env, lock.raw())?;
            let locks = self.locks.clone();
            Ok(
                self.ask(env, async move { locks.inspect(&key).await }, |env, info| match info {
                    Some(info) => info_object(env, &info),
                    None => Ok(null(env)),
                }),
            )
        })
    }

    #[napi(skip_typescript)]
    pub fn list<'env>(&self, env: &'env Env, options: Unknown<'env>) -> Result<Unknown<'env>> {
        promise(env, || {
            let options = Options::new(env, "options", options.raw(), &["prefix"])?;
            let prefix = options.text("prefix")?.unwrap_or_default();
            let locks = self.locks.clone();
            Ok(self.ask(env, async move { locks.list(&prefix).await }, |env, infos| {
                array(env, infos.iter().map(|info| info_object(env, info)))
            }))
        })
    }

    #[napi(skip_typescript)]
    pub fn force_release<'env>(&self, env: &'env Env, lock: Unknown<'env>) -> Result<Unknown<'env>> {
        promise(env, || {
            let key = name(env, lock.raw())?;
            let locks = self.locks.clone();
            Ok(
                self.ask(env, async move { locks.force_release(&key).await }, |env, freed| {
                    Ok(boolean(env, freed))
                }),
            )
        })
    }

    #[napi(skip_typescript)]
    pub fn stats<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        let stats = self.locks.stats();
        let build = || {
            let result = object(env)?;
            for (name, count) in [
                ("held", stats.held),
                ("waiting", stats.waiting),
                ("acquired", stats.acquired),
                ("busy", stats.busy),
                ("released", stats.released),
                ("renewed", stats.renewed),
                ("lost", stats.lost),
                ("storeErrors", stats.store_errors),
            ] {
                set(env, result, name, number(env, count as f64)?)?;
            }
            Ok(result)
        };
        returned(env, build())
    }

    #[napi(skip_typescript)]
    pub fn close<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        promise(env, || {
            let locks = self.locks.clone();
            let work = async move {
                locks.close().await;
                Ok(())
            };
            Ok(self.ask(env, work, |env, ()| Ok(undefined(env))))
        })
    }
}

fn info_object(env: &Env, info: &LockInfo) -> Answer<Value> {
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
    let metadata = info
        .metadata
        .as_deref()
        .map_or_else(|| Ok(null(env)), |json| parsed(env, json))?;
    set(env, result, "metadata", metadata)?;
    Ok(result)
}

fn date(env: &Env, ms: u64) -> Answer<Value> {
    let mut value = std::ptr::null_mut();
    // SAFETY: `env` is the live environment of this thread.
    unsafe { napi::sys::napi_create_date(env.raw(), ms as f64, &mut value) };
    Ok(value)
}
