//! Why a request failed, and what follows from it.

use std::fmt;

use http::HeaderMap;

/// Codes of gRPC (<https://grpc.github.io/grpc/core/md_doc_statuscodes.html>).
const UNKNOWN: u32 = 2;
const INVALID_ARGUMENT: u32 = 3;
const DEADLINE_EXCEEDED: u32 = 4;
const NOT_FOUND: u32 = 5;
const ALREADY_EXISTS: u32 = 6;
const PERMISSION_DENIED: u32 = 7;
const RESOURCE_EXHAUSTED: u32 = 8;
const FAILED_PRECONDITION: u32 = 9;
const ABORTED: u32 = 10;
const UNIMPLEMENTED: u32 = 12;
const INTERNAL: u32 = 13;
const UNAVAILABLE: u32 = 14;
const DATA_LOSS: u32 = 15;
const UNAUTHENTICATED: u32 = 16;

/// The refusals of a login whose token has expired, or whose users have changed since. (The last one is that of etcd 3.5.1.)
const OLD_LOGIN: [(u32, &str); 3] = [
    (UNAUTHENTICATED, "token"),
    (INVALID_ARGUMENT, "revision of auth store is old"),
    (UNKNOWN, "revision in header is old"),
];
/// The refusal of a request without a login.
const NO_LOGIN: (u32, &str) = (INVALID_ARGUMENT, "user name is empty");

/// The failure of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine::etcd) enum Status {
    /// etcd answered with an error.
    Etcd { code: u32, message: String },
    /// The connection broke, or a proxy answered for the server.
    Broken(String),
    /// The server cannot be used: for example it is no etcd.
    Wrong(String),
}

impl Status {
    /// An answer that breaks the protocol.
    pub(super) fn protocol(what: &str) -> Self {
        Status::Broken(format!("unexpected reply: {what}"))
    }

    /// Returns the failure of a watch that the server has cancelled.
    pub(in crate::engine::etcd) fn cancelled(reason: &str) -> Self {
        let mut refusals = OLD_LOGIN.iter().chain([&NO_LOGIN]);
        let code = refusals
            .find(|(_, text)| reason.contains(text))
            .map_or(ABORTED, |(code, _)| *code);
        Status::Etcd {
            code,
            message: format!(
                "the watch was cancelled: {}",
                reason.chars().take(300).collect::<String>()
            ),
        }
    }

    /// Reads the status in the headers or trailers of an answer. `None`: there is none.
    pub(super) fn read(headers: &HeaderMap) -> Option<Result<(), Self>> {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let code = text("grpc-status")?.parse().unwrap_or(INTERNAL);
        let message = text("grpc-message").unwrap_or_default();
        Some(match code {
            0 => Ok(()),
            code => Err(Status::Etcd {
                code,
                // The text of a server may have any length.
                message: message.chars().take(300).collect(),
            }),
        })
    }

    fn is(&self, codes: &[u32], text: &str) -> bool {
        matches!(self, Status::Etcd { code, message } if codes.contains(code) && message.contains(text))
    }

    /// Whether the token of the login has expired, or the users have changed since.
    fn has_old_token(&self) -> bool {
        OLD_LOGIN.iter().any(|(code, text)| self.is(&[*code], text))
    }

    /// Whether a new login may help: also where the server had no users at the last one.
    pub(super) fn needs_login(&self) -> bool {
        self.has_old_token() || self.is(&[NO_LOGIN.0], NO_LOGIN.1)
    }

    /// Whether the server has no users, so that a login is not possible and not needed.
    pub(super) fn has_no_users(&self) -> bool {
        self.is(&[FAILED_PRECONDITION], "not enabled")
    }

    /// Whether another member may answer: this one has no leader, or stops.
    pub(super) fn is_of_member(&self) -> bool {
        match self {
            Status::Etcd { code, .. } => [DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE].contains(code),
            Status::Broken(_) | Status::Wrong(_) => true,
        }
    }

    /// Whether the lease of a put has expired.
    pub(in crate::engine::etcd) fn is_lease_gone(&self) -> bool {
        self.is(&[NOT_FOUND], "lease")
    }

    /// Whether the store is full, so that it refuses every transaction.
    pub(in crate::engine::etcd) fn is_full(&self) -> bool {
        self.is(&[RESOURCE_EXHAUSTED], "space exceeded")
    }

    /// Whether the same request may succeed later.
    pub(super) fn is_passing(&self) -> bool {
        match self {
            Status::Etcd {
                code:
                    INVALID_ARGUMENT | NOT_FOUND | ALREADY_EXISTS | PERMISSION_DENIED | FAILED_PRECONDITION | UNIMPLEMENTED
                    | DATA_LOSS,
                ..
            } => self.is_lease_gone() || self.has_old_token(),
            Status::Etcd { .. } | Status::Broken(_) => true,
            Status::Wrong(_) => false,
        }
    }

    /// Returns what to do, if that is known.
    fn advice(&self) -> Option<&'static str> {
        let of = |codes: &[u32], text| self.is(codes, text);
        if self.is_full() {
            return Some(
                "compact and defragment the members or raise --quota-backend-bytes, then run etcdctl alarm disarm",
            );
        }
        if of(&[PERMISSION_DENIED], "") {
            return Some("the user needs a role with the permission readwrite on the keys with the prefix (keyPrefix)");
        }
        if of(&[INVALID_ARGUMENT], "authentication failed") {
            return Some("check the user name and the password; in a URL, special characters are percent-encoded");
        }
        if of(&[NO_LOGIN.0], NO_LOGIN.1) {
            return Some("the server requires a login: put user:password@ into the URL");
        }
        of(&[UNAVAILABLE], "no leader").then_some("a majority of the members must run and reach each other")
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Status::Etcd { code, message } => write!(f, "{message} [code {code}]")?,
            Status::Broken(text) | Status::Wrong(text) => f.write_str(text)?,
        }
        self.advice().map_or(Ok(()), |advice| write!(f, " ({advice})"))
    }
}

impl std::error::Error for Status {}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(code: &str, message: &'static str) -> Status {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-status", code.parse().unwrap());
        headers.insert("grpc-message", message.parse().unwrap());
        Status::read(&headers).unwrap().unwrap_err()
    }

    #[test]
    fn only_mistakes_in_the_configuration_are_permanent() {
        for (code, message) in [
            ("14", "etcdserver: no leader"),
            ("14", "etcdserver: request timed out"),
            ("8", "etcdserver: too many requests"),
            ("8", "etcdserver: mvcc: database space exceeded"),
            ("16", "etcdserver: invalid auth token"),
            ("3", "etcdserver: revision of auth store is old"),
            ("5", "etcdserver: requested lease not found"),
            ("11", "etcdserver: mvcc: required revision has been compacted"),
            ("2", "context canceled"),
            ("x", "not a number"),
        ] {
            assert!(status(code, message).is_passing(), "{message}");
        }
        for (code, message) in [
            ("7", "etcdserver: permission denied"),
            ("3", "etcdserver: authentication failed, invalid user ID or password"),
            ("3", "etcdserver: user name is empty"),
            ("12", "unknown service etcdserverpb.KV"),
        ] {
            assert!(!status(code, message).is_passing(), "{message}");
        }
        for (code, message) in [
            ("16", "etcdserver: invalid auth token"),
            ("3", "etcdserver: revision of auth store is old"),
            ("2", "auth: revision in header is old"),
            ("3", "etcdserver: user name is empty"),
        ] {
            assert!(status(code, message).needs_login(), "{message}");
            assert!(Status::cancelled(message).needs_login(), "{message}");
        }
        assert!(!Status::cancelled("etcdserver: permission denied").needs_login());
        assert!(
            status("7", "etcdserver: permission denied")
                .to_string()
                .contains("readwrite")
        );
        assert!(status("9", "etcdserver: authentication is not enabled").has_no_users());
    }

    #[test]
    fn an_answer_without_an_error_has_none() {
        assert_eq!(Status::read(&HeaderMap::new()), None);
        let mut headers = HeaderMap::new();
        headers.insert("grpc-status", "0".parse().unwrap());
        assert_eq!(Status::read(&headers), Some(Ok(())));
        headers.insert("grpc-status", "14".parse().unwrap());
        headers.insert("grpc-message", "x".repeat(10_000).parse().unwrap());
        let shown = Status::read(&headers).unwrap().unwrap_err().to_string();
        assert!(shown.len() < 400);
    }
}
