//! The few operations on JavaScript values that the boundary needs, each with its failure as a value.
//!
//! A call into JavaScript may throw. Node-API then leaves an exception pending, which would surface at some later, wrong
//! place: here it is taken at once and becomes [`Thrown::Js`].

use std::panic::AssertUnwindSafe;
use std::ptr;
use std::sync::Arc;

use napi::{Env, sys};

use super::error::to_js;
use super::promise::{Discarded, Shared};
use crate::error::LockError;

pub(super) type Value = sys::napi_value;

/// Why the boundary stops: an error of ours, or whatever JavaScript threw.
#[derive(Debug)]
pub(super) enum Thrown {
    Lock(LockError),
    Js(Value),
}

impl From<LockError> for Thrown {
    fn from(error: LockError) -> Self {
        Thrown::Lock(error)
    }
}

impl Thrown {
    /// The value to reject with.
    pub(super) fn into_value(self, env: &Env) -> Value {
        match self {
            Thrown::Lock(error) => to_js(env, &error),
            Thrown::Js(value) => value,
        }
    }
}

pub(super) type Answer<T> = Result<T, Thrown>;

/// Turns a status into an answer; takes a pending exception with it.
fn check(env: &Env, status: sys::napi_status) -> Answer<()> {
    if status == sys::Status::napi_ok {
        return Ok(());
    }
    let (mut pending, mut exception) = (false, ptr::null_mut());
    // SAFETY: `env` is the live environment of the calling thread.
    unsafe { sys::napi_is_exception_pending(env.raw(), &mut pending) };
    if pending {
        // SAFETY: as above.
        unsafe { sys::napi_get_and_clear_last_exception(env.raw(), &mut exception) };
        return Err(Thrown::Js(exception));
    }
    Err(LockError::invalid("a value", "could not be read", format_args!("Node-API status {status}")).into())
}

macro_rules! out {
    ($env:expr, $call:ident($($arg:expr),*)) => {{
        let mut result = ptr::null_mut();
        // SAFETY: `env` is the live environment of the calling thread, and the values belong to the open handle scope.
        let status = unsafe { sys::$call($env.raw() $(, $arg)*, &mut result) };
        check($env, status).map(|()| result)
    }};
}

/// JavaScript's `typeof`, with `null` and arrays told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Undefined,
    Null,
    Boolean,
    Number,
    String,
    Object,
    Array,
    Function,
    Other,
}

pub(super) fn kind(env: &Env, value: Value) -> Kind {
    let mut kind = 0;
    // SAFETY: as in `out!`.
    if unsafe { sys::napi_typeof(env.raw(), value, &mut kind) } != sys::Status::napi_ok {
        return Kind::Other;
    }
    match kind {
        sys::ValueType::napi_undefined => Kind::Undefined,
        sys::ValueType::napi_null => Kind::Null,
        sys::ValueType::napi_boolean => Kind::Boolean,
        sys::ValueType::napi_number => Kind::Number,
        sys::ValueType::napi_string => Kind::String,
        sys::ValueType::napi_function => Kind::Function,
        sys::ValueType::napi_object => {
            let mut array = false;
            // SAFETY: as in `out!`.
            unsafe { sys::napi_is_array(env.raw(), value, &mut array) };
            if array { Kind::Array } else { Kind::Object }
        }
        _ => Kind::Other,
    }
}

pub(super) fn undefined(env: &Env) -> Value {
    let mut value = ptr::null_mut();
    // SAFETY: as in `out!`.
    unsafe { sys::napi_get_undefined(env.raw(), &mut value) };
    value
}

pub(super) fn null(env: &Env) -> Value {
    let mut value = ptr::null_mut();
    // SAFETY: as in `out!`.
    unsafe { sys::napi_get_null(env.raw(), &mut value) };
    value
}

pub(super) fn boolean(env: &Env, value: bool) -> Value {
    let mut result = ptr::null_mut();
    // SAFETY: as in `out!`.
    unsafe { sys::napi_get_boolean(env.raw(), value, &mut result) };
    result
}

pub(super) fn number(env: &Env, value: f64) -> Answer<Value> {
    out!(env, napi_create_double(value))
}

pub(super) fn bigint(env: &Env, value: u64) -> Answer<Value> {
    out!(env, napi_create_bigint_uint64(value))
}

pub(super) fn string(env: &Env, value: &str) -> Answer<Value> {
    out!(
        env,
        napi_create_string_utf8(value.as_ptr().cast(), value.len() as isize)
    )
}

pub(super) fn object(env: &Env) -> Answer<Value> {
    out!(env, napi_create_object())
}

pub(super) fn array(env: &Env, items: impl IntoIterator<Item = Answer<Value>>) -> Answer<Value> {
    let array = out!(env, napi_create_array())?;
    for (index, item) in items.into_iter().enumerate() {
        // SAFETY: as in `out!`.
        check(env, unsafe {
            sys::napi_set_element(env.raw(), array, index as u32, item?)
        })?;
    }
    Ok(array)
}

pub(super) fn length(env: &Env, array: Value) -> Answer<u32> {
    let mut length = 0;
    // SAFETY: as in `out!`.
    check(env, unsafe {
        sys::napi_get_array_length(env.raw(), array, &mut length)
    })?;
    Ok(length)
}

pub(super) fn elements(env: &Env, array: Value) -> Answer<Vec<Value>> {
    (0..length(env, array)?)
        .map(|index| out!(env, napi_get_element(array, index)))
        .collect()
}

pub(super) fn get(env: &Env, object: Value, name: &str) -> Answer<Value> {
    let key = string(env, name)?;
    out!(env, napi_get_property(object, key))
}

pub(super) fn set(env: &Env, object: Value, name: &str, value: Value) -> Answer<()> {
    let key = string(env, name)?;
    // SAFETY: as in `out!`.
    check(env, unsafe { sys::napi_set_property(env.raw(), object, key, value) })
}

/// The names of an object's own enumerable properties.
pub(super) fn keys(env: &Env, object: Value) -> Answer<Vec<String>> {
    let names = out!(
        env,
        napi_get_all_property_names(
            object,
            sys::KeyCollectionMode::own_only,
            sys::KeyFilter::enumerable | sys::KeyFilter::skip_symbols,
            sys::KeyConversion::numbers_to_strings
        )
    )?;
    elements(env, names)?
        .into_iter()
        .map(|name| read_lossy(env, name))
        .collect()
}

pub(super) fn read_bool(env: &Env, value: Value) -> Answer<bool> {
    let mut result = false;
    // SAFETY: as in `out!`.
    check(env, unsafe { sys::napi_get_value_bool(env.raw(), value, &mut result) })?;
    Ok(result)
}

pub(super) fn read_number(env: &Env, value: Value) -> Answer<f64> {
    let mut result = 0.0;
    // SAFETY: as in `out!`.
    check(env, unsafe {
        sys::napi_get_value_double(env.raw(), value, &mut result)
    })?;
    Ok(result)
}

/// A string as UTF-16, the form in which it is lossless.
fn read_utf16(env: &Env, value: Value) -> Answer<Vec<u16>> {
    let mut length = 0;
    // SAFETY: as in `out!`; a null buffer asks for the length.
    check(env, unsafe {
        sys::napi_get_value_string_utf16(env.raw(), value, ptr::null_mut(), 0, &mut length)
    })?;
    let mut units = vec![0u16; length + 1];
    // SAFETY: the buffer has room for the text and its terminator.
    let status =
        unsafe { sys::napi_get_value_string_utf16(env.raw(), value, units.as_mut_ptr(), units.len(), &mut length) };
    check(env, status)?;
    units.truncate(length);
    Ok(units)
}

/// What `look` makes of a string; `None` for one with a lone surrogate, which UTF-8 cannot carry: two such names would
/// become one.
pub(super) fn read_text<T>(env: &Env, value: Value, look: impl FnOnce(&str) -> T) -> Answer<Option<T>> {
    // Short ASCII is the rule: one call, no detour over UTF-16.
    let mut small = [0u8; 128];
    let mut length = 0;
    // SAFETY: the buffer's length is passed with it.
    let status = unsafe {
        sys::napi_get_value_string_utf8(env.raw(), value, small.as_mut_ptr().cast(), small.len(), &mut length)
    };
    check(env, status)?;
    if length < small.len() - 4
        && small[..length].is_ascii()
        && let Ok(text) = std::str::from_utf8(&small[..length])
    {
        return Ok(Some(look(text)));
    }
    Ok(String::from_utf16(&read_utf16(env, value)?).ok().as_deref().map(look))
}

pub(super) fn read_lossy(env: &Env, value: Value) -> Answer<String> {
    Ok(String::from_utf16_lossy(&read_utf16(env, value)?))
}

/// `delete object.name`.
pub(super) fn delete(env: &Env, object: Value, name: &str) -> Answer<()> {
    let key = string(env, name)?;
    // SAFETY: as in `out!`; whether there was such a property is of no interest.
    check(env, unsafe {
        sys::napi_delete_property(env.raw(), object, key, ptr::null_mut())
    })
}

/// Calls a function.
pub(super) fn call(env: &Env, this: Value, function: Value, args: &[Value]) -> Answer<Value> {
    out!(env, napi_call_function(this, function, args.len(), args.as_ptr()))
}

/// `object.name(...args)`.
pub(super) fn invoke(env: &Env, object: Value, name: &str, args: &[Value]) -> Answer<Value> {
    let method = get(env, object, name)?;
    call(env, object, method, args)
}

/// A property of `globalThis`.
pub(super) fn global(env: &Env, name: &str) -> Answer<Value> {
    let global = out!(env, napi_get_global())?;
    get(env, global, name)
}

/// `new Constructor()`.
pub(super) fn construct(env: &Env, constructor: Value) -> Answer<Value> {
    out!(env, napi_new_instance(constructor, 0, ptr::null()))
}

/// A function backed by `body`, which gets `this` and the first argument. What `body` fails with is thrown.
pub(super) fn function<F>(env: &Env, name: &str, body: F) -> Answer<Value>
where
    F: Fn(&Env, Value, Value) -> Answer<Value> + 'static,
{
    unsafe extern "C" fn trampoline<F>(raw: sys::napi_env, info: sys::napi_callback_info) -> Value
    where
        F: Fn(&Env, Value, Value) -> Answer<Value> + 'static,
    {
        let env = Env::from_raw(raw);
        let (mut this, mut first) = (ptr::null_mut(), ptr::null_mut());
        let mut count = 1;
        let mut data = ptr::null_mut();
        // SAFETY: `info` is what Node-API passed to this very call; a missing argument is filled with `undefined`.
        unsafe { sys::napi_get_cb_info(raw, info, &mut count, &mut first, &mut this, &mut data) };
        // SAFETY: `data` is the box made below, which lives as long as the function.
        let body = unsafe { &*data.cast::<F>() };
        // A panic must not unwind into Node, which would end the process.
        match std::panic::catch_unwind(AssertUnwindSafe(|| body(&env, this, first))) {
            Ok(Ok(value)) => value,
            Err(_) => {
                tracing::error!("a bug in holdfast: a callback panicked");
                ptr::null_mut()
            }
            Ok(Err(thrown)) => {
                let value = thrown.into_value(&env);
                // SAFETY: as in `out!`.
                unsafe { sys::napi_throw(raw, value) };
                ptr::null_mut()
            }
        }
    }
    unsafe extern "C" fn drop_body<F>(_: sys::napi_env, data: *mut std::ffi::c_void, _: *mut std::ffi::c_void) {
        // SAFETY: the box made below; Node-API calls the finalizer once.
        drop(unsafe { Box::from_raw(data.cast::<F>()) });
    }
    let data: *mut F = Box::into_raw(Box::new(body));
    let made = out!(
        env,
        napi_create_function(
            name.as_ptr().cast(),
            name.len() as isize,
            Some(trampoline::<F>),
            data.cast()
        )
    );
    let function = match made {
        Ok(function) => function,
        Err(thrown) => {
            // SAFETY: nobody else has the box.
            drop(unsafe { Box::from_raw(data) });
            return Err(thrown);
        }
    };
    // SAFETY: as in `out!`.
    let status = unsafe {
        sys::napi_add_finalizer(
            env.raw(),
            function,
            data.cast(),
            Some(drop_body::<F>),
            ptr::null_mut(),
            ptr::null_mut(),
        )
    };
    check(env, status)?;
    Ok(function)
}

/// The asynchronous context of a call, so that a callback of the user's sees the same `AsyncLocalStorage` as its caller.
pub(super) struct Context {
    /// The environment it was made in: an addon that is loaded twice has two on one thread, and Node counts in each.
    env: sys::napi_env,
    context: sys::napi_async_context,
    shared: Arc<Shared>,
}

// SAFETY: off the JavaScript thread the context is only ever put on the list of what is to be deleted.
unsafe impl Send for Context {}

impl Context {
    /// The context of the running code.
    pub(super) fn current(env: &Env, shared: &Arc<Shared>) -> Answer<Self> {
        let name = string(env, "holdfast")?;
        let context = out!(env, napi_async_init(ptr::null_mut(), name))?;
        Ok(Context {
            env: env.raw(),
            context,
            shared: shared.clone(),
        })
    }

    /// Runs `body` in the context.
    pub(super) fn enter<T>(&self, body: impl FnOnce() -> Answer<T>) -> Answer<T> {
        let env = &Env::from_raw(self.env);
        let resource = object(env)?;
        let scope = out!(env, napi_open_callback_scope(resource, self.context))?;
        let answer = body();
        // SAFETY: opened and closed in pairs on this thread.
        unsafe { sys::napi_close_callback_scope(env.raw(), scope) };
        answer
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.shared.discard(Discarded::Context(self.context));
    }
}

/// Keeps a value alive across calls. Made and read on the JavaScript thread; may be dropped on any.
pub(super) struct Kept {
    reference: sys::napi_ref,
    shared: Arc<Shared>,
}

// SAFETY: off the JavaScript thread the reference is only ever put on the list of references to delete.
unsafe impl Send for Kept {}
// SAFETY: as above.
unsafe impl Sync for Kept {}

impl Kept {
    /// Keeps an object or a function.
    pub(super) fn new(env: &Env, shared: &Arc<Shared>, value: Value) -> Answer<Self> {
        let reference = out!(env, napi_create_reference(value, 1))?;
        Ok(Kept {
            reference,
            shared: shared.clone(),
        })
    }

    /// Keeps any value, a primitive too (which Node-API's references do not take), by way of an array around it.
    pub(super) fn wrapped(env: &Env, shared: &Arc<Shared>, value: Value) -> Answer<Self> {
        let around = array(env, [Ok(value)])?;
        Self::new(env, shared, around)
    }

    pub(super) fn value(&self, env: &Env) -> Answer<Value> {
        out!(env, napi_get_reference_value(self.reference))
    }

    /// What [`Kept::wrapped`] was given.
    pub(super) fn unwrapped(&self, env: &Env) -> Answer<Value> {
        let around = self.value(env)?;
        out!(env, napi_get_element(around, 0))
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.shared.discard(Discarded::Reference(self.reference));
    }
}

/// A short text that shows a value in an error message.
pub(super) fn describe(env: &Env, value: Value) -> String {
    match kind(env, value) {
        Kind::Undefined => "undefined".into(),
        Kind::Null => "null".into(),
        Kind::Boolean => read_bool(env, value).map_or_else(|_| "a boolean".into(), |b| b.to_string()),
        Kind::Number => match read_number(env, value) {
            Ok(n) if n == f64::INFINITY => "Infinity".into(),
            Ok(n) if n == f64::NEG_INFINITY => "-Infinity".into(),
            Ok(n) => n.to_string(),
            Err(_) => "a number".into(),
        },
        Kind::String => match read_lossy(env, value) {
            Ok(text) if text.chars().count() > 60 => {
                let start: String = text.chars().take(60).collect();
                format!("{start:?}… ({} bytes)", text.len())
            }
            Ok(text) => format!("{text:?}"),
            Err(_) => "a string".into(),
        },
        Kind::Array => "an array".into(),
        Kind::Object => "an object".into(),
        Kind::Function => "a function".into(),
        Kind::Other => "a symbol, bigint or external".into(),
    }
}
