//! From a URL and settings to a store.

use std::str::FromStr;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};

use crate::engine::tls::{Pem, Verified};
use crate::engine::{Settings, TlsFiles};
use crate::error::LockError;

const RULE: &str = "must be postgres://[user[:password]@]host[:port][,host[:port]][/database][?option=value], special characters \
                    percent-encoded";
/// Maximum length of a table name, without suffixes (`_waiters`), and of the name of its schema.
const MAX_TABLE: usize = 51;

/// A parsed `postgres://` URL.
#[derive(Clone)]
pub struct PostgresConfig {
    pub(super) driver: Config,
    /// The table of the locks: `name` or `schema.name`. It is checked, and safe inside quotes.
    pub(super) table: String,
    /// The prefix of every name.
    pub(super) key_prefix: String,
    /// The servers and the database, for messages.
    pub(super) server: String,
    pub(super) tls: TlsFiles,
    pub(super) verified: Verified,
    /// Whether a pooler is between this process and the server.
    pub(super) is_pooled: bool,
    pub(super) store_timeout: Duration,
}

impl std::fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresConfig")
            .field("server", &self.server)
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}

impl PostgresConfig {
    /// Parses `postgres://` and `postgresql://`.
    ///
    /// # Behavior
    /// Every TLS connection is verified, unless `tls.insecure` is set. Without `sslmode` the connection has TLS if the server
    /// offers it; with TLS settings it must.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` with `target`, `table` or a TLS setting. No message contains a part of the URL.
    pub fn parse(url: &str, settings: &Settings) -> Result<Self, LockError> {
        let invalid = |got: &str| LockError::invalid("target", RULE, got);
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let (mut kept, mut is_pooled, mut ssl_mode) = (Vec::new(), false, None);
        for option in query.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("pooler", "transaction") | ("pgbouncer", "true")) => is_pooled = true,
                Some(("pooler", "none") | ("pgbouncer", "false")) => is_pooled = false,
                Some(("pooler" | "pgbouncer", _)) => return Err(invalid("a URL with a pooler that is not known")),
                Some(("sslmode", mode)) => ssl_mode = Some(mode),
                _ => kept.push(option),
            }
        }
        let (mode, verified) = match ssl_mode {
            None if settings.tls == TlsFiles::default() => (SslMode::Prefer, Verified::Full),
            None | Some("require" | "verify-full") => (SslMode::Require, Verified::Full),
            Some("verify-ca") => (SslMode::Require, Verified::Authority),
            Some("prefer") => (SslMode::Prefer, Verified::Full),
            Some("disable") if settings.tls == TlsFiles::default() => (SslMode::Disable, Verified::Full),
            Some("disable") => {
                let rule = "contradicts the target";
                return Err(LockError::invalid("tls", rule, "sslmode=disable in the URL"));
            }
            Some(_) => return Err(invalid("a URL with an sslmode that is not known")),
        };
        let mut driver = Config::from_str(&format!("{base}?{}", kept.join("&")))
            .map_err(|_| invalid("a URL that does not parse, or with an option that is not known"))?;
        if driver.get_hosts().is_empty() {
            return Err(invalid("a URL without a host"));
        }
        if driver.get_hosts().len() > 1 && driver.get_target_session_attrs() == TargetSessionAttrs::Any {
            driver.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        if driver.get_application_name().is_none() {
            driver.application_name("holdfast");
        }
        driver.ssl_mode(mode);
        driver.connect_timeout(settings.store_timeout);
        driver.tcp_user_timeout(settings.store_timeout);
        driver.keepalives_idle(Duration::from_secs(15));
        driver.keepalives_interval(Duration::from_secs(5));
        Pem::read(&settings.tls).map_err(|wrong| LockError::invalid(wrong.setting, wrong.rule, wrong.how))?;
        Ok(PostgresConfig {
            server: described(&driver),
            driver,
            table: checked_table(&settings.table)?,
            key_prefix: settings.key_prefix.clone().unwrap_or_default(),
            tls: settings.tls.clone(),
            verified,
            is_pooled,
            store_timeout: settings.store_timeout,
        })
    }
}

/// Returns the servers and the database of a configuration, as text.
fn described(driver: &Config) -> String {
    let ports = driver.get_ports();
    let servers = driver.get_hosts().iter().enumerate().map(|(index, host)| {
        let port = ports.get(index).or(ports.first()).copied().unwrap_or(5432);
        match host {
            Host::Tcp(host) => format!("{host}:{port}"),
            #[allow(unreachable_patterns, reason = "Windows has no sockets of files")]
            other => format!("{other:?}:{port}"),
        }
    });
    let servers: Vec<String> = servers.collect();
    match driver.get_dbname() {
        Some(database) => format!("{}/{database}", servers.join(",")),
        None => servers.join(","),
    }
}

fn checked_table(table: &str) -> Result<String, LockError> {
    let is_name = |name: &str| {
        let mut bytes = name.bytes();
        bytes
            .next()
            .is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
            && name.len() <= MAX_TABLE
    };
    if table.split('.').count() <= 2 && table.split('.').all(is_name) {
        return Ok(table.to_owned());
    }
    Err(LockError::invalid(
        "table",
        "must be 1 to 51 letters, digits and underscores, not starting with a digit, or two such names: schema.table",
        format_args!("{table:?}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(url: &str) -> PostgresConfig {
        PostgresConfig::parse(url, &Settings::default()).unwrap()
    }

    #[test]
    fn a_url_is_parsed() {
        let config = parsed("postgres://u:s%40cret@h:6543/app?pooler=transaction&application_name=jobs");
        assert_eq!((config.server.as_str(), config.is_pooled), ("h:6543/app", true));
        assert_eq!(config.driver.get_password(), Some(&b"s@cret"[..]));
        assert_eq!(config.driver.get_application_name(), Some("jobs"));
        assert!(!format!("{config:?}").contains("cret"));
        let two = parsed("postgresql://a,b:5433/app");
        assert_eq!(two.driver.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
    }

    #[test]
    fn tls_is_verified() {
        for (query, mode, verified) in [
            ("", SslMode::Prefer, Verified::Full),
            ("?sslmode=disable", SslMode::Disable, Verified::Full),
            ("?sslmode=require", SslMode::Require, Verified::Full),
            ("?sslmode=verify-ca", SslMode::Require, Verified::Authority),
            ("?sslmode=verify-full", SslMode::Require, Verified::Full),
        ] {
            let config = parsed(&format!("postgres://h/app{query}"));
            assert_eq!(
                (config.driver.get_ssl_mode(), config.verified),
                (mode, verified),
                "{query}"
            );
        }
    }

    #[test]
    fn an_invalid_url_is_rejected_without_its_text() {
        for url in [
            "postgres://",
            "postgres:///app",
            "postgres://u:secret@h:port/app",
            "postgres://u:secret@h/app?secret=1",
            "postgres://u:secret@h/app?sslmode=secret",
            "postgres://u:secret@h/app?pooler=secret",
        ] {
            let message = PostgresConfig::parse(url, &Settings::default()).unwrap_err().message;
            assert!(
                message.starts_with("target ") && !message.contains("secret"),
                "{url}: {message}"
            );
        }
    }

    #[test]
    fn table_names_are_checked() {
        let table = |table: &str| {
            let settings = Settings {
                table: table.into(),
                ..Settings::default()
            };
            PostgresConfig::parse("postgres://h/app", &settings).map(|config| config.table)
        };
        assert_eq!(table("app.locks").unwrap(), "app.locks");
        for bad in ["", "a\"b", "a.b.c", ".b", "1a", &"x".repeat(52)] {
            assert!(table(bad).unwrap_err().message.starts_with("table "), "{bad}");
        }
    }
}
