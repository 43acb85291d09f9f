//! Opens connections. Of several servers it uses the first one that accepts writes.

use std::io;
use std::path::Path;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::net::lookup_host;
use tokio::time::sleep;
use tokio_postgres::config::TargetSessionAttrs;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Config, Connection, SimpleQueryMessage};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::cancel::Canceller;
use super::config::{PostgresConfig, ServerConfig, Target, pass_file};
use super::error::{READ_ONLY, is_refused_login, is_tls, kind_of};
use crate::engine::Login;
use crate::engine::core::stream::{Endpoint, Stream, StreamHandle};
use crate::engine::sql::failure::{Failure, Kind};
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::connection::Connections;
use crate::error::is_passing_of_network;

/// The delay before the next server is tried while the one before it has not answered (RFC 8305, "Connection Attempt Delay").
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// The settings of a session. Each statement is planned once (see `PLAN_AGE`), and finds its rows by an index, unless the table has a few
/// rows. `client_min_messages=warning`: the session receives the server's warning that a commit no longer waits for its standby.
/// Poolers refuse the options of a session.
const OPTIONS: &str = "-c enable_seqscan=off -c enable_hashjoin=off -c enable_mergejoin=off -c jit=off \
                       -c plan_cache_mode=force_generic_plan -c client_min_messages=warning -c holdfast.direct=yes";

/// A custom setting in [`OPTIONS`]. If a session has no value for it, a pooler has ignored the options.
pub(super) const DIRECT: &str = "holdfast.direct";

/// The driver's part of a connection. A task polls it.
pub(super) type Driver = Connection<Stream, <MakeRustlsConnect as MakeTlsConnect<Stream>>::Stream>;

/// An open connection.
pub(super) struct Connected {
    pub client: Client,
    pub driver: Driver,
    pub socket: StreamHandle,
    pub canceller: Canceller,
}

/// The cause of a connection that could not be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("cannot connect: {0}")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Driver(#[from] tokio_postgres::Error),
    #[error("the server does not allow writes ({READ_ONLY})")]
    ReadOnly,
}

/// Connects to the first server that accepts writes, in the order of the URL. A server without an answer delays the next one by
/// [`ATTEMPT_DELAY`] only. `has_options`: sets [`OPTIONS`].
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
            () = sleep(ATTEMPT_DELAY), if has_more => {}
            else => break,
        }
    }
    Err(failed.unwrap_or_else(|| Failure::unexpected(&connections.place, "no server")))
}

async fn connect_to(
    config: &PostgresConfig,
    connections: &Connections,
    server: &ServerConfig,
    login: Option<&Login>,
    tls: &MakeRustlsConnect,
    has_options: bool,
) -> Outcome<Connected> {
    let mut driver_config = server.driver_config.clone();
    if has_options {
        // The last value counts: that of the URL.
        let lock_wait_ms = connections.lock_wait().as_millis();
        let of_url = driver_config.get_options().unwrap_or_default();
        let options = format!("{OPTIONS} -c lock_timeout={lock_wait_ms} {of_url}");
        driver_config.options(options);
    }
    if let Some(Login { username, password }) = login {
        driver_config.password(password);
        if let Some(username) = username {
            driver_config.user(username);
        }
    } else if driver_config.get_password().is_none()
        && let Some(path) = config.settings.environment.get("PGPASSFILE")
    {
        let user = driver_config.get_user().unwrap_or_default();
        let database = driver_config.get_dbname().unwrap_or(user);
        let port = server.port.to_string();
        let found = pass_file::password(path.as_ref(), [&server.host, &port, database, user]);
        found.iter().for_each(|password| _ = driver_config.password(password));
    }
    let connected = open(&driver_config, server, connections.store_timeout, tls).await;
    connected.map_err(|error| {
        let (kind, message) = match &error {
            // The next login may be a newer one.
            ConnectError::Driver(error) if login.is_some() && is_refused_login(error) => {
                (Kind::Refused, kind_of(error).1)
            }
            ConnectError::Driver(error) if is_tls(error) => (connections.kind_of_tls(), kind_of(error).1),
            ConnectError::Driver(error) => kind_of(error),
            ConnectError::Socket(error) if !is_passing_of_network(error) => (Kind::Permanent, error.to_string()),
            ConnectError::Socket(_) | ConnectError::ReadOnly => (Kind::Broken, error.to_string()),
        };
        Failure::of_driver(&connections.place, (kind, message), error).at(&server.to_string())
    })
}

/// Connects to the first address of a server that accepts the login.
async fn open(
    driver_config: &Config,
    server: &ServerConfig,
    timeout: Duration,
    tls: &MakeRustlsConnect,
) -> Result<Connected, ConnectError> {
    let mut failed = None;
    for endpoint in endpoints(driver_config, server, timeout).await? {
        match open_at(driver_config, server, endpoint, tls).await {
            Ok(connected) => return Ok(connected),
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the host has no address").into()))
}

/// Returns the addresses of a server.
async fn endpoints(driver_config: &Config, server: &ServerConfig, timeout: Duration) -> io::Result<Vec<Endpoint>> {
    let tcp = |address| Endpoint::Tcp {
        address,
        has_keepalives: driver_config.get_keepalives(),
        timeout,
    };
    let (host, port) = (server.host.as_str(), server.port);
    match driver_config.get_hostaddrs().first() {
        Some(address) => Ok(vec![tcp((*address, port).into())]),
        None if host.starts_with('/') => Ok(vec![Endpoint::Local(Path::new(host).join(format!(".s.PGSQL.{port}")))]),
        None => Ok(lookup_host((host, port)).await?.map(tcp).collect()),
    }
}

/// Connects to one address of a server.
async fn open_at(
    driver_config: &Config,
    server: &ServerConfig,
    endpoint: Endpoint,
    tls: &MakeRustlsConnect,
) -> Result<Connected, ConnectError> {
    let stream = Stream::connect(&endpoint).await?;
    let (socket, mut tls) = (stream.handle(), tls.clone());
    let of_host = MakeTlsConnect::<Stream>::make_tls_connect(&mut tls, &server.host).map_err(io::Error::other)?;
    let (client, mut connection) = driver_config.connect_raw(stream, of_host).await?;
    // PostgreSQL 14 and later reports both with the login.
    let reported = ["in_hot_standby", "default_transaction_read_only"].map(|name| connection.parameter(name));
    if reported.contains(&Some("on")) {
        return Err(ConnectError::ReadOnly);
    }
    let asks = driver_config.get_target_session_attrs() == TargetSessionAttrs::ReadWrite;
    if asks && reported.contains(&None) {
        let mut state = Box::pin(client.simple_query("SHOW transaction_read_only"));
        let state = tokio::select! {
            biased;
            state = &mut state => state?,
            ended = &mut connection => {
                ended?;
                let message = "the server closed the connection after the login";
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, message).into());
            }
        };
        let is_read_only =
            |message: &SimpleQueryMessage| matches!(message, SimpleQueryMessage::Row(row) if row.get(0) == Some("on"));
        if state.iter().any(is_read_only) {
            return Err(ConnectError::ReadOnly);
        }
    }
    let canceller = Canceller {
        endpoint,
        host: server.host.clone(),
        token: client.cancel_token(),
        tls,
    };
    Ok(Connected {
        client,
        driver: connection,
        socket,
        canceller,
    })
}

/// Returns the login that the caller provides. `None`: the one of the URL.
async fn login(config: &PostgresConfig, connections: &Connections) -> Outcome<Option<Login>> {
    let Some(credentials) = &config.settings.credentials else {
        return Ok(None);
    };
    let login = credentials.login(config.settings.store_timeout / 2).await;
    login.map(Some).map_err(|reason| {
        let message = format!("no login for a new connection: {reason}");
        Failure::new(&connections.place, Kind::Refused, message).not_sent()
    })
}
