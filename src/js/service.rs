//! `LockService` as JavaScript sees it. Its types and documentation stand in `types.d.ts`.
//!
//! Every method returns a promise and never throws: what is wrong with the arguments rejects it.

use std::rc::Rc;

use napi::bindgen_prelude::*;
use napi_derive::napi;

use super::calls::{Settle, info_object};
use super::connect::Request;
use super::lock::{Lock, returned};
use super::options::{ACQUIRE, Options, callback, name, names, ttl_seconds};
use super::promise::{Bridge, Deferred};
use super::run::OnLoss;
use super::value::{Answer, Kind, Thrown, Value, array, boolean, kind, null, number, object, set, string, undefined};
use crate::error::LockError;
use crate::service::{AcquireOptions, Locks, Wait};

/// A lock service over one store.
#[napi(custom_finalize)]
pub struct LockService {
    pub(super) locks: Locks,
    pub(super) bridge: Rc<Bridge>,
    pub(super) defaults: AcquireOptions,
}

impl ObjectFinalize for LockService {}

/// The promise that `body` makes; one that is rejected already when `body` finds the arguments wrong.
fn promise<'env>(env: &Env, body: impl FnOnce() -> Answer<Value>) -> Result<Unknown<'env>> {
    let value = body().unwrap_or_else(|thrown| Deferred::rejected(env, thrown));
    returned(env, Ok(value))
}

#[napi]
impl LockService {
    #[napi(constructor, skip_typescript)]
    pub fn refuse() -> Result<Self> {
        Err(Error::new(
            Status::GenericFailure,
            "a LockService is made with `await LockService.connect(…)`, not with new",
        ))
    }

    #[napi(skip_typescript)]
    pub fn connect<'env>(env: &'env Env, target: Unknown<'env>, options: Unknown<'env>) -> Result<Unknown<'env>> {
        promise(env, || {
            let bridge = Bridge::get(env)?;
            let request = Request::read(env, &bridge, target.raw(), options.raw())?;
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
            let acquiring = self.locks.acquire_by_name(key, options);
            let locks = self.locks.clone();
            Ok(self.ask(env, acquiring, move |env, lease| match lease {
                Some(lease) if lease.is_held() => Ok(boolean(env, true)),
                Some(_) if locks.is_closed() => Err(LockError::closed().into()),
                // The lease ended before the event loop received it.
                Some(_) | None => Ok(boolean(env, false)),
            }))
        })
    }

    #[napi(skip_typescript)]
    pub fn release_lock<'env>(&self, env: &'env Env, lock: Unknown<'env>) -> Result<Unknown<'env>> {
        promise(env, || {
            let key = name(env, lock.raw())?;
            let freed = self.locks.release_by_name(&key);
            Ok(self.ask(env, freed, |env, outcome| Ok(boolean(env, outcome.is_freed()))))
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
                    Some(lease) => Lock::instance(env, bridge, locks, lease),
                    None => Err(Self::timeout(first.as_str(), wait).into()),
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
                    Some(lease) => Lock::instance(env, bridge, locks, lease),
                    None => Ok(null(env)),
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

    /// `await using locks = await LockService.connect()`.
    #[napi(well_known_symbol = "asyncDispose", skip_typescript)]
    pub fn async_dispose<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        self.close(env)
    }

    /// What `console.log` shows.
    #[napi(symbol_for = "nodejs.util.inspect.custom", skip_typescript)]
    pub fn inspected<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        let build = || {
            let shown = object(env)?;
            set(env, shown, "engine", string(env, self.locks.engine_name())?)?;
            set(env, shown, "held", number(env, self.locks.stats().held as f64)?)?;
            set(env, shown, "waiting", number(env, self.locks.stats().waiting as f64)?)?;
            Ok(shown)
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
