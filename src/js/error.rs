//! Coded errors, built on the JavaScript thread where the promise is settled.

use std::error::Error as _;
use std::ptr;

use napi::{Env, sys};

use super::value::{Answer, Value, set, string};
use crate::error::LockError;

/// A real `Error` with `name: 'LockError'`, `code`, `retryable`, and `key`, `engine`, `cause` where they apply.
pub(super) fn to_js(env: &Env, error: &LockError) -> Value {
    match build(env, error) {
        Ok(value) => value,
        // An environment that cannot make an error any more is shutting down: nobody will read it.
        Err(_) => ptr::null_mut(),
    }
}

fn build(env: &Env, error: &LockError) -> Answer<Value> {
    let value = plain(env, &error.message)?;
    hide(env, value, "name", string(env, "LockError")?);
    hide(
        env,
        value,
        "stack",
        string(env, &format!("LockError [{}]: {}", error.code.as_str(), error.message))?,
    );
    set(env, value, "code", string(env, error.code.as_str())?)?;
    set(env, value, "retryable", super::value::boolean(env, error.retryable))?;
    if let Some(key) = &error.key {
        set(env, value, "key", string(env, key)?)?;
    }
    if let Some(engine) = error.engine {
        set(env, value, "engine", string(env, engine)?)?;
    }
    if let Some(cause) = error.source() {
        let inner = cause.source().map_or_else(|| cause.to_string(), ToString::to_string);
        hide(env, value, "cause", plain(env, &inner)?);
    }
    Ok(value)
}

/// `new Error(message)`.
fn plain(env: &Env, message: &str) -> Answer<Value> {
    let message = string(env, message)?;
    let mut value = ptr::null_mut();
    // SAFETY: `env` is the live environment of this thread.
    unsafe { sys::napi_create_error(env.raw(), ptr::null_mut(), message, &mut value) };
    Ok(value)
}

/// Sets a property that does not show up in enumeration, as JavaScript's own errors have them.
pub(super) fn hide(env: &Env, object: Value, name: &str, value: Value) {
    let Ok(key) = string(env, name) else { return };
    let property = sys::napi_property_descriptor {
        utf8name: ptr::null(),
        name: key,
        method: None,
        getter: None,
        setter: None,
        value,
        attributes: sys::PropertyAttributes::writable | sys::PropertyAttributes::configurable,
        data: ptr::null_mut(),
    };
    // SAFETY: as above; the descriptor is read before the call returns.
    unsafe { sys::napi_define_properties(env.raw(), object, 1, &property) };
}
