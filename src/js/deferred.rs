//! The native end of a promise.

use std::ptr;

use napi::bindgen_prelude::{FromNapiValue, ToNapiValue, Unknown};
use napi::{Env, sys};

use super::error::to_json;
use crate::error::LockError;

/// Settles a promise, once, on the JavaScript thread.
pub(super) struct Deferred(sys::napi_deferred);

// SAFETY: it travels through the I/O thread inside a task, and is used on the JavaScript thread only.
unsafe impl Send for Deferred {}

impl Deferred {
    /// Creates a promise.
    pub(super) fn new<'env>(env: &'env Env) -> napi::Result<(Self, Unknown<'env>)> {
        let (mut deferred, mut promise) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: `env` is the live environment of this thread, and the promise belongs to the open handle scope.
        unsafe {
            napi::check_status!(sys::napi_create_promise(env.raw(), &mut deferred, &mut promise))?;
            Ok((Deferred(deferred), Unknown::from_napi_value(env.raw(), promise)?))
        }
    }

    /// Returns a settled promise.
    pub(super) fn settled<'env, T: ToNapiValue>(
        env: &'env Env,
        result: Result<T, LockError>,
    ) -> napi::Result<Unknown<'env>> {
        let (deferred, promise) = Deferred::new(env)?;
        deferred.settle(env, result);
        Ok(promise)
    }

    /// Returns a rejected promise.
    pub(super) fn rejected<'env>(env: &'env Env, error: LockError) -> napi::Result<Unknown<'env>> {
        Self::settled::<()>(env, Err(error))
    }

    /// Resolves the promise with a value, or rejects it with the JSON text of an error.
    pub(super) fn settle<T: ToNapiValue>(self, env: &Env, result: Result<T, LockError>) {
        // SAFETY: a deferred is settled once, because this function consumes it. A value that cannot be created is a null handle,
        // which Node-API rejects.
        unsafe {
            match result {
                Ok(value) => {
                    let value = T::to_napi_value(env.raw(), value).unwrap_or(ptr::null_mut());
                    sys::napi_resolve_deferred(env.raw(), self.0, value)
                }
                Err(error) => {
                    let text = String::to_napi_value(env.raw(), to_json(&error).to_string());
                    sys::napi_reject_deferred(env.raw(), self.0, text.unwrap_or(ptr::null_mut()))
                }
            }
        };
    }
}
