//! What follows from errors of the database.

use std::io;
use std::path::Path;

use crate::engine::errors::{Row, find, render, rows};
use crate::engine::sql::failure::Kind;
use crate::error::is_passing;

const NEEDS_RIGHTS: &str =
    ": this process needs the right to read and write the file, and to create files in its folder";

/// SQLite's result codes (<https://www.sqlite.org/rescode.html>): extended ones, and primary ones, which are their low bytes.
const ERRORS: &[Row<Kind>] = rows! {
    // READONLY_DBMOVED.
    "1032" => Kind::Broken;
    // BUSY, LOCKED, and PROTOCOL: a connection failed too many times in a row to lock the write-ahead log.
    "5 6 15" => Kind::Busy, ": other processes had it for the whole store timeout; find one that stopped inside a transaction";
    // FULL, NOMEM, and IOERR: also where a full disk, or a limit of the system, has no room for an index of the log or for a lock.
    "13 7 10" => Kind::Refused;
    // READONLY.
    "8" => Kind::Permanent, NEEDS_RIGHTS;
};

/// Returns what follows from an error of the driver for the file `path`, and its text.
pub(super) fn kind_of(path: &Path, error: &sqlx::Error) -> (Kind, String) {
    match error {
        sqlx::Error::Database(error) => of_database(path, error.code().as_deref(), error.message()),
        sqlx::Error::Io(error) => (of_system(error), error.to_string()),
        sqlx::Error::WorkerCrashed => (Kind::Broken, error.to_string()),
        _ => (Kind::Permanent, error.to_string()),
    }
}

fn of_database(path: &Path, code: Option<&str>, message: &str) -> (Kind, String) {
    const CANTOPEN: u32 = 14;
    let code: u32 = code.and_then(|code| code.parse().ok()).unwrap_or_default();
    let primary = code & 0xff;
    let of = |code: u32| find(ERRORS, &code.to_string(), message);
    match of(code).or_else(|| of(primary)) {
        Some((kind, advice)) => (kind, render(message, advice)),
        None if primary == CANTOPEN => not_opened(path, message),
        None => (Kind::Permanent, message.to_owned()),
    }
}

pub(super) fn of_system(error: &io::Error) -> Kind {
    if is_passing(error) {
        Kind::Refused
    } else {
        Kind::Permanent
    }
}

/// Finds out why a file could not be opened, which SQLite does not say: opens the folder. (Never the file: closing it would drop
/// the process's locks on it.)
fn not_opened(path: &Path, message: &str) -> (Kind, String) {
    match path.parent().map(std::fs::File::open) {
        Some(Err(error)) if is_passing(&error) => (Kind::Refused, format!("{message}: {error}")),
        _ if path.is_dir() => (
            Kind::Permanent,
            render(message, ": it is a folder, add the name of a file"),
        ),
        _ => (Kind::Permanent, render(message, NEEDS_RIGHTS)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind_of(code: Option<&str>) -> Kind {
        of_database(Path::new(""), code, "").0
    }

    #[test]
    fn only_transient_errors_are_retryable() {
        // BUSY, LOCKED, PROTOCOL, BUSY_RECOVERY, BUSY_SNAPSHOT, LOCKED_SHAREDCACHE.
        for code in ["5", "6", "15", "261", "517", "262"] {
            assert_eq!(kind_of(Some(code)), Kind::Busy, "{code}");
        }
        assert_eq!(kind_of(Some("1032")), Kind::Broken);
        // FULL, NOMEM, IOERR, IOERR_WRITE, IOERR_NOMEM, IOERR_SHMSIZE.
        for code in ["13", "7", "10", "778", "3082", "4874"] {
            assert_eq!(kind_of(Some(code)), Kind::Refused, "{code}");
        }
        // ERROR, READONLY, CORRUPT, NOTADB.
        for code in ["1", "8", "11", "26", "?"] {
            assert_eq!(kind_of(Some(code)), Kind::Permanent, "{code}");
        }
        assert_eq!(kind_of(None), Kind::Permanent);
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
            let (kind, message) = not_opened(path, "unable");
            assert!(kind == Kind::Permanent && message.starts_with(expected), "{message}");
        }
        let (_, readonly) = of_database(&folder, Some("8"), "attempt to write a readonly database");
        assert!(readonly.contains("the right to"), "{readonly}");
    }
}
