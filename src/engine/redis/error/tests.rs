//! What errors say, and whether a retry can help.

use super::*;

fn server(line: &str) -> RedisError {
    redis::parse_redis_value(format!("-{line}\r\n").as_bytes())
        .unwrap()
        .extract_error()
        .unwrap_err()
}

#[test]
fn what_passes_is_retryable() {
    for line in [
        "LOADING Redis is loading the dataset in memory",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "OOM command not allowed when used memory > 'maxmemory'. script: 1b, on @user_script:38.",
        "READONLY You can't write against a read only replica. script: 1b, on @user_script:38.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "CLUSTERDOWN Hash slot not served",
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "NOREPLICAS Not enough good replicas to write.",
        "ERR max number of clients reached",
        "ERR Error running script (call to f_1b): @user_script:38: -READONLY You can't write against a read only replica.",
        "ERR Error running script (call to f_1b): @user_script:38: @user_script: 38: -OOM command not allowed",
    ] {
        assert!(Failure::Call(server(line)).retryable(), "{line}");
    }
    for kind in [
        io::ErrorKind::ConnectionRefused,
        io::ErrorKind::TimedOut,
        io::ErrorKind::BrokenPipe,
    ] {
        assert!(Failure::Call(io::Error::from(kind).into()).retryable(), "{kind}");
    }
    let socket_in_a_file = io::Error::from(io::ErrorKind::NotADirectory).into();
    assert!(!Failure::Call(socket_in_a_file).retryable());
    assert!(Failure::Call(io::Error::other("failed to lookup address information").into()).retryable());
}

#[test]
fn what_a_human_mends_is_not() {
    for line in [
        "NOAUTH Authentication required.",
        "WRONGPASS invalid username-password pair or user is disabled.",
        "NOPERM this user has no permissions to run the 'evalsha' command",
        "WRONGTYPE Operation against a key holding the wrong kind of value script: 1b, on @user_script:18.",
        "ERR Error running script (call to f_1b): @user_script:18: WRONGTYPE Operation against a key",
        "ERR The user executing the script can't publish to the channel mentioned in the command script: c6",
        "ERR unknown command 'EVALSHA'",
        "MOVED 3999 127.0.0.1:6381",
        "CROSSSLOT Keys in request don't hash to the same slot",
        "NOPROTO unsupported protocol version",
    ] {
        assert!(!Failure::Call(server(line)).retryable(), "{line}");
    }
    let tls = rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
    let failure = Failure::Call(io::Error::new(io::ErrorKind::InvalidData, tls).into());
    assert!(!failure.retryable() && !failure.clone().during("connect").retryable);
    assert!(failure.during("renew").retryable, "certificates may be exchanged");
}

#[test]
fn the_error_of_an_open_connection_has_its_address() {
    for error in [io::Error::from(io::ErrorKind::BrokenPipe).into(), broken()] {
        let failure = Failure::from(at("h:1")(error));
        assert!(
            failure.retryable() && failure.to_string().ends_with(" (h:1)"),
            "{failure}"
        );
    }
    let tls = io::Error::new(io::ErrorKind::InvalidData, rustls::Error::DecryptError);
    assert!(tls_error(&at("h:1")(tls.into())).is_some());
    assert_eq!(
        at("h:1")(server("NOAUTH x")).to_string(),
        server("NOAUTH x").to_string()
    );
    let closed = Failure::Closed("h:1".into()).to_string();
    assert_eq!(closed, "the connection to h:1 was closed by this side");
}

#[test]
fn messages_are_the_servers_own_words() {
    let line = "WRONGTYPE Operation against a key holding the wrong kind of value";
    let shown = Failure::Call(server(line)).during("acquire").to_string();
    assert_eq!(
        shown,
        format!("redis: acquire failed: a key of the lock has a value of another type: {line}")
    );
    let refused = io::Error::from(io::ErrorKind::ConnectionRefused).into();
    let shown = Failure::Connect {
        address: "h:1".into(),
        error: refused,
    }
    .during("renew")
    .to_string();
    assert_eq!(shown, "redis: renew failed: no connection to h:1: connection refused");
}

#[test]
fn a_connection_to_a_replica_or_of_an_unknown_user_is_unusable() {
    assert!(spoils_connection(&server(
        "READONLY You can't write against a read only replica."
    )));
    assert!(spoils_connection(&server("NOAUTH Authentication required.")));
    assert!(spoils_connection(&io::Error::from(io::ErrorKind::BrokenPipe).into()));
    assert!(!spoils_connection(&server("NOPERM this user has no permissions")));
    assert!(!spoils_connection(&server(
        "LOADING Redis is loading the dataset in memory"
    )));
}
