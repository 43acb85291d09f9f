//! A proxy between an engine and its servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What a proxy does with its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Forwards,
    /// Delays each packet of both directions.
    Delays(Duration),
    /// Keeps the connections and drops all packets of the server.
    LosesReplies,
    /// Keeps the connections and passes nothing on until the mode changes.
    Holds,
    /// Closes the connections and refuses new ones.
    Closed,
}

/// A proxy of the first server of a URL.
pub(super) struct Proxy {
    pub url: String,
    pub mode: Arc<watch::Sender<Mode>>,
    /// The number of bytes that the servers have sent.
    pub received: Arc<AtomicUsize>,
}

impl Proxy {
    pub(super) async fn start(url: &str) -> Self {
        let (scheme, _) = url.split_once("://").unwrap();
        let server = super::servers(url).list.remove(0).to_string();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("{scheme}://{}", listener.local_addr().unwrap());
        let mode = Arc::new(watch::Sender::new(Mode::Forwards));
        let received = Arc::new(AtomicUsize::new(0));
        let (modes, count) = (mode.clone(), received.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if *modes.borrow() == Mode::Closed {
                    continue;
                }
                let Ok(server) = TcpStream::connect(&server).await else {
                    continue;
                };
                let ((from, to), (back, forth)) = (client.into_split(), server.into_split());
                tokio::spawn(forward(from, forth, modes.subscribe(), None));
                tokio::spawn(forward(back, to, modes.subscribe(), Some(count.clone())));
            }
        });
        Proxy { url, mode, received }
    }

    pub(super) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }
}

async fn forward(
    mut from: impl tokio::io::AsyncRead + Unpin,
    mut to: impl tokio::io::AsyncWrite + Unpin,
    mut mode: watch::Receiver<Mode>,
    received: Option<Arc<AtomicUsize>>,
) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let length = tokio::select! {
            read = from.read(&mut buffer) => match read {
                Ok(0) | Err(_) => return,
                Ok(length) => length,
            },
            Ok(_) = mode.wait_for(|mode| *mode == Mode::Closed) => return,
        };
        received.iter().for_each(|count| _ = count.fetch_add(length, Relaxed));
        let passes = mode.wait_for(|mode| *mode != Mode::Holds).await.map(|mode| *mode);
        match passes {
            Ok(Mode::LosesReplies) if received.is_some() => continue,
            Ok(Mode::Delays(by)) => tokio::time::sleep(by).await,
            Ok(Mode::Closed) | Err(_) => return,
            Ok(_) => {}
        }
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
