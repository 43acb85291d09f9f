//! Failures of a server and of its connections, and what follows from them.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use super::connection::Connections;
use crate::engine::sql::jobs::Failed;
use crate::error::EngineError;

/// What to do about an error that every server has.
pub(in crate::engine::sql) const OTHER_TABLE: &str =
    "a table of this name is not one of holdfast: choose another name with the option table";

/// A failure, which the calls of one transaction may share.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message} ({server})")]
pub(in crate::engine::sql) struct Failure {
    engine: &'static str,
    server: Arc<str>,
    message: String,
    #[source]
    cause: Option<Arc<dyn Error + Send + Sync>>,
    kind: Kind,
    /// Whether the server may have received a statement.
    may_be_executed: bool,
}

/// What follows from a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine::sql) enum Kind {
    /// A conflict with another transaction: a retry may succeed at once.
    Conflict,
    /// A row or a table was locked for [`LOCK_WAIT`](super::LOCK_WAIT), or as long as the server's configuration allows.
    Locked,
    /// The server refused the statement for now. The connection is usable.
    Refused,
    /// The server cancelled the statement, which was not executed, for example at its own time limit for statements. The statement may
    /// have waited for a lock. The connection is usable.
    Cancelled,
    /// The connection is broken, or leads to a server that cannot write. A new one may work.
    Broken,
    /// The statements that this connection has prepared are missing: a pooler changed the server's session.
    #[cfg_attr(
        not(feature = "postgres"),
        allow(dead_code, reason = "only PostgreSQL has a mode for poolers")
    )]
    Pooled,
    /// A table does not exist. The next connection creates it.
    NoTable,
    /// The configuration or the server must change: a wrong password, a missing privilege.
    Permanent,
}

impl Kind {
    /// Whether the statement was not executed, and a transaction may execute its calls.
    pub(in crate::engine::sql) fn is_left_to_transactions(self) -> bool {
        matches!(self, Kind::Conflict | Kind::Locked | Kind::Cancelled | Kind::Permanent)
    }
}

impl Failure {
    /// Creates the failure that a driver reported.
    pub(in crate::engine::sql) fn of_driver<E: Error + Send + Sync + 'static>(
        connections: &Connections,
        kind: Kind,
        message: String,
        cause: E,
    ) -> Self {
        let cause: Arc<dyn Error + Send + Sync> = Arc::new(cause);
        Failure {
            cause: Some(cause),
            ..Failure::new(connections, kind, message)
        }
    }

    /// Creates a failure without a cause in the driver.
    pub(in crate::engine::sql) fn new(connections: &Connections, kind: Kind, message: String) -> Self {
        Failure {
            engine: connections.engine,
            server: connections.address.clone(),
            message,
            cause: None,
            kind,
            may_be_executed: true,
        }
    }

    pub(in crate::engine::sql) fn unanswered(connections: &Connections, limit: Duration, kind: Kind) -> Self {
        Self::new(connections, kind, format!("no answer within {} ms", limit.as_millis()))
    }

    /// The failure to open a connection because of a panic.
    pub(in crate::engine::sql) fn panicked(connections: &Connections) -> Self {
        let message = "a bug in holdfast or in its driver: the login panicked".to_owned();
        Self::new(connections, Kind::Broken, message).not_sent()
    }

    pub(in crate::engine::sql) fn unexpected(connections: &Connections, what: &str) -> Self {
        let message = format!("unexpected reply from the server: {what}");
        Self::new(connections, Kind::Permanent, message)
    }

    /// Changes the server to one of several.
    #[cfg(feature = "postgres")]
    pub(in crate::engine::sql) fn at(mut self, address: &str) -> Self {
        self.server = address.into();
        self
    }

    /// Joins the failures of two servers. The result is permanent if both are.
    #[cfg(feature = "postgres")]
    pub(in crate::engine::sql) fn and(self, other: Failure) -> Self {
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
        self.message = format!("{} ({advice})", self.message);
        self
    }

    /// Marks the failure as one before the first statement.
    pub(in crate::engine::sql) fn not_sent(mut self) -> Self {
        self.may_be_executed = false;
        self
    }

    /// Marks the failure as one after a commit: a repetition would find another state.
    #[cfg(feature = "mysql")]
    pub(in crate::engine::sql) fn after_commit(mut self) -> Self {
        if self.kind.is_left_to_transactions() {
            self.kind = Kind::Refused;
        }
        self
    }

    /// Marks the failure as one of the connection.
    pub(super) fn broken(mut self) -> Self {
        self.kind = Kind::Broken;
        self
    }

    /// Whether the server reported a locked row or table. `false` for a cancelled statement, which may also have [`Kind::Locked`].
    #[cfg(feature = "mysql")]
    pub(in crate::engine::sql) fn is_reported_lock(&self) -> bool {
        self.cause.is_some() && self.kind == Kind::Locked
    }

    pub(in crate::engine::sql) fn kind(&self) -> Kind {
        self.kind
    }
}

impl Failed for Failure {
    fn error(&self, op: &'static str) -> EngineError {
        let is_retryable = self.kind != Kind::Permanent;
        let error = EngineError::new(self.engine, op, is_retryable, self.clone());
        if self.may_be_executed { error } else { error.not_sent() }
    }
}

/// Returns the texts of an error and of its causes.
pub(in crate::engine::sql) fn causes(error: &dyn Error) -> String {
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
