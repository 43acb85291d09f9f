//! What the errors of the client mean for a caller, and what to do about them.

use super::client::{ConnectFailure, Failure, code};
use crate::error::EngineError;

pub(super) const NAME: &str = "zookeeper";

/// Creates the error of an operation at `address`.
pub(super) fn engine_error(op: &'static str, address: &str, failure: &Failure) -> EngineError {
    let at = |text: &str| format!("{text} ({address})");
    let (passes, text) = match failure {
        Failure::Refused(code) => refused(*code, address),
        Failure::Broken(why) => (true, at(&format!("the connection broke: {why}"))),
        Failure::SessionEnded => (true, at("the session has ended, and with it the locks of this process")),
        Failure::Unreachable(failure) => return unreachable(op, failure),
        Failure::Malformed => (
            false,
            at("the server sent a reply that is not one of ZooKeeper's protocol"),
        ),
        Failure::TooLong => {
            let text = "the request has more than 1000000 bytes, and a server takes 1 MiB (jute.maxbuffer): use fewer names in one call, \
                        shorter names or less metadata";
            (false, text.to_owned())
        }
        Failure::Closed => (false, "the connection is closed".to_owned()),
    };
    EngineError::new(NAME, op, passes, text)
}

/// Creates the error of an operation for which no server could be reached.
pub(super) fn unreachable(op: &'static str, failure: &ConnectFailure) -> EngineError {
    EngineError::new(NAME, op, failure.passes, failure.text.clone()).not_sent()
}

/// Whether an error of a server passes, and its text.
fn refused(code: i32, address: &str) -> (bool, String) {
    let (passes, name, advice) = match code {
        code::UNIMPLEMENTED => (false, "Unimplemented", "use ZooKeeper 3.6 or later"),
        code::NO_AUTH => (
            false,
            "NoAuth",
            "give the login of the URL the permissions create, read, write and delete on the path of the URL and below it",
        ),
        code::INVALID_ACL => (false, "InvalidACL", "the server has not accepted the login of the URL"),
        code::AUTH_FAILED => (false, "AuthFailed", "check the user and the password of the URL"),
        code::QUOTA_EXCEEDED => (true, "QuotaExceeded", "raise the quota of the path of the URL"),
        code::THROTTLED => (true, "ThrottledOp", "the server is overloaded"),
        code::SESSION_EXPIRED => (true, "SessionExpired", "the locks of this process have ended"),
        code::SESSION_MOVED => (true, "SessionMoved", "the session has another connection"),
        code::NO_NODE => (true, "NoNode", "a node was deleted during the call"),
        code::BAD_VERSION => (true, "BadVersion", "a node was changed during the call"),
        code::NODE_EXISTS => (true, "NodeExists", "a node was created during the call"),
        _ => {
            let text = format!("the server at {address} answered with the error {code}; its log has the reason");
            return (true, text);
        }
    };
    (
        passes,
        format!("the server at {address} answered {name} ({code}): {advice}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_to_do_and_whether_they_pass() {
        let error = |failure: &Failure| engine_error("acquire", "h:2181", failure);
        let refused = error(&Failure::Refused(code::NO_AUTH));
        assert!(
            !refused.retryable && refused.to_string().contains("NoAuth (-102)"),
            "{refused}"
        );
        assert!(
            refused
                .to_string()
                .starts_with("zookeeper: acquire failed: the server at h:2181")
        );
        let broken = error(&Failure::Broken("reset".into()));
        assert!(broken.retryable && broken.may_be_executed, "{broken}");
        let text = "h:2181: cannot connect: refused".to_owned();
        let unreachable = error(&Failure::Unreachable(ConnectFailure { text, passes: true }));
        assert!(unreachable.retryable && !unreachable.may_be_executed, "{unreachable}");
        assert!(error(&Failure::Refused(-99)).to_string().contains("-99"));
        assert!(!error(&Failure::TooLong).retryable && !error(&Failure::Malformed).retryable);
    }
}
