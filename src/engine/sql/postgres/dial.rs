//! Opens connections. Of several servers it uses the first one that accepts writes.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::time::sleep;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Connection, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::config::{Address, PostgresConfig, Target, pass_file};
use super::error::{is_refused_login, kind_of};
use crate::engine::Login;
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::connection::Connections;
use crate::engine::sql::server::error::{Failure, Kind};

/// How long the next server waits for the answer of the one before it.
const HEAD_START: Duration = Duration::from_millis(250);

/// The planner's settings for a session. Each statement is planned once, and finds its rows by an index, also when the table was almost
/// empty at that time. Poolers refuse the options of a session.
const OPTIONS: &str = "-c enable_seqscan=off -c enable_hashjoin=off -c enable_mergejoin=off -c jit=off \
                       -c plan_cache_mode=force_generic_plan -c holdfast.direct=yes";

/// A setting of [`OPTIONS`] that the server does not know by itself. Without a value in a session: a pooler has ignored them.
pub(super) const DIRECT: &str = "holdfast.direct";

pub(super) type Connected = (
    Client,
    Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>,
);

/// Connects to the first server that accepts writes, in the order of the URL. A server without an answer delays the next one by
/// [`HEAD_START`] only. `has_options`: sets [`OPTIONS`].
pub(super) async fn connect(
    config: &PostgresConfig,
    connections: &Connections,
    target: &Target,
    tls: &MakeRustlsConnect,
    has_options: bool,
) -> Outcome<Connected> {
    let login = login(config, connections).await?;
    let mut waiting = target.servers.iter();
    let mut attempts = FuturesUnordered::new();
    let mut failed: Option<Failure> = None;
    loop {
        if let Some(server) = waiting.next() {
            attempts.push(connect_to(
                config,
                connections,
                server,
                login.as_ref(),
                tls,
                has_options,
            ));
        }
        let has_more = waiting.len() > 0;
        tokio::select! {
            biased;
            Some(attempt) = attempts.next() => match attempt {
                Ok(connected) => return Ok(connected),
                Err(failure) => failed = Some(match failed.take() {
                    Some(earlier) => earlier.and(failure),
                    None => failure,
                }),
            },
            () = sleep(HEAD_START), if has_more => {}
            else => break,
        }
    }
    Err(failed.unwrap_or_else(|| Failure::unexpected(connections, "no server")))
}

async fn connect_to(
    config: &PostgresConfig,
    connections: &Connections,
    server: &Address,
    login: Option<&Login>,
    tls: &MakeRustlsConnect,
    has_options: bool,
) -> Outcome<Connected> {
    let mut driver = server.driver.clone();
    if has_options {
        // The last value counts: that of the URL.
        let options = format!("{OPTIONS} {}", driver.get_options().unwrap_or_default());
        driver.options(options);
    }
    if let Some(Login { username, password }) = login {
        driver.password(password);
        if let Some(username) = username {
            driver.user(username);
        }
    } else if driver.get_password().is_none()
        && let Some(path) = &config.pass_file
    {
        let user = driver.get_user().unwrap_or_default();
        let (port, database) = (server.port.to_string(), driver.get_dbname().unwrap_or(user));
        let found = pass_file::password(path, [&server.host, &port, database, user]);
        found.iter().for_each(|password| _ = driver.password(password));
    }
    let connected = driver.connect(tls.clone()).await;
    connected.map_err(|error| {
        let (kind, message) = kind_of(&error);
        // The next login may be a newer one.
        let is_outdated = login.is_some() && is_refused_login(&error);
        let kind = if is_outdated { Kind::Busy } else { kind };
        Failure::of_driver(connections, kind, message, error).at(&server.to_string())
    })
}

/// Returns the login that the caller provides. `None`: the one of the URL.
async fn login(config: &PostgresConfig, connections: &Connections) -> Outcome<Option<Login>> {
    let Some(credentials) = &config.credentials else {
        return Ok(None);
    };
    let login = credentials.login(config.store_timeout / 2).await;
    login.map(Some).map_err(|reason| {
        let message = format!("no login for a new connection: {reason}");
        Failure::new(connections, Kind::Busy, message).not_sent()
    })
}
