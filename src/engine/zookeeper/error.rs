//! What the errors of the client mean for a caller, and what to do about them.

use super::client::Failure as Refusal;
use crate::engine::entries::Failure;
use crate::engine::errors::{Row, find, rows};

/// The errors of a server: whether they pass, their names, and what to do.
const ERRORS: &[Row<bool>] = rows! {
    "-6" => false, "Unimplemented (-6): use ZooKeeper 3.6 or later";
    "-102" => false, "NoAuth (-102): give the login of the URL the permissions create, read, write and delete on the path of the URL and below \
        it, and check its password";
    "-114" => false, "InvalidACL (-114): the server has not accepted the login of the URL";
    "-115" => false, "AuthFailed (-115): check the user and the password of the URL";
    "-125" => true, "QuotaExceeded (-125): raise the quota of the path of the URL";
    "-127" => true, "ThrottledOp (-127): the server is overloaded";
    "-112" => true, "SessionExpired (-112): the locks of this process have ended";
    "-118" => true, "SessionMoved (-118): the session has another connection";
    "-101" => true, "NoNode (-101): a node was deleted during the call";
    "-103" => true, "BadVersion (-103): a node was changed during the call";
    "-110" => true, "NodeExists (-110): a node was created during the call";
};

/// Describes the failure of a request at `address`.
pub(super) fn failure(refusal: Refusal, address: &str) -> Failure {
    let at = |text: &str| format!("{text} ({address})");
    let (passes, text) = match refusal {
        Refusal::Refused(code) => {
            let (passes, what) = find(ERRORS, &code.to_string(), "").unwrap_or((true, ""));
            let text = match what {
                "" => format!("with the error {code}; its log has the reason"),
                what => what.to_owned(),
            };
            (passes, format!("the server at {address} answered {text}"))
        }
        Refusal::Broken(why) => (true, at(&format!("the connection broke: {why}"))),
        Refusal::Unreachable(failure) => return failure,
        Refusal::Malformed => (
            false,
            at("the server sent a reply that is not one of ZooKeeper's protocol"),
        ),
        Refusal::TooLong => {
            let text = "the request has more than 1000000 bytes, and a server takes 1 MiB (jute.maxbuffer): use fewer names in one call, \
                        shorter names or less metadata";
            (false, text.to_owned())
        }
        Refusal::LongReply(what) => {
            let text = format!(
                "the list of {what} has more than 16 MiB, and is not read: delete the nodes of other programs there, or let fewer calls \
                 use it at the same time"
            );
            (false, at(&text))
        }
        Refusal::NoNumbers => {
            let text = "the name has had 2 billion entries since it was last unused, and the server cannot count further: it begins again \
                        some time after the last lock and the last waiter of the name";
            (true, at(text))
        }
        Refusal::Closed => (false, "the service is closed".to_owned()),
    };
    Failure {
        text,
        passes,
        is_sent: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_to_do_and_whether_they_pass() {
        let error = |refusal: Refusal| failure(refusal, "h:2181").of("zookeeper", "acquire");
        let refused = error(Refusal::Refused(-102));
        assert!(
            !refused.retryable && refused.to_string().contains("NoAuth (-102)"),
            "{refused}"
        );
        assert!(
            refused
                .to_string()
                .starts_with("zookeeper: acquire failed: the server at h:2181")
        );
        let broken = error(Refusal::Broken("reset".into()));
        assert!(broken.retryable && broken.may_be_executed, "{broken}");
        let unreachable = error(Refusal::Unreachable(Failure {
            text: "h:2181: cannot connect: refused".to_owned(),
            passes: true,
            is_sent: false,
        }));
        assert!(unreachable.retryable && !unreachable.may_be_executed, "{unreachable}");
        assert!(error(Refusal::Refused(-99)).to_string().contains("-99"));
        assert!(!error(Refusal::TooLong).retryable && !error(Refusal::Malformed).retryable);
        let long = error(Refusal::LongReply("the entries of n".into()));
        assert!(
            !long.retryable && long.to_string().contains("the entries of n has more than 16 MiB"),
            "{long}"
        );
    }
}
