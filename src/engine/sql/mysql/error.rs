//! The meaning of the errors of the server and its driver.

use sqlx::Error;
use sqlx::mysql::MySqlDatabaseError;

use crate::engine::errors::{Table, rows};
use crate::engine::sql::failure::{Kind, OTHER_TABLE, causes, is_of_tls};
use crate::error::is_passing_of_network;

/// The text of the driver's error for a server without TLS.
const NO_TLS: &str = "does not support TLS";

pub(super) const READ_ONLY: &str = "the server is a replica, or read-only for now: the URL must lead to the primary";

const NEEDS_TLS: &str = "the password of this user (caching_sha2_password or sha256_password) is only sent over TLS, and this connection \
                         has none: turn on TLS at the server, and leave out ssl-mode=DISABLED";

/// The numbers of errors (<https://dev.mysql.com/doc/mysql-errors/8.0/en/server-error-reference.html>,
/// <https://mariadb.com/kb/en/mariadb-error-codes/>).
const ERRORS: Table<Kind> = Table {
    additions: [
        ", or add ssl-mode=DISABLED to the URL for a server on this machine",
        ", or add ssl-mode=VERIFY_CA",
    ],
    rows: rows! {
        // A lock wait that lasted too long, and MySQL's answer to `NOWAIT`.
        "1205 3572" => Kind::Locked;
        // An interrupted statement; a statement that exceeded `max_statement_time` (1969) or `max_execution_time` (3024).
        "1317 1969 3024" => Kind::Cancelled;
        // A deadlock, a row that changed, a waiter that another connection has entered; Group Replication: another member has changed a
        // row.
        "1213 1020 1062 3101" => Kind::Conflict;
        "1146" => Kind::NoTable;
        "1290: read-only" => Kind::Broken, READ_ONLY;
        "1836" => Kind::Broken, READ_ONLY;
        // The server shuts down, ended this connection, is offline or read-only now; Galera: the node is not ready; ProxySQL (9001 to 9999): it
        // reaches no server.
        "1047 1053 1158 1159 1160 1161 1290 1792 1927 2003 2006 2013 3032 3169 4031 9???" => Kind::Broken;
        // Too many connections, transactions or locks, a limit of the user, no memory, a commit that failed.
        "1040 1203 1226 1037 1038 1041 1135 1180 1206 1637 3100" => Kind::Refused;
        // A full disk: of the tables, of temporary files (3, 14, 20, 1004, 1026), of the binary log (1534, 1598).
        "1021 1030 1114 3 14 20 1004 1026 1534 1598" => Kind::Refused;
        "1045 1698" => Kind::Permanent, "check the user name and the password; in a URL, special characters are percent-encoded. A user \
            that requires TLS needs ssl-mode=REQUIRED, one that requires a certificate tls.certFile and tls.keyFile";
        "1046" => Kind::Permanent, "name the database in the URL: mysql://host/database";
        "1049" => Kind::Permanent, "check the database in the URL and in the option table, or create it: holdfast creates tables, not databases";
        "1044" => Kind::Permanent, "the database does not exist, or the user has no privileges on it: create the database, or GRANT them";
        "1142 1143" => Kind::Permanent, "the user needs the privileges SELECT, INSERT, UPDATE and DELETE on both tables, and CREATE until \
            the tables exist";
        "1054 1176" => Kind::Permanent, OTHER_TABLE;
        "3159" => Kind::Permanent, "the server requires TLS: replace ssl-mode=DISABLED by ssl-mode=REQUIRED in the URL";
        ": does not support TLS" => Kind::Permanent, "add ssl-mode=DISABLED to the URL if the network is private";
    },
};

/// Whether an error says that the server has no TLS.
pub(super) fn has_no_tls(error: &Error) -> bool {
    matches!(error, Error::Tls(cause) if cause.to_string().contains(NO_TLS))
}

/// Whether TLS could not be set up.
pub(super) fn is_tls(error: &Error) -> bool {
    matches!(error, Error::Tls(_)) || matches!(error, Error::Io(cause) if is_of_tls(cause))
}

/// Returns the number of an error of the server.
fn number(error: &Error) -> Option<u16> {
    let error = error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>();
    error.map(MySqlDatabaseError::number)
}

/// Whether an error says that a statement was not executed because it is not prepared: the server has too many prepared statements, or a
/// proxy supports none or has lost them.
pub(super) fn cannot_prepare(error: &Error) -> bool {
    matches!(number(error), Some(1243 | 1295 | 1461 | 1615))
}

/// Whether the server refuses to prepare a statement. `false`: the cause is temporary, such as a cancellation, a lock, a limit of the
/// server, or a proxy without a server.
pub(super) fn refuses_to_prepare(error: &Error) -> bool {
    matches!(error, Error::Database(_)) && matches!(kind_of(error).0, Kind::NoTable | Kind::Permanent)
}

/// Returns what follows from an error, and its text.
pub(super) fn kind_of(error: &Error) -> (Kind, String) {
    let kind = match error {
        Error::Database(database) => return of_server(number(error).unwrap_or_default(), database.message()),
        Error::Configuration(cause) if cause.to_string().starts_with("RSA") => {
            return (Kind::Permanent, NEEDS_TLS.to_owned());
        }
        Error::Io(cause) if !is_passing_of_network(cause) => Kind::Permanent,
        Error::Tls(_) | Error::Configuration(_) => Kind::Permanent,
        // Also an unexpected answer: those that follow cannot be trusted.
        _ => Kind::Broken,
    };
    let text = causes(error);
    let (known, message) = ERRORS.explain(None, &text, &text);
    (known.unwrap_or(kind), message)
}

/// Returns what follows from an error of the server, and its text.
fn of_server(number: u16, message: &str) -> (Kind, String) {
    // The server's text repeats a part of the statement, which has names and metadata.
    let message = if number == 1064 {
        "the server cannot parse a statement of holdfast"
    } else {
        message
    };
    let (kind, message) = ERRORS.explain(Some(&number.to_string()), message, format_args!("{message} [{number}]"));
    (kind.unwrap_or(Kind::Permanent), message)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    fn text_of(number: u16, message: &str) -> String {
        of_server(number, message).1
    }

    #[test]
    fn a_password_without_tls_is_explained() {
        let cause = "RSA auth backend disabled; enable feature `mysql-rsa`";
        let (kind, message) = kind_of(&Error::Configuration(cause.into()));
        assert!(
            kind == Kind::Permanent && message.contains("only sent over TLS"),
            "{message}"
        );
    }

    #[test]
    fn a_certificate_is_explained() {
        use rustls::CertificateError::{Expired, NotValidForName, Revoked, UnknownIssuer};
        for (certificate, advice) in [
            (UnknownIssuer, "set tls.caFile or tls.ca"),
            (NotValidForName, "ssl-mode=VERIFY_CA"),
            (Expired, "renew the certificate"),
            (Revoked, ""),
        ] {
            let cause = rustls::Error::InvalidCertificate(certificate.clone());
            let (kind, message) = kind_of(&Error::Io(io::Error::new(io::ErrorKind::InvalidData, cause)));
            assert!(kind == Kind::Permanent && message.contains(advice), "{message}");
            assert_eq!(message.contains(" ("), !advice.is_empty(), "{certificate:?}: {message}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_connection_without_a_file_descriptor_can_be_tried_again() {
        for (errno, expected) in [(23, Kind::Broken), (24, Kind::Broken), (20, Kind::Permanent)] {
            let (kind, message) = kind_of(&Error::Io(io::Error::from_raw_os_error(errno)));
            assert_eq!(kind, expected, "{message}");
        }
    }

    #[test]
    fn a_server_without_tls_is_explained() {
        let (kind, message) = kind_of(&Error::Tls("server does not support TLS".into()));
        assert!(
            kind == Kind::Permanent && message.contains("ssl-mode=DISABLED"),
            "{message}"
        );
    }

    #[test]
    fn a_login_and_a_url_without_a_database_are_explained() {
        assert!(text_of(1045, "Access denied").contains("[1045] (check the user name and the password"));
        assert!(text_of(1046, "No database selected").contains("[1046] (name the database in the URL"));
        assert_eq!(text_of(1062, "Duplicate entry"), "Duplicate entry [1062]");
        for repeats in [
            "You have an error in your SQL syntax near 'job:7' at line 1",
            "Fehler bei 'job:7' in Zeile 1",
        ] {
            assert_eq!(
                text_of(1064, repeats),
                "the server cannot parse a statement of holdfast [1064]"
            );
        }
    }

    #[test]
    fn only_mistakes_in_the_configuration_are_permanent() {
        for (kind, numbers) in [
            (Kind::Locked, &[1205, 3572][..]),
            (Kind::Conflict, &[1213]),
            (Kind::Broken, &[1053, 1290, 1792, 1836, 2003, 2006, 2013, 9001]),
            (Kind::Refused, &[1040, 1114, 1021, 1026, 3]),
            (Kind::Cancelled, &[1317, 1969, 3024]),
            (Kind::NoTable, &[1146]),
            (Kind::Permanent, &[1044, 1045, 1049, 1054, 1142]),
        ] {
            for number in numbers {
                assert_eq!(of_server(*number, "").0, kind, "{number}");
            }
        }
    }
}
