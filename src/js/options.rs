//! The options of `connect` and of an acquisition, which `lib/options.ts` and `lib/connect.ts` have checked. Durations are in milliseconds. An absent
//! field means the default.

use std::collections::HashMap;
use std::time::Duration;

use napi_derive::napi;

use crate::engine::{Settings, TlsFiles};
use crate::error::LockError;
use crate::model::{Share, Ttl};
use crate::service::{AcquireOptions, Wait};

/// What an acquisition has of a shared name.
#[napi(object)]
#[derive(Clone, Copy)]
pub struct ShareRecord {
    pub permits: u32,
    pub limit: u32,
}

impl ShareRecord {
    /// Returns the share.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT`.
    pub(super) fn share(self) -> Result<Share, LockError> {
        let rule = "must be from 1 to the limit, which is at most 1048576";
        Share::new(self.permits, self.limit).ok_or_else(|| LockError::invalid("permits", rule, self.permits))
    }
}

/// The options of one acquisition, or the defaults of a service.
#[napi(object)]
pub struct AcquireRecord {
    pub ttl_ms: Option<f64>,
    pub wait_ms: Option<f64>,
    pub renew: Option<bool>,
    /// `Infinity`: no limit.
    pub max_hold_ms: Option<f64>,
    pub stall_limit_ms: Option<f64>,
    pub min_hold_ms: Option<f64>,
    pub waits_for_store: Option<bool>,
    /// The metadata as JSON text.
    pub metadata: Option<String>,
    /// The only name is a shared one. One field, because each costs time in every call with this record.
    pub share: Option<ShareRecord>,
    /// The ticket that `cancel` takes.
    pub ticket: Option<f64>,
}

impl AcquireRecord {
    /// Returns these options on top of `defaults`.
    pub(super) fn over(&self, defaults: &AcquireOptions) -> AcquireOptions {
        AcquireOptions {
            ttl: self.ttl_ms.map_or(defaults.ttl, ttl),
            wait: self.wait_ms.map_or(defaults.wait, wait),
            renew: self.renew.unwrap_or(defaults.renew),
            max_hold: self
                .max_hold_ms
                .map_or(defaults.max_hold, |ms| ms.is_finite().then(|| ttl(ms).duration())),
            stall_limit: self
                .stall_limit_ms
                .map_or(defaults.stall_limit, |ms| ttl(ms).duration()),
            min_hold: self
                .min_hold_ms
                .map_or(defaults.min_hold, |ms| duration(ms).unwrap_or_default()),
            waits_for_store: self.waits_for_store.unwrap_or(defaults.waits_for_store),
            metadata: self.metadata.as_deref().map(Into::into).or(defaults.metadata.clone()),
            ..defaults.clone()
        }
    }
}

/// Converts milliseconds. `None`: negative, too large, or not a number.
pub(super) fn duration(ms: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(ms / 1000.0).ok()
}

/// Converts milliseconds to a ttl within its limits.
pub(super) fn ttl(ms: f64) -> Ttl {
    Ttl::clamped(duration(ms).unwrap_or(Duration::MAX))
}

/// Converts milliseconds to a wait; zero is one attempt.
pub(super) fn wait(ms: f64) -> Wait {
    if ms == 0.0 {
        return Wait::No;
    }
    // A longer wait than 2^40 s counts as infinite.
    let span = duration(ms).filter(|span| span.as_secs() < 1 << 40);
    span.map_or(Wait::Forever, Wait::For)
}

/// The options of `connect`.
#[napi(object)]
pub struct Config {
    pub urls: Vec<String>,
    pub key_prefix: Option<String>,
    pub collection: Option<String>,
    pub table: Option<String>,
    pub store_timeout_ms: Option<f64>,
    pub min_replicas: Option<u32>,
    pub max_connections: Option<u32>,
    pub session_timeout_ms: Option<f64>,
    pub defaults: AcquireRecord,
    /// Whether `notify` receives events, in addition to losses.
    pub events: bool,
    /// Whether `notify` is asked for the login of every new connection.
    pub credentials: Option<bool>,
    pub listen_url: Option<String>,
    /// Variables of the environment.
    pub environment: Option<HashMap<String, String>>,
    /// How long `connect` tries again.
    pub connect_ms: Option<f64>,
    pub ca_file: Option<String>,
    pub cert_file: Option<String>,
    pub key_file: Option<String>,
    /// The text of the files, instead of their paths.
    pub ca: Option<String>,
    pub cert: Option<String>,
    pub key: Option<String>,
    pub servername: Option<String>,
    pub insecure: Option<bool>,
    /// The ticket that `cancel` takes.
    pub ticket: Option<f64>,
}

impl Config {
    /// Returns the settings of the engine.
    pub(super) fn settings(&self) -> Settings {
        let unset = Settings::default();
        Settings {
            key_prefix: self.key_prefix.clone(),
            collection: self.collection.clone().unwrap_or(unset.collection),
            table: self.table.clone().unwrap_or(unset.table),
            store_timeout: self.store_timeout_ms.and_then(duration).unwrap_or(unset.store_timeout),
            min_replicas: self.min_replicas.unwrap_or(unset.min_replicas),
            max_connections: self.max_connections,
            session_timeout: self.session_timeout_ms.and_then(duration),
            tls: TlsFiles {
                ca_file: self.ca_file.clone().map(Into::into),
                cert_file: self.cert_file.clone().map(Into::into),
                key_file: self.key_file.clone().map(Into::into),
                ca: self.ca.clone(),
                cert: self.cert.clone(),
                key: self.key.clone(),
                server_name: self.servername.clone(),
                insecure: self.insecure.unwrap_or(false),
            },
            listen_url: self.listen_url.clone(),
            environment: self.environment.clone().unwrap_or_default(),
            connect_for: self.connect_ms.and_then(duration).unwrap_or_default(),
            ..unset
        }
    }
}
