//! The meaning of the errors of the server and its driver.

use std::io;

use sqlx::Error;
use sqlx::mysql::MySqlDatabaseError;

use crate::engine::sql::server::error::{Kind, causes};

/// The text of the driver's error for a server without TLS.
const NO_TLS: &str = "does not support TLS";

const WITHOUT_TLS: &str = "add ssl-mode=DISABLED to the URL if the network is private";

const WRONG_LOGIN: &str = "check the user name and the password; in a URL, special characters are percent-encoded";

const NO_DATABASE: &str = "name the database in the URL: mysql://host/database";

const NEEDS_TLS: &str = "the password of this user (caching_sha2_password or sha256_password) is only sent over TLS, and this connection \
                         has none: turn on TLS at the server, and leave out ssl-mode=DISABLED";

/// Whether an error says that the server has no TLS.
pub(super) fn has_no_tls(error: &Error) -> bool {
    matches!(error, Error::Tls(cause) if cause.to_string().contains(NO_TLS))
}

/// Returns what follows from an error, and its text.
pub(super) fn kind_of(error: &Error) -> (Kind, String) {
    match error {
        Error::Database(database) => match database.try_downcast_ref::<MySqlDatabaseError>() {
            Some(error) => {
                let number = error.number();
                (kind_of_number(number), text_of(number, error.message()))
            }
            None => (Kind::Permanent, database.message().to_owned()),
        },
        Error::Io(cause) => {
            let is_tls = cause.get_ref().is_some_and(|inner| inner.is::<rustls::Error>());
            let is_permanent = is_tls || cause.kind() == io::ErrorKind::InvalidInput;
            let kind = if is_permanent { Kind::Permanent } else { Kind::Broken };
            (kind, causes(error))
        }
        Error::Configuration(cause) if cause.to_string().starts_with("RSA") => (Kind::Permanent, NEEDS_TLS.to_owned()),
        Error::Tls(_) if has_no_tls(error) => (Kind::Permanent, format!("{} ({WITHOUT_TLS})", causes(error))),
        Error::Tls(_) | Error::Configuration(_) => (Kind::Permanent, causes(error)),
        // An unexpected answer: those that follow cannot be trusted.
        _ => (Kind::Broken, causes(error)),
    }
}

/// Returns the server's text of an error, with the remedy for a mistake in the URL.
fn text_of(number: u16, message: &str) -> String {
    match number {
        1045 => format!("{message} [{number}] ({WRONG_LOGIN})"),
        1046 => format!("{message} [{number}] ({NO_DATABASE})"),
        _ => format!("{message} [{number}]"),
    }
}

/// Maps the number of an error (<https://dev.mysql.com/doc/mysql-errors/8.0/en/server-error-reference.html>,
/// <https://mariadb.com/kb/en/mariadb-error-codes/>).
fn kind_of_number(number: u16) -> Kind {
    match number {
        // A lock wait that lasted too long, a deadlock, a row that changed, a waiter that another connection has entered.
        1205 | 1213 | 1020 | 1062 => Kind::Conflict,
        1146 => Kind::NoTable,
        // The server shuts down, ended this connection, or is read-only now; Galera: the node is not ready.
        1047 | 1053 | 1158..=1161 | 1290 | 1792 | 1836 | 1927 | 2006 | 2013 | 3169 | 4031 => Kind::Broken,
        // Too many connections, a limit of the user, a full disk, no memory, a cancelled statement, a statement that took too long.
        1040 | 1203 | 1226 | 1021 | 1030 | 1037 | 1038 | 1041 | 1114 | 1135 | 1317 | 1969 | 3024 => Kind::Busy,
        _ => Kind::Permanent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(text_of(1049, "Unknown database 'x'"), "Unknown database 'x' [1049]");
    }

    #[test]
    fn only_mistakes_in_the_configuration_are_permanent() {
        for (kind, numbers) in [
            (Kind::Conflict, &[1205, 1213][..]),
            (Kind::Broken, &[1053, 1290, 1792, 1836, 2006, 2013]),
            (Kind::Busy, &[1040, 1114, 1317]),
            (Kind::NoTable, &[1146]),
            (Kind::Permanent, &[1044, 1045, 1049, 1054, 1142]),
        ] {
            for number in numbers {
                assert_eq!(kind_of_number(*number), kind, "{number}");
            }
        }
    }
}
