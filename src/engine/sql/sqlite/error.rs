//! What the database says when it fails, and what to make of it.

use std::path::Path;
use std::sync::Arc;

use crate::engine::sql::sqlite::NAME;
use crate::error::EngineError;

/// A failure that several calls may share, because they shared a transaction.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{said} ({})", path.display())]
pub(super) struct Failure {
    path: Arc<Path>,
    said: String,
    #[source]
    cause: Option<Arc<sqlx::Error>>,
    kind: Kind,
}

/// What follows from a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Others had the file for too long. Nothing is wrong with it.
    Busy,
    /// The connection is of no use any more; a new one may be.
    Broken,
    /// Something that a human must mend: a full disk, a missing permission, a file that is no database.
    Stuck,
}

impl Failure {
    pub(super) fn of_driver(path: &Arc<Path>, cause: sqlx::Error) -> Self {
        let (said, kind) = match &cause {
            sqlx::Error::Database(error) => (error.message().to_owned(), kind_of(error.code().as_deref())),
            sqlx::Error::WorkerCrashed => (cause.to_string(), Kind::Broken),
            _ => (cause.to_string(), Kind::Stuck),
        };
        Failure {
            path: path.clone(),
            said,
            cause: Some(Arc::new(cause)),
            kind,
        }
    }

    pub(super) fn of_folder(path: &Arc<Path>, cause: &std::io::Error) -> Self {
        Failure {
            path: path.clone(),
            said: format!("its folder cannot be made: {cause}"),
            cause: None,
            kind: Kind::Stuck,
        }
    }

    pub(super) fn of_replaced_files(path: &Arc<Path>) -> Self {
        Failure {
            path: path.clone(),
            said: "the database, its -wal or its -shm file was deleted or replaced".to_owned(),
            cause: None,
            kind: Kind::Broken,
        }
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// As the answer to one call.
    pub(super) fn error(&self, op: &'static str) -> EngineError {
        EngineError::new(NAME, op, self.kind != Kind::Stuck, self.clone())
    }
}

/// By SQLite's extended result code (<https://www.sqlite.org/rescode.html>), whose low byte is the primary one.
fn kind_of(code: Option<&str>) -> Kind {
    const BUSY: u32 = 5;
    const LOCKED: u32 = 6;
    const PROTOCOL: u32 = 15;
    const READONLY_DBMOVED: u32 = 8 | 4 << 8;
    match code.and_then(|code| code.parse::<u32>().ok()) {
        Some(READONLY_DBMOVED) => Kind::Broken,
        // PROTOCOL: a connection lost the race for the write-ahead log's locks too many times in a row.
        Some(code) if matches!(code & 0xff, BUSY | LOCKED | PROTOCOL) => Kind::Busy,
        _ => Kind::Stuck,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_passes_by_itself_is_worth_a_retry() {
        // BUSY, LOCKED, PROTOCOL, BUSY_RECOVERY, BUSY_SNAPSHOT, LOCKED_SHAREDCACHE.
        for code in ["5", "6", "15", "261", "517", "262"] {
            assert_eq!(kind_of(Some(code)), Kind::Busy, "{code}");
        }
        assert_eq!(kind_of(Some("1032")), Kind::Broken);
        // ERROR, READONLY, IOERR, CORRUPT, FULL, CANTOPEN, NOTADB, IOERR_WRITE.
        for code in ["1", "8", "10", "11", "13", "14", "26", "778", "?"] {
            assert_eq!(kind_of(Some(code)), Kind::Stuck, "{code}");
        }
        assert_eq!(kind_of(None), Kind::Stuck);
    }
}
