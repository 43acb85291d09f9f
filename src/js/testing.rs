//! The native functions of `holdfast/testing`. JavaScript passes every service on the store.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use napi::bindgen_prelude::{ClassInstance, Env, Result, ToNapiValue, Unknown};
use napi_derive::napi;

use super::bridge::deferred::Deferred;
use super::bridge::{Bridge, failed};
use super::options::duration;
use super::service::LockService;
use crate::error::LockError;
use crate::model::Key;
use crate::service::{Locks, testing};

/// Moves the clock of the store of these services forward by `ms` milliseconds.
#[napi(ts_return_type = "Promise<void>")]
pub fn advance<'env>(env: &'env Env, services: Vec<ClassInstance<'_, LockService>>, ms: f64) -> Result<Unknown<'env>> {
    let (services, by) = (locks_of(&services), duration(ms).unwrap_or(Duration::ZERO));
    on_io_thread(env, |bridge| {
        let shared = bridge.shared().clone();
        let deliver = move || {
            let shared = Arc::clone(&shared);
            async move { shared.delivered().await }
        };
        async move { testing::advance(&services, by, deliver).await }
    })
}

/// Ends the lease of a name, or all of a shared name, in the store of these services. Resolves to whether the name was held.
#[napi(ts_return_type = "Promise<boolean>")]
pub fn lose<'env>(
    env: &'env Env,
    services: Vec<ClassInstance<'_, LockService>>,
    name: String,
    is_shared: bool,
) -> Result<Unknown<'env>> {
    let services = locks_of(&services);
    on_io_thread(env, |bridge| {
        let shared = bridge.shared().clone();
        async move {
            let key = Key::new(&name)?;
            let key = if is_shared { key.shared() } else { key };
            let was_held = testing::lose(&services, &key).await?;
            shared.delivered().await;
            Ok(was_held)
        }
    })
}

fn locks_of(services: &[ClassInstance<'_, LockService>]) -> Vec<Locks> {
    services.iter().map(|service| service.locks.clone()).collect()
}

/// Returns a promise for the work that `make` returns, which runs on the I/O thread.
fn on_io_thread<'env, T: ToNapiValue + Send + 'static, W>(
    env: &'env Env,
    make: impl FnOnce(&Rc<Bridge>) -> W,
) -> Result<Unknown<'env>>
where
    W: Future<Output = std::result::Result<T, LockError>> + Send + 'static,
{
    let bridge = match Bridge::get(env) {
        Ok(bridge) => bridge,
        Err(error) => return Deferred::rejected(env, error),
    };
    let work = make(&bridge);
    // A call may begin on the JavaScript thread; a task does not.
    let task = async move {
        let ended = tokio::spawn(work).await;
        ended.unwrap_or_else(|error| Err(failed("test", &error.to_string())))
    };
    bridge.promise(env, false, task, |_, _, result| result)
}
