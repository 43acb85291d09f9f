//! The errors between this engine and its server, and whether a retry can help.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;

use redis::{ErrorKind, RedisError};

use super::advice::{PASSING, explained, explained_of_sentinel, of_call, tls_error, without_arguments};
use crate::engine::errors::render;
use crate::error::{EngineError, is_passing_of_network};

/// The engine's name in errors.
pub(super) const ENGINE: &str = "redis";

/// The failure of a call. Cheap to clone, because all callers that waited for a connection get the same failure.
#[derive(Debug, Clone)]
pub(super) enum Failure {
    /// No connection could be opened.
    Connect { address: Arc<str>, error: RedisError },
    /// The server refused the call, or the connection broke before its reply.
    Call(RedisError),
    /// The server sent a reply that the command or script does not have.
    Unexpected(&'static str),
    /// The server is not what the URL says, or cannot keep locks. Contains the address, or what it is.
    WrongServer(String),
    /// The caller's function gave no login for a new connection.
    NoLogin(String),
    /// The leases of a claim's first names ended before its last names were granted.
    TooSlow,
    /// The sentinels know no master, or the server that they name is none.
    NoMaster(NoMaster),
    /// Too few replicas acknowledged a write in time.
    Replicas { acknowledged: i64, wanted: u32 },
    /// No node of the cluster serves the slot.
    Unserved,
    /// The nodes of the cluster redirect in a circle: the slot is moving.
    Moving,
    /// The engine was closed. Contains the address.
    Closed(Arc<str>),
}

impl Failure {
    /// Creates the failure of a connection attempt.
    pub(super) fn connect(address: &Arc<str>, error: RedisError) -> Self {
        Failure::Connect {
            address: address.clone(),
            error: without_arguments(error),
        }
    }

    /// Creates the failure of a call without a reply in time.
    pub(super) fn timed_out() -> Self {
        Failure::Call(io::Error::from(io::ErrorKind::TimedOut).into())
    }

    /// Returns the failure of a request about the cluster. Explains that of a server without cluster mode.
    pub(super) fn in_cluster(self, address: &str) -> Self {
        match &self {
            Failure::Call(error)
                if error
                    .detail()
                    .is_some_and(|text| text.contains("cluster support disabled")) =>
            {
                Failure::WrongServer(format!(
                    "{address} is not a node of a Redis Cluster: use redis://HOST:PORT"
                ))
            }
            _ => self,
        }
    }

    /// Returns the error of a cluster's node that does not serve a slot: its code, and the address (if it has one) with the
    /// slot.
    pub(super) fn redirection(&self) -> Option<(&str, Option<(&str, u16)>)> {
        match self {
            Failure::Call(error) => Some((code(error), error.redirect_node())),
            _ => None,
        }
    }

    /// Converts it to the error of the layers above.
    pub(super) fn during(self, op: &'static str) -> EngineError {
        let is_unsent = matches!(
            self,
            Failure::Connect { .. } | Failure::NoMaster(_) | Failure::NoLogin(_) | Failure::Unserved
        );
        // With settings that worked before, a later call may succeed: the certificates may be exchanged now.
        let retryable = self.retryable() || op != "connect" && self.is_of_tls();
        let error = EngineError::new(ENGINE, op, retryable, self);
        if is_unsent { error.not_sent() } else { error }
    }

    /// Whether the same call may succeed later without a change by an administrator.
    pub(super) fn retryable(&self) -> bool {
        match self {
            Failure::Connect { error, .. } | Failure::Call(error) => passes(error),
            Failure::NoMaster(reason) => reason.passes,
            Failure::Replicas { .. } | Failure::Unserved | Failure::Moving | Failure::TooSlow | Failure::NoLogin(_) => {
                true
            }
            Failure::Unexpected(_) | Failure::WrongServer(..) | Failure::Closed(_) => false,
        }
    }

    /// Whether it is an error of TLS, of the server or of each sentinel.
    fn is_of_tls(&self) -> bool {
        match self {
            Failure::Connect { error, .. } | Failure::Call(error) => tls_error(error).is_some(),
            Failure::NoMaster(reason) => reason.is_of_tls,
            _ => false,
        }
    }

    /// Whether the server refused the call with one of these codes.
    pub(super) fn is(&self, codes: &[&str]) -> bool {
        matches!(self, Failure::Call(error) if codes.contains(&code(error)))
    }

    /// Whether the server does not know the script.
    pub(super) fn is_unknown_script(&self) -> bool {
        self.is(&["NOSCRIPT"])
    }

    /// Whether a node of a cluster did not execute the call because a slot moves.
    pub(super) fn is_moving(&self) -> bool {
        self.is(&["MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"])
    }

    /// Whether a node of a cluster did not execute the call because the keys of a name are not all on the same node.
    pub(super) fn is_split(&self) -> bool {
        self.is(&["TRYAGAIN"])
    }

    /// Whether a key has a type other than string.
    pub(super) fn is_wrong_type(&self) -> bool {
        self.is(&["WRONGTYPE"])
    }
}

impl From<RedisError> for Failure {
    fn from(error: RedisError) -> Self {
        Failure::Call(without_arguments(error))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Connect { address, error } => write!(f, "no connection to {address}: {}", explained(error)),
            Failure::Call(error) => {
                let meaning = of_call(error).map_or("", |(_, meaning)| meaning);
                f.write_str(&render(explained(error), meaning))
            }
            Failure::Unexpected(what) => write!(f, "unexpected reply from Redis to {what}"),
            Failure::WrongServer(why) => f.write_str(why),
            Failure::NoLogin(why) => write!(f, "no login for a new connection: {why}"),
            Failure::TooSlow => f.write_str("the ttl is too short for the number of names in this cluster"),
            Failure::NoMaster(reason) => f.write_str(&reason.text),
            Failure::Replicas { acknowledged, wanted } => write!(
                f,
                "{acknowledged} of the {wanted} replicas that minReplicas asks for have acknowledged it in time"
            ),
            Failure::Moving => f.write_str("the nodes of the cluster do not agree yet where the slot of the name is"),
            Failure::Unserved => f.write_str("no node of the cluster serves the slot of the name"),
            Failure::Closed(address) => write!(f, "the connection to {address} was closed by this side"),
        }
    }
}

impl StdError for Failure {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Failure::Connect { error, .. } | Failure::Call(error) => Some(error),
            _ => None,
        }
    }
}

/// The reason why there is no master to connect to.
#[derive(Debug, Clone)]
pub(super) struct NoMaster {
    pub(super) text: Arc<str>,
    pub(super) passes: bool,
    pub(super) is_of_tls: bool,
}

impl NoMaster {
    /// No sentinel reports one: the name, and the error of each sentinel. `None`: it does not know the name. If all have answered so, a
    /// retry cannot help.
    pub(super) fn unnamed(master: &str, refusals: &[(String, Option<RedisError>)]) -> Self {
        let answers = refusals.iter().map(|(sentinel, error)| match error {
            Some(error) => format!("{sentinel}: {}", explained_of_sentinel(error)),
            None => format!("{sentinel}: does not know that name"),
        });
        let answers = answers.collect::<Vec<_>>().join("; ");
        let has_error =
            |fits: &dyn Fn(&RedisError) -> bool| refusals.iter().any(|(_, error)| error.as_ref().is_some_and(fits));
        NoMaster {
            text: format!("no sentinel names a master {master:?} ({answers})").into(),
            passes: has_error(&passes),
            is_of_tls: has_error(&|error| tls_error(error).is_some()),
        }
    }
}

/// Returns the error of a broken connection.
pub(super) fn broken() -> RedisError {
    let text = "the connection ended: the server closed it, sent an unexpected reply, or did not answer for too long";
    io::Error::new(io::ErrorKind::BrokenPipe, text).into()
}

/// Adds the address to the error of a connection that broke.
pub(super) fn at(address: &str) -> impl FnOnce(RedisError) -> RedisError {
    move |error| {
        if error.kind() != ErrorKind::Io || !passes(&error) {
            return error;
        }
        let kind = match io_error(&error).map_or(io::ErrorKind::BrokenPipe, io::Error::kind) {
            // EPERM is retryable by its error number, which the new error does not have. `Other` is retryable.
            io::ErrorKind::PermissionDenied => io::ErrorKind::Other,
            kind => kind,
        };
        io::Error::new(kind, format!("{error} ({address})")).into()
    }
}

/// Returns the code of a server's error, or "".
///
/// Up to Redis 6.2 an error inside a script arrives as `ERR Error running script (…): @user_script:7: -READONLY …`.
pub(super) fn code(error: &RedisError) -> &str {
    match (error.code(), error.detail()) {
        (Some("ERR"), Some(detail)) if detail.contains("The user executing the script can't") => "NOPERM",
        (Some("ERR"), Some(detail)) if detail.contains("@user_script") => PASSING
            .split(' ')
            .chain(["WRONGTYPE"])
            .find(|code| detail.contains(code))
            .unwrap_or("ERR"),
        (code, _) => code.unwrap_or_default(),
    }
}

/// Whether the error is temporary: the same may succeed later without a change by an administrator.
pub(super) fn passes(error: &RedisError) -> bool {
    match error.kind() {
        ErrorKind::Io => match io_error(error) {
            Some(io) => is_passing_of_network(io),
            // Without a cause it is a broken connection, reported by the driver or by this engine; else a problem of the
            // system's certificates.
            None => error.source().is_none(),
        },
        ErrorKind::Server(_) | ErrorKind::Extension => of_call(error).is_some_and(|(passes, _)| passes),
        _ => false,
    }
}

/// Returns the error of the system or of TLS under an error of the driver.
pub(super) fn io_error(error: &RedisError) -> Option<&io::Error> {
    error
        .source()?
        .downcast_ref::<Arc<dyn StdError + Send + Sync>>()?
        .downcast_ref()
}

/// Whether the connection is unusable after this error.
///
/// Not only when it broke: a demoted master is still connected, and only another look-up of its name finds the new one. An
/// error about an unknown protocol or user does not go away on this connection.
pub(super) fn spoils_connection(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Io | ErrorKind::Parse) || matches!(code(error), "READONLY" | "NOAUTH")
}

/// Whether the server does not support the options of a command.
pub(super) fn is_not_understood(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("syntax error"))
}

/// Whether the server refused the login.
pub(super) fn is_refused_login(error: &RedisError) -> bool {
    matches!(code(error), "WRONGPASS" | "NOAUTH")
}

/// Whether the user lacks the right to a command.
pub(super) fn is_forbidden(error: &RedisError) -> bool {
    code(error) == "NOPERM"
}

#[cfg(test)]
mod tests;
