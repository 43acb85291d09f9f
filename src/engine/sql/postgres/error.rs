//! The meaning of the errors of the server and its driver.

use std::error::Error as StdError;
use std::io;

use tokio_postgres::Error;

use crate::engine::errors::{Table, rows};
use crate::engine::sql::failure::{Kind, OTHER_TABLE, causes, is_of_tls};
use crate::error::is_passing_of_network;

pub(super) const READ_ONLY: &str =
    "it is a standby, or default_transaction_read_only is on: the URL must lead to the primary, or have both hosts";
pub(super) const MISSING_PRIVILEGE: &str = "the user needs the privileges USAGE on the schema, and SELECT, INSERT, UPDATE and DELETE on \
                                            both tables; until the tables exist also CREATE on the schema, or on the database if the \
                                            schema is missing: CREATE SCHEMA … AUTHORIZATION the user creates one";

/// The codes of errors (<https://www.postgresql.org/docs/current/errcodes-appendix.html>).
const ERRORS: Table<Kind> = Table {
    additions: [
        ", or add sslmode=disable to the URL for a server on this machine",
        " (the option hostaddr may have its IP address), or add sslmode=verify-ca",
    ],
    rows: rows! {
        // PgBouncer, and RDS Proxy.
        ": unsupported startup parameter|command-line options" => Kind::Pooled;
        // PgBouncer in its statement mode.
        ": statement pooling mode" => Kind::Permanent, "PgBouncer must be in transaction or session mode for this database: pool_mode = \
            transaction";
        "40001 40P01" => Kind::Conflict;
        "26000 42P05" => Kind::Pooled;
        "42P01" => Kind::NoTable;
        "25006" => Kind::Broken, READ_ONLY;
        // The server shuts down or starts, or ended this session.
        "57P01 57P02 57P03 57P05 25P03 25P04 08???" => Kind::Broken;
        "55P03" => Kind::Locked;
        "57014" => Kind::Cancelled;
        // Too many connections, a full disk, an error of the operating system, an internal error: Supavisor's for a full pool.
        "53??? 58??? XX???" => Kind::Refused;
        "28P01" => Kind::Permanent, "check the user name and the password; in a URL, special characters are percent-encoded";
        "28000: client certificate" => Kind::Permanent, "the server requires a client certificate that it trusts: set tls.certFile and tls.keyFile";
        "28000: no encryption|SSL off" => Kind::Permanent, "the server may expect TLS: add sslmode=require to the URL";
        "3D000" => Kind::Permanent, "check the database in the URL, without which it is PGDATABASE or the name of the user; or create it: \
            holdfast creates tables, not databases";
        "42501" => Kind::Permanent, MISSING_PRIVILEGE;
        "42703" => Kind::Permanent, OTHER_TABLE;
        ": does not support TLS" => Kind::Permanent, "the server has no TLS: add sslmode=disable to the URL if the network is private";
        ": password missing" => Kind::Permanent, "the server requires a password: put it into the URL, PGPASSWORD or ~/.pgpass, or set the \
            option password";
    },
};

/// Returns what follows from an error, and its text.
pub(super) fn kind_of(error: &Error) -> (Kind, String) {
    let Some(server) = error.as_db_error() else {
        let text = causes(error);
        let (kind, message) = ERRORS.explain(None, &text, &text);
        // Permanent: for example a missing password, or a server without TLS.
        let passes = error.is_closed() || io_error(error).is_some_and(is_passing_of_network);
        let otherwise = if passes { Kind::Broken } else { Kind::Permanent };
        return (kind.unwrap_or(otherwise), message);
    };
    let (code, text) = (server.code().code(), server.message());
    let (kind, message) = match server.hint() {
        Some(hint) => ERRORS.explain(Some(code), text, format_args!("{text} [{code}]; {hint}")),
        None => ERRORS.explain(Some(code), text, format_args!("{text} [{code}]")),
    };
    (kind.unwrap_or(Kind::Permanent), message)
}

/// Whether TLS could not be set up.
pub(super) fn is_tls(error: &Error) -> bool {
    io_error(error).is_some_and(is_of_tls) || causes(error).contains("does not support TLS")
}

/// Whether the server refused a login.
pub(super) fn is_refused_login(error: &Error) -> bool {
    error.code().is_some_and(|code| code.code().starts_with("28"))
}

fn io_error(error: &Error) -> Option<&io::Error> {
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref() {
            return Some(error);
        }
        cause = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mistakes_in_the_configuration_are_permanent() {
        let kind = |code: &str| ERRORS.explain(Some(code), "", code).0.unwrap_or(Kind::Permanent);
        for code in ["40001", "40P01"] {
            assert_eq!(kind(code), Kind::Conflict, "{code}");
        }
        for code in ["08006", "08P01", "57P01", "57P02", "57P03", "25006", "25P03"] {
            assert_eq!(kind(code), Kind::Broken, "{code}");
        }
        for code in ["53300", "53100", "58030", "XX000"] {
            assert_eq!(kind(code), Kind::Refused, "{code}");
        }
        for code in ["28P01", "28000", "3D000", "42501", "42703", "22021"] {
            assert_eq!(kind(code), Kind::Permanent, "{code}");
        }
        assert_eq!(
            ["26000", "42P05", "42P01", "55P03", "57014"].map(kind),
            [Kind::Pooled, Kind::Pooled, Kind::NoTable, Kind::Locked, Kind::Cancelled]
        );
    }
}
