//! Warns of a server that evicts locks when its memory is full.

use std::sync::Arc;

use redis::Value;

use super::Link;

/// Warns if the server has a memory limit and evicts keys. Does nothing if the user may not read these settings, or if the server
/// does not answer.
pub(in super::super) async fn warn_of_eviction(link: &Arc<Link>) {
    let Some(warnings) = &link.config().warnings else {
        return;
    };
    let mut info = redis::cmd("INFO");
    info.arg("memory");
    let text = match link.call(&info).await {
        Ok(Value::VerbatimString { text, .. }) => text,
        Ok(Value::BulkString(text)) => String::from_utf8_lossy(&text).into_owned(),
        _ => return,
    };
    if let Some((policy, bytes)) = eviction(&text) {
        warnings.warn(format!(
            "Redis at {} evicts locks when its memory is full (maxmemory is {bytes} bytes, maxmemory-policy is {policy}): an \
             evicted lock can have two holders; set maxmemory-policy to noeviction",
            link.config().address(),
        ));
    }
}

/// Returns the policy by which a server evicts keys, and its memory limit, from its answer to `INFO memory`.
fn eviction(info: &str) -> Option<(&str, &str)> {
    let field = |name: &str| {
        let mut lines = info.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    };
    let (policy, bytes) = (field("maxmemory_policy")?, field("maxmemory")?);
    (bytes != "0" && policy != "noeviction").then_some((policy, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_evicts_only_with_a_limit_and_a_policy() {
        let info = |limit: &str, policy: &str| {
            format!("# Memory\r\nmaxmemory:{limit}\r\nmaxmemory_human:0B\r\nmaxmemory_policy:{policy}\r\n")
        };
        assert_eq!(eviction(&info("0", "allkeys-lru")), None);
        assert_eq!(eviction(&info("100", "noeviction")), None);
        assert_eq!(eviction(&info("100", "volatile-lru")), Some(("volatile-lru", "100")));
        assert_eq!(eviction("# Memory\r\n"), None);
    }
}
