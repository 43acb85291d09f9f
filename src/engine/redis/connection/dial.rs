//! Finds the server and connects to it.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;

use redis::aio::PubSub;
use redis::io::AsyncDNSResolver;
use redis::io::tcp::socket2::SockRef;
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, ConnectionInfo, RedisConnectionInfo, RedisFuture, RedisResult, Value,
};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::clock::Moment;
use crate::engine::TlsFiles;
use crate::engine::redis::config::{RedisConfig, keepalive, show_address, tls_config};
use crate::engine::redis::error::Failure;
use crate::engine::redis::fast_path::{FastPath, resp};
use crate::engine::redis::topology::sentinel;

/// Returns the server with its current address and login.
pub(in crate::engine::redis) async fn locate(config: &RedisConfig) -> Result<ConnectionInfo, Failure> {
    let server = match config.sentinels() {
        Some(sentinels) => {
            let (host, port) = sentinels.ask(config.limit / 4).await.map_err(Failure::NoMaster)?;
            config.server.clone().set_addr(config.at(host, port))
        }
        None => config.server.clone(),
    };
    let login = login(config).await?;
    Ok(server.set_redis_settings(login))
}

/// Returns the login for a new connection, and the other settings of the protocol.
async fn login(config: &RedisConfig) -> Result<RedisConnectionInfo, Failure> {
    let settings = config.server.redis_settings().clone();
    let Some(credentials) = &config.credentials else {
        return Ok(settings);
    };
    let login = credentials
        .login(config.opening_limit() / 2)
        .await
        .map_err(Failure::NoLogin)?;
    let settings = settings.set_password(login.password);
    Ok(match login.username {
        Some(username) => settings.set_username(username),
        None => settings,
    })
}

/// Resolves every name to the addresses of one host: where the name in the certificate is not the host of the URL, the driver
/// gets that name in the place of the host.
struct Resolver(String);

impl AsyncDNSResolver for Resolver {
    fn resolve<'a, 'b: 'a>(
        &'a self,
        _: &'b str,
        port: u16,
    ) -> RedisFuture<'a, Box<dyn Iterator<Item = SocketAddr> + Send + 'a>> {
        Box::pin(async move {
            let addresses = tokio::net::lookup_host((&*self.0, port)).await?;
            Ok(Box::new(addresses) as Box<dyn Iterator<Item = SocketAddr> + Send>)
        })
    }
}

/// Replaces the host by the name in the certificate, if the settings have one.
pub(in crate::engine::redis) fn by_server_name(
    tls: Option<&TlsFiles>,
    server: ConnectionInfo,
    options: AsyncConnectionConfig,
) -> (ConnectionInfo, AsyncConnectionConfig) {
    let name = tls.and_then(|tls| tls.server_name.clone());
    let mut address = server.addr().clone();
    match (name, &mut address) {
        (Some(name), ConnectionAddr::TcpTls { host, .. }) => {
            let host = std::mem::replace(host, name);
            (server.set_addr(address), options.set_dns_resolver(Resolver(host)))
        }
        _ => (server, options),
    }
}

/// Opens a fast path to the server at this address. `None`: it is a Unix socket, or the system has no fast path.
pub(super) async fn fast_path(
    config: &RedisConfig,
    address: &ConnectionAddr,
) -> Result<Option<Arc<FastPath>>, Failure> {
    let (ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. }) = address else {
        return Ok(None);
    };
    if !FastPath::IS_SUPPORTED {
        return Ok(None);
    }
    let settings = login(config).await?;
    let started = Moment::now();
    let mut stream = connect(host, *port).await?;
    let (stream, session, version) = match &config.tls {
        None => {
            let version = log_in(&mut stream, config, address, &settings).await?;
            (stream, None, version)
        }
        Some(files) => {
            let mut stream = shake_hands(files, host, stream).await?;
            let version = log_in(&mut stream, config, address, &settings).await?;
            let (stream, session) = stream.into_inner();
            (stream, Some(session), version)
        }
    };
    let fast_path = FastPath::new(stream, session, version, config.layout.clone(), 2 * config.limit)?;
    fast_path.health().measured(started.elapsed());
    Ok(Some(fast_path))
}

async fn connect(host: &str, port: u16) -> RedisResult<TcpStream> {
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    socket.set_tcp_keepalive(&keepalive())?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(Some(crate::engine::redis::config::PEER_SILENCE))?;
    Ok(stream)
}

/// Opens a connection for the messages of a server.
pub(in crate::engine::redis) async fn pubsub(server: &ConnectionInfo, tls: Option<&TlsFiles>) -> RedisResult<PubSub> {
    let (ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. }) = server.addr() else {
        return Err(io::Error::from(ErrorKind::Unsupported).into());
    };
    let (stream, login) = (connect(host, *port).await?, server.redis_settings());
    match tls {
        None => PubSub::new(login, stream).await,
        Some(files) => PubSub::new(login, shake_hands(files, host, stream).await?).await,
    }
}

/// Starts TLS with a host. Its certificate is for the name in the settings, if they have one.
async fn shake_hands(files: &TlsFiles, host: &str, stream: TcpStream) -> RedisResult<TlsStream<TcpStream>> {
    let name = files.server_name.as_deref().unwrap_or(host).to_owned();
    let name = ServerName::try_from(name).map_err(io::Error::other)?;
    let stream = TlsConnector::from(tls_config(files)?).connect(name, stream).await?;
    Ok(stream)
}

/// Sends the login on a new connection, and checks the role of a server that sentinels report. Returns its major version.
async fn log_in(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    config: &RedisConfig,
    address: &ConnectionAddr,
    settings: &RedisConnectionInfo,
) -> Result<Option<u32>, Failure> {
    // Sent without a password, too: if the server refuses the connection, the error arrives here and not at the first call.
    let mut hello = redis::cmd("HELLO");
    hello.arg(2);
    if let Some(password) = settings.password() {
        hello
            .arg("AUTH")
            .arg(settings.username().unwrap_or("default"))
            .arg(password);
    }
    let mut login = vec![hello];
    if settings.db() != 0 {
        let mut select = redis::cmd("SELECT");
        select.arg(settings.db());
        login.push(select);
    }
    let mut version = None;
    for cmd in &login {
        let reply = ask(stream, cmd).await?.extract_error()?;
        version = version.or_else(|| major_version(&reply));
    }
    if config.sentinels().is_some() {
        let role = ask(stream, &redis::cmd("ROLE")).await?.extract_error()?;
        sentinel::check_master(&role, &show_address(address).into())?;
    }
    Ok(version)
}

/// Sends one command on a new connection, and waits for its reply.
///
/// # Errors
/// Also when more than one reply has arrived: later replies could not be assigned.
async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), cmd: &Cmd) -> RedisResult<Value> {
    let mut input = Vec::new();
    stream.write_all(&cmd.get_packed_command()).await?;
    stream.flush().await?;
    loop {
        if stream.read_buf(&mut input).await? == 0 {
            return Err(io::Error::from(ErrorKind::UnexpectedEof).into());
        }
        match resp::length(&input)? {
            Some(length) if length == input.len() => return redis::parse_redis_value(&input),
            Some(_) => return Err(resp::nonsense()),
            None => {}
        }
    }
}

/// Returns the major version of the server, from its reply to `HELLO`.
fn major_version(reply: &Value) -> Option<u32> {
    let Value::Array(fields) = reply else { return None };
    fields.chunks_exact(2).find_map(|field| match field {
        [Value::BulkString(name), Value::BulkString(version)] if name == b"version" => {
            std::str::from_utf8(version).ok()?.split('.').next()?.parse().ok()
        }
        _ => None,
    })
}
