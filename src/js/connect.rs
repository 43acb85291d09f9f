//! `LockService.connect`: from its arguments to a running service.

use std::sync::Arc;
use std::time::Duration;

use napi::Env;

use super::options::{self, Options, text};
use super::promise::{Bridge, Shared};
use super::signal::warn;
use super::value::{
    Answer, Kept, Kind, Value, array, bigint, call, describe, elements, function, get, global, invoke, kind, length,
    number, object, set, string, undefined,
};
use crate::engine::{EngineConfig, Settings, TlsFiles};
use crate::error::LockError;
use crate::service::{AcquireOptions, Event, EventKind, EventSink, StallDetector};

/// What `connect` was asked for.
pub(super) struct Request {
    pub(super) config: EngineConfig,
    pub(super) settings: Settings,
    pub(super) defaults: AcquireOptions,
    pub(super) events: Option<EventSink>,
    pub(super) pulse: Arc<StallDetector>,
}

const OPTIONS: &[&str] = &[
    "keyPrefix",
    "collection",
    "table",
    "storeTimeoutMs",
    "minReplicas",
    "defaults",
    "tls",
    "onEvent",
];
const OPTIONS_WITH_URL: &[&str] = &[
    "url",
    "keyPrefix",
    "collection",
    "table",
    "storeTimeoutMs",
    "minReplicas",
    "defaults",
    "tls",
    "onEvent",
];
/// The longest list of URLs.
const MAX_URLS: u32 = 100;
/// The most replicas that `minReplicas` may ask for.
const MAX_REPLICAS: u32 = 100;
const TLS: &[&str] = &["caFile", "certFile", "keyFile", "insecure"];

impl Request {
    /// Reads `connect(target?, options?)`.
    pub(super) fn read(env: &Env, bridge: &Bridge, target: Value, options: Value) -> Answer<Self> {
        let shared = bridge.shared();
        let (target, options) = match kind(env, target) {
            // A `URL` object is as good as its text.
            Kind::Object if kind(env, get(env, target, "href")?) == Kind::String => (
                Some(get(env, target, "href")?),
                Options::new(env, "options", options, OPTIONS)?,
            ),
            Kind::Object => {
                if kind(env, options) != Kind::Undefined {
                    let rule = "must be absent when the target is an options object";
                    return Err(LockError::invalid("options", rule, describe(env, options)).into());
                }
                let options = Options::new(env, "target", target, OPTIONS_WITH_URL)?;
                (options.get("url")?, options)
            }
            Kind::Undefined => (None, Options::new(env, "options", options, OPTIONS)?),
            _ => (Some(target), Options::new(env, "options", options, OPTIONS)?),
        };
        let urls = urls(env, target)?;
        let mut settings = Settings {
            key_prefix: options.text("keyPrefix")?,
            event_loop: bridge.event_loop(),
            ..Settings::default()
        };
        if let Some(collection) = options.text("collection")? {
            settings.collection = non_empty("collection", collection)?;
        }
        if let Some(table) = options.text("table")? {
            settings.table = non_empty("table", table)?;
        }
        if let Some(limit) = options.positive_span("storeTimeoutMs")? {
            settings.store_timeout = limit;
        }
        if let Some(count) = options.count("minReplicas", MAX_REPLICAS)? {
            settings.min_replicas = count;
        }
        if let Some(tls) = options.get("tls")? {
            let tls = Options::new(env, "tls", tls, TLS)?;
            settings.tls = TlsFiles {
                ca_file: tls.text("caFile")?.map(Into::into),
                cert_file: tls.text("certFile")?.map(Into::into),
                key_file: tls.text("keyFile")?.map(Into::into),
                insecure: tls.flag("insecure")?.unwrap_or(false),
            };
        }
        let mut defaults = AcquireOptions::default();
        if let Some(value) = options.get("defaults")? {
            defaults = Options::new(env, "defaults", value, options::DEFAULTS)?.acquire(&defaults)?;
        }
        let events = match options.get("onEvent")? {
            Some(callback) => {
                let callback = options::callback(env, "onEvent", callback)?;
                Some(event_sink(shared.clone(), Kept::new(env, shared, callback)?))
            }
            None => None,
        };
        let config = EngineConfig::parse(&urls, &settings)?;
        Ok(Request {
            config,
            settings,
            defaults,
            events,
            pulse: pulse(shared.clone()),
        })
    }
}

fn non_empty(argument: &str, value: String) -> Answer<String> {
    if value.is_empty() {
        Err(LockError::invalid(argument, "must not be empty", "\"\"").into())
    } else {
        Ok(value)
    }
}

/// The target's URLs; those of the environment when there is no target.
fn urls(env: &Env, target: Option<Value>) -> Answer<Vec<String>> {
    let Some(target) = target else {
        return Ok(std::env::var("HOLDFAST_URL")
            .ok()
            .filter(|url| !url.is_empty())
            .into_iter()
            .collect());
    };
    match kind(env, target) {
        Kind::String | Kind::Object => Ok(vec![url(env, target)?]),
        Kind::Array => {
            let count = length(env, target)?;
            if count > MAX_URLS {
                let got = format!("{count} URLs");
                return Err(LockError::invalid("target", "must be at most 100 URLs", got).into());
            }
            let items = elements(env, target)?;
            if items.is_empty() {
                return Err(LockError::invalid("target", "must not be an empty list", "[]").into());
            }
            items.into_iter().map(|item| url(env, item)).collect()
        }
        _ => {
            let rule = "must be a URL, a list of URLs, or an options object";
            Err(LockError::invalid("target", rule, describe(env, target)).into())
        }
    }
}

/// A URL as text, or the text of a `URL` object.
fn url(env: &Env, value: Value) -> Answer<String> {
    let value = if kind(env, value) == Kind::Object {
        get(env, value, "href")?
    } else {
        value
    };
    text(env, "target", value)
}

/// Asks the event loop for a sign of life without holding it open.
fn pulse(shared: Arc<Shared>) -> Arc<StallDetector> {
    Arc::new_cyclic(|pulse: &std::sync::Weak<StallDetector>| {
        let pulse = pulse.clone();
        StallDetector::new(move || {
            let pulse = pulse.clone();
            shared.notice(move |_| {
                if let Some(pulse) = pulse.upgrade() {
                    pulse.responded();
                }
            });
        })
    })
}

/// Carries events to the user's `onEvent`. What it throws, or its promise rejects with, becomes a warning.
fn event_sink(shared: Arc<Shared>, callback: Kept) -> EventSink {
    let callback = Arc::new(callback);
    Arc::new(move |event| {
        let callback = callback.clone();
        shared.notice(move |env| {
            if let Err(thrown) = deliver(env, &callback, &event) {
                let value = thrown.into_value(env);
                warn(env, WARNING, value);
            }
        });
    })
}

const WARNING: &str = "onEvent failed";

fn deliver(env: &Env, callback: &Kept, event: &Event) -> Answer<()> {
    let returned = call(env, undefined(env), callback.value(env)?, &[event_object(env, event)?])?;
    if kind(env, returned) == Kind::Object && kind(env, get(env, returned, "then")?) == Kind::Function {
        let promise = invoke(env, global(env, "Promise")?, "resolve", &[returned])?;
        let report = function(env, "", |env, _, reason| {
            warn(env, WARNING, reason);
            Ok(undefined(env))
        })?;
        invoke(env, promise, "then", &[undefined(env), report])?;
    }
    Ok(())
}

fn event_object(env: &Env, event: &Event) -> Answer<Value> {
    let result = object(env)?;
    set(env, result, "type", string(env, event.kind.as_str())?)?;
    set(env, result, "name", string(env, event.names[0].as_str())?)?;
    set(
        env,
        result,
        "names",
        array(env, event.names.iter().map(|name| string(env, name.as_str())))?,
    )?;
    if let Some(fence) = event.fence {
        set(env, result, "fencingToken", bigint(env, fence.0)?)?;
    }
    if let Some(duration) = event.duration {
        let name = if event.kind == EventKind::Acquired {
            "waitedMs"
        } else {
            "heldMs"
        };
        set(env, result, name, millis(env, duration)?)?;
    }
    if let Some(reason) = &event.reason {
        set(env, result, "reason", string(env, reason)?)?;
    }
    Ok(result)
}

/// A duration in milliseconds.
pub(super) fn millis(env: &Env, duration: Duration) -> Answer<Value> {
    number(env, duration.as_secs_f64() * 1000.0)
}
