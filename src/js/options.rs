//! Arguments, checked where they come in. Every error names the argument and shows the value.

use std::time::Duration;

use napi::Env;

use super::abort;
use super::error::{hide, to_js};
use super::value::{
    Answer, Kind, Thrown, Value, describe, elements, get, global, invoke, keys, kind, length, read_bool, read_number,
    read_text,
};
use crate::error::LockError;
use crate::model::{Key, MAX_TTL, Ttl};
use crate::service::{AcquireOptions, Wait};

/// The most metadata a lock carries, in bytes of JSON.
const MAX_METADATA_BYTES: usize = 16 * 1024;
/// The most names one lock may have.
const MAX_NAMES: u32 = 1000;

fn invalid<T>(env: &Env, argument: &str, rule: &str, value: Value) -> Answer<T> {
    Err(LockError::invalid(argument, rule, describe(env, value)).into())
}

/// Text, well-formed.
pub(super) fn text(env: &Env, argument: &str, value: Value) -> Answer<String> {
    text_as(env, argument, value, str::to_owned)
}

fn text_as<T>(env: &Env, argument: &str, value: Value, make: impl FnOnce(&str) -> T) -> Answer<T> {
    if kind(env, value) != Kind::String {
        return invalid(env, argument, "must be a string", value);
    }
    match read_text(env, value, make)? {
        Some(made) => Ok(made),
        None => invalid(
            env,
            argument,
            "must be well-formed Unicode (it has a lone surrogate)",
            value,
        ),
    }
}

/// A lock's name.
pub(super) fn name(env: &Env, value: Value) -> Answer<Key> {
    Ok(text_as(env, "name", value, Key::new)??)
}

/// One name, or an array of them.
pub(super) fn names(env: &Env, value: Value) -> Answer<Vec<Key>> {
    match kind(env, value) {
        Kind::String => Ok(vec![name(env, value)?]),
        Kind::Array => {
            // Before anything is read: a huge array must not block the event loop.
            let count = length(env, value)?;
            if count == 0 {
                return Err(LockError::invalid("names", "must not be empty", "[]").into());
            }
            if count > MAX_NAMES {
                return Err(LockError::invalid("names", "must be at most 1000 names", count).into());
            }
            let items = elements(env, value)?;
            items.into_iter().map(|item| name(env, item)).collect()
        }
        _ => invalid(env, "names", "must be a string or an array of strings", value),
    }
}

/// A function.
pub(super) fn callback(env: &Env, argument: &str, value: Value) -> Answer<Value> {
    if kind(env, value) == Kind::Function {
        Ok(value)
    } else {
        invalid(env, argument, "must be a function", value)
    }
}

fn finite(env: &Env, argument: &str, rule: &str, value: Value) -> Answer<f64> {
    if kind(env, value) == Kind::Number {
        let number = read_number(env, value)?;
        if number.is_finite() {
            return Ok(number);
        }
    }
    invalid(env, argument, rule, value)
}

/// A ttl in `unit`s of so many milliseconds.
fn ttl(env: &Env, argument: &str, rule: &str, unit: f64, value: Value) -> Answer<Ttl> {
    let ms = finite(env, argument, rule, value)? * unit;
    if ms > 0.0 && ms <= MAX_TTL.as_secs_f64() * 1000.0 {
        Ok(Ttl::clamped(Duration::from_secs_f64(ms / 1000.0)))
    } else {
        invalid(env, argument, rule, value)
    }
}

/// The gist's ttl.
pub(super) fn ttl_seconds(env: &Env, value: Value) -> Answer<Ttl> {
    ttl(
        env,
        "ttlSeconds",
        "must be a number of seconds, more than 0 and at most 2147483.648",
        1000.0,
        value,
    )
}

/// A ttl in milliseconds.
pub(super) fn ttl_ms(env: &Env, value: Value) -> Answer<Ttl> {
    ttl(
        env,
        "ttlMs",
        "must be a number of milliseconds, more than 0 and at most 2147483648",
        1.0,
        value,
    )
}

/// A span of time: zero or more milliseconds, at most `MAX_TTL`.
fn span(env: &Env, argument: &str, value: Value) -> Answer<Duration> {
    let rule = "must be a number of milliseconds from 0 to 2147483648";
    let ms = finite(env, argument, rule, value)?;
    if (0.0..=MAX_TTL.as_secs_f64() * 1000.0).contains(&ms) {
        Ok(Duration::from_secs_f64(ms / 1000.0))
    } else {
        invalid(env, argument, rule, value)
    }
}

/// A span that may not be zero.
fn positive_span(env: &Env, argument: &str, value: Value) -> Answer<Duration> {
    ttl(
        env,
        argument,
        "must be a number of milliseconds, more than 0 and at most 2147483648",
        1.0,
        value,
    )
    .map(Ttl::duration)
}

fn wait(env: &Env, value: Value) -> Answer<Wait> {
    let rule = "must be a number of milliseconds, 0 or more, or Infinity";
    if kind(env, value) != Kind::Number {
        return invalid(env, "waitMs", rule, value);
    }
    let ms = read_number(env, value)?;
    if ms.is_nan() || ms < 0.0 {
        return invalid(env, "waitMs", rule, value);
    }
    if ms == 0.0 {
        return Ok(Wait::No);
    }
    // Whatever is past the clock's range is for ever in all but name.
    let span = Duration::try_from_secs_f64(ms / 1000.0)
        .ok()
        .filter(|span| span.as_secs() < 1 << 40);
    Ok(span.map_or(Wait::Forever, Wait::For))
}

/// A value as JSON text.
fn metadata(env: &Env, value: Value) -> Answer<Option<std::sync::Arc<str>>> {
    if matches!(kind(env, value), Kind::Undefined | Kind::Null) {
        return Ok(None);
    }
    let rule = "must be a value that JSON can carry";
    let json = match invoke(env, global(env, "JSON")?, "stringify", &[value]) {
        Ok(json) if kind(env, json) == Kind::String => json,
        // A function or a symbol has no JSON.
        Ok(_) => return invalid(env, "metadata", rule, value),
        // A circular object or a bigint makes `stringify` throw, or the value's own `toJSON` does.
        Err(thrown) => {
            let error = to_js(env, &LockError::invalid("metadata", rule, describe(env, value)));
            hide(env, error, "cause", thrown.into_value(env));
            return Err(Thrown::Js(error));
        }
    };
    let json = text(env, "metadata", json)?;
    if json.len() > MAX_METADATA_BYTES {
        let bytes = format!("{} bytes", json.len());
        return Err(LockError::invalid("metadata", "must be at most 16384 bytes of JSON", bytes).into());
    }
    Ok(Some(json.into()))
}

/// Whether an object is one of the caller's own making: `{…}` of any realm, without a prototype, or a class of options. A
/// promise that was not awaited, a `Map`, a `URL` have nothing that would be read, and must not pass as "no options".
fn is_plain(env: &Env, value: Value) -> Answer<bool> {
    let object = global(env, "Object")?;
    let text = invoke(
        env,
        get(env, get(env, object, "prototype")?, "toString")?,
        "call",
        &[value],
    )?;
    Ok(read_text(env, text, |text| text == "[object Object]")? == Some(true))
}

/// An options object, or nothing. Properties that are `undefined` count as absent; unknown ones are refused, because a
/// misspelt option is a lock that does not do what its user thinks.
pub(super) struct Options<'a> {
    env: &'a Env,
    object: Option<Value>,
}

impl<'a> Options<'a> {
    pub(super) fn new(env: &'a Env, argument: &str, value: Value, known: &[&str]) -> Answer<Self> {
        let object = match kind(env, value) {
            Kind::Undefined => None,
            Kind::Object if is_plain(env, value)? => Some(value),
            _ => return invalid(env, argument, "must be a plain object", value),
        };
        if let Some(object) = object {
            for name in keys(env, object)? {
                if !known.contains(&name.as_str()) {
                    let list = known.join(", ");
                    return Err(LockError::invalid(argument, &format!("may have {list}"), format!("{name:?}")).into());
                }
            }
        }
        Ok(Options { env, object })
    }

    /// A property that is there.
    pub(super) fn get(&self, name: &str) -> Answer<Option<Value>> {
        let Some(object) = self.object else { return Ok(None) };
        let value = get(self.env, object, name)?;
        Ok((kind(self.env, value) != Kind::Undefined).then_some(value))
    }

    pub(super) fn text(&self, name: &str) -> Answer<Option<String>> {
        self.get(name)?.map(|value| text(self.env, name, value)).transpose()
    }

    pub(super) fn flag(&self, name: &str) -> Answer<Option<bool>> {
        let Some(value) = self.get(name)? else { return Ok(None) };
        if kind(self.env, value) != Kind::Boolean {
            return invalid(self.env, name, "must be true or false", value);
        }
        Ok(Some(read_bool(self.env, value)?))
    }

    /// A whole number from 0 on.
    pub(super) fn count(&self, name: &str, most: u32) -> Answer<Option<u32>> {
        let Some(value) = self.get(name)? else { return Ok(None) };
        let rule = format!("must be a whole number from 0 to {most}");
        let number = finite(self.env, name, &rule, value)?;
        if number.fract() != 0.0 || !(0.0..=f64::from(most)).contains(&number) {
            return invalid(self.env, name, &rule, value);
        }
        Ok(Some(number as u32))
    }

    pub(super) fn positive_span(&self, name: &str) -> Answer<Option<Duration>> {
        self.get(name)?
            .map(|value| positive_span(self.env, name, value))
            .transpose()
    }

    /// The caller's abort signal.
    pub(super) fn signal(&self) -> Answer<Option<Value>> {
        let Some(value) = self.get("signal")? else {
            return Ok(None);
        };
        abort::check(self.env, value)?;
        Ok(Some(value))
    }

    /// How to acquire: what is given here on top of `defaults`.
    pub(super) fn acquire(&self, defaults: &AcquireOptions) -> Answer<AcquireOptions> {
        let mut options = defaults.clone();
        let env = self.env;
        if let Some(value) = self.get("ttlMs")? {
            options.ttl = ttl_ms(env, value)?;
        }
        if let Some(value) = self.get("ttlSeconds")? {
            options.ttl = ttl_seconds(env, value)?;
        }
        if let Some(value) = self.get("waitMs")? {
            options.wait = wait(env, value)?;
        }
        if let Some(renew) = self.flag("renew")? {
            options.renew = renew;
        }
        if let Some(most) = self.positive_span("maxHoldMs")? {
            options.max_hold = Some(most);
        }
        if let Some(limit) = self.positive_span("stallLimitMs")? {
            options.stall_limit = limit;
        }
        if let Some(value) = self.get("minHoldMs")? {
            options.min_hold = span(env, "minHoldMs", value)?;
        }
        if let Some(value) = self.get("metadata")? {
            options.metadata = metadata(env, value)?;
        }
        Ok(options)
    }
}

/// The options of `acquire`, `tryAcquire` (which does not wait, whatever they say) and `using`.
pub(super) const ACQUIRE: &[&str] = &[
    "ttlMs",
    "waitMs",
    "renew",
    "signal",
    "maxHoldMs",
    "stallLimitMs",
    "minHoldMs",
    "metadata",
];
/// The object form of `acquireAndExecute`.
pub(super) const EXECUTE: &[&str] = &["name", "ttlSeconds", "waitMs", "renew", "minHoldMs", "signal"];
/// `connect`'s `defaults`.
pub(super) const DEFAULTS: &[&str] = &["ttlMs", "waitMs", "renew", "maxHoldMs", "stallLimitMs", "minHoldMs"];
