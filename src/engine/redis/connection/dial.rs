//! Finds the server, connects to it, and logs in.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, select_ok};
use redis::{Cmd, ConnectionAddr, ConnectionInfo, RedisConnectionInfo, RedisResult, Value};
use rustls::ProtocolVersion;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;

use super::version::Greeting;
use crate::engine::TlsFiles;
use crate::engine::core::stream::{Endpoint, Replies, Stream, StreamHandle};
use crate::engine::redis::config::{RedisConfig, show_address};
use crate::engine::redis::error::{Failure, broken};
use crate::engine::redis::topology::sentinel;
use crate::engine::redis::wire::{Io, Opened, resp};
use crate::engine::tls::{Verified, client_config};

/// The longest time that sent bytes may stay without an acknowledgement. The default of Linux is about 15 minutes, for which
/// a call in flight would wait.
const PEER_SILENCE: Duration = Duration::from_secs(30);
/// The longest reply during the login, and the longest message of a sentinel, in bytes.
const LONGEST: usize = 1 << 20;
/// How much TLS may hold of requests that the socket has not taken, in bytes: those are sent also if their callers leave.
const ENCRYPTED: usize = 16 * 1024;

/// The number of records after which a session of TLS 1.2 is replaced. rustls sends no more than 2^24 with one key, and cannot change it.
const TLS_1_2_RECORDS: u64 = 1 << 23;

/// Returns the server with its current address and login.
pub(in super::super) async fn locate(config: &RedisConfig) -> Result<ConnectionInfo, Failure> {
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

/// A connection on which commands are sent one by one: for the login, and to a sentinel.
pub(in super::super) struct Dialed {
    pub(in super::super) io: Box<dyn Io>,
    socket: StreamHandle,
    tls_records: u64,
    input: Vec<u8>,
}

impl Dialed {
    /// Connects to a server.
    pub(in super::super) async fn connect(server: &ConnectionInfo, tls: Option<&TlsFiles>) -> RedisResult<Self> {
        let (stream, host) = match server.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                (connect(host, *port).await?, host.as_str())
            }
            ConnectionAddr::Unix(path) => (Stream::connect(&Endpoint::Local(path.clone())).await?, ""),
            _ => return Err(io::Error::from(ErrorKind::Unsupported).into()),
        };
        let socket = stream.handle();
        let (io, tls_records): (Box<dyn Io>, _) = match tls {
            None => (Box::new(stream), u64::MAX),
            Some(files) => {
                // The certificate is for the name in the settings, if they have one.
                let name = files.server_name.as_deref().unwrap_or(host).to_owned();
                let name = ServerName::try_from(name).map_err(io::Error::other)?;
                let mut stream = TlsConnector::from(Arc::new(client_config(files, Verified::Full)?))
                    .connect(name, stream)
                    .await?;
                let session = stream.get_mut().1;
                session.set_buffer_limit(Some(ENCRYPTED));
                let is_limited = session.protocol_version() == Some(ProtocolVersion::TLSv1_2);
                let tls_records = if is_limited { TLS_1_2_RECORDS } else { u64::MAX };
                (Box::new(stream), tls_records)
            }
        };
        Ok(Dialed {
            io,
            socket,
            tls_records,
            input: Vec::new(),
        })
    }

    /// Sends one command, and waits for its reply.
    pub(in super::super) async fn ask(&mut self, cmd: &Cmd) -> RedisResult<Value> {
        self.io.write_all(&cmd.get_packed_command()).await?;
        self.io.flush().await?;
        self.next().await?.extract_error()
    }

    /// Waits for a reply or a message.
    pub(in super::super) async fn next(&mut self) -> RedisResult<Value> {
        loop {
            if let Some(length) = resp::length(&self.input)? {
                let reply: Vec<u8> = self.input.drain(..length).collect();
                return resp::value(&reply);
            }
            if self.input.len() > LONGEST {
                return Err(resp::nonsense());
            }
            if self.io.read_buf(&mut self.input).await? == 0 {
                return Err(broken());
            }
        }
    }

    /// Logs in to a sentinel. Sentinels without a login need no greeting.
    pub(in super::super) async fn log_in_to_sentinel(&mut self, login: &RedisConnectionInfo) -> RedisResult<()> {
        if let Some(password) = login.password() {
            let mut auth = redis::cmd("AUTH");
            auth.arg(login.username()).arg(password);
            self.ask(&auth).await.map_err(|error| match error.kind() {
                redis::ErrorKind::Io | redis::ErrorKind::Parse => error,
                _ => (redis::ErrorKind::AuthenticationFailed, "the sentinel refuses the login").into(),
            })?;
        }
        Ok(())
    }

    /// Logs in with RESP3.
    async fn log_in(&mut self, login: &RedisConnectionInfo) -> RedisResult<Option<Greeting>> {
        // Sent without a password, too: if the server refuses the connection, the error arrives here and not at the first call.
        let mut hello = redis::cmd("HELLO");
        hello.arg(3);
        if let Some(password) = login.password() {
            hello
                .arg("AUTH")
                .arg(login.username().unwrap_or("default"))
                .arg(password);
        }
        let greeting = Greeting::read(&self.ask(&hello).await?);
        if login.db() != 0 {
            self.ask(redis::cmd("SELECT").arg(login.db())).await?;
        }
        Ok(greeting)
    }
}

async fn connect(host: &str, port: u16) -> io::Result<Stream> {
    connect_to_one_of(tokio::net::lookup_host((host, port)).await?).await
}

/// Connects to the first address that answers: one of several may be unreachable without an error.
async fn connect_to_one_of(addresses: impl Iterator<Item = SocketAddr>) -> io::Result<Stream> {
    let mut attempts = addresses.map(connect_to).peekable();
    if attempts.peek().is_none() {
        return Err(io::Error::new(
            ErrorKind::NotFound,
            "the name of the server has no address",
        ));
    }
    Ok(select_ok(attempts).await?.0)
}

fn connect_to(address: SocketAddr) -> BoxFuture<'static, io::Result<Stream>> {
    let endpoint = Endpoint::Tcp {
        address,
        has_keepalives: true,
        timeout: PEER_SILENCE,
    };
    async move { Stream::connect(&endpoint).await }.boxed()
}

/// Opens a connection to a server, and checks the role of one that sentinels report. From then on the event loop polls its socket, if
/// there is one. `receivers` counts the channels with receivers.
pub(super) async fn open(
    config: &RedisConfig,
    server: &ConnectionInfo,
    receivers: &Replies,
) -> Result<(Opened, Option<Greeting>), Failure> {
    let mut dialed = Dialed::connect(server, config.tls.as_ref()).await?;
    let greeting = dialed.log_in(server.redis_settings()).await?;
    if config.sentinels().is_some() {
        let role = dialed.ask(&redis::cmd("ROLE")).await?;
        sentinel::check_master(&role, &show_address(server.addr()).into())?;
    }
    let Dialed {
        io,
        socket,
        tls_records,
        input,
    } = dialed;
    if !input.is_empty() {
        // Later replies could not be assigned.
        return Err(resp::nonsense().into());
    }
    let replies = Replies::default();
    if let Some(event_loop) = &config.event_loop {
        socket
            .serve_on(event_loop, receivers, &replies)
            .map_err(redis::RedisError::from)?;
    }
    let version = greeting.as_ref().and_then(Greeting::version);
    let opened = Opened {
        io,
        replies,
        tls_records,
        version: version.map(|(major, _)| major),
    };
    Ok((opened, greeting))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_address_that_does_not_answer_is_no_obstacle() {
        let open = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        full.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        full.listen(0).unwrap();
        let silent = full.local_addr().unwrap().as_socket().unwrap();
        // Its queue has room for one connection.
        let _first = std::net::TcpStream::connect(silent).unwrap();
        let within = Duration::from_millis(100);
        let connecting = tokio::net::TcpStream::connect(silent);
        assert!(
            tokio::time::timeout(within, connecting).await.is_err(),
            "it does not answer"
        );
        let addresses = [silent, open.local_addr().unwrap()];
        let connected = tokio::time::timeout(Duration::from_secs(10), connect_to_one_of(addresses.into_iter())).await;
        assert!(connected.unwrap().is_ok());
        assert!(connect_to_one_of([].into_iter()).await.is_err());
    }
}
