//! Failures of the database, and what follows from them.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::engine::sql::jobs::Failed;
use crate::engine::sql::sqlite::NAME;
use crate::error::{EngineError, is_passing};

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
    /// A resource of the system is used up: space on the disk, descriptors, threads, memory. A later call may succeed.
    Refused,
    /// The connection is broken. A new one may work.
    Broken,
    /// The configuration must change: a missing permission, a file that is not a database.
    Permanent,
}

impl Failure {
    pub(super) fn of_driver(path: &Arc<Path>, cause: sqlx::Error) -> Self {
        let (message, kind) = match &cause {
            sqlx::Error::Database(error) => match kind_of(error.code().as_deref()) {
                None => not_opened(path, error.message()),
                Some(kind) => (format!("{}{}", error.message(), advice(kind, error.message())), kind),
            },
            sqlx::Error::Io(error) => (error.to_string(), of_system(error)),
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

    pub(super) fn of_folder(path: &Arc<Path>, cause: &io::Error) -> Self {
        Failure {
            path: path.clone(),
            message: format!("its folder cannot be created: {cause} (create it, or choose another path)"),
            cause: None,
            kind: of_system(cause),
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

    /// Whether one call of a transaction may be the cause, for example one that needs more space than the disk has.
    pub(super) fn may_be_of_one_call(&self) -> bool {
        matches!(self.kind, Kind::Refused | Kind::Permanent)
    }
}

impl Failed for Failure {
    fn error(&self, op: &'static str) -> EngineError {
        EngineError::new(NAME, op, self.kind != Kind::Permanent, self.clone())
    }
}

/// Maps SQLite's extended result code (<https://www.sqlite.org/rescode.html>), whose low byte is the primary code. `None`: a file
/// could not be opened.
fn kind_of(code: Option<&str>) -> Option<Kind> {
    const BUSY: u32 = 5;
    const LOCKED: u32 = 6;
    const NOMEM: u32 = 7;
    const IOERR: u32 = 10;
    const FULL: u32 = 13;
    const CANTOPEN: u32 = 14;
    const PROTOCOL: u32 = 15;
    const READONLY_DBMOVED: u32 = 8 | 4 << 8;
    let code: u32 = code.and_then(|code| code.parse().ok()).unwrap_or_default();
    match (code, code & 0xff) {
        (READONLY_DBMOVED, _) => Some(Kind::Broken),
        // PROTOCOL: a connection failed too many times in a row to lock the write-ahead log.
        (_, BUSY | LOCKED | PROTOCOL) => Some(Kind::Busy),
        // IOERR: also where a full disk, or a limit of the system, has no room for an index of the log or for a lock.
        (_, FULL | IOERR | NOMEM) => Some(Kind::Refused),
        (_, CANTOPEN) => None,
        _ => Some(Kind::Permanent),
    }
}

const NEEDS_RIGHTS: &str =
    ": this process needs the right to read and write the file, and to create files in its folder";

fn advice(kind: Kind, message: &str) -> &'static str {
    match kind {
        Kind::Busy => {
            ": other processes had it for the whole store timeout; find one that stopped inside a transaction"
        }
        Kind::Permanent if message.contains("readonly") => NEEDS_RIGHTS,
        _ => "",
    }
}

fn of_system(error: &io::Error) -> Kind {
    if is_passing(error) {
        Kind::Refused
    } else {
        Kind::Permanent
    }
}

/// Finds out why a file could not be opened, which SQLite does not say: opens the folder. (Never the file: closing it would drop
/// the process's locks on it.)
fn not_opened(path: &Path, message: &str) -> (String, Kind) {
    match path.parent().map(std::fs::File::open) {
        Some(Err(error)) if is_passing(&error) => (format!("{message}: {error}"), Kind::Refused),
        _ if path.is_dir() => (
            format!("{message}: it is a folder, add the name of a file"),
            Kind::Permanent,
        ),
        _ => (format!("{message}{NEEDS_RIGHTS}"), Kind::Permanent),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_transient_errors_are_retryable() {
        // BUSY, LOCKED, PROTOCOL, BUSY_RECOVERY, BUSY_SNAPSHOT, LOCKED_SHAREDCACHE.
        for code in ["5", "6", "15", "261", "517", "262"] {
            assert_eq!(kind_of(Some(code)), Some(Kind::Busy), "{code}");
        }
        assert_eq!(kind_of(Some("1032")), Some(Kind::Broken));
        // FULL, NOMEM, IOERR, IOERR_WRITE, IOERR_NOMEM, IOERR_SHMSIZE.
        for code in ["13", "7", "10", "778", "3082", "4874"] {
            assert_eq!(kind_of(Some(code)), Some(Kind::Refused), "{code}");
        }
        // ERROR, READONLY, CORRUPT, NOTADB.
        for code in ["1", "8", "11", "26", "?"] {
            assert_eq!(kind_of(Some(code)), Some(Kind::Permanent), "{code}");
        }
        assert_eq!(kind_of(None), Some(Kind::Permanent));
    }

    #[test]
    fn a_path_that_cannot_be_used_is_explained() {
        let folder = std::env::temp_dir();
        for (path, expected) in [
            (&folder, "unable: it is a folder, add the name of a file"),
            (
                &folder.join("none.sqlite"),
                "unable: this process needs the right to read and write the file",
            ),
        ] {
            let (message, kind) = not_opened(path, "unable");
            assert!(kind == Kind::Permanent && message.starts_with(expected), "{message}");
        }
        assert!(advice(Kind::Permanent, "attempt to write a readonly database").contains("the right to"));
    }
}
