//! From a URL and settings to a store.

use std::path::PathBuf;

use sqlx::ConnectOptions;
use sqlx::mysql::MySqlConnectOptions;

use crate::engine::sql::tables::checked_table;
use crate::engine::target::{Known, Target, Values, decoded};
use crate::engine::tls::{Pem, WrongFile};
use crate::engine::{Settings, TlsFiles};
use crate::error::LockError;

const RULE: &str = "must be mysql://[user[:password]@]host[:port][/database][?ssl-mode=…&socket=…], special characters percent-encoded";

/// The options of a URL. Those of a pool of connections are Prisma's.
const OPTIONS: [Known; 6] = [
    (
        "ssl-mode",
        Values::OneOf(&["DISABLED", "PREFERRED", "REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY"]),
    ),
    ("socket", Values::Form),
    ("connection_limit", Values::Ignored),
    ("pool_timeout", Values::Ignored),
    ("socket_timeout", Values::Ignored),
    ("statement_cache_size", Values::Ignored),
];

/// Capacity of the driver's cache of prepared statements: more than 12 sizes of attempts and 12 of releases (`prepared.rs`), so that none is
/// closed. After a close, the next request waits until the server has acknowledged the packet.
pub(super) const PREPARED: usize = 30;

/// Whether connections have TLS, and what is verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tls {
    Disabled,
    /// If the server offers it: the certificate and its name.
    Preferred,
    /// Any certificate.
    Unverified,
    /// The certificate, for any name.
    Authority,
    /// The certificate and its name.
    Full,
}

/// A parsed `mysql://` URL.
#[derive(Clone)]
pub struct MysqlConfig {
    driver_options: MySqlConnectOptions,
    pub(super) tls_mode: Tls,
    /// The table of the locks: `name`, in `database`, or `schema.name`. It is checked, and safe inside quotes.
    pub(super) table: String,
    /// The database of the URL, or nothing.
    pub(super) database: String,
    /// The server and the database, for messages.
    pub(in crate::engine) server: String,
    pub(super) settings: Settings,
}

impl std::fmt::Debug for MysqlConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MysqlConfig")
            .field("server", &self.server)
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}

impl MysqlConfig {
    /// Parses `mysql://` and `mariadb://`.
    ///
    /// # Behavior
    /// Every TLS connection is verified, unless `tls.insecure` is set. Without `ssl-mode` the connection has TLS if the server
    /// offers it; with TLS settings it must.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` with `target`, `table` or a TLS setting. No message contains a part of the URL.
    pub fn parse(url: &str, settings: &Settings) -> Result<Self, LockError> {
        let invalid = |got: String| LockError::invalid("target", RULE, got);
        let target = Target::parse(url, [3306; 2]).map_err(invalid)?;
        let server = target.server().map_err(invalid)?;
        let database = decoded(target.path.trim_start_matches('/')).map_err(invalid)?;
        // No settings of the driver: the engine sets those that its statements need.
        let mut driver_options = MySqlConnectOptions::new()
            .host(&server.host)
            .port(server.port)
            .pipes_as_concat(false)
            .no_engine_substitution(false)
            .timezone(None)
            .set_names(false)
            .statement_cache_capacity(PREPARED)
            .disable_statement_logging();
        let (user, password) = target.login.clone().unwrap_or_default();
        if !user.is_empty() {
            driver_options = driver_options.username(&user);
        }
        if let Some(password) = password.filter(|password| !password.is_empty()) {
            driver_options = driver_options.password(&password);
        }
        if !database.is_empty() {
            driver_options = driver_options.database(&database);
        }
        let options = target.options(&OPTIONS).map_err(invalid)?;
        if let Some(socket) = options.get("socket") {
            driver_options = driver_options.socket(PathBuf::from(socket));
        }
        let tls_mode = tls_mode(options.get("ssl-mode"), &settings.tls)?;
        let config = MysqlConfig {
            driver_options,
            tls_mode,
            table: checked_table(&settings.table, true)?,
            server: match database.as_str() {
                "" => server.to_string(),
                database => format!("{server}/{database}"),
            },
            database,
            settings: settings.clone(),
        };
        config.driver_options_with_tls()?;
        Ok(config)
    }

    /// Returns the options of the driver, with the current TLS files.
    pub(super) fn driver_options_with_tls(&self) -> Result<MySqlConnectOptions, WrongFile> {
        let Pem { authorities, client } = Pem::read(&self.settings.tls)?;
        let mut options = self.driver_options.clone();
        if let Some(authorities) = authorities {
            options = options.ssl_ca_from_pem(authorities);
        }
        if let Some((cert, key)) = client {
            options = options.ssl_client_cert_from_pem(cert).ssl_client_key_from_pem(key);
        }
        Ok(options)
    }
}

/// Returns whether connections have TLS. `of_url`: the value of `ssl-mode`.
fn tls_mode(of_url: Option<&str>, tls: &TlsFiles) -> Result<Tls, LockError> {
    tls.reject_server_name("the driver of MySQL expects the host of the URL in the certificate")?;
    let has_settings = *tls != TlsFiles::default();
    Ok(match of_url {
        Some("DISABLED") if has_settings => {
            let rule = "must be absent, or ssl-mode=DISABLED removed from the URL";
            return Err(LockError::invalid("tls", rule, "both"));
        }
        Some("DISABLED") => Tls::Disabled,
        _ if tls.insecure => Tls::Unverified,
        Some("PREFERRED") => Tls::Preferred,
        None if !has_settings => Tls::Preferred,
        Some("VERIFY_CA") => Tls::Authority,
        _ => Tls::Full,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(url: &str) -> MysqlConfig {
        MysqlConfig::parse(url, &Settings::default()).unwrap()
    }

    #[test]
    fn a_url_is_parsed() {
        let config = parsed("mysql://u:s%40cret@h:3307/app");
        assert_eq!(config.server, "h:3307/app");
        assert_eq!(config.driver_options.get_username(), "u");
        assert!(!format!("{config:?}").contains("cret"));
        assert_eq!(parsed("mariadb://h?connection_limit=5&pool_timeout=2").server, "h:3306");
        assert_eq!(parsed("mysql://[::1]/app").driver_options.get_host(), "::1");
    }

    #[test]
    fn tls_is_verified() {
        for (query, mode) in [
            ("", Tls::Preferred),
            ("?ssl-mode=disabled", Tls::Disabled),
            ("?ssl-mode=REQUIRED", Tls::Full),
            ("?ssl-mode=VERIFY_CA", Tls::Authority),
            ("?ssl-mode=VERIFY_IDENTITY", Tls::Full),
        ] {
            assert_eq!(parsed(&format!("mysql://h/app{query}")).tls_mode, mode, "{query}");
        }
        let insecure = Settings {
            tls: TlsFiles {
                insecure: true,
                ..TlsFiles::default()
            },
            ..Settings::default()
        };
        assert_eq!(
            MysqlConfig::parse("mysql://h", &insecure).unwrap().tls_mode,
            Tls::Unverified
        );
        let contradiction = MysqlConfig::parse("mysql://h?ssl-mode=DISABLED", &insecure).unwrap_err();
        assert!(contradiction.message.starts_with("tls "), "{contradiction:?}");
        let mut named = Settings::default();
        named.tls.server_name = Some("h".into());
        let error = MysqlConfig::parse("mysql://h", &named).unwrap_err();
        assert!(error.message.starts_with("tls.servername "), "{error:?}");
    }

    #[test]
    fn an_unknown_option_is_named() {
        let error = MysqlConfig::parse("mysql://u:secret@h/app?charset=utf8mb4", &Settings::default()).unwrap_err();
        assert!(
            error
                .message
                .ends_with(" not one of ssl-mode, socket, or that has an invalid value: charset"),
            "{error:?}"
        );
    }

    #[test]
    fn an_invalid_url_is_rejected_without_its_text() {
        for url in [
            "mysql:",
            "mysql://",
            "mysql:///app",
            "mysql://u:secret@h:port/app",
            "mysql://u:p?secret@h/app",
            "mysql://u:1?secret=x&y=z@h/app",
            "mysql://u:secret@h/app?ssl-mode=secret",
            "mysql://u:secret%ff@h/app",
            "mysql://u:1/secret@h",
            "mysql://h/app@secret",
            "mysql://u:1?secret#x@h",
        ] {
            let message = MysqlConfig::parse(url, &Settings::default()).unwrap_err().message;
            assert!(
                message.starts_with("target ") && !message.contains("secret"),
                "{url}: {message}"
            );
        }
    }
}
