//! Why a request failed, and what follows from it.

use std::fmt::Display;

use http::HeaderMap;

use crate::engine::errors::{Row, find, render, rows};

/// What follows from the failure of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine::etcd) enum Kind {
    /// The same request may succeed later.
    Passing,
    /// Another member may answer: this one has no leader, or stops.
    OfMember,
    /// The connection broke, or a proxy answered for the server.
    Broken,
    /// The token of the login has expired, or the users have changed since.
    OldLogin,
    /// The request had no login.
    NoLogin,
    /// The server has no users, so that a login is not possible and not needed.
    NoUsers,
    /// The lease of a put has expired.
    LeaseGone,
    /// The store is full, so that it refuses every transaction.
    Full,
    /// The configuration must change.
    Permanent,
    /// The server cannot be used: for example it is no etcd.
    Wrong,
}

/// The refusals of etcd, by the codes of gRPC (<https://grpc.github.io/grpc/core/md_doc_statuscodes.html>).
const ERRORS: &[Row<Kind>] = rows! {
    // UNAUTHENTICATED, INVALID_ARGUMENT, UNKNOWN (etcd 3.5.1).
    "16: token" => Kind::OldLogin;
    "3: revision of auth store is old" => Kind::OldLogin;
    "2: revision in header is old" => Kind::OldLogin;
    "3: user name is empty" => Kind::NoLogin, "the server requires a login: put user:password@ into the URL";
    "3: authentication failed" => Kind::Permanent, "check the user name and the password; in a URL, special characters are percent-encoded";
    "5: lease" => Kind::LeaseGone;
    "7" => Kind::Permanent, "the user needs a role with the permission readwrite on the keys with the prefix (keyPrefix)";
    "8: space exceeded" => Kind::Full, "compact and defragment the members or raise --quota-backend-bytes, then run etcdctl alarm disarm";
    "9: not enabled" => Kind::NoUsers;
    "14: no leader" => Kind::OfMember, "a majority of the members must run and reach each other";
    // DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE.
    "4 13 14" => Kind::OfMember;
    // INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION, UNIMPLEMENTED, DATA_LOSS.
    "3 5 6 9 12 15" => Kind::Permanent;
};

/// The failure of a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(in crate::engine::etcd) struct Status {
    pub kind: Kind,
    text: String,
}

impl Status {
    pub(super) fn broken(text: impl Into<String>) -> Self {
        let (kind, text) = (Kind::Broken, text.into());
        Status { kind, text }
    }

    pub(super) fn wrong(text: impl Into<String>) -> Self {
        let (kind, text) = (Kind::Wrong, text.into());
        Status { kind, text }
    }

    /// An answer that breaks the protocol.
    pub(super) fn protocol(what: &str) -> Self {
        Status::broken(format!("unexpected reply: {what}"))
    }

    /// An answer of etcd.
    fn refused(code: &str, what: impl Display, message: &str) -> Self {
        // The text of a server may have any length.
        let message: String = message.chars().take(300).collect();
        let (kind, advice) = find(ERRORS, code, &message).unwrap_or((Kind::Passing, ""));
        let text = render(format_args!("{what}{message} [code {code}]"), advice);
        Status { kind, text }
    }

    /// Returns the failure of a watch that the server has cancelled.
    pub(in crate::engine::etcd) fn cancelled(reason: &str) -> Self {
        // The server does not say the code. ABORTED: the same watch may succeed later.
        let is_of_login = |code: &&str| Status::refused(code, "", reason).needs_login();
        let code = ["16", "3", "2"].into_iter().find(is_of_login).unwrap_or("10");
        Status::refused(code, "the watch was cancelled: ", reason)
    }

    /// Reads the status in the headers or trailers of an answer. `None`: there is none.
    pub(super) fn read(headers: &HeaderMap) -> Option<Result<(), Self>> {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        // INTERNAL.
        let code: u32 = text("grpc-status")?.parse().unwrap_or(13);
        Some(match code {
            0 => Ok(()),
            code => Err(Status::refused(
                &code.to_string(),
                "",
                text("grpc-message").unwrap_or_default(),
            )),
        })
    }

    /// Whether a new login may help: also where the server had no users at the last one.
    pub(super) fn needs_login(&self) -> bool {
        matches!(self.kind, Kind::OldLogin | Kind::NoLogin)
    }

    /// Whether the same request may succeed later.
    pub(super) fn is_passing(&self) -> bool {
        !matches!(self.kind, Kind::NoLogin | Kind::NoUsers | Kind::Permanent | Kind::Wrong)
    }
}

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
        assert!(status("9", "etcdserver: authentication is not enabled").kind == Kind::NoUsers);
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
