//! Which failures pass by themselves, and how they are told.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use mongodb::error::{Error, ErrorKind, RETRYABLE_WRITE_ERROR, WriteFailure};

use super::trouble;
use crate::error::EngineError;

/// The engine's name in errors.
pub(super) const ENGINE: &str = "mongodb";

/// Somebody else was faster: two upserts of one missing document.
const DUPLICATE_KEY: i32 = 11000;
const UNAUTHORIZED: i32 = 13;
const AUTHENTICATION_FAILED: i32 = 18;

/// Answers of a server that will be back: elections, shutdowns, start-up, trouble between the members, time-outs, overload.
const PASSING: [i32; 28] = [
    6,     // HostUnreachable
    7,     // HostNotFound
    24,    // LockTimeout
    43,    // CursorNotFound
    50,    // MaxTimeMSExpired
    64,    // WriteConcernFailed: the members did not acknowledge within wtimeoutMS
    89,    // NetworkTimeout
    91,    // ShutdownInProgress
    94,    // NotYetInitialized
    112,   // WriteConflict
    133,   // FailedToSatisfyReadPreference
    134,   // ReadConcernMajorityNotAvailableYet
    175,   // QueryPlanKilled
    189,   // PrimarySteppedDown
    202,   // NetworkInterfaceExceededTimeLimit
    217,   // IncompleteTransactionHistory: what a retried write did is not kept any more
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
];

/// Answers that mean that change streams cannot be had here: CommandNotFound, CommandNotSupported, FailedToParse of an
/// unknown stage, and "only supported on replica sets".
const NO_CHANGE_STREAMS: [i32; 4] = [59, 115, 40324, 40573];

/// Failures that this engine detects, not the driver.
#[derive(Debug)]
enum Own {
    NoTokens,
    /// The caller dropped the attempt.
    Cancelled,
    /// The driver gave no answer for this time.
    Unanswered(Duration),
}

/// A driver's error that tells what happened without the driver's inner life.
#[derive(Debug, Clone)]
pub(super) struct Failure(pub(super) Error);

impl Failure {
    /// The failure as the layers above see it.
    pub(super) fn during(self, op: &'static str) -> EngineError {
        let is_unsent = matches!(
            *self.0.kind,
            ErrorKind::ServerSelection { .. } | ErrorKind::ConnectionPoolCleared { .. }
        );
        let error = EngineError::new(ENGINE, op, self.retryable(), self);
        if is_unsent { error.not_sent() } else { error }
    }

    /// Whether the same call may succeed later without a human's help.
    pub(super) fn retryable(&self) -> bool {
        match &*self.0.kind {
            ErrorKind::Io(error) => trouble::of_error(&error.to_string()).passes,
            ErrorKind::ServerSelection { message, .. } => trouble::of_search(message).passes,
            ErrorKind::ConnectionPoolCleared { .. } | ErrorKind::DnsResolve { .. } => true,
            ErrorKind::Custom(_) => self.own().is_some(),
            _ => {
                self.0.contains_label(RETRYABLE_WRITE_ERROR) || self.code().is_some_and(|code| PASSING.contains(&code))
            }
        }
    }

    /// There is a document of this name already. (A unique index of somebody else's may have the same code; that is no
    /// answer but a failure.)
    pub(super) fn is_duplicate_key(&self) -> bool {
        let names_an_index = |message: &str| message.contains(" index: ") && !message.contains(" index: _id_ ");
        self.code() == Some(DUPLICATE_KEY) && !self.message().is_some_and(names_an_index)
    }

    /// What the server says.
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

    /// Why nothing can be granted while the cluster's clock stands still.
    pub(super) fn without_tokens() -> Self {
        Failure(Error::custom(Own::NoTokens))
    }

    /// The caller dropped the attempt.
    pub(super) fn cancelled() -> Self {
        Failure(Error::custom(Own::Cancelled))
    }

    /// Whether the caller dropped the attempt.
    pub(super) fn is_cancelled(&self) -> bool {
        matches!(self.own(), Some(Own::Cancelled))
    }

    /// Creates the failure of a call without an answer within `limit`.
    pub(super) fn unanswered(limit: Duration) -> Self {
        Failure(Error::custom(Own::Unanswered(limit)))
    }

    /// Whether a command was not answered, so that the server may execute it at any time.
    pub(super) fn is_without_answer(&self) -> bool {
        matches!(*self.0.kind, ErrorKind::Io(_)) || matches!(self.own(), Some(Own::Unanswered(_)))
    }

    fn own(&self) -> Option<&Own> {
        match &*self.0.kind {
            ErrorKind::Custom(reason) => reason.downcast_ref(),
            _ => None,
        }
    }

    /// The user may not do this.
    pub(super) fn is_unauthorized(&self) -> bool {
        self.code() == Some(UNAUTHORIZED)
    }

    /// The server has no change streams (for this user).
    pub(super) fn is_without_change_streams(&self) -> bool {
        self.is_unauthorized() || self.code().is_some_and(|code| NO_CHANGE_STREAMS.contains(&code))
    }

    /// The server does not believe who this is.
    pub(super) fn is_authentication(&self) -> bool {
        matches!(&*self.0.kind, ErrorKind::Authentication { .. }) || self.code() == Some(AUTHENTICATION_FAILED)
    }

    /// No server was found in time.
    pub(super) fn is_server_selection(&self) -> bool {
        matches!(&*self.0.kind, ErrorKind::ServerSelection { .. })
    }

    /// The server's code.
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

    /// Which document of several the server refused, by its place among them.
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
                f.write_str("a unique index that is not ours is in the way: ")?;
            }
            _ => {}
        }
        match self.own() {
            Some(Own::NoTokens) => {
                return f.write_str(
                    "the cluster time is so far ahead of the primary's clock that there are no fencing tokens left",
                );
            }
            Some(Own::Cancelled) => return f.write_str("the caller dropped the attempt"),
            Some(Own::Unanswered(limit)) => return write!(f, "no answer within {} ms", limit.as_millis()),
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
            ErrorKind::Write(WriteFailure::WriteConcernError(error)) => {
                write!(
                    f,
                    "the write concern was not met: {} (code {})",
                    error.message, error.code
                )
            }
            ErrorKind::ServerSelection { message, .. } => f.write_str(&trouble::of_search(message).text),
            ErrorKind::Io(error) => f.write_str(&trouble::of_error(&error.to_string()).text),
            kind => f.write_str(&trouble::without_inner_life(&kind.to_string())),
        }
    }
}

impl StdError for Failure {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}

/// What a refusal means: the server says the same code to users without a right and to no user at all.
fn forbidden(message: &str) -> &'static str {
    match message.contains("requires authentication") {
        true => "the server asks who this is, and the URL names no user: ",
        false => "the user has not the right to do this: ",
    }
}

/// The text without the whole command, owner token and all, that the server quotes when it refuses one.
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
    fn an_outage_passes_and_a_bad_certificate_does_not() {
        assert!(io(std::io::ErrorKind::ConnectionRefused, "refused").retryable());
        assert!(
            !io(
                std::io::ErrorKind::InvalidData,
                "invalid peer certificate: UnknownIssuer"
            )
            .retryable()
        );
        assert!(!Failure(Error::custom("anything else")).retryable());
        assert!(Failure::without_tokens().retryable());
    }
}
