//! A proxy between an engine and its server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Forwards connections while it is open, and counts the packets to the server.
pub(in crate::engine::sql) struct Proxy {
    pub url: String,
    sent: Arc<Sent>,
    is_open: watch::Sender<bool>,
}

/// Counters of what the proxy forwarded to the server.
#[derive(Default)]
struct Sent {
    packets: AtomicUsize,
    largest: AtomicUsize,
}

impl Proxy {
    /// Starts a proxy of the server of a URL, with its user and path.
    pub(in crate::engine::sql) async fn start(url: &str) -> Self {
        let (head, path) = url.rsplit_once('/').unwrap();
        let (head, server) = head.rsplit_once('@').unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Proxy {
            url: format!("{head}@{}/{path}", listener.local_addr().unwrap()),
            sent: Arc::default(),
            is_open: watch::Sender::new(true),
        };
        let (server, sent, is_open) = (server.to_owned(), proxy.sent.clone(), proxy.is_open.subscribe());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(forward(client, server.clone(), sent.clone(), is_open.clone()));
            }
        });
        proxy
    }

    /// Returns how many packets the server was sent.
    pub(in crate::engine::sql) fn packets(&self) -> usize {
        self.sent.packets.load(Ordering::SeqCst)
    }

    /// Returns the size of the largest read from a client, in bytes.
    #[cfg(feature = "mysql")]
    pub(in crate::engine::sql) fn largest_packet(&self) -> usize {
        self.sent.largest.load(Ordering::SeqCst)
    }

    /// Opens or closes the proxy for new connections, which wait until it is open.
    pub(in crate::engine::sql) fn set_open(&self, is_open: bool) {
        self.is_open.send_replace(is_open);
    }
}

async fn forward(client: TcpStream, server: String, sent: Arc<Sent>, mut is_open: watch::Receiver<bool>) {
    is_open.wait_for(|is_open| *is_open).await.unwrap();
    let server = TcpStream::connect(server).await.unwrap();
    for stream in [&client, &server] {
        stream.set_nodelay(true).unwrap();
    }
    let ((mut from, mut to), (mut back, mut forth)) = (client.into_split(), server.into_split());
    tokio::spawn(async move { copy(&mut back, &mut to).await });
    let mut packet = vec![0; 1 << 20];
    while let Ok(length @ 1..) = from.read(&mut packet).await {
        sent.packets.fetch_add(1, Ordering::SeqCst);
        sent.largest.fetch_max(length, Ordering::SeqCst);
        if forth.write_all(&packet[..length]).await.is_err() {
            return;
        }
    }
}
