//! The meaning of the errors of the server and its driver.

use std::error::Error as StdError;
use std::io;

use tokio_postgres::Error;
use tokio_postgres::error::{DbError, SqlState};

use crate::engine::sql::server::error::{Kind, OTHER_TABLE, causes};
use crate::engine::tls::CertificateFault;
use crate::error::is_passing_of_network;

/// Returns what follows from an error, and its text.
pub(super) fn kind_of(error: &Error) -> (Kind, String) {
    let message = match error.as_db_error() {
        Some(error) => of_server(error),
        None => causes(error),
    };
    let advice = advice(error).map(|advice| format!(" ({advice})"));
    (kind_of_error(error), message + advice.as_deref().unwrap_or_default())
}

/// Whether TLS could not be set up.
pub(super) fn is_tls(error: &Error) -> bool {
    io_error(error).and_then(tls_error).is_some() || causes(error).contains(NO_TLS_TEXT)
}

/// Whether the server refused a login.
pub(super) fn is_refused_login(error: &Error) -> bool {
    error.code().is_some_and(|code| code.code().starts_with("28"))
}

fn of_server(error: &DbError) -> String {
    match error.hint() {
        Some(advice) => format!("{} [{}]; {advice}", error.message(), error.code().code()),
        None => format!("{} [{}]", error.message(), error.code().code()),
    }
}

fn kind_of_error(error: &Error) -> Kind {
    if let Some(error) = error.as_db_error() {
        // PgBouncer, and RDS Proxy.
        let refuses_options = ["unsupported startup parameter", "command-line options"];
        if refuses_options.iter().any(|text| error.message().contains(text)) {
            return Kind::Pooled;
        }
        if error.message().contains(STATEMENT_MODE) {
            return Kind::Permanent;
        }
        return kind_of_code(error.code());
    }
    if error.is_closed() {
        return Kind::Broken;
    }
    match io_error(error) {
        Some(io) if is_passing_of_network(io) => Kind::Broken,
        // For example a missing password, or a server without TLS.
        _ => Kind::Permanent,
    }
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

fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// The text of the driver's error for a server without TLS.
const NO_TLS_TEXT: &str = "does not support TLS";

const UNTRUSTED: &str = "the certificate of the server is from an authority that is not trusted here: set tls.caFile or tls.ca to \
                         the certificate of that authority, or add sslmode=disable to the URL for a server on this machine";
const OTHER_NAME: &str = "the certificate of the server is for another host name: use that name in the URL (the option hostaddr may \
                          have its IP address), or add sslmode=verify-ca";
const NO_CERTIFICATE: &str =
    "the server requires a client certificate that it trusts: set tls.certFile and tls.keyFile";
const NO_TLS: &str = "the server has no TLS: add sslmode=disable to the URL if the network is private";
const NEEDS_TLS: &str = "the server may expect TLS: add sslmode=require to the URL";
const NO_PASSWORD: &str =
    "the server requires a password: put it into the URL, PGPASSWORD or ~/.pgpass, or set the option password";
const UNKNOWN_DATABASE: &str = "check the database in the URL, without which it is PGDATABASE or the name of the user; or create it: \
                                holdfast creates tables, not databases";
pub(super) const READ_ONLY: &str =
    "it is a standby, or default_transaction_read_only is on: the URL must lead to the primary, or have both hosts";
/// The text of PgBouncer's error for a transaction in its statement mode.
const STATEMENT_MODE: &str = "statement pooling mode";
const NEEDS_TRANSACTIONS: &str =
    "PgBouncer must be in transaction or session mode for this database: pool_mode = transaction";
pub(super) const MISSING_PRIVILEGE: &str = "the user needs the privileges USAGE on the schema, and SELECT, INSERT, UPDATE and DELETE on \
                                            both tables; until the tables exist also CREATE on the schema, or on the database if the \
                                            schema is missing: CREATE SCHEMA … AUTHORIZATION the user creates one";
const WRONG_PASSWORD: &str = "check the user name and the password; in a URL, special characters are percent-encoded";

/// Returns what to do about an error of a connection, if that is known.
fn advice(error: &Error) -> Option<&'static str> {
    if let Some(error) = error.as_db_error() {
        let says = |text: &str| error.message().contains(text);
        return match error.code().code() {
            "28P01" => Some(WRONG_PASSWORD),
            "28000" if says("client certificate") => Some(NO_CERTIFICATE),
            "28000" if says("no encryption") || says("SSL off") => Some(NEEDS_TLS),
            "3D000" => Some(UNKNOWN_DATABASE),
            "25006" => Some(READ_ONLY),
            "42501" => Some(MISSING_PRIVILEGE),
            "42703" => Some(OTHER_TABLE),
            _ if says(STATEMENT_MODE) => Some(NEEDS_TRANSACTIONS),
            _ => None,
        };
    }
    match io_error(error).map(tls_error) {
        Some(error) => Some(match CertificateFault::of(error?)? {
            CertificateFault::Untrusted => UNTRUSTED,
            CertificateFault::OtherName => OTHER_NAME,
            CertificateFault::Expired => CertificateFault::EXPIRED,
        }),
        None => {
            let text = causes(error);
            if text.contains(NO_TLS_TEXT) {
                Some(NO_TLS)
            } else {
                text.contains("password missing").then_some(NO_PASSWORD)
            }
        }
    }
}

/// Maps the code of an error (<https://www.postgresql.org/docs/current/errcodes-appendix.html>).
fn kind_of_code(code: &SqlState) -> Kind {
    match (code.code(), code.code().get(..2).unwrap_or_default()) {
        ("40001" | "40P01", _) => Kind::Conflict,
        ("26000" | "42P05", _) => Kind::Pooled,
        ("42P01", _) => Kind::NoTable,
        // The server shuts down or starts, ended this session, or is a standby now.
        ("57P01" | "57P02" | "57P03" | "57P05" | "25006" | "25P03" | "25P04", _) | (_, "08") => Kind::Broken,
        ("55P03", _) => Kind::Locked,
        ("57014", _) => Kind::Cancelled,
        // Too many connections, a full disk, an error of the operating system, an internal error: Supavisor's for a full pool.
        (_, "53" | "58" | "XX") => Kind::Refused,
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
