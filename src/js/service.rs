//! The native `LockService`, which `lib/service.ts` wraps.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use napi::bindgen_prelude::{Either, Env, Function, JavaScriptClassExt, Result, Unknown};
use napi_derive::napi;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::acquisition::PendingAcquisition;
use super::bridge::{Bridge, failed};
use super::deferred::Deferred;
use super::leases::Entry;
use super::notifier::{Notifier, stall_detector};
use super::options::{AcquireRecord, Config, ttl, wait};
use crate::engine::EngineConfig;
use crate::error::LockError;
use crate::model::{Fence, Key, LockInfo, OwnerToken};
use crate::service::{AcquireOptions, EventSink, Locks};

/// Flags of `acquire`: whether the lease is renewed, if the call sets it, and whether a busy name is an error.
const RENEW: u32 = 1;
const NO_RENEW: u32 = 2;
const REJECT_BUSY: u32 = 4;

/// A lock service over one store.
#[napi]
pub struct LockService {
    locks: Locks,
    bridge: Rc<Bridge>,
    notifier: Arc<Notifier>,
    defaults: AcquireOptions,
}

/// Connects to a store. `notify` receives JSON text: an array of events and losses. It must not throw.
#[napi(ts_return_type = "Promise<LockService>")]
pub fn connect<'env>(env: &'env Env, mut config: Config, notify: Function<'_, String, ()>) -> Result<Unknown<'env>> {
    let bridge = match Bridge::get(env) {
        Ok(bridge) => bridge,
        Err(error) => return Deferred::rejected(env, error),
    };
    let notifier = Notifier::new(env, bridge.shared(), &notify)?;
    let mut settings = config.settings();
    settings.event_loop = bridge.event_loop();
    let engine = match EngineConfig::parse(&std::mem::take(&mut config.urls), &settings) {
        Ok(engine) => engine,
        Err(error) => return Deferred::rejected(env, error),
    };
    let defaults = config.defaults.over(&AcquireOptions::default());
    let detector = stall_detector(bridge.shared());
    let sink = config.events.then(|| {
        let notifier = notifier.clone();
        Arc::new(move |event| notifier.event(&event)) as EventSink
    });
    let work = async move {
        let engine = crate::engine::connect(engine, &settings).await?;
        Ok(Locks::new(engine, settings.store_timeout, detector, sink))
    };
    let (deferred, promise) = Deferred::new(env)?;
    bridge.call(env, work, move |env, bridge, locks| {
        let service = locks.and_then(|locks| {
            let service = LockService {
                locks,
                bridge: bridge.clone(),
                notifier,
                defaults,
            };
            service
                .into_instance(env)
                .map_err(|error| failed("connect", &error.reason))
        });
        deferred.settle(env, service);
    });
    Ok(promise)
}

/// Cancels the acquisition with this ticket.
#[napi]
pub fn cancel(env: &Env, ticket: f64) {
    let token = Bridge::existing(env).and_then(|bridge| bridge.cancellations.borrow_mut().remove(&(ticket as u64)));
    if let Some(token) = token {
        token.cancel();
    }
}

/// Checks one name or several.
fn keys(names: Either<String, Vec<String>>) -> std::result::Result<Vec<Key>, LockError> {
    match names {
        Either::A(name) => Ok(vec![Key::new(&name)?]),
        Either::B(names) => names.iter().map(|name| Key::new(name)).collect(),
    }
}

impl LockService {
    /// Calls `start` with a valid name. Otherwise the promise rejects.
    fn with_key<'env>(
        &self,
        env: &'env Env,
        name: &str,
        start: impl FnOnce(Key) -> Result<Unknown<'env>>,
    ) -> Result<Unknown<'env>> {
        match Key::new(name) {
            Ok(key) => start(key),
            Err(error) => Deferred::rejected(env, error),
        }
    }
}

#[napi]
impl LockService {
    /// Makes one attempt. Resolves to whether this service holds the name now. `NaN` means the default ttl.
    #[napi(ts_return_type = "Promise<boolean>")]
    pub fn acquire_by_name<'env>(&self, env: &'env Env, name: String, ttl_ms: f64) -> Result<Unknown<'env>> {
        self.with_key(env, &name, |key| {
            let mut options = self.defaults.clone();
            if !ttl_ms.is_nan() {
                options.ttl = ttl(ttl_ms);
            }
            let acquiring = self.locks.acquire_by_name(key, options);
            let locks = self.locks.clone();
            self.bridge
                .try_promise(env, &self.locks, acquiring, move |_, lease| match lease {
                    Some(lease) if lease.is_held() => Ok(true),
                    Some(_) if locks.is_closed() => Err(LockError::closed()),
                    // The lease ended before the event loop received it.
                    Some(_) | None => Ok(false),
                })
        })
    }

    /// Releases a lease of `acquireByName`. Resolves to whether this call released it.
    #[napi(ts_return_type = "Promise<boolean>")]
    pub fn release_by_name<'env>(&self, env: &'env Env, name: String) -> Result<Unknown<'env>> {
        self.with_key(env, &name, |key| {
            let released = self.locks.release_by_name(&key);
            self.bridge
                .promise(env, &self.locks, released, |_, outcome| outcome.is_freed())
        })
    }

    /// Acquires a lease. Resolves to its number, or to zero if a name is busy or the call was cancelled. `NaN` means the default.
    #[napi(ts_return_type = "Promise<number>")]
    pub fn acquire<'env>(
        &self,
        env: &'env Env,
        names: Either<String, Vec<String>>,
        ttl_ms: f64,
        wait_ms: f64,
        flags: u32,
        more: Option<AcquireRecord>,
    ) -> Result<Unknown<'env>> {
        let names = match keys(names) {
            Ok(names) => names,
            Err(error) => return Deferred::rejected(env, error),
        };
        let mut options = match &more {
            Some(more) => more.over(&self.defaults),
            None => self.defaults.clone(),
        };
        if !ttl_ms.is_nan() {
            options.ttl = ttl(ttl_ms);
        }
        if !wait_ms.is_nan() {
            options.wait = wait(wait_ms);
        }
        options.renew = (options.renew || flags & RENEW != 0) && flags & NO_RENEW == 0;
        let cancellation = more.and_then(|more| more.ticket).map(|ticket| {
            let token = CancellationToken::new();
            self.bridge
                .cancellations
                .borrow_mut()
                .insert(ticket as u64, token.clone());
            (ticket as u64, token)
        });
        let (deferred, promise) = Deferred::new(env)?;
        let acquisition = PendingAcquisition {
            locks: self.locks.clone(),
            notifier: self.notifier.clone(),
            names,
            options,
            rejects_busy: flags & REJECT_BUSY != 0,
            cancellation,
            started: Instant::now(),
            deferred,
        };
        acquisition.start(env, &self.bridge);
        Ok(promise)
    }

    /// Transfers a lease to this service, by its owner token. Resolves to its number.
    #[napi(ts_return_type = "Promise<number>")]
    pub fn transfer<'env>(
        &self,
        env: &'env Env,
        names: Vec<String>,
        token: String,
        fence: String,
        options: AcquireRecord,
    ) -> Result<Unknown<'env>> {
        let parsed = || {
            let keys = keys(Either::B(names))?;
            let owner = OwnerToken::parse(&token)?;
            let Ok(fence) = fence.parse().map(Fence) else {
                return Err(LockError::invalid(
                    "fencingToken",
                    "must be a whole number as text",
                    format!("{fence:?}"),
                ));
            };
            Ok((keys, owner, fence))
        };
        let (keys, owner, fence) = match parsed() {
            Ok(parsed) => parsed,
            Err(error) => return Deferred::rejected(env, error),
        };
        let (locks, notifier) = (self.locks.clone(), self.notifier.clone());
        let options = options.over(&self.defaults);
        let service = locks.clone();
        let restoring = async move { service.restore(&keys, owner, fence, options).await };
        self.bridge.promise(env, &self.locks, restoring, move |bridge, lease| {
            bridge.leases.borrow_mut().add(Entry { locks, lease, notifier })
        })
    }

    /// Reads the holder of a name. Resolves to JSON text: an array, which is empty if the name is free.
    #[napi(ts_return_type = "Promise<string>")]
    pub fn inspect<'env>(&self, env: &'env Env, name: String) -> Result<Unknown<'env>> {
        self.with_key(env, &name, |key| {
            let locks = self.locks.clone();
            let inspecting = async move { Ok(to_json(locks.inspect(&key).await?.as_slice())) };
            self.bridge.promise(env, &self.locks, inspecting, |_, text| text)
        })
    }

    /// Lists the held locks whose name starts with `prefix`. Resolves to JSON text: an array.
    #[napi(ts_return_type = "Promise<string>")]
    pub fn list<'env>(&self, env: &'env Env, prefix: String) -> Result<Unknown<'env>> {
        let locks = self.locks.clone();
        let listing = async move { Ok(to_json(&locks.list(&prefix).await?)) };
        self.bridge.promise(env, &self.locks, listing, |_, text| text)
    }

    /// Releases a name, no matter which owner holds it. Resolves to whether it was held.
    #[napi(ts_return_type = "Promise<boolean>")]
    pub fn force_release<'env>(&self, env: &'env Env, name: String) -> Result<Unknown<'env>> {
        self.with_key(env, &name, |key| {
            let locks = self.locks.clone();
            let releasing = async move { locks.force_release(&key).await };
            self.bridge.promise(env, &self.locks, releasing, |_, released| released)
        })
    }

    /// Returns the counters as JSON text.
    #[napi]
    pub fn stats(&self) -> String {
        let stats = self.locks.stats();
        json!({
            "held": stats.held,
            "waiting": stats.waiting,
            "acquired": stats.acquired,
            "busy": stats.busy,
            "released": stats.released,
            "renewed": stats.renewed,
            "lost": stats.lost,
            "storeErrors": stats.store_errors,
        })
        .to_string()
    }

    /// The name of the store.
    #[napi(getter)]
    pub fn engine(&self) -> &'static str {
        self.locks.engine_name()
    }

    /// Closes the service.
    #[napi(ts_return_type = "Promise<void>")]
    pub fn close<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        let locks = self.locks.clone();
        let closing = async move {
            locks.close().await;
            Ok(())
        };
        self.bridge.promise(env, &self.locks, closing, |_, ()| ())
    }
}

fn to_json(infos: &[LockInfo]) -> String {
    let infos = infos.iter().map(|info| {
        json!({
            "name": info.name,
            "remainingMs": info.remaining.map(|remaining| remaining.as_secs_f64() * 1000.0),
            "fencingToken": info.fence.map(|fence| fence.0.to_string()),
            "holder": info.holder.as_ref().map(|holder| {
                json!({ "host": holder.process.host, "pid": holder.process.pid, "since": holder.since_ms })
            }),
            "metadata": info.metadata,
        })
    });
    infos.collect::<Value>().to_string()
}
