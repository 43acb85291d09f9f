//! The native `LockService`, which `lib/service.ts` wraps.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::{Either, OptionFuture, ready};
use napi::bindgen_prelude::{Env, Function, Result, Unknown};
use napi_derive::napi;
use tokio_util::sync::CancellationToken;

use super::acquisition::PendingAcquisition;
use super::bridge::Bridge;
use super::bridge::deferred::{Deferred, infos_to_json};
use super::bridge::leases::Entry;
use super::bridge::notifier::{Notifier, stall_detector, warnings};
use super::bridge::questions::{credentials, resolver};
use super::names::{NameArgument, NamesArgument, keys};
use super::options::{AcquireRecord, Config, duration, ttl, wait};
use crate::clock::Moment;
use crate::engine::config::{self, EngineConfig};
use crate::error::LockError;
use crate::model::{Fence, OwnerToken};
use crate::service::{AcquireOptions, EventSink, Locks, Wait};

/// Flags of `acquire`: whether the lease is renewed, if the call sets it, whether a busy name is an error, and whether the call does not
/// keep the event loop alive.
const RENEW: u32 = 1;
const NO_RENEW: u32 = 2;
const REJECT_BUSY: u32 = 4;
const IN_BACKGROUND: u32 = 8;

/// A lock service over one store.
#[napi]
pub struct LockService {
    pub(super) locks: Locks,
    pub(super) bridge: Rc<Bridge>,
    notifier: Arc<Notifier>,
    /// The options of a call without any, which such calls share: without and with [`REJECT_BUSY`].
    defaults: [Arc<AcquireOptions>; 2],
    /// The same for `acquire_by_name`.
    by_name: Arc<AcquireOptions>,
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
    settings.warnings = Some(warnings(&notifier));
    // Shorter than the engine's own limit, so that an error has the reason.
    settings.resolver = Some(resolver(&notifier, settings.store_timeout.mul_f64(0.9)));
    if config.credentials == Some(true) {
        settings.credentials = Some(credentials(&notifier));
    }
    let engine = match EngineConfig::parse(&std::mem::take(&mut config.urls), &settings) {
        Ok(engine) => engine,
        Err(error) => return Deferred::rejected(env, error),
    };
    let defaults = config.defaults.over(&AcquireOptions::default());
    let detector = stall_detector(bridge.shared());
    let sink = {
        let notifier = notifier.clone();
        Arc::new(move |event| notifier.event(&event)) as EventSink
    };
    let emits_events = config.events;
    let cancellation = config.ticket.map(|ticket| bridge.cancellation(ticket as u64));
    let work = async move {
        let cancelled = OptionFuture::from(cancellation.as_ref().map(CancellationToken::cancelled));
        let engine = tokio::select! {
            biased;
            Some(()) = cancelled => return Err(LockError::closed()),
            engine = config::connect(engine, &settings) => engine?,
        };
        let locks = Locks::new(engine, settings.store_timeout, detector, Some(sink));
        locks.set_events(emits_events);
        Ok(locks)
    };
    bridge.promise(env, false, work, move |_, bridge, locks| {
        if let Some(ticket) = config.ticket {
            bridge.cancellations.borrow_mut().remove(&(ticket as u64));
        }
        Ok(LockService {
            locks: locks?,
            bridge: bridge.clone(),
            notifier,
            defaults: [false, true].map(|report_holder| {
                Arc::new(AcquireOptions {
                    report_holder,
                    ..defaults.clone()
                })
            }),
            by_name: Arc::new(AcquireOptions {
                wait: Wait::No,
                renew: false,
                // `acquireLock` returns none, but the events of its lease have it.
                needs_token: false,
                ..defaults
            }),
        })
    })
}

/// Cancels the acquisition, or the attempt to connect, with this ticket.
#[napi]
pub fn cancel(env: &Env, ticket: f64) {
    let token = Bridge::existing(env).and_then(|bridge| bridge.cancellations.borrow_mut().remove(&(ticket as u64)));
    if let Some(token) = token {
        token.cancel();
    }
}

/// Waits for `ms` milliseconds, or until `cancel` with the ticket. Resolves to the milliseconds that have passed. `is_in_background`: the
/// event loop does not wait for it.
#[napi(ts_return_type = "Promise<number>")]
pub fn pause(env: &Env, ms: f64, ticket: f64, is_in_background: bool) -> Result<Unknown<'_>> {
    let bridge = match Bridge::get(env) {
        Ok(bridge) => bridge,
        Err(error) => return Deferred::rejected(env, error),
    };
    let ticket = ticket as u64;
    let cancelled = bridge.cancellation(ticket).cancelled_owned();
    let time = duration(ms).unwrap_or_default();
    let started = Moment::now();
    let pausing = async move {
        // The end of the pause is either of them.
        let _ = tokio::time::timeout(time, cancelled).await;
        Ok(started.elapsed().as_secs_f64() * 1000.0)
    };
    bridge.promise(env, is_in_background, pausing, move |_, bridge, ended| {
        bridge.cancellations.borrow_mut().remove(&ticket);
        ended
    })
}

#[napi]
impl LockService {
    /// Makes one attempt. Resolves to whether this service holds the name now. `NaN` means the default ttl.
    #[napi(ts_args_type = "name: string, ttlMs: number", ts_return_type = "Promise<boolean>")]
    pub fn acquire_by_name<'env>(&self, env: &'env Env, name: NameArgument, ttl_ms: f64) -> Result<Unknown<'env>> {
        let mut options = self.by_name.clone();
        if !ttl_ms.is_nan() {
            Arc::make_mut(&mut options).ttl = ttl(ttl_ms);
        }
        let locks = self.locks.clone();
        // The call begins now.
        let acquiring = match name.0 {
            Ok(key) => Either::Right(locks.acquire_by_name(key, options)),
            Err(error) => Either::Left(ready(Err(error))),
        };
        self.bridge
            .answer(env, &self.locks, acquiring, move |_, lease| match lease {
                Some(lease) if lease.is_held() => Ok(true),
                Some(_) if locks.is_closed() => Err(LockError::closed()),
                // The lease ended before the event loop received it.
                Some(_) | None => Ok(false),
            })
    }

    /// Releases a lease of `acquireByName`. Resolves to whether this call released it.
    #[napi(ts_args_type = "name: string", ts_return_type = "Promise<boolean>")]
    pub fn release_by_name<'env>(&self, env: &'env Env, name: NameArgument) -> Result<Unknown<'env>> {
        let releasing = match name.0 {
            Ok(key) => Either::Right(self.locks.release_by_name(&key)),
            Err(error) => Either::Left(ready(Err(error))),
        };
        self.bridge
            .answer(env, &self.locks, releasing, |_, is_freed| Ok(is_freed))
    }

    /// Acquires a lease. Resolves to its number, or to zero if a name is busy or the call was cancelled. `NaN` means the default.
    #[napi(
        ts_args_type = "names: string | Array<string>, ttlMs: number, waitMs: number, flags: number, more?: AcquireRecord | undefined | null",
        ts_return_type = "Promise<number>"
    )]
    pub fn acquire<'env>(
        &self,
        env: &'env Env,
        names: NamesArgument,
        ttl_ms: f64,
        wait_ms: f64,
        flags: u32,
        more: Option<AcquireRecord>,
    ) -> Result<Unknown<'env>> {
        let mut names = match names.0 {
            Ok(names) => names,
            Err(error) => return Deferred::rejected(env, error),
        };
        let mut options = self.defaults[usize::from(flags & REJECT_BUSY != 0)].clone();
        if let Some(more) = &more {
            options = more.over(&options).into();
            if let Some(record) = more.share {
                match record.share() {
                    Ok(share) => Arc::make_mut(&mut options).share = Some(share),
                    Err(error) => return Deferred::rejected(env, error),
                }
                names = names[0].shared().into();
            }
        }
        if !ttl_ms.is_nan() {
            Arc::make_mut(&mut options).ttl = ttl(ttl_ms);
        }
        if !wait_ms.is_nan() {
            Arc::make_mut(&mut options).wait = wait(wait_ms);
        }
        if flags & (RENEW | NO_RENEW) != 0 {
            Arc::make_mut(&mut options).renew = flags & RENEW != 0;
        }
        let cancellation = more.and_then(|more| more.ticket).map(|ticket| {
            let ticket = ticket as u64;
            (ticket, self.bridge.cancellation(ticket))
        });
        let (deferred, promise) = Deferred::new(env)?;
        let acquisition = PendingAcquisition {
            locks: self.locks.clone(),
            notifier: self.notifier.clone(),
            names,
            options: options.clone(),
            cancellation,
            started: Instant::now(),
            is_in_background: flags & IN_BACKGROUND != 0,
            deferred,
        };
        acquisition.start(env, &self.bridge, options);
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
            let keys = keys(&names)?;
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
        let parsed = parsed();
        let (locks, notifier) = (self.locks.clone(), self.notifier.clone());
        let options = options.over(&self.defaults[0]);
        let service = locks.clone();
        let restoring = async move {
            let (keys, owner, fence) = parsed?;
            service.restore(&keys, owner, fence, options).await
        };
        self.bridge.answer(env, &self.locks, restoring, move |bridge, lease| {
            // The lease may have ended before the event loop received it.
            match lease.loss() {
                Some(loss) => Err(loss),
                None => Ok(bridge.leases.borrow_mut().add(Entry { locks, lease, notifier })),
            }
        })
    }

    /// Reads the holder of a name. Resolves to JSON text: an array, which is empty if the name is free.
    #[napi(ts_args_type = "name: string", ts_return_type = "Promise<string>")]
    pub fn inspect<'env>(&self, env: &'env Env, name: NameArgument) -> Result<Unknown<'env>> {
        let locks = self.locks.clone();
        let inspecting = async move { Ok(infos_to_json(&locks.inspect(&name.0?).await?)) };
        self.bridge.answer(env, &self.locks, inspecting, |_, text| Ok(text))
    }

    /// Reads the holders of a shared name. Resolves to JSON text: an array, in the order of the grants.
    #[napi(ts_args_type = "name: string", ts_return_type = "Promise<string>")]
    pub fn inspect_shared<'env>(&self, env: &'env Env, name: NameArgument) -> Result<Unknown<'env>> {
        self.inspect(env, name.shared())
    }

    /// Releases a shared name of all owners. Resolves to whether it was held.
    #[napi(ts_args_type = "name: string", ts_return_type = "Promise<boolean>")]
    pub fn force_release_shared<'env>(&self, env: &'env Env, name: NameArgument) -> Result<Unknown<'env>> {
        self.force_release(env, name.shared())
    }

    /// Releases a name, no matter which owner holds it. Resolves to whether it was held.
    #[napi(ts_args_type = "name: string", ts_return_type = "Promise<boolean>")]
    pub fn force_release<'env>(&self, env: &'env Env, name: NameArgument) -> Result<Unknown<'env>> {
        let locks = self.locks.clone();
        let releasing = async move { locks.force_release(&name.0?).await };
        self.bridge
            .answer(env, &self.locks, releasing, |_, released| Ok(released))
    }

    /// Returns the counters as JSON text.
    #[napi]
    pub fn stats(&self) -> String {
        // Numbers are always valid JSON.
        serde_json::to_string(&self.locks.stats()).unwrap_or_default()
    }

    /// The name of the store.
    #[napi(getter)]
    pub fn engine(&self) -> &'static str {
        self.locks.engine_name()
    }

    /// Makes one round trip to the store. Resolves to its duration in milliseconds.
    #[napi(ts_return_type = "Promise<number>")]
    pub fn ping<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        let locks = self.locks.clone();
        let pinging = async move { locks.ping().await };
        self.bridge
            .answer(env, &self.locks, pinging, |_, took| Ok(took.as_secs_f64() * 1000.0))
    }

    /// Returns whether the last operation of the store succeeded, or there was none.
    #[napi]
    pub fn is_connected(&self) -> bool {
        self.locks.is_connected()
    }

    /// Switches events on or off.
    #[napi]
    pub fn set_events(&self, enabled: bool) {
        self.locks.set_events(enabled);
    }

    /// Records that jobs run now, or that none runs any more. While one runs, the process does not exit by itself.
    #[napi]
    pub fn set_runs_jobs(&self, env: &Env, runs_jobs: bool) {
        self.locks.set_runs_jobs(runs_jobs);
        self.bridge.keep_alive(env, runs_jobs);
    }

    /// Closes a service that was garbage collected, as soon as it has no lease, call or job. Does not keep the event loop alive.
    /// Resolves to whether this call closed it.
    #[napi(ts_return_type = "Promise<boolean>")]
    pub fn close_unused<'env>(&self, env: &'env Env) -> Result<Unknown<'env>> {
        let locks = self.locks.clone();
        let closing = async move { Ok(locks.close_unused().await) };
        self.bridge.promise(env, true, closing, |_, _, closed| closed)
    }

    /// Closes the service, after a drain of at most `drain_ms`. Zero means no drain.
    #[napi(ts_return_type = "Promise<void>")]
    pub fn close<'env>(&self, env: &'env Env, drain_ms: f64) -> Result<Unknown<'env>> {
        let (locks, shared) = (self.locks.clone(), self.bridge.shared().clone());
        let notifier = self.notifier.clone();
        let drain = duration(drain_ms).filter(|drain| !drain.is_zero());
        // Before the future runs: the calls that follow in this tick are rejected.
        locks.end_calls();
        let closing = async move {
            if let Some(limit) = drain {
                locks.drain(limit).await;
            }
            // The signals of the locks that are lost abort before the names are free.
            let unreleased = locks.close_after(shared.delivered()).await;
            if unreleased > 0 {
                notifier.warn(&locks.unreleased_warning(unreleased));
            }
            Ok(())
        };
        self.bridge.answer(env, &self.locks, closing, |_, ()| Ok(()))
    }
}
