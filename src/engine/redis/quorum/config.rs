//! Parses a list of URLs into the nodes of a quorum.

use std::time::Duration;

use crate::engine::Settings;
use crate::engine::config::scheme_of;
use crate::engine::redis::config::RedisConfig;
use crate::error::LockError;

const RULE: &str = "must be one URL (etcd, ZooKeeper and MongoDB: with all hosts, scheme://h1,h2,h3), or a list of redis:// and \
                    rediss:// URLs";
/// Two nodes are worse than one: every majority would need both, and the loss of either would stop everything.
const MIN_NODES: usize = 3;
/// A node has this part of the store timeout for an answer, so that a node that hangs costs little time, and the service
/// can retry within the store timeout.
const NODE_SHARE: u32 = 4;
/// The shortest time that a node has for an answer.
pub(super) const MIN_NODE_TIMEOUT: Duration = Duration::from_millis(50);

/// The independent Redis servers of a list of URLs.
#[derive(Debug, Clone)]
pub struct QuorumConfig {
    pub(super) nodes: Vec<RedisConfig>,
    /// The longest time that one node has for one answer.
    pub(super) node_timeout: Duration,
}

impl QuorumConfig {
    /// Returns the addresses of the nodes, for messages.
    pub(in crate::engine) fn address(&self) -> String {
        let all: Vec<String> = self.nodes.iter().map(RedisConfig::address).collect();
        all.join(", ")
    }

    /// Parses a list of at least three URLs, each with [`RedisConfig::parse`].
    ///
    /// # Behavior
    /// The order does not matter. An even number is allowed, but the last node adds no fault tolerance: of four nodes three
    /// are a majority.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` with `target` for another scheme in the list, for two URLs, for a duplicate address (such a
    /// server would vote twice), and for each URL that [`RedisConfig::parse`] rejects.
    pub fn parse(urls: &[String], settings: &Settings) -> Result<Self, LockError> {
        for url in urls {
            let got = match scheme_of(url) {
                "redis" | "rediss" => continue,
                "" => "a list with a text without a scheme".to_owned(),
                other => format!("a list with the scheme \"{other}:\""),
            };
            return Err(LockError::invalid("target", RULE, got));
        }
        if urls.len() < MIN_NODES {
            let rule = "must list 3 Redis nodes or more: with 2 the loss of either would stop everything";
            return Err(LockError::invalid("target", rule, format_args!("{} URLs", urls.len())));
        }
        let node_timeout = (settings.store_timeout / NODE_SHARE).max(MIN_NODE_TIMEOUT);
        let each = Settings {
            store_timeout: node_timeout,
            ..settings.clone()
        };
        let nodes = urls
            .iter()
            .map(|url| RedisConfig::parse(url, &each))
            .collect::<Result<Vec<_>, _>>()?;
        if nodes.iter().any(RedisConfig::is_sharded) {
            let rule = "must list single servers";
            return Err(LockError::invalid("target", rule, "a list with ?sharded=true"));
        }
        let addresses: Vec<String> = nodes.iter().map(|node| node.address().to_ascii_lowercase()).collect();
        for (second, address) in addresses.iter().enumerate() {
            if let Some(first) = addresses[..second].iter().position(|other| other == address) {
                return Err(LockError::invalid(
                    "target",
                    "must list each Redis node once",
                    format_args!("the address of URL {} again as URL {}", first + 1, second + 1),
                ));
            }
        }
        Ok(QuorumConfig { nodes, node_timeout })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::config::EngineConfig;
    use crate::error::Code;

    fn parse(urls: &[&str]) -> Result<EngineConfig, LockError> {
        EngineConfig::parse(
            &urls.iter().copied().map(String::from).collect::<Vec<_>>(),
            &Settings::default(),
        )
    }

    #[test]
    fn a_list_is_a_quorum_and_one_url_is_not() {
        let urls = ["redis://a", "rediss://b:7000", "redis://u:p@c/2"].map(String::from);
        let config = QuorumConfig::parse(&urls, &Settings::default()).unwrap();
        assert_eq!(config.nodes.len(), 3);
        assert_eq!(config.node_timeout, Duration::from_millis(1250));
        assert!(parse(&["redis://a", "redis://b", "redis://c", "redis://d"]).is_ok());
        let shown = |urls: &[&str]| format!("{:?}", parse(urls).unwrap());
        assert_eq!(
            shown(&["redis://a", "redis://b", "redis://c"]),
            "redis a:6379, b:6379, c:6379"
        );
        assert_eq!(shown(&["redis://a"]), "redis a:6379");
    }

    #[test]
    fn a_list_that_is_no_quorum_is_rejected_without_its_secrets() {
        for (urls, why) in [
            (
                &["redis://:secret@a", "mongodb://:secret@b", "redis://c"][..],
                "\"mongodb:\"",
            ),
            (&["mongodb://:secret@a", "mongodb://b"], "\"mongodb:\""),
            (&["redis://a", "secret", "redis://c"], "without a scheme"),
            (
                &["redis://a", "redis+sentinel://b/m", "redis://c"],
                "\"redis+sentinel:\"",
            ),
            (&["redis://:secret@a", "redis://b"], "2 URLs"),
            (
                &["redis://:secret@A/1", "redis://b", "redis://a:6379"],
                "URL 1 again as URL 3",
            ),
            (&["redis://a", "redis://b?secret", "redis://c"], "\"?\""),
            (&["redis://a", "redis://b?sharded=true", "redis://c"], "sharded"),
        ] {
            let error = parse(urls).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{urls:?}");
            assert!(error.message.starts_with("target "), "{}", error.message);
            assert!(error.message.contains(why), "{}", error.message);
            assert!(!error.message.contains("secret"), "{}", error.message);
        }
    }
}
