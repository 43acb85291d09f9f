//! Failures of the database, and what follows from them.

use std::path::Path;
use std::sync::Arc;

use crate::engine::sql::jobs::Failed;
use crate::engine::sql::sqlite::NAME;
use crate::error::EngineError;

/// A failure, which the calls of one transaction may share.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message} ({})", path.display())]
pub(super) struct Failure {
    path: Arc<Path>,
    message: String,
    #[source]
    cause: Option<Arc<sqlx::Error>>,
    kind: Kind,
}

/// What follows from a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Other processes used the file for too long.
    Busy,
    /// The connection is broken. A new one may work.
    Broken,
    /// The environment must change: a full disk, a missing permission, a file that is not a database.
    Permanent,
}

impl Failure {
    pub(super) fn of_driver(path: &Arc<Path>, cause: sqlx::Error) -> Self {
        let (message, kind) = match &cause {
            sqlx::Error::Database(error) => (error.message().to_owned(), kind_of(error.code().as_deref())),
            sqlx::Error::WorkerCrashed => (cause.to_string(), Kind::Broken),
            _ => (cause.to_string(), Kind::Permanent),
        };
        Failure {
            path: path.clone(),
            message,
            cause: Some(Arc::new(cause)),
            kind,
        }
    }

    pub(super) fn of_folder(path: &Arc<Path>, cause: &std::io::Error) -> Self {
        Failure {
            path: path.clone(),
            message: format!("its folder cannot be created: {cause}"),
            cause: None,
            kind: Kind::Permanent,
        }
    }

    pub(super) fn of_replaced_files(path: &Arc<Path>) -> Self {
        Failure {
            path: path.clone(),
            message: "the database, its -wal or its -shm file was deleted or replaced".to_owned(),
            cause: None,
            kind: Kind::Broken,
        }
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }
}

impl Failed for Failure {
    fn error(&self, op: &'static str) -> EngineError {
        EngineError::new(NAME, op, self.kind != Kind::Permanent, self.clone())
    }
}

/// Maps SQLite's extended result code (<https://www.sqlite.org/rescode.html>), whose low byte is the primary code.
fn kind_of(code: Option<&str>) -> Kind {
    const BUSY: u32 = 5;
    const LOCKED: u32 = 6;
    const PROTOCOL: u32 = 15;
    const READONLY_DBMOVED: u32 = 8 | 4 << 8;
    match code.and_then(|code| code.parse::<u32>().ok()) {
        Some(READONLY_DBMOVED) => Kind::Broken,
        // PROTOCOL: a connection failed too many times in a row to lock the write-ahead log.
        Some(code) if matches!(code & 0xff, BUSY | LOCKED | PROTOCOL) => Kind::Busy,
        _ => Kind::Permanent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_transient_errors_are_retryable() {
        // BUSY, LOCKED, PROTOCOL, BUSY_RECOVERY, BUSY_SNAPSHOT, LOCKED_SHAREDCACHE.
        for code in ["5", "6", "15", "261", "517", "262"] {
            assert_eq!(kind_of(Some(code)), Kind::Busy, "{code}");
        }
        assert_eq!(kind_of(Some("1032")), Kind::Broken);
        // ERROR, READONLY, IOERR, CORRUPT, FULL, CANTOPEN, NOTADB, IOERR_WRITE.
        for code in ["1", "8", "10", "11", "13", "14", "26", "778", "?"] {
            assert_eq!(kind_of(Some(code)), Kind::Permanent, "{code}");
        }
        assert_eq!(kind_of(None), Kind::Permanent);
    }
}
