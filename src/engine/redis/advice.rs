//! The table of errors, and their texts: why a call or a connection failed, and what to do about it.

use std::error::Error as StdError;

use redis::{ErrorKind, RedisError, Value};
use rustls::Error as TlsError;

use super::error::{broken, code, io_error};
use crate::engine::errors::{Row, Table, find, render, rows};

/// Temporary errors: a server that starts, fails over, is out of memory or of disk space, or runs a slow script.
pub(super) const PASSING: &str = "LOADING BUSY OOM READONLY MASTERDOWN CLUSTERDOWN TRYAGAIN MISCONF NOREPLICAS";

/// The errors of calls: whether they pass, by their codes, and what they mean.
const CALLS: &[Row<bool>] = rows! {
    "TRYAGAIN" => true, "the slot of the name is moving to another node of the cluster, or the move was interrupted (see redis-cli --cluster \
        check, and end it with --cluster fix):";
    PASSING => true;
    ": max number of clients|busy running a script" => true;
    "WRONGTYPE" => false, "a key of the lock has a value of another type:";
    "MOVED ASK" => false, "the server is a node of a Redis Cluster (use redis+cluster://):";
    "CROSSSLOT" => false, "the server has several shards behind one address (add ?sharded=true to the URL), or is a node of a Redis Cluster \
        (use redis+cluster://):";
    "NOPERM" => false, "the server's ACL forbids it:";
};

const NO_HELLO: &str = "Redis 6.2 or newer with the command HELLO is needed, which this server does not have: remove rename-command for \
                        HELLO in its configuration";

/// What to do about errors of connections and of calls.
const ADVICE: Table<()> = Table {
    additions: ["", ", or set tls.servername to it"],
    rows: rows! {
        "NOAUTH" => (), "the server requires a login: put it into the URL (redis://USER:PASSWORD@HOST), or set the options username and \
            password";
        "WRONGPASS" => (), "check the user name and the password; in a URL, special characters are percent-encoded";
        ": DB index is out of range" => (), "the server does not have the database in the URL; its setting \"databases\" is the number of \
            databases, which are numbered from 0";
        ": access a key|access one of the keys" => (), "the user needs the keys that begin with the keyPrefix and those that begin with \
            holdfast:, by default ~lock:* and ~holdfast:*";
        ": access a channel" => (), "the user needs the channels that begin with holdfast:, &holdfast:*";
        ": unknown command 'SENTINEL|unknown command `SENTINEL|unknown command 'sentinel" => (), "the server is no Redis Sentinel: use the address of a Sentinel \
            (default port 26379), or use redis://HOST:PORT for the server itself";
        ": unknown command 'HELLO|unknown command `HELLO|unknown command 'hello" => (), NO_HELLO;
        ": unknown command" => (), "locks need this command: remove its rename-command in the configuration of the server";
    },
};

/// What to do about a sentinel that requires a login, and about one that refuses it: it is not that of the server.
const OF_SENTINELS: [&str; 2] = [
    "this sentinel requires a login of its own: add ?sentinelPassword=PASSWORD to the URL, and sentinelUsername if it has users",
    "check sentinelUsername and sentinelPassword in the URL, the login at the sentinels; special characters are percent-encoded",
];

/// Whether an error of a call passes, and what it means, if the table has it.
pub(super) fn of_call(error: &RedisError) -> Option<(bool, &'static str)> {
    find(CALLS, code(error), error.detail().unwrap_or_default())
}

/// Returns the error of TLS under an error of the driver.
pub(super) fn tls_error(error: &RedisError) -> Option<&TlsError> {
    io_error(error)?.get_ref()?.downcast_ref()
}

/// Returns an error without the arguments of the refused command, which the server repeats for an unknown one: they may be a
/// login. Every error of the driver passes through here before it is shown or becomes the cause of another one.
pub(super) fn without_arguments(error: RedisError) -> RedisError {
    let repeats = |detail: &str| detail.find("with args beginning with");
    let (Some(code), Some(detail)) = (error.code(), error.detail()) else {
        return error;
    };
    let Some(at) = repeats(detail) else { return error };
    let line = format!("-{code} {}\r\n", detail[..at].trim_end_matches([' ', ',']));
    let cut = redis::parse_redis_value(line.as_bytes()).and_then(Value::extract_error);
    // A line that begins with a minus sign is an error.
    cut.err().unwrap_or_else(broken)
}

/// Renders an error of the driver or of the server in its own words, and what to do about it.
pub(super) fn explained(error: &RedisError) -> String {
    match (tls_error(error), error.kind()) {
        (Some(tls), _) => ADVICE.explain(None, &tls.to_string(), said(error)).1,
        (None, _) => {
            let code = Some(error.code().unwrap_or_default());
            ADVICE.explain(code, error.detail().unwrap_or_default(), said(error)).1
        }
    }
}

/// Renders an error of a sentinel like [`explained`].
pub(super) fn explained_of_sentinel(error: &RedisError) -> String {
    let [required, refused] = OF_SENTINELS;
    match (error.kind(), error.code()) {
        (ErrorKind::AuthenticationFailed, _) => render("refuses the login", refused),
        (_, Some("NOAUTH")) => render(said(error), required),
        _ => explained(error),
    }
}

/// Returns the error of a server in its own words. The driver shows the names of its variants instead.
fn said(error: &RedisError) -> String {
    let server = error
        .source()
        .and_then(|source| source.downcast_ref::<redis::ServerError>());
    match (server, error.detail()) {
        (Some(server), _) => format!("{} {}", server.code(), server.details().unwrap_or_default()),
        // An error that the driver made from the server's words.
        (None, Some(detail)) => detail.to_owned(),
        (None, None) => error.to_string(),
    }
}
