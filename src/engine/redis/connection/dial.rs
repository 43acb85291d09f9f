//! Finds the server and connects to it.

use std::io::{self, ErrorKind};
use std::sync::Arc;

use redis::io::tcp::socket2::SockRef;
use redis::{Cmd, ConnectionAddr, ConnectionInfo, RedisResult, Value};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::engine::redis::config::{RedisConfig, keepalive};
use crate::engine::redis::error::Failure;
use crate::engine::redis::fast_path::{FastPath, resp};

/// Returns the server with its current address.
pub(in crate::engine::redis) async fn locate(config: &RedisConfig) -> Result<ConnectionInfo, Failure> {
    let Some(sentinels) = config.sentinels() else {
        return Ok(config.server.clone());
    };
    let (host, port) = sentinels.ask(config.limit / 4).await.map_err(Failure::NoMaster)?;
    Ok(config.server.clone().set_addr(config.at(host, port)))
}

/// Opens a fast path. `None`: the server is not the one of the URL, the connection is not plain TCP, or the system has no fast
/// path.
pub(super) async fn fast_path(config: &RedisConfig) -> RedisResult<Option<Arc<FastPath>>> {
    let ConnectionAddr::Tcp(host, port) = config.server.addr() else {
        return Ok(None);
    };
    if !config.is_server() || !FastPath::IS_SUPPORTED {
        return Ok(None);
    }
    let mut stream = tokio::net::TcpStream::connect((&**host, *port)).await?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    socket.set_tcp_keepalive(&keepalive())?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(Some(crate::engine::redis::config::PEER_SILENCE))?;
    let settings = config.server.redis_settings();
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
        let reply = ask(&mut stream, cmd).await?.extract_error()?;
        version = version.or_else(|| major_version(&reply));
    }
    FastPath::new(stream, version, config.layout.clone(), 2 * config.limit).map(Some)
}

/// Sends one command on a new connection, and waits for its reply.
async fn ask(stream: &mut tokio::net::TcpStream, cmd: &Cmd) -> RedisResult<Value> {
    let mut input = Vec::new();
    stream.write_all(&cmd.get_packed_command()).await?;
    while resp::length(&input)?.is_none() {
        if stream.read_buf(&mut input).await? == 0 {
            return Err(io::Error::from(ErrorKind::UnexpectedEof).into());
        }
    }
    redis::parse_redis_value(&input)
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
