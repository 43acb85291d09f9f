//! A proxy between an engine and its server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

/// Forwards connections while it is open, and counts them and the packets to the server.
pub(in crate::engine::sql) struct Proxy {
    pub url: String,
    counters: Arc<Counters>,
    is_open: watch::Sender<bool>,
    hangs_after: Arc<AtomicUsize>,
    /// The number of connections, the first ones, whose packets are dropped.
    silent: Arc<AtomicUsize>,
}

#[derive(Default)]
struct Counters {
    connections: AtomicUsize,
    packets: AtomicUsize,
    largest: AtomicUsize,
}

impl Proxy {
    /// Starts a proxy of the server of a URL, with its user and path.
    pub(in crate::engine::sql) async fn start(url: &str) -> Self {
        Self::delayed(url, Duration::ZERO).await
    }

    /// Starts a proxy that delays each direction by `delay`.
    pub(in crate::engine::sql) async fn delayed(url: &str, delay: Duration) -> Self {
        let (head, path) = url.rsplit_once('/').unwrap();
        let (head, server) = head.rsplit_once('@').unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Proxy {
            url: format!("{head}@{}/{path}", listener.local_addr().unwrap()),
            counters: Arc::default(),
            is_open: watch::Sender::new(true),
            hangs_after: Arc::new(AtomicUsize::new(usize::MAX)),
            silent: Arc::default(),
        };
        let (hangs_after, silent) = (proxy.hangs_after.clone(), proxy.silent.clone());
        let (server, counters, is_open) = (server.to_owned(), proxy.counters.clone(), proxy.is_open.subscribe());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (server, counters, mut is_open) = (server.clone(), counters.clone(), is_open.clone());
                let (hangs_after, silent) = (hangs_after.load(Ordering::SeqCst), silent.clone());
                tokio::spawn(async move {
                    is_open.wait_for(|is_open| *is_open).await.unwrap();
                    let number = counters.connections.fetch_add(1, Ordering::SeqCst);
                    let server = TcpStream::connect(server).await.unwrap();
                    for stream in [&client, &server] {
                        stream.set_nodelay(true).unwrap();
                    }
                    let ((from, to), (back, forth)) = (client.into_split(), server.into_split());
                    tokio::spawn(forward(back, to, delay, |_| true));
                    let mut reads = 0;
                    let passes = move |length| {
                        counters.packets.fetch_add(1, Ordering::SeqCst);
                        counters.largest.fetch_max(length, Ordering::SeqCst);
                        reads += 1;
                        reads <= hangs_after && number >= silent.load(Ordering::SeqCst)
                    };
                    forward(from, forth, delay, passes).await;
                });
            }
        });
        proxy
    }

    /// Returns how many connections were forwarded.
    pub(in crate::engine::sql) fn connections(&self) -> usize {
        self.counters.connections.load(Ordering::SeqCst)
    }

    /// Returns how many packets the server was sent.
    pub(in crate::engine::sql) fn packets(&self) -> usize {
        self.counters.packets.load(Ordering::SeqCst)
    }

    /// Returns the size of the largest read from a client, in bytes.
    #[cfg(feature = "mysql")]
    pub(in crate::engine::sql) fn largest_packet(&self) -> usize {
        self.counters.largest.load(Ordering::SeqCst)
    }

    /// Opens or closes the proxy for new connections, which wait until it is open.
    pub(in crate::engine::sql) fn set_open(&self, is_open: bool) {
        self.is_open.send_replace(is_open);
    }

    /// Lets new connections hang after this number of packets to the server, such as those of a login.
    pub(in crate::engine::sql) fn hang_after(&self, packets: usize) {
        self.hangs_after.store(packets, Ordering::SeqCst);
    }

    /// Drops what the open connections send from now on, as a network path does that has lost their state.
    pub(in crate::engine::sql) fn drop_packets(&self) {
        self.silent.store(self.connections(), Ordering::SeqCst);
    }
}

/// Forwards the reads that pass, each delayed by `delay`. `passes` receives the length of each read.
async fn forward(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    delay: Duration,
    mut passes: impl FnMut(usize) -> bool,
) {
    let (sender, mut receiver) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    tokio::spawn(async move {
        while let Some((at, bytes)) = receiver.recv().await {
            sleep_until(at).await;
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
    });
    let mut buffer = vec![0; 1 << 20];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        if !passes(length) {
            continue;
        }
        if sender
            .send((Instant::now() + delay, buffer[..length].to_vec()))
            .is_err()
        {
            return;
        }
    }
}
