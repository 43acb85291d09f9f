//! The two error types: `EngineError` from a store, `LockError` for a caller.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;

use crate::model::{LockInfo, Ttl};

/// The kinds of failure. Busy is not one of them: it is an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    /// An argument is invalid. Nothing was sent to the store.
    InvalidArgument,
    /// The name was busy until the caller's timeout.
    Timeout,
    /// The lease ended before the caller released it.
    Lost,
    /// The service was closed.
    Closed,
    /// The store failed, or did not answer in time.
    Store,
}

impl Code {
    /// Returns the value of `error.code` in JavaScript.
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

/// A failure of a call of the service.
#[derive(Debug, Clone)]
pub struct LockError {
    /// The kind of failure.
    pub code: Code,
    /// One sentence for people.
    pub message: String,
    /// The lock's name, if the failure concerns one.
    pub key: Option<String>,
    /// The store's name (`redis`, `mongodb`, …), if the store failed.
    pub engine: Option<&'static str>,
    /// Whether the same call may succeed later.
    pub retryable: bool,
    /// The store's error.
    pub cause: Option<Arc<EngineError>>,
    /// The state of the busy name of a timeout, if the store returned it.
    pub busy: Option<Box<LockInfo>>,
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
            busy: None,
        }
    }

    /// Creates `LOCK_INVALID_ARGUMENT`, with the argument's name, the rule and the value.
    pub fn invalid(argument: &str, rule: &str, got: impl fmt::Display) -> Self {
        Self::new(Code::InvalidArgument, format!("{argument} {rule}, got {got}"))
    }

    /// Creates `LOCK_TIMEOUT`. `busy`: the state of the name.
    pub fn timeout(key: &str, message: impl Into<String>, busy: Option<LockInfo>) -> Self {
        LockError {
            key: Some(key.to_owned()),
            retryable: true,
            busy: busy.map(Box::new),
            ..Self::new(Code::Timeout, message)
        }
    }

    /// Creates `LOCK_LOST`.
    pub fn lost(key: &str, message: impl Into<String>) -> Self {
        LockError {
            key: Some(key.to_owned()),
            ..Self::new(Code::Lost, message)
        }
    }

    /// Creates `LOCK_CLOSED`.
    pub fn closed() -> Self {
        Self::new(Code::Closed, "this LockService is closed")
    }

    /// Creates `LOCK_STORE` from an engine's error.
    pub fn store(error: EngineError) -> Self {
        LockError {
            engine: Some(error.engine),
            retryable: error.retryable,
            message: error.to_string(),
            cause: Some(Arc::new(error)),
            ..Self::new(Code::Store, "")
        }
    }

    /// Adds the lock's name, unless the error has one.
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

/// A failure of a store.
///
/// The store may have executed an operation that failed: a reply can be lost after the write.
#[derive(Debug, thiserror::Error)]
#[error("{engine}: {op} failed: {}", without_docs_url(source.to_string()))]
pub struct EngineError {
    /// The store's name (`redis`, `mongodb`, …).
    pub engine: &'static str,
    /// The operation (`acquire`, `renew`, `release`, `connect`, …).
    pub op: &'static str,
    /// Whether the same call may succeed later: true for an outage, false for a wrong password and other mistakes in the
    /// configuration.
    pub retryable: bool,
    /// Whether the store may have executed the command. `false`: there was no connection to send it on, or the store refused it.
    pub may_be_executed: bool,
    /// Whether the store has not executed the command because a row is locked. The service stays connected.
    pub is_locked: bool,
    /// The driver's own error.
    #[source]
    pub source: Box<dyn StdError + Send + Sync>,
}

/// Removes the URL of documents for programmers from an error of rustls.
fn without_docs_url(mut text: String) -> String {
    let Some(start) = text.find(": https://docs.rs/rustls/") else {
        return text;
    };
    let length = text[start + 2..]
        .find([' ', ')', ';'])
        .unwrap_or(text.len() - start - 2);
    text.replace_range(start..start + 2 + length, "");
    text
}

impl EngineError {
    /// Creates an error from a driver's error.
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
            is_locked: false,
            source: source.into(),
        }
    }

    /// Marks the error as one of a command that was not executed.
    pub fn not_sent(mut self) -> Self {
        self.may_be_executed = false;
        self
    }

    /// Marks the error as that of a locked row. The store has not executed the command.
    pub fn row_locked(mut self) -> Self {
        self.is_locked = true;
        self.not_sent()
    }

    /// Creates the error of an operation that timed out. `address` is the address of the store, or empty.
    pub fn no_answer(engine: &'static str, address: &str, op: &'static str, timeout: std::time::Duration) -> Self {
        let place = match address {
            "" => String::new(),
            address => format!(" ({address})"),
        };
        let text = format!("no answer within {} ms{place}", timeout.as_millis());
        Self::new(engine, op, true, text)
    }

    /// Returns a copy with the text of the driver's error in its place.
    pub fn copy(&self) -> Self {
        EngineError {
            source: self.source.to_string().into(),
            ..*self
        }
    }

    /// Creates the error of a hand-off that was received after the end of its lease.
    pub fn handed_off_too_late(engine: &'static str, late: std::time::Duration) -> Self {
        let late = late.as_millis();
        Self::new(
            engine,
            "acquire",
            true,
            format!(
                "the lock was granted too late: the process received the hand-off {late} ms after the end of its lease, which is short at first; \
                 find what stopped the process or delayed the network"
            ),
        )
    }

    /// Creates the error of a grant that arrived after its lease had ended. It is permanent if no grant can arrive in time.
    pub fn granted_too_late(engine: &'static str, after: std::time::Duration, ttl: Ttl) -> Self {
        let is_possible = !ttl.validity().is_zero();
        let advice = match is_possible {
            true => "use a longer ttl",
            false => {
                "2 ms of each ttl are an allowance for clocks, so use at least 3 ms, and more than a round trip to the store"
            }
        };
        let (after, ttl) = (after.as_millis(), ttl.as_millis());
        Self::new(
            engine,
            "acquire",
            is_possible,
            format!(
                "the lock was granted too late: the answer came after {after} ms, and the ttl is {ttl} ms; {advice}"
            ),
        )
    }
}

/// Whether an error of the operating system is temporary: the same call may succeed later, without a change of the configuration.
///
/// # Behavior
/// True for connections that were refused, reset or timed out, for names of hosts that were not resolved, and for resources that
/// are used up: file descriptors, threads, memory, buffers, space on a disk. False for a missing permission, a wrong path or
/// address, and for invalid data (rustls reports its errors with this kind).
pub fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    !matches!(
        error.kind(),
        Kind::PermissionDenied
            | Kind::AlreadyExists
            | Kind::InvalidInput
            | Kind::InvalidData
            | Kind::InvalidFilename
            | Kind::Unsupported
            | Kind::ReadOnlyFilesystem
            | Kind::NotADirectory
            | Kind::IsADirectory
    )
}

/// Like [`is_passing`], for an error of a connection. True for EPERM, too: a firewall refuses the connection, in Kubernetes with Cilium
/// also where a service has no pod that is ready.
pub fn is_passing_of_network(error: &io::Error) -> bool {
    is_passing(error) || cfg!(unix) && error.raw_os_error() == Some(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_rustls_has_no_url() {
        for (rest, expected) in [("", ""), (" (host:1)", " (host:1)"), ("; other: none", "; other: none")] {
            let driver = format!(
                "peer closed connection without sending TLS close_notify: https://docs.rs/rustls/latest/rustls/x.html#eof{rest}"
            );
            let error = EngineError::new("redis", "inspect", true, driver);
            let expected =
                format!("redis: inspect failed: peer closed connection without sending TLS close_notify{expected}");
            assert_eq!(error.to_string(), expected);
        }
    }

    #[test]
    fn errors_of_used_up_resources_and_of_the_network_pass() {
        use io::ErrorKind as Kind;
        for passing in [
            Kind::WouldBlock,
            Kind::OutOfMemory,
            Kind::StorageFull,
            Kind::QuotaExceeded,
            Kind::ConnectionRefused,
            Kind::ConnectionReset,
            Kind::BrokenPipe,
            Kind::TimedOut,
            Kind::HostUnreachable,
            Kind::NetworkUnreachable,
            Kind::AddrNotAvailable,
            // The socket of a server that starts again.
            Kind::NotFound,
        ] {
            assert!(is_passing(&passing.into()), "{passing}");
        }
        // ENFILE, EMFILE, ENOBUFS on Linux.
        for passing in [23, 24, 105] {
            let error = io::Error::from_raw_os_error(passing);
            assert!(is_passing(&error), "{error}");
        }
        let refused = || io::Error::from_raw_os_error(1);
        assert!(
            is_passing_of_network(&refused()) && !is_passing(&refused()),
            "{}",
            refused()
        );
        assert!(is_passing(&io::Error::other("failed to lookup address information")));
        for lasting in [
            Kind::PermissionDenied,
            Kind::AlreadyExists,
            Kind::InvalidInput,
            Kind::InvalidData,
            Kind::ReadOnlyFilesystem,
            Kind::NotADirectory,
            Kind::IsADirectory,
        ] {
            assert!(!is_passing(&lasting.into()), "{lasting}");
        }
    }
}
