//! The errors between this engine and its server, and whether a retry can help.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;

use redis::{ErrorKind, RedisError};

use super::advice::{Kind, WrongServer, explain, explain_sentinel, tls_error, without_arguments};
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
    /// The server refuses a command that locks need: the command, and the error.
    Refused { command: String, error: String },
    /// The server is not what the URL says.
    WrongServer(WrongServer),
    /// The caller's function gave no login for a new connection.
    NoLogin(String),
    /// The server is older than the engine supports.
    TooOld(String),
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
                let (address, kind) = (address.into(), Kind::NotInCluster);
                Failure::WrongServer(WrongServer { address, kind })
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
            Failure::NoMaster(reason) => reason.passes(),
            Failure::Replicas { .. } | Failure::Unserved | Failure::Moving | Failure::TooSlow | Failure::NoLogin(_) => {
                true
            }
            Failure::Unexpected(_)
            | Failure::Refused { .. }
            | Failure::WrongServer(_)
            | Failure::TooOld(_)
            | Failure::Closed(_) => false,
        }
    }

    /// Whether it is an error of TLS, of the server or of each sentinel.
    fn is_of_tls(&self) -> bool {
        match self {
            Failure::Connect { error, .. } | Failure::Call(error) => tls_error(error).is_some(),
            Failure::NoMaster(NoMaster::Unnamed(_, refusals)) => refusals
                .iter()
                .any(|(_, refusal)| matches!(refusal, Refusal::Failed(error) if tls_error(error).is_some())),
            _ => false,
        }
    }

    /// Whether the server does not know the script.
    pub(super) fn is_unknown_script(&self) -> bool {
        matches!(self, Failure::Call(error) if code(error) == "NOSCRIPT")
    }

    /// Whether a node of a cluster did not execute the call because a slot moves.
    pub(super) fn is_moving(&self) -> bool {
        matches!(self, Failure::Call(error) if matches!(code(error), "MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN"))
    }

    /// Whether a node of a cluster did not execute the call because the keys of a name are not all on the same node.
    pub(super) fn is_split(&self) -> bool {
        matches!(self, Failure::Call(error) if code(error) == "TRYAGAIN")
    }

    /// Whether a key has a type other than string.
    pub(super) fn is_wrong_type(&self) -> bool {
        matches!(self, Failure::Call(error) if code(error) == "WRONGTYPE")
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
            Failure::Connect { address, error } => {
                write!(f, "no connection to {address}: ")?;
                explain(error, f)
            }
            Failure::Call(error) => {
                f.write_str(match code(error) {
                    "WRONGTYPE" => "a key of the lock has a value of another type: ",
                    "MOVED" | "ASK" => "the server is a node of a Redis Cluster (use redis+cluster://): ",
                    "CROSSSLOT" => {
                        "the server has several shards behind one address (add ?sharded=true to the URL), or is a node of a Redis \
                         Cluster (use redis+cluster://): "
                    }
                    "TRYAGAIN" => {
                        "the slot of the name is moving to another node of the cluster, or the move was interrupted (see \
                         redis-cli --cluster check, and end it with --cluster fix): "
                    }
                    "NOPERM" => "the server's ACL forbids it: ",
                    _ => "",
                })?;
                explain(error, f)
            }
            Failure::Unexpected(what) => write!(f, "unexpected reply from Redis to {what}"),
            Failure::Refused { command, error } => write!(f, "the server refuses {command}, which locks need: {error}"),
            Failure::WrongServer(wrong) => wrong.fmt(f),
            Failure::NoLogin(why) => write!(f, "no login for a new connection: {why}"),
            Failure::TooOld(version) => {
                write!(
                    f,
                    "Redis 6.2 or newer is needed, and 7.0 for a cluster; this is {version}"
                )
            }
            Failure::TooSlow => f.write_str("the ttl is too short for the number of names in this cluster"),
            Failure::NoMaster(reason) => reason.fmt(f),
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
pub(super) enum NoMaster {
    /// No sentinel reports one: the name, and the answer of each sentinel.
    Unnamed(Arc<str>, Arc<[(String, Refusal)]>),
    /// The server that the sentinels report is no master.
    Other { address: Arc<str>, role: Arc<str> },
}

/// The answer of a sentinel without an address.
#[derive(Debug, Clone)]
pub(super) enum Refusal {
    /// It does not know the name.
    Unknown,
    Failed(RedisError),
}

impl NoMaster {
    /// Whether a retry can help. It cannot if every sentinel has answered, and none knows the name.
    fn passes(&self) -> bool {
        match self {
            NoMaster::Unnamed(_, refusals) => refusals
                .iter()
                .any(|(_, refusal)| matches!(refusal, Refusal::Failed(error) if passes(error))),
            NoMaster::Other { .. } => true,
        }
    }
}

impl fmt::Display for NoMaster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoMaster::Unnamed(master, refusals) => {
                write!(f, "no sentinel names a master {master:?} (")?;
                for (i, (sentinel, refusal)) in refusals.iter().enumerate() {
                    let separator = if i == 0 { "" } else { "; " };
                    write!(f, "{separator}{sentinel}: ")?;
                    match refusal {
                        Refusal::Unknown => f.write_str("does not know that name")?,
                        Refusal::Failed(error) => explain_sentinel(error, f)?,
                    }
                }
                f.write_str(")")
            }
            NoMaster::Other { address, role } => write!(
                f,
                "the sentinels name {address} as the master, but its role is {role:?}: a fail-over is under way"
            ),
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

/// Temporary errors: a server that starts, fails over, is out of memory or of disk space, or runs a slow script.
const PASSING: [&str; 9] = [
    "LOADING",
    "BUSY",
    "OOM",
    "READONLY",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "MISCONF",
    "NOREPLICAS",
];

/// Returns the code of a server's error, or "".
///
/// Up to Redis 6.2 an error inside a script arrives as `ERR Error running script (…): @user_script:7: -READONLY …`.
fn code(error: &RedisError) -> &str {
    match (error.code(), error.detail()) {
        (Some("ERR"), Some(detail)) if detail.contains("The user executing the script can't") => "NOPERM",
        (Some("ERR"), Some(detail)) if detail.contains("@user_script") => PASSING
            .iter()
            .chain(&["WRONGTYPE"])
            .find(|code| detail.contains(**code))
            .copied()
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
        ErrorKind::Server(_) | ErrorKind::Extension => {
            PASSING.contains(&code(error))
                || error.detail().is_some_and(|detail| {
                    detail.contains("max number of clients") || detail.contains("busy running a script")
                })
        }
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
