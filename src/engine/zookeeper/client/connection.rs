//! Opens a connection to one server: TCP, TLS, the session, the login.

use std::io;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::jute::Malformed;
use super::messages::{self, LOGIN, Request, code};
use super::replies::{self, Connected};
use crate::clock::Moment;
use crate::engine::entries::Failure;
use crate::engine::entries::servers::{Io, Servers};
use crate::engine::target::Server;

/// The longest message of a server before the session is open, in bytes.
const MAX_GREETING: usize = 4096;

/// An open connection with a session.
pub(super) struct Connection {
    pub stream: Box<dyn Io>,
    pub session: Connected,
    /// When the request for the session was sent and answered.
    pub sent: Moment,
    pub answered: Moment,
}

/// Opens a connection, and a session or `last`, which is moved to it. `None`: that one has expired.
pub(super) async fn open(
    server: &Server,
    Servers { login, tls, .. }: &Servers,
    session_timeout: Duration,
    last: &Connected,
    last_zxid: i64,
) -> Result<Option<Connection>, Failure> {
    let mut stream = server.connect(tls.as_ref(), None).await?;
    let timeout_ms = i32::try_from(session_timeout.as_millis()).unwrap_or(i32::MAX);
    let request = messages::connect(last_zxid, timeout_ms, last.id, &last.password);
    let sent = Moment::now();
    let frame = ask(&mut stream, &request)
        .await
        .map_err(|error| greeting(&error, tls.is_some()))?;
    let answered = Moment::now();
    let connected = Connected::parse(&frame).map_err(|Malformed| no_zookeeper())?;
    if connected.timeout_ms == 0 {
        return Ok(None);
    }
    if let Some((user, password)) = login {
        let mut request = BytesMut::new();
        Request::login(user, password).write(LOGIN, &mut request);
        let refused = "the login was refused: check the user and the password of the URL";
        let frame = ask(&mut stream, &request).await;
        let frame = frame.map_err(|error| failed("no answer to the login", &error))?;
        match replies::head(&frame) {
            Ok((head, _)) if head.number == LOGIN && head.code == code::OK => {}
            Ok((head, _)) if head.number == LOGIN => {
                return Err(Failure::not_sent(refused, false));
            }
            _ => return Err(no_zookeeper()),
        }
    }
    Ok(Some(Connection {
        stream,
        session: connected,
        sent,
        answered,
    }))
}

/// Sends one message on a new connection, and reads one frame.
async fn ask(stream: &mut dyn Io, message: &[u8]) -> io::Result<Vec<u8>> {
    stream.write_all(message).await?;
    stream.flush().await?;
    let length = stream.read_u32().await? as usize;
    if length > MAX_GREETING {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut frame = vec![0; length];
    stream.read_exact(&mut frame).await?;
    Ok(frame)
}

fn failed(what: &str, error: &io::Error) -> Failure {
    Failure::not_sent(format!("{what}: {error}"), crate::error::is_passing_of_network(error))
}

/// Describes a server that did not open a session.
fn greeting(error: &io::Error, has_tls: bool) -> Failure {
    if error.kind() == io::ErrorKind::InvalidData {
        return no_zookeeper();
    }
    let tls = match has_tls {
        // TLS 1.3: the server checks the client's certificate after the handshake of the client.
        true => "require a client certificate (tls.certFile, tls.keyFile)",
        false => "need TLS (zookeepers://)",
    };
    let text = format!(
        "the server opened no session ({error}): it may {tls}, have no quorum, have too many connections (maxClientCnxns), or \
         have older data than this process has seen (a restored snapshot: restart the process)"
    );
    Failure::not_sent(text, true)
}

fn no_zookeeper() -> Failure {
    let text = "the answer is none of ZooKeeper: check the port, and whether it needs TLS (zookeepers://)";
    Failure::not_sent(text, false)
}
