//! Failures of a database and of its connections, and what follows from them.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::errors::render;
use crate::error::EngineError;

/// What to do about an error that every server has.
pub(super) const OTHER_TABLE: &str =
    "a table of this name is not one of holdfast: choose another name with the option table";

/// Where failures occur: the name of the engine, and the address for messages.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub engine: &'static str,
    pub address: Arc<str>,
}

/// A failure, which the calls of one transaction may share.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message} ({})", place.address)]
pub(super) struct Failure {
    place: Place,
    message: String,
    #[source]
    cause: Option<Arc<dyn Error + Send + Sync>>,
    kind: Kind,
    /// Whether the server may have received a statement.
    may_be_executed: bool,
}

/// What follows from a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A conflict with another transaction: a retry may succeed at once.
    Conflict,
    /// A row or a table stayed locked for [`LOCK_WAIT`](super::server::LOCK_WAIT), for less in a brief transaction, or for as long as the server's
    /// configuration allows. The statement was not executed.
    Locked,
    /// SQLite: other processes used the file for too long.
    Busy,
    /// The server refused the statement for now, or a resource of the system is used up. The connection is usable.
    Refused,
    /// The server cancelled the statement, which was not executed, for example at its own time limit for statements. The statement may
    /// have waited for a lock. The connection is usable.
    Cancelled,
    /// The connection is broken, or leads to a server that cannot write. A new one may work.
    Broken,
    /// The statements that this connection has prepared are missing: a pooler changed the server's session.
    Pooled,
    /// A table does not exist. The next connection creates it.
    NoTable,
    /// The configuration or the server must change: a wrong password, a missing privilege.
    Permanent,
}

impl Kind {
    /// Whether the statement was not executed, and a transaction may execute its calls.
    pub(super) fn is_left_to_transactions(self) -> bool {
        matches!(self, Kind::Conflict | Kind::Locked | Kind::Cancelled | Kind::Permanent)
    }
}

impl Failure {
    /// Creates the failure that a driver reported.
    pub(super) fn of_driver<E: Error + Send + Sync + 'static>(
        place: &Place,
        (kind, message): (Kind, String),
        cause: E,
    ) -> Self {
        let cause: Arc<dyn Error + Send + Sync> = Arc::new(cause);
        Failure {
            cause: Some(cause),
            ..Failure::new(place, kind, message)
        }
    }

    /// Creates a failure without a cause in the driver.
    pub(super) fn new(place: &Place, kind: Kind, message: impl Into<String>) -> Self {
        Failure {
            place: place.clone(),
            message: message.into(),
            cause: None,
            kind,
            may_be_executed: true,
        }
    }

    /// Marks the failure as one before the first statement.
    pub(super) fn not_sent(mut self) -> Self {
        self.may_be_executed = false;
        self
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the failure as an error of one call.
    pub(super) fn error(&self, op: &'static str) -> EngineError {
        let is_retryable = self.kind != Kind::Permanent;
        let error = EngineError::new(self.place.engine, op, is_retryable, self.clone());
        match self.kind {
            Kind::Locked => error.row_locked(),
            _ if self.may_be_executed => error,
            _ => error.not_sent(),
        }
    }
}

impl Failure {
    pub(super) fn unanswered(place: &Place, limit: Duration, kind: Kind) -> Self {
        Self::new(place, kind, format!("no answer within {} ms", limit.as_millis()))
    }

    pub(super) fn unexpected(place: &Place, what: &str) -> Self {
        let message = format!("unexpected reply from the server: {what}");
        Self::new(place, Kind::Permanent, message)
    }

    /// Changes the server to one of several.
    pub(super) fn at(mut self, address: &str) -> Self {
        self.place.address = address.into();
        self
    }

    /// Joins the failures of two servers. The result is permanent if both are.
    pub(super) fn and(self, other: Failure) -> Self {
        Failure {
            message: format!("{self}; {}", other.message),
            kind: match self.kind {
                Kind::Permanent => other.kind,
                kind => kind,
            },
            ..other
        }
    }

    /// Adds what to do.
    pub(super) fn with_advice(mut self, advice: &str) -> Self {
        self.message = render(self.message, advice);
        self
    }

    /// Changes what follows from it.
    pub(super) fn with_kind(self, kind: Kind) -> Self {
        Failure { kind, ..self }
    }

    /// Marks the failure as one after a commit: a repetition would find another state.
    pub(super) fn after_commit(self) -> Self {
        match self.kind.is_left_to_transactions() {
            true => self.with_kind(Kind::Refused),
            false => self,
        }
    }

    /// Whether the server reported a locked row or table. `false` for a cancelled statement, which may also have [`Kind::Locked`].
    pub(super) fn is_reported_lock(&self) -> bool {
        self.cause.is_some() && self.kind == Kind::Locked
    }
}

/// Whether an error of a socket is one of TLS.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(super) fn is_of_tls(error: &std::io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>())
}

/// Returns the texts of an error and of its causes.
pub(super) fn causes(error: &dyn Error) -> String {
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
