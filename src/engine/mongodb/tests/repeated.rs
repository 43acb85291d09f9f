//! Tests of commands that the driver repeats.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;

/// A proxy that closes the connection of the first insert before the server receives the command. Returns its port.
async fn proxy(server: String, is_cut: Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let (mut server, is_cut) = (TcpStream::connect(&server).await.unwrap(), is_cut.clone());
            tokio::spawn(async move {
                let (mut sent, mut received) = (vec![0; 65536], vec![0; 65536]);
                loop {
                    tokio::select! {
                        read = client.read(&mut sent) => {
                            let Ok(count @ 1..) = read else { return };
                            let is_insert = sent[..count].windows(8).any(|part| part == b"\x02insert\0");
                            if is_insert && !is_cut.swap(true, SeqCst) {
                                return;
                            }
                            server.write_all(&sent[..count]).await.unwrap();
                        }
                        read = server.read(&mut received) => {
                            let Ok(count @ 1..) = read else { return };
                            if client.write_all(&received[..count]).await.is_err() {
                                return;
                            }
                        }
                    }
                }
            });
        }
    });
    port
}

/// The reply to a repeated insert does not prove the token, so the grant has a stamp. If this fails with a new version of the driver,
/// the driver does not report each sending any more (`connection/checkouts.rs`).
#[tokio::test]
async fn a_grant_whose_insert_the_driver_repeated_has_a_stamp() {
    let Some(url) = url(REPLICA_SET) else { return };
    let address = url.strip_prefix("mongodb://").unwrap().split('/').next().unwrap();
    let is_cut = Arc::new(AtomicBool::new(false));
    let port = proxy(address.to_owned(), is_cut.clone()).await;
    let settings = Settings {
        collection: format!("t{}", OwnerToken::fresh().as_str()),
        ..Settings::default()
    };
    let through = format!("mongodb://127.0.0.1:{port}/holdfast?directConnection=true");
    let engine = connect(&through, &settings).await.unwrap();
    granted(&engine, &claim(&["repeated"], LONG)).await;
    assert!(is_cut.load(SeqCst), "the proxy saw no insert");
    assert!(document(&engine, "repeated").await.unwrap().contains_key("fence"));
    tokens::granted_by_one_write(&engine, &["once"]).await;
    engine.locks().drop().await.unwrap();
    engine.close().await;
}
