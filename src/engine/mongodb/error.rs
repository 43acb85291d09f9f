//! Failures: which are transient, and their messages.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use mongodb::error::{Error, ErrorKind, RETRYABLE_WRITE_ERROR, WriteFailure};

use super::connection::diagnostics::{self, Diagnosis};
use crate::error::{EngineError, is_passing_of_network};

/// The engine's name in errors.
pub(super) const ENGINE: &str = "mongodb";
/// The operation `connect`, in errors.
pub(crate) const CONNECT: &str = "connect";

/// Another client was faster: two upserts of one missing document.
const DUPLICATE_KEY: i32 = 11000;
const UNAUTHORIZED: i32 = 13;
const AUTHENTICATION_FAILED: i32 = 18;
/// WriteConcernFailed: the members did not confirm a write within its `wtimeout`.
const UNCONFIRMED: i32 = 64;
/// UnsatisfiableWriteConcern: the set has too few members for the write concern.
pub(super) const UNSATISFIABLE: i32 = 100;

/// Codes of transient errors: elections, shutdowns, start-up, errors between the members, timeouts, overload.
const TRANSIENT: [i32; 29] = [
    6,  // HostUnreachable
    7,  // HostNotFound
    24, // LockTimeout
    43, // CursorNotFound
    50, // MaxTimeMSExpired
    UNCONFIRMED,
    89,    // NetworkTimeout
    91,    // ShutdownInProgress
    94,    // NotYetInitialized
    112,   // WriteConflict
    133,   // FailedToSatisfyReadPreference
    134,   // ReadConcernMajorityNotAvailableYet
    175,   // QueryPlanKilled
    189,   // PrimarySteppedDown
    202,   // NetworkInterfaceExceededTimeLimit
    217,   // IncompleteTransactionHistory: the result of a retried write is not stored any more
    237,   // CursorKilled
    262,   // ExceededTimeLimit
    365,   // TemporarilyUnavailable
    462,   // IngressRequestRateLimitExceeded
    9001,  // SocketException
    10107, // NotWritablePrimary
    11600, // InterruptedAtShutdown
    11601, // Interrupted: an operator ended the command
    11602, // InterruptedDueToReplStateChange
    13388, // StaleConfig
    13435, // NotPrimaryNoSecondaryOk
    13436, // NotPrimaryOrSecondary
    16500, // RequestRateTooLarge of Azure Cosmos DB, and of other servers that limit requests
];

/// Codes of a server without change streams: CommandNotFound, CommandNotSupported, FailedToParse of an unknown stage, and "only
/// supported on replica sets".
const NO_CHANGE_STREAMS: [i32; 4] = [59, 115, 40324, 40573];

/// Failures that this engine detects, not the driver.
#[derive(Debug)]
enum OwnFailure {
    NoTokens,
    /// The caller dropped the attempt.
    Cancelled,
    /// The driver gave no answer for this time.
    Unanswered(Duration),
    /// The driver found no usable server.
    NoServer(Diagnosis),
}

/// An error of the driver, or of the engine. Its message omits the labels and commands that the driver adds.
#[derive(Debug, Clone)]
pub(crate) struct Failure(pub(super) Error);

impl Failure {
    /// Returns the failure as an error of the trait.
    pub(super) fn during(self, op: &'static str) -> EngineError {
        let is_unsent = self.is_server_selection() || matches!(*self.0.kind, ErrorKind::ConnectionPoolCleared { .. });
        // An engine that has connected has valid settings: a certificate that is refused later is being replaced.
        let retryable = self.retryable() || (op != CONNECT && self.is_of_connection());
        let error = EngineError::new(ENGINE, op, retryable, self);
        if is_unsent { error.not_sent() } else { error }
    }

    /// Whether the same call may succeed later without a change of the configuration.
    pub(super) fn retryable(&self) -> bool {
        match &*self.0.kind {
            ErrorKind::Io(error) => is_passing_of_network(error),
            // Otherwise the driver does not support the servers' version.
            ErrorKind::ServerSelection { .. } => self.is_selection_timeout(),
            ErrorKind::ConnectionPoolCleared { .. } | ErrorKind::DnsResolve { .. } => true,
            ErrorKind::Custom(_) => match self.own() {
                Some(OwnFailure::NoServer(diagnosis)) => diagnosis.is_transient,
                own => own.is_some(),
            },
            _ => {
                self.0.contains_label(RETRYABLE_WRITE_ERROR)
                    || self.code().is_some_and(|code| TRANSIENT.contains(&code))
            }
        }
    }

    /// Whether no connection could be opened, or one broke.
    fn is_of_connection(&self) -> bool {
        matches!(*self.0.kind, ErrorKind::Io(_)) || self.is_server_selection()
    }

    /// Whether this process has no file descriptor left.
    pub(super) fn is_out_of_descriptors(&self) -> bool {
        let ErrorKind::Io(error) = &*self.0.kind else {
            return false;
        };
        // EMFILE and ENFILE. An error with an added text has no number.
        let text = error.to_string();
        cfg!(unix)
            && ["(os error 24)", "(os error 23)"]
                .iter()
                .any(|number| text.contains(number))
    }

    /// Whether the members of the replica set did not confirm a write in time.
    pub(super) fn is_unconfirmed(&self) -> bool {
        self.code() == Some(UNCONFIRMED)
    }

    /// Whether a document of this name exists. (A unique index of another tool has the same code: this is a failure, not an
    /// answer.)
    pub(super) fn is_duplicate_key(&self) -> bool {
        let names_an_index = |message: &str| message.contains(" index: ") && !message.contains(" index: _id_ ");
        self.code() == Some(DUPLICATE_KEY) && !self.message().is_some_and(names_an_index)
    }

    /// Returns the server's message.
    fn message(&self) -> Option<&str> {
        match &*self.0.kind {
            ErrorKind::Command(error) => Some(&error.message),
            ErrorKind::Write(WriteFailure::WriteError(error)) => Some(&error.message),
            ErrorKind::InsertMany(many) => {
                let first = many.write_errors.as_ref().and_then(|errors| errors.first());
                first.map(|error| error.message.as_str())
            }
            _ => None,
        }
    }

    /// Creates the failure of a grant while the cluster's clock does not advance.
    pub(super) fn without_tokens() -> Self {
        Failure(Error::custom(OwnFailure::NoTokens))
    }

    /// Creates the failure of an attempt that its caller dropped.
    pub(super) fn cancelled() -> Self {
        Failure(Error::custom(OwnFailure::Cancelled))
    }

    /// Whether the caller dropped the attempt.
    pub(super) fn is_cancelled(&self) -> bool {
        matches!(self.own(), Some(OwnFailure::Cancelled))
    }

    /// Creates the failure of a call without an answer within `limit`.
    pub(super) fn unanswered(limit: Duration) -> Self {
        Failure(Error::custom(OwnFailure::Unanswered(limit)))
    }

    /// Creates the failure of a call on a closed engine.
    pub(super) fn shutdown() -> Self {
        Failure(ErrorKind::Shutdown.into())
    }

    /// Creates the failure to find a usable server.
    pub(super) fn no_server(diagnosis: Diagnosis) -> Self {
        Failure(Error::custom(OwnFailure::NoServer(diagnosis)))
    }

    /// Whether a command was not answered, so that the server may execute it at any time.
    pub(super) fn is_without_answer(&self) -> bool {
        matches!(*self.0.kind, ErrorKind::Io(_)) || matches!(self.own(), Some(OwnFailure::Unanswered(_)))
    }

    fn own(&self) -> Option<&OwnFailure> {
        match &*self.0.kind {
            ErrorKind::Custom(reason) => reason.downcast_ref(),
            _ => None,
        }
    }

    /// Whether the user has not the right.
    pub(super) fn is_unauthorized(&self) -> bool {
        self.code() == Some(UNAUTHORIZED)
    }

    /// Whether the server has no change streams for this user.
    pub(super) fn is_without_change_streams(&self) -> bool {
        self.is_unauthorized() || self.code().is_some_and(|code| NO_CHANGE_STREAMS.contains(&code))
    }

    /// Whether the login failed.
    pub(super) fn is_authentication(&self) -> bool {
        matches!(&*self.0.kind, ErrorKind::Authentication { .. }) || self.code() == Some(AUTHENTICATION_FAILED)
    }

    /// Whether the driver found no usable server.
    pub(super) fn is_server_selection(&self) -> bool {
        matches!(&*self.0.kind, ErrorKind::ServerSelection { .. })
            || matches!(self.own(), Some(OwnFailure::NoServer(_)))
    }

    /// Whether the driver found no usable server within its timeout, and does not describe the servers.
    pub(super) fn is_selection_timeout(&self) -> bool {
        matches!(&*self.0.kind, ErrorKind::ServerSelection { message, .. } if message.starts_with("Server selection timeout"))
    }

    /// Returns the server's code.
    pub(super) fn code(&self) -> Option<i32> {
        match &*self.0.kind {
            ErrorKind::Command(error) => Some(error.code),
            ErrorKind::Write(WriteFailure::WriteError(error)) => Some(error.code),
            ErrorKind::Write(WriteFailure::WriteConcernError(error)) => Some(error.code),
            ErrorKind::InsertMany(many) => match (&many.write_errors, &many.write_concern_error) {
                (Some(errors), _) => errors.first().map(|error| error.code),
                (None, error) => error.as_ref().map(|error| error.code),
            },
            _ => None,
        }
    }

    /// Returns the index of the document that the server refused.
    pub(super) fn index(&self) -> usize {
        match &*self.0.kind {
            ErrorKind::InsertMany(many) => {
                let first = many.write_errors.as_ref().and_then(|errors| errors.first());
                first.map_or(0, |error| error.index)
            }
            _ => 0,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure(error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0.kind {
            ErrorKind::Command(error) if error.code == UNAUTHORIZED => f.write_str(forbidden(&error.message))?,
            _ if self.code() == Some(UNAUTHORIZED) => f.write_str("the user has not the right to do this: ")?,
            _ if self.code() == Some(DUPLICATE_KEY) => {
                f.write_str("a unique index of another program conflicts: ")?;
            }
            _ => {}
        }
        match self.own() {
            Some(OwnFailure::NoTokens) => {
                return f.write_str(
                    "the cluster time is so far ahead of the primary's clock that there are no fencing tokens left",
                );
            }
            Some(OwnFailure::Cancelled) => return f.write_str("the caller dropped the attempt"),
            Some(OwnFailure::NoServer(diagnosis)) => return f.write_str(&diagnosis.text),
            Some(OwnFailure::Unanswered(limit)) => return write!(f, "no answer within {} ms", limit.as_millis()),
            None => {}
        }
        match &*self.0.kind {
            ErrorKind::Authentication { message, .. } => write!(f, "wrong user, password or authSource: {message}"),
            ErrorKind::Command(error) => write!(f, "{} (code {})", without_command(&error.message), error.code),
            ErrorKind::Write(WriteFailure::WriteError(error)) => write!(f, "{} (code {})", error.message, error.code),
            ErrorKind::InsertMany(many) => match many.write_errors.as_ref().and_then(|errors| errors.first()) {
                Some(error) => write!(f, "{} (code {})", error.message, error.code),
                None => f.write_str("some documents could not be written"),
            },
            ErrorKind::Write(WriteFailure::WriteConcernError(error)) if error.code == UNCONFIRMED => write!(
                f,
                "too few members of the replica set confirmed the write in time: check that the majority of those with data is up \
                 ({}, code {})",
                error.message, error.code
            ),
            ErrorKind::Write(WriteFailure::WriteConcernError(error)) => {
                write!(
                    f,
                    "the write concern was not met: {} (code {})",
                    error.message, error.code
                )
            }
            ErrorKind::ServerSelection { message, .. } => {
                // The driver's description of the servers follows.
                let reason = message.split(". Topology: ").next().unwrap_or(message);
                f.write_str(&diagnostics::without_labels(reason))
            }
            ErrorKind::Io(error) => f.write_str(&diagnostics::of_error(&error.to_string()).text),
            kind => f.write_str(&diagnostics::without_labels(&kind.to_string())),
        }
    }
}

impl StdError for Failure {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}

/// Describes a refusal. The server's code is the same for a user without the right and for a connection without a login.
fn forbidden(message: &str) -> &'static str {
    match message.contains("requires authentication") {
        true => "the server requires a login, and the URL names no user: ",
        false => "the user has not the right to do this: ",
    }
}

/// Returns the message without the command that the server quotes, which contains the owner token.
fn without_command(message: &str) -> Cow<'_, str> {
    match message.split_once(" to execute command { ") {
        Some((before, command)) => {
            let name = command.split(':').next().unwrap_or_default();
            Cow::Owned(format!("{before} to execute {name}"))
        }
        None => Cow::Borrowed(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn io(kind: std::io::ErrorKind, text: &str) -> Failure {
        Failure(std::io::Error::new(kind, text.to_owned()).into())
    }

    #[test]
    fn an_outage_is_transient_and_a_bad_certificate_is_not() {
        assert!(io(std::io::ErrorKind::ConnectionRefused, "refused").retryable());
        assert!(
            !io(
                std::io::ErrorKind::InvalidData,
                "invalid peer certificate: UnknownIssuer"
            )
            .retryable()
        );
        let refused = || {
            io(
                std::io::ErrorKind::InvalidData,
                "invalid peer certificate: certificate expired",
            )
        };
        assert!(!refused().during(CONNECT).retryable, "a wrong setting");
        assert!(
            refused().during("renew").retryable,
            "the certificate is being exchanged"
        );
        assert!(!Failure(Error::custom("anything else")).retryable());
        assert!(Failure::without_tokens().retryable());
        assert!(TRANSIENT.contains(&16500));
        let no_descriptor = std::io::Error::from_raw_os_error(24).to_string();
        for text in [
            &*no_descriptor,
            &format!("tls.ca cannot be written to /tmp/x: {no_descriptor}"),
        ] {
            assert!(io(std::io::ErrorKind::Other, text).is_out_of_descriptors() || cfg!(not(unix)));
        }
        assert!(!io(std::io::ErrorKind::NotFound, "not found (os error 2)").is_out_of_descriptors());
    }
}
