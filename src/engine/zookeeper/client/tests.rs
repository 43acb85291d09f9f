//! The client and hostile or silent servers.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::jute::{Reader, Writer};
use super::*;
use crate::engine::target::Server;

const TIMEOUT: Duration = Duration::from_secs(10);

impl Reply {
    /// Reads how often children of a node were created or deleted.
    pub(in super::super) fn changes_of_children(&self) -> Result<i32, Malformed> {
        let mut reader = Reader(&self.body);
        reader.buffer()?;
        let _of_node = [reader.long()?, reader.long()?, reader.long()?, reader.long()?];
        let _version = reader.int()?;
        reader.int()
    }

    /// Reads the path of a new node.
    pub(in super::super) fn created(&self) -> Result<String, Malformed> {
        Reader(&self.body).text().map(str::to_owned)
    }
}

/// Runs a server. `serve` gets each connection with its number.
async fn server<F>(serve: impl Fn(TcpStream, usize) -> F + Send + 'static) -> Server
where
    F: Future<Output = std::io::Result<()>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        for number in 0.. {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(serve(stream, number));
        }
    });
    Server {
        host: "127.0.0.1".into(),
        port,
    }
}

async fn read_frame(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let length = stream.read_u32().await? as usize;
    let mut frame = vec![0; length];
    stream.read_exact(&mut frame).await?;
    Ok(frame)
}

/// Answers the request for a session.
async fn greet(stream: &mut TcpStream, session: i64) -> std::io::Result<()> {
    read_frame(stream).await?;
    let body = Writer::default()
        .int(0)
        .int(TIMEOUT.as_millis() as i32)
        .long(session)
        .buffer(&[7; 16])
        .flag(false);
    stream.write_all(&Writer::default().buffer(&body.0).0).await
}

/// Answers each request with `code` and no body.
async fn answer_all(stream: &mut TcpStream, code: i32) -> std::io::Result<()> {
    loop {
        let frame = read_frame(stream).await?;
        let reply = Writer::default()
            .int(i32::from_be_bytes(frame[..4].try_into().unwrap()))
            .long(9)
            .int(code);
        stream.write_all(&Writer::default().buffer(&reply.0).0).await?;
    }
}

async fn connect(list: Vec<Server>) -> Result<Client, ConnectFailure> {
    let (login, tls) = (None, None);
    let servers = Servers {
        list,
        login,
        tls,
        store_timeout: TIMEOUT,
    };
    Client::connect(servers, TIMEOUT).await
}

#[tokio::test]
async fn a_server_that_is_none_is_named() {
    let http = server(|mut stream, _| async move {
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await?;
        stream.shutdown().await
    });
    let (http, closing) = (http.await, server(|_, _| async { Ok(()) }).await);
    let names = [http.to_string(), closing.to_string()];
    let failure = connect(vec![http, closing]).await.err().unwrap();
    assert!(names.iter().all(|name| failure.text.contains(name)), "{failure:?}");
    assert!(
        failure.text.contains("the answer is none of ZooKeeper")
            && failure.text.contains("it may need TLS (zookeepers://), have no quorum")
    );
    let nobody = Server {
        host: "127.0.0.1".into(),
        port: 1,
    };
    let failure = connect(vec![nobody]).await.err().unwrap();
    assert!(
        failure.passes && failure.text.contains("127.0.0.1:1: cannot connect"),
        "{failure:?}"
    );
}

#[tokio::test]
async fn replies_that_are_none_break_the_connection() {
    let negative = Writer::default().int(-2).0;
    let long = |number| Writer::default().int(i32::MAX).int(number).long(0).int(0).0;
    let other_number = Writer::default().buffer(&Writer::default().int(77).long(0).int(0).0).0;
    let cut = Writer::default().buffer(&[0; 7]).0;
    let event = Writer::default()
        .buffer(&Writer::default().int(-1).long(0).int(0).int(1).0)
        .0;
    for bytes in [negative, long(77), long(-1), other_number, cut, event] {
        let hostile = bytes.clone();
        let server = server(move |mut stream, number| {
            let bytes = hostile.clone();
            async move {
                greet(&mut stream, 5).await?;
                if number == 0 {
                    read_frame(&mut stream).await?;
                    stream.write_all(&bytes).await?;
                    // The client closes the connection.
                    let mut rest = Vec::new();
                    stream.read_to_end(&mut rest).await?;
                    return Ok(());
                }
                answer_all(&mut stream, code::OK).await
            }
        });
        let client = connect(vec![server.await]).await.unwrap();
        let failure = client.call(Request::exists("/a")).await.unwrap_err();
        assert!(matches!(failure, Failure::Broken(_)), "{failure:?} after {bytes:?}");
        client.call(Request::exists("/a")).await.unwrap();
        assert_eq!(client.state().id, 5, "the session goes on");
    }
}

/// The connection is that of all calls and of the locks' session.
#[tokio::test]
async fn a_reply_that_is_too_long_fails_its_request_only() {
    const LONG: usize = 17 << 20;
    let server = server(|mut stream, number| async move {
        assert_eq!(number, 0, "another connection");
        greet(&mut stream, 5).await?;
        loop {
            let frame = read_frame(&mut stream).await?;
            // That of a read of children.
            let is_long = frame[4..8] == 8_i32.to_be_bytes();
            let length = 16 + if is_long { LONG + fastrand::usize(..9) } else { 0 };
            let reply = Writer::default()
                .int(length as i32)
                .int(i32::from_be_bytes(frame[..4].try_into().unwrap()))
                .long(9)
                .int(0);
            let mut bytes = reply.0;
            bytes.resize(size_of::<i32>() + length, 1);
            let (head, rest) = bytes.split_at(fastrand::usize(1..bytes.len().min(30)));
            for part in [head, rest] {
                stream.write_all(part).await?;
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    });
    let client = connect(vec![server.await]).await.unwrap();
    for _ in 0..5 {
        let calls = [Request::exists("/a"), Request::children("/a"), Request::exists("/a")];
        let [before, long, after] = calls.map(|call| client.call(call));
        let (before, long, after) = tokio::join!(before, long, after);
        before.and(after).unwrap();
        assert!(matches!(long, Err(Failure::LongReply(_))), "{long:?}");
    }
}

#[tokio::test]
async fn a_silent_server_is_left_for_another_one() {
    let served = Arc::new(AtomicUsize::new(0));
    let mut servers = Vec::new();
    for _ in 0..2 {
        let served = served.clone();
        servers.push(
            server(move |mut stream, _| {
                let is_silent = served.fetch_add(1, Relaxed) == 0;
                async move {
                    greet(&mut stream, 5).await?;
                    if is_silent {
                        return std::future::pending().await;
                    }
                    answer_all(&mut stream, code::OK).await
                }
            })
            .await,
        );
    }
    let client = connect(servers).await.unwrap();
    let first = client.address();
    let failure = client.call(Request::exists("/a")).await.unwrap_err();
    assert!(
        matches!(&failure, Failure::Broken(why) if why.contains("no answer within 1500 ms")),
        "{failure:?}"
    );
    client.call(Request::exists("/a")).await.unwrap();
    assert_ne!(client.address(), first);
}

#[tokio::test]
async fn an_expired_session_is_replaced() {
    let server = server(|mut stream, number| async move {
        match number {
            0 => {
                greet(&mut stream, 5).await?;
                read_frame(&mut stream).await?;
                Ok(())
            }
            1 => {
                let request = read_frame(&mut stream).await?;
                assert_eq!(request[16..24], 5_i64.to_be_bytes());
                let body = Writer::default().int(0).int(0).long(0).buffer(&[0; 16]).flag(false);
                stream.write_all(&Writer::default().buffer(&body.0).0).await
            }
            _ => {
                greet(&mut stream, 6).await?;
                answer_all(&mut stream, code::NO_NODE).await
            }
        }
    });
    let client = connect(vec![server.await]).await.unwrap();
    assert!(client.lasts(5, Moment::now() + TIMEOUT / 2, "/").await.unwrap());
    assert!(matches!(
        client.call(Request::exists("/a")).await,
        Err(Failure::Broken(_))
    ));
    let answer = client.call(Request::exists("/a")).await;
    assert!(matches!(answer, Err(Failure::Refused(code::NO_NODE))), "{answer:?}");
    assert_eq!(client.state().id, 6);
    assert!(!client.lasts(5, Moment::now(), "/").await.unwrap());
}

#[tokio::test]
async fn requests_without_a_connection_wait_for_one_attempt() {
    let server = server(|mut stream, number| async move {
        if number == 0 {
            greet(&mut stream, 5).await?;
            read_frame(&mut stream).await?;
        }
        Ok(())
    });
    let client = connect(vec![server.await]).await.unwrap();
    assert!(matches!(
        client.call(Request::exists("/a")).await,
        Err(Failure::Broken(_))
    ));
    let failure = client.call(Request::exists("/a")).await.unwrap_err();
    assert!(
        matches!(&failure, Failure::Unreachable(failure) if failure.passes),
        "{failure:?}"
    );
    let long = Request::set_data("/a", &vec![0; MAX_REQUEST], -1);
    assert!(matches!(client.call(long).await, Err(Failure::TooLong)));
    client.close().await;
    assert!(matches!(client.call(Request::exists("/a")).await, Err(Failure::Closed)));
}

#[tokio::test]
async fn dropped_requests_are_not_sent_and_urgent_ones_go_first() {
    let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
    let server = server(move |mut stream, number| {
        let sender = sender.clone();
        async move {
            greet(&mut stream, 5).await?;
            if number == 0 {
                read_frame(&mut stream).await?;
                return Ok(());
            }
            loop {
                let frame = read_frame(&mut stream).await?;
                let _ = sender.send(frame[4..].to_vec());
                let reply = Writer::default()
                    .int(i32::from_be_bytes(frame[..4].try_into().unwrap()))
                    .long(9)
                    .int(0);
                stream.write_all(&Writer::default().buffer(&reply.0).0).await?;
            }
        }
    });
    let client = connect(vec![server.await]).await.unwrap();
    assert!(client.call(Request::exists("/a")).await.is_err());
    // There is no connection now.
    drop(client.call(Request::exists("/dropped")));
    let ordinary = client.call(Request::exists("/ordinary"));
    let urgent = client.call_urgently(Request::exists("/urgent"));
    let (ordinary, urgent) = tokio::join!(ordinary, urgent);
    ordinary.and(urgent).unwrap();
    let mut paths = Vec::new();
    while let Ok(body) = received.try_recv() {
        // Without the syncs.
        if body[..4] == 3_i32.to_be_bytes() {
            paths.push(String::from_utf8_lossy(&body[8..body.len() - 1]).into_owned());
        }
    }
    assert_eq!(paths, ["/urgent", "/ordinary"]);
}
