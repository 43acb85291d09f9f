//! Failures: which are transient, and their messages.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use mongodb::error::{Error, ErrorKind, RETRYABLE_WRITE_ERROR, WriteFailure};

use super::connection::diagnostics::{self, Diagnosis};
use crate::engine::errors::{Row, find, render, rows};
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

/// The server's errors that pass (elections, shutdowns, start-up, errors between the members, timeouts, overload), or that have a meaning.
const ERRORS: &[Row<bool>] = rows! {
    // WriteConcernFailed.
    "64" => true, "too few members of the replica set confirmed the write in time; check that the majority of those with data is up:";
    // HostUnreachable, HostNotFound, LockTimeout, CursorNotFound, MaxTimeMSExpired, NetworkTimeout, ShutdownInProgress, NotYetInitialized,
    // WriteConflict, FailedToSatisfyReadPreference, ReadConcernMajorityNotAvailableYet, QueryPlanKilled, PrimarySteppedDown,
    // NetworkInterfaceExceededTimeLimit.
    "6 7 24 43 50 89 91 94 112 133 134 175 189 202" => true;
    // IncompleteTransactionHistory: the result of a retried write is not stored any more.
    "217" => true;
    // CursorKilled, ExceededTimeLimit, TemporarilyUnavailable, IngressRequestRateLimitExceeded, SocketException, NotWritablePrimary,
    // InterruptedAtShutdown, Interrupted (an operator ended the command), InterruptedDueToReplStateChange, StaleConfig,
    // NotPrimaryNoSecondaryOk, NotPrimaryOrSecondary.
    "237 262 365 462 9001 10107 11600 11601 11602 13388 13435 13436" => true;
    // RequestRateTooLarge of Azure Cosmos DB, and of other servers that limit requests.
    "16500" => true;
    // The server's code is the same for a user without the right and for a connection without a login.
    "13: requires authentication" => false, "the server requires a login, and the URL names no user:";
    "13" => false, "the user has not the right to do this:";
    "11000" => false, "a unique index of another program conflicts:";
};

/// Codes of a server without change streams: CommandNotFound, CommandNotSupported, FailedToParse of an unknown stage, and "only
/// supported on replica sets".
const NO_CHANGE_STREAMS: [i32; 4] = [59, 115, 40324, 40573];

/// A failure that this engine detects, not the driver.
#[derive(Debug)]
struct OwnFailure(Own, Diagnosis);

#[derive(Debug, PartialEq, Eq)]
enum Own {
    NoTokens,
    /// The caller dropped the attempt.
    Cancelled,
    /// The driver gave no answer in time.
    Unanswered,
    /// The driver found no usable server.
    NoServer,
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
            ErrorKind::Custom(_) => self.own().is_some_and(|OwnFailure(_, why)| why.is_transient),
            _ => self.0.contains_label(RETRYABLE_WRITE_ERROR) || self.meaning().is_some_and(|(passes, _)| passes),
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
        self.refusal().is_some_and(|(code, message, _)| {
            code == DUPLICATE_KEY && (!message.contains(" index: ") || message.contains(" index: _id_ "))
        })
    }

    /// Whether the server's error passes, and what it means.
    fn meaning(&self) -> Option<(bool, &'static str)> {
        let (code, message, _) = self.refusal()?;
        find(ERRORS, &code.to_string(), message)
    }

    /// Creates the failure of a grant while the cluster's clock does not advance.
    pub(super) fn without_tokens() -> Self {
        let text = "the cluster time is so far ahead of the primary's clock that there are no fencing tokens left";
        Failure::of_engine(Own::NoTokens, diagnostics::transient(text))
    }

    /// Creates the failure of an attempt that its caller dropped.
    pub(super) fn cancelled() -> Self {
        Failure::of_engine(Own::Cancelled, diagnostics::transient("the caller dropped the attempt"))
    }

    /// Whether the caller dropped the attempt.
    pub(super) fn is_cancelled(&self) -> bool {
        self.is_own(&Own::Cancelled)
    }

    /// Creates the failure of a call without an answer within `limit`.
    pub(super) fn unanswered(limit: Duration) -> Self {
        let text = format!("no answer within {} ms", limit.as_millis());
        Failure::of_engine(Own::Unanswered, diagnostics::transient(&text))
    }

    /// Creates the failure of a call on a closed engine.
    pub(super) fn shutdown() -> Self {
        Failure(ErrorKind::Shutdown.into())
    }

    /// Creates the failure to find a usable server.
    pub(super) fn no_server(diagnosis: Diagnosis) -> Self {
        Failure::of_engine(Own::NoServer, diagnosis)
    }

    /// Whether a command was not answered, so that the server may execute it at any time.
    pub(super) fn is_without_answer(&self) -> bool {
        matches!(*self.0.kind, ErrorKind::Io(_)) || self.is_own(&Own::Unanswered)
    }

    fn of_engine(what: Own, why: Diagnosis) -> Self {
        Failure(Error::custom(OwnFailure(what, why)))
    }

    fn is_own(&self, what: &Own) -> bool {
        self.own().is_some_and(|OwnFailure(own, _)| own == what)
    }

    fn own(&self) -> Option<&OwnFailure> {
        self.0.get_custom()
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
        matches!(&*self.0.kind, ErrorKind::ServerSelection { .. }) || self.is_own(&Own::NoServer)
    }

    /// Whether the driver found no usable server within its timeout, and does not describe the servers.
    pub(super) fn is_selection_timeout(&self) -> bool {
        matches!(&*self.0.kind, ErrorKind::ServerSelection { message, .. } if message.starts_with("Server selection timeout"))
    }

    /// Returns the server's code.
    pub(super) fn code(&self) -> Option<i32> {
        self.refusal().map(|(code, ..)| code)
    }

    /// Returns the index of the document that the server refused.
    pub(super) fn index(&self) -> usize {
        self.refusal().map_or(0, |(.., index)| index)
    }

    /// Returns the code and the message of the server, and the index of the document that it refused.
    fn refusal(&self) -> Option<(i32, &str, usize)> {
        Some(match &*self.0.kind {
            ErrorKind::Command(error) => (error.code, &error.message, 0),
            ErrorKind::Write(WriteFailure::WriteError(error)) => (error.code, &error.message, 0),
            ErrorKind::Write(WriteFailure::WriteConcernError(error)) => (error.code, &error.message, 0),
            ErrorKind::InsertMany(many) => match (&many.write_errors, &many.write_concern_error) {
                (Some(errors), _) => errors.first().map(|error| (error.code, &*error.message, error.index))?,
                (None, error) => error.as_ref().map(|error| (error.code, &*error.message, 0))?,
            },
            _ => return None,
        })
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure(error)
    }
}

const UNMET: &str = "the write concern was not met:";

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((code, message, _)) = self.refusal() {
            let text = format!("{} (code {code})", without_command(message));
            let meaning = match (self.meaning(), &*self.0.kind) {
                (Some((_, meaning)), _) if !meaning.is_empty() => meaning,
                (_, ErrorKind::Write(WriteFailure::WriteConcernError(_))) => UNMET,
                (_, ErrorKind::InsertMany(many)) if many.write_errors.is_none() => UNMET,
                _ => "",
            };
            return f.write_str(&render(text, meaning));
        }
        if let Some(OwnFailure(_, why)) = self.own() {
            return f.write_str(&why.text);
        }
        match &*self.0.kind {
            ErrorKind::Authentication { message, .. } => write!(f, "wrong user, password or authSource: {message}"),
            ErrorKind::InsertMany(_) => f.write_str("some documents could not be written"),
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
        assert_eq!(find(ERRORS, "16500", ""), Some((true, "")));
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
