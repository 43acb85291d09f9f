//! The two error types: what a store says (`EngineError`) and what a caller sees (`LockError`).

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

/// What went wrong, as the caller tells cases apart. Busy is not among them: it is an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    /// An argument is outside what the function takes. Nothing reached the store.
    InvalidArgument,
    /// The name stayed busy for as long as the caller was ready to wait.
    Timeout,
    /// The lease ended before the caller released it.
    Lost,
    /// The service was closed.
    Closed,
    /// The store failed, or did not answer in time.
    Store,
}

impl Code {
    /// The code as JavaScript sees it in `error.code`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Code::InvalidArgument => "LOCK_INVALID_ARGUMENT",
            Code::Timeout => "LOCK_TIMEOUT",
            Code::Lost => "LOCK_LOST",
            Code::Closed => "LOCK_CLOSED",
            Code::Store => "LOCK_STORE",
        }
    }
}

/// A failure that a caller of the service sees.
#[derive(Debug, Clone)]
pub struct LockError {
    /// The case.
    pub code: Code,
    /// One sentence for a human.
    pub message: String,
    /// The lock's name, where the failure concerns one.
    pub key: Option<String>,
    /// The store's name (`redis`, `mongodb`, …), where the failure came from it.
    pub engine: Option<&'static str>,
    /// Whether the same call may succeed later without a change to it.
    pub retryable: bool,
    /// What the store said.
    pub cause: Option<Arc<EngineError>>,
}

impl LockError {
    fn new(code: Code, message: impl Into<String>) -> Self {
        LockError {
            code,
            message: message.into(),
            key: None,
            engine: None,
            retryable: false,
            cause: None,
        }
    }

    /// `LOCK_INVALID_ARGUMENT`: names the argument and shows the value.
    pub fn invalid(argument: &str, rule: &str, got: impl fmt::Display) -> Self {
        Self::new(Code::InvalidArgument, format!("{argument} {rule}, got {got}"))
    }

    /// `LOCK_TIMEOUT`.
    pub fn timeout(key: &str, message: impl Into<String>) -> Self {
        LockError {
            key: Some(key.to_owned()),
            retryable: true,
            ..Self::new(Code::Timeout, message)
        }
    }

    /// `LOCK_LOST`.
    pub fn lost(key: &str, message: impl Into<String>) -> Self {
        LockError {
            key: Some(key.to_owned()),
            ..Self::new(Code::Lost, message)
        }
    }

    /// `LOCK_CLOSED`.
    pub fn closed() -> Self {
        Self::new(Code::Closed, "this LockService is closed")
    }

    /// `LOCK_STORE` from what the engine reported.
    pub fn store(error: EngineError) -> Self {
        LockError {
            engine: Some(error.engine),
            retryable: error.retryable,
            message: error.to_string(),
            cause: Some(Arc::new(error)),
            ..Self::new(Code::Store, "")
        }
    }

    /// The same error with the lock's name in it.
    pub fn with_key(mut self, key: &str) -> Self {
        self.key.get_or_insert_with(|| key.to_owned());
        self
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for LockError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.cause.as_deref().map(|e| e as _)
    }
}

/// A failure of a store: which one, in which operation, and whether the same call may succeed later.
///
/// An operation that failed may still have been carried out: a reply can be lost after the store applied the write.
#[derive(Debug, thiserror::Error)]
#[error("{engine}: {op} failed: {source}")]
pub struct EngineError {
    /// The store's name (`redis`, `mongodb`, …).
    pub engine: &'static str,
    /// The operation (`acquire`, `renew`, `release`, `connect`, …).
    pub op: &'static str,
    /// Whether the same call may succeed later: true for an outage, false for a wrong password or a full disk of
    /// configuration mistakes that only a human mends.
    pub retryable: bool,
    /// Whether the command may have reached the store. `false`: there was no connection to send it on.
    pub may_be_executed: bool,
    /// The driver's own error.
    #[source]
    pub source: Box<dyn StdError + Send + Sync>,
}

impl EngineError {
    /// Wraps a driver's error.
    pub fn new(
        engine: &'static str,
        op: &'static str,
        retryable: bool,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        EngineError {
            engine,
            op,
            retryable,
            may_be_executed: true,
            source: source.into(),
        }
    }

    /// The same error of a command that was not sent.
    pub fn not_sent(mut self) -> Self {
        self.may_be_executed = false;
        self
    }

    /// The store gave no answer within the limit.
    pub fn no_answer(engine: &'static str, op: &'static str, limit: std::time::Duration) -> Self {
        Self::new(engine, op, true, format!("no answer within {} ms", limit.as_millis()))
    }

    /// Creates the error of a grant that arrived after its lease had ended.
    pub fn granted_too_late(engine: &'static str, after: std::time::Duration, ttl: std::time::Duration) -> Self {
        let (after, ttl) = (after.as_millis(), ttl.as_millis());
        Self::new(
            engine,
            "acquire",
            true,
            format!(
                "the lock was granted too late: the answer came after {after} ms, and the ttl is {ttl} ms; use a longer ttl"
            ),
        )
    }
}
