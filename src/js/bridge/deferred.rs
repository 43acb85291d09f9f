//! The native end of a promise, and errors as JSON text, from which `lib/errors.ts` creates a `LockError`.

use std::error::Error as _;
use std::ptr;

use napi::bindgen_prelude::{FromNapiValue, ToNapiValue, Unknown};
use napi::{Env, sys};
use serde_json::{Value, json};

use crate::error::{EngineError, LockError};
use crate::model::{LockInfo, Share};

/// Settles a promise, once, on the JavaScript thread.
pub(in crate::js) struct Deferred(sys::napi_deferred);

// SAFETY: it travels through the I/O thread inside a task, and is used on the JavaScript thread only.
unsafe impl Send for Deferred {}

impl Deferred {
    /// Creates a promise.
    pub(in crate::js) fn new<'env>(env: &'env Env) -> napi::Result<(Self, Unknown<'env>)> {
        let (mut deferred, mut promise) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: `env` is the live environment of this thread, and the promise belongs to the open handle scope.
        unsafe {
            napi::check_status!(sys::napi_create_promise(env.raw(), &mut deferred, &mut promise))?;
            Ok((Deferred(deferred), Unknown::from_napi_value(env.raw(), promise)?))
        }
    }

    /// Returns a settled promise.
    pub(in crate::js) fn settled<'env, T: ToNapiValue>(
        env: &'env Env,
        result: Result<T, LockError>,
    ) -> napi::Result<Unknown<'env>> {
        let (deferred, promise) = Deferred::new(env)?;
        deferred.settle(env, result);
        Ok(promise)
    }

    /// Returns a rejected promise.
    pub(in crate::js) fn rejected<'env>(env: &'env Env, error: LockError) -> napi::Result<Unknown<'env>> {
        Self::settled::<()>(env, Err(error))
    }

    /// Resolves the promise with a value, or rejects it with the JSON text of an error.
    pub(in crate::js) fn settle<T: ToNapiValue>(self, env: &Env, result: Result<T, LockError>) {
        // SAFETY: the value and the text belong to the open handle scope, and a deferred is settled once, because this function
        // consumes it.
        unsafe {
            let value = result.and_then(|value| {
                T::to_napi_value(env.raw(), value).map_err(|error| {
                    // For example a list whose JSON text is longer than the longest string of JavaScript.
                    LockError::store(EngineError::new("holdfast", "answer", false, error.reason.clone()))
                })
            });
            match value {
                Ok(value) => sys::napi_resolve_deferred(env.raw(), self.0, value),
                Err(error) => {
                    // Without memory for the text, the reason is `undefined`, which always exists. Once a worker is being ended,
                    // Node-API settles no promise; no JavaScript that could wait for it runs there any more.
                    let text = String::to_napi_value(env.raw(), to_json(&error).to_string());
                    let reason = text.or_else(|_| <()>::to_napi_value(env.raw(), ()));
                    sys::napi_reject_deferred(env.raw(), self.0, reason.unwrap_or(ptr::null_mut()))
                }
            }
        };
    }
}

/// Returns the fields of a `LockError` as JSON. A field that does not apply is `null`.
pub(in crate::js) fn to_json(error: &LockError) -> Value {
    let cause = error
        .source()
        .map(|cause| cause.source().map_or_else(|| cause.to_string(), ToString::to_string));
    json!({
        "code": error.code.as_str(),
        "message": error.message,
        "retryable": error.retryable,
        "key": error.key,
        "engine": error.engine,
        "cause": cause,
        "busy": error.busy.as_deref().map(info_to_json),
    })
}

/// Returns the states of locks as JSON text: an array.
pub(in crate::js) fn infos_to_json(infos: &[LockInfo]) -> String {
    infos.iter().map(info_to_json).collect::<Value>().to_string()
}

/// Returns the state of a lock as JSON.
fn info_to_json(info: &LockInfo) -> Value {
    let mut json = json!({
        "name": info.name,
        "remainingMs": info.remaining.map(|remaining| remaining.as_secs_f64() * 1000.0),
        "fencingToken": info.fence.map(|fence| fence.0.to_string()),
        "holder": info.holder.as_ref().filter(|holder| holder.is_known()).map(|holder| {
            json!({ "host": holder.process.host, "pid": holder.process.pid, "since": holder.since_ms })
        }),
        "metadata": info.metadata,
        "waiting": info.waiting,
    });
    if let Some(share) = info.share {
        json["share"] = share_to_json(share);
    }
    json
}

/// Returns what an owner has of a shared name as JSON.
pub(super) fn share_to_json(share: Share) -> Value {
    json!({ "permits": share.permits(), "limit": share.limit() })
}
