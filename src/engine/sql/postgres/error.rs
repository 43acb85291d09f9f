//! The meaning of the errors of the server and its driver.

use std::error::Error as StdError;
use std::io;

use tokio_postgres::Error;
use tokio_postgres::error::{DbError, SqlState};

use crate::engine::sql::server::error::{Kind, causes};

/// Returns what follows from an error, and its text.
pub(super) fn kind_of(error: &Error) -> (Kind, String) {
    let message = match error.as_db_error() {
        Some(error) => of_server(error),
        None => causes(error),
    };
    (kind_of_error(error), message)
}

fn of_server(error: &DbError) -> String {
    match error.hint() {
        Some(advice) => format!("{} [{}]; {advice}", error.message(), error.code().code()),
        None => format!("{} [{}]", error.message(), error.code().code()),
    }
}

fn kind_of_error(error: &Error) -> Kind {
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
