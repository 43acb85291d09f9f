//! Failures of the server and of connections, and what follows from them.

use std::error::Error as StdError;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::Error;
use tokio_postgres::error::{DbError, SqlState};

use super::NAME;
use crate::engine::sql::jobs::Failed;
use crate::error::EngineError;

/// A failure, which the calls of one transaction may share.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message} ({server})")]
pub(super) struct Failure {
    server: Arc<str>,
    message: String,
    #[source]
    cause: Option<Arc<Error>>,
    kind: Kind,
    /// Whether the server may have received a statement.
    may_be_executed: bool,
}

/// What follows from a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Another transaction was in the way: the same one may succeed at once.
    Conflict,
    /// The server refused this time. The connection is usable.
    Busy,
    /// The connection is broken, or leads to a server that cannot write. A new one may work.
    Broken,
    /// The statements that this connection has prepared are missing: a pooler changed the server's session.
    Pooled,
    /// A table does not exist.
    NoTable,
    /// The configuration or the server must change: a wrong password, a missing right.
    Permanent,
}

impl Failure {
    pub(super) fn of_driver(server: &Arc<str>, cause: Error) -> Self {
        let kind = kind_of(&cause);
        let message = match cause.as_db_error() {
            Some(error) => of_server(error),
            None => causes(&cause),
        };
        Failure {
            server: server.clone(),
            message,
            cause: Some(Arc::new(cause)),
            kind,
            may_be_executed: true,
        }
    }

    pub(super) fn unanswered(server: &Arc<str>, limit: Duration, kind: Kind) -> Self {
        Failure {
            server: server.clone(),
            message: format!("no answer within {} ms", limit.as_millis()),
            cause: None,
            kind,
            may_be_executed: true,
        }
    }

    pub(super) fn unexpected(server: &Arc<str>, what: &str) -> Self {
        Failure {
            server: server.clone(),
            message: format!("unexpected answer of the server: {what}"),
            cause: None,
            kind: Kind::Permanent,
            may_be_executed: true,
        }
    }

    pub(super) fn of_tls_file(server: &Arc<str>, cause: &io::Error) -> Self {
        Failure {
            server: server.clone(),
            message: format!("a TLS file cannot be used: {cause}"),
            cause: None,
            kind: Kind::Permanent,
            may_be_executed: false,
        }
    }

    /// Marks the failure as one before the first statement.
    pub(super) fn not_sent(mut self) -> Self {
        self.may_be_executed = false;
        self
    }

    /// Whether the server did not answer at all.
    pub(super) fn is_silence(&self) -> bool {
        self.cause.is_none() && self.kind == Kind::Broken
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }
}

impl Failed for Failure {
    fn error(&self, op: &'static str) -> EngineError {
        let is_retryable = !matches!(self.kind, Kind::Permanent | Kind::NoTable);
        let error = EngineError::new(NAME, op, is_retryable, self.clone());
        if self.may_be_executed { error } else { error.not_sent() }
    }
}

fn of_server(error: &DbError) -> String {
    match error.hint() {
        Some(advice) => format!("{} [{}]; {advice}", error.message(), error.code().code()),
        None => format!("{} [{}]", error.message(), error.code().code()),
    }
}

/// Returns the texts of an error and of its causes.
fn causes(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

fn kind_of(error: &Error) -> Kind {
    if let Some(code) = error.code() {
        return kind_of_code(code);
    }
    if error.is_closed() {
        return Kind::Broken;
    }
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            let is_tls = error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>());
            return if is_tls || error.kind() == io::ErrorKind::InvalidInput {
                Kind::Permanent
            } else {
                Kind::Broken
            };
        }
        cause = error.source();
    }
    // For example a missing password, or a server without TLS.
    Kind::Permanent
}

/// Maps the code of an error (<https://www.postgresql.org/docs/current/errcodes-appendix.html>).
fn kind_of_code(code: &SqlState) -> Kind {
    match (code.code(), code.code().get(..2).unwrap_or_default()) {
        ("40001" | "40P01", _) => Kind::Conflict,
        ("26000" | "42P05", _) => Kind::Pooled,
        ("42P01", _) => Kind::NoTable,
        // The server shuts down or starts, ended this session, or is a standby now.
        ("57P01" | "57P02" | "57P03" | "57P05" | "25006" | "25P03" | "25P04", _) | (_, "08") => Kind::Broken,
        // Cancelled, locked, too many connections, a full disk, an error of the operating system.
        ("57014" | "55P03", _) | (_, "53" | "58") => Kind::Busy,
        _ => Kind::Permanent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mistakes_in_the_configuration_are_permanent() {
        let kind = |code: &str| kind_of_code(&SqlState::from_code(code));
        for code in ["40001", "40P01"] {
            assert_eq!(kind(code), Kind::Conflict, "{code}");
        }
        for code in ["08006", "08P01", "57P01", "57P02", "57P03", "25006", "25P03"] {
            assert_eq!(kind(code), Kind::Broken, "{code}");
        }
        for code in ["57014", "55P03", "53300", "53100", "58030"] {
            assert_eq!(kind(code), Kind::Busy, "{code}");
        }
        for code in ["28P01", "28000", "3D000", "42501", "42703", "22021"] {
            assert_eq!(kind(code), Kind::Permanent, "{code}");
        }
        assert_eq!(
            (kind("26000"), kind("42P05"), kind("42P01")),
            (Kind::Pooled, Kind::Pooled, Kind::NoTable)
        );
    }
}
