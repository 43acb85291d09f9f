//! The URL of etcd: `etcd://user:password@h1,h2:2379`, `etcds://…` with TLS.

use crate::engine::Settings;
use crate::engine::entries::servers::{Rule, Servers};
use crate::error::LockError;

const RULE: Rule = Rule {
    text: "must be like etcd://h1,h2 or etcds://user:password@h1:2379",
    ports: [2379; 2],
};
const DEFAULT_PREFIX: &str = "holdfast/";

/// A parsed URL of etcd, with its settings.
#[derive(Debug, Clone)]
pub struct EtcdConfig {
    pub(in crate::engine) servers: Servers,
    /// The prefix of all keys.
    pub(super) prefix: String,
}

impl EtcdConfig {
    /// Parses a URL.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` for an invalid URL or setting. The message has no text of the URL.
    pub(in crate::engine) fn parse(url: &str, settings: &Settings) -> Result<Self, LockError> {
        let (servers, path) = Servers::parse(url, settings, &RULE)?;
        if !matches!(path.as_str(), "" | "/") {
            return Err(RULE.broken("a URL with a path (keyPrefix is the prefix of the keys)"));
        }
        Ok(EtcdConfig {
            servers,
            prefix: settings.key_prefix.clone().unwrap_or_else(|| DEFAULT_PREFIX.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::TlsFiles;

    #[test]
    fn a_url_has_servers_a_login_and_tls() {
        let config = EtcdConfig::parse("etcds://me:p%40ss@h1,h2:1/", &Settings::default()).unwrap();
        assert_eq!(config.servers.to_string(), "h1:2379, h2:1");
        assert_eq!(config.servers.login, Some(("me".into(), "p@ss".into())));
        assert!(config.servers.tls.is_some() && config.prefix == DEFAULT_PREFIX);
        assert!(!format!("{config:?}").contains("ss@") && !format!("{config:?}").contains("p@ss"));
        let settings = Settings {
            key_prefix: Some(String::new()),
            ..Settings::default()
        };
        let config = EtcdConfig::parse("etcd://h", &settings).unwrap();
        assert!(config.servers.tls.is_none() && config.prefix.is_empty());
    }

    #[test]
    fn a_wrong_url_names_the_rule() {
        let message = |url: &str, settings: &Settings| EtcdConfig::parse(url, settings).unwrap_err().message;
        let plain = Settings::default();
        for (url, text) in [
            ("etcd:h", "without \"//\""),
            ("etcd://h/path", "keyPrefix"),
            ("etcd://h?timeout=1", "a URL with an option: timeout"),
            ("etcd://secret@h", "no password"),
            ("etcd://:secret@h", "without a user name"),
        ] {
            let message = message(url, &plain);
            assert!(message.contains(text) && !message.contains("secret"), "{message}");
        }
        let settings = |tls| Settings {
            tls,
            ..Settings::default()
        };
        let tls = TlsFiles {
            insecure: true,
            ..TlsFiles::default()
        };
        assert!(message("etcd://h", &settings(tls)).contains("etcds://"));
        let tls = TlsFiles {
            server_name: Some("n".into()),
            ..TlsFiles::default()
        };
        assert!(message("etcds://h", &settings(tls)).contains("tls.servername"));
        let tls = TlsFiles {
            ca: Some("/path/to/ca.pem".into()),
            ..TlsFiles::default()
        };
        assert!(message("etcds://h", &settings(tls)).contains("tls.ca must"));
    }
}
