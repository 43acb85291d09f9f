//! From a URL and settings to servers, a session and a layout.

use std::time::Duration;

use super::client::Access;
use super::layout::Layout;
use crate::engine::Settings;
use crate::engine::entries::servers::{Rule, Servers};
use crate::error::LockError;

pub(super) const RULE: Rule = Rule {
    text: "must be zookeeper://[user:password@]host[:port],host[:port][/chroot] or zookeepers://…, special characters of the user and the \
           password percent-encoded",
    ports: [2181, 2281],
};
/// The default session timeout.
const SESSION_TIMEOUT: Duration = Duration::from_secs(10);

/// A parsed `zookeeper://` URL.
#[derive(Debug, Clone)]
pub struct ZookeeperConfig {
    pub(in crate::engine) servers: Servers,
    /// The session timeout that is asked for.
    pub(super) session_timeout: Duration,
    pub(super) layout: Layout,
}

impl ZookeeperConfig {
    /// Parses `zookeeper://` and `zookeepers://`.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` with `target`, `sessionTimeoutMs` or a TLS setting. No message contains a part of the URL.
    pub fn parse(url: &str, settings: &Settings) -> Result<Self, LockError> {
        let (servers, path) = Servers::parse(url, settings, &RULE)?;
        let chroot = path.trim_end_matches('/');
        let of_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b':' | b'-');
        let is_name = |name: &str| !matches!(name, "" | "." | "..") && name.bytes().all(of_name);
        if !chroot.is_empty() && !chroot[1..].split('/').all(is_name) {
            return Err(RULE.broken("a URL whose path is not names of A-Z a-z 0-9 _ . : - between slashes"));
        }
        if chroot == "/zookeeper" || chroot.starts_with("/zookeeper/") {
            return Err(RULE.broken("a URL whose path is the server's own /zookeeper"));
        }
        let has_login = servers.login.is_some();
        Ok(ZookeeperConfig {
            layout: Layout {
                chroot: chroot.to_owned(),
                prefix: settings.key_prefix.clone().unwrap_or_default(),
                access: if has_login { Access::Creator } else { Access::Everyone },
            },
            servers,
            session_timeout: settings.session_timeout.unwrap_or(SESSION_TIMEOUT),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::TlsFiles;

    fn parse(url: &str) -> Result<ZookeeperConfig, LockError> {
        ZookeeperConfig::parse(url, &Settings::default())
    }

    #[test]
    fn urls_are_parsed() {
        let config = parse("zookeeper://us%40er:p%3Aw@h1,h2:2182/a/b/").unwrap();
        assert_eq!(config.servers.to_string(), "h1:2181, h2:2182");
        assert_eq!(config.layout.chroot, "/a/b");
        assert_eq!(config.layout.access, Access::Creator);
        assert_eq!(config.servers.login, Some(("us@er".into(), "p:w".into())));
        assert_eq!(config.session_timeout, Duration::from_secs(10));
        assert!(!format!("{config:?}").contains("p:w"));
        let plain = parse("zookeeper://[::1]").unwrap();
        assert_eq!(
            (plain.layout.chroot.as_str(), plain.layout.access),
            ("", Access::Everyone)
        );
        assert!(plain.servers.tls.is_none());
        let secure = parse("zookeepers://h").unwrap();
        assert!(secure.servers.list[0].port == 2281 && secure.servers.tls.is_some());
    }

    #[test]
    fn wrong_urls_are_refused_without_their_text() {
        for url in [
            "zookeeper:h",
            "zookeeper://",
            "zookeeper://h/secret?x=1",
            "zookeeper://h/a//secret",
            "zookeeper://h/../secret",
            "zookeeper://h/secret%20",
            "zookeeper://h/zookeeper/secret",
            "zookeeper://user:sec/secret@h",
        ] {
            let message = parse(url).unwrap_err().message;
            assert!(
                message.starts_with("target must be zookeeper://") && !message.contains("secret"),
                "{message}"
            );
        }
        let with = |url: &str, tls: TlsFiles| {
            ZookeeperConfig::parse(
                url,
                &Settings {
                    tls,
                    ..Settings::default()
                },
            )
        };
        let insecure = TlsFiles {
            insecure: true,
            ..TlsFiles::default()
        };
        assert!(
            with("zookeeper://h", insecure.clone())
                .unwrap_err()
                .message
                .contains("zookeepers://")
        );
        assert!(with("zookeepers://h", insecure).is_ok());
        let named = TlsFiles {
            server_name: Some("n".into()),
            ..TlsFiles::default()
        };
        assert!(
            with("zookeepers://h", named)
                .unwrap_err()
                .message
                .starts_with("tls.servername")
        );
        let missing = TlsFiles {
            ca_file: Some("/does/not/exist".into()),
            ..TlsFiles::default()
        };
        assert!(
            with("zookeepers://h", missing)
                .unwrap_err()
                .message
                .starts_with("tls.caFile")
        );
    }
}
