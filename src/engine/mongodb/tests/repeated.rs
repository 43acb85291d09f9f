//! Tests of commands that the driver repeats.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::queue::shares;
use super::*;

/// The name of a command as it is in a message.
const INSERT: &[u8] = b"\x02insert\0";
const FIND_AND_MODIFY: &[u8] = b"\x02findAndModify\0";

/// A proxy that closes the connection of the first such command while `is_cut` is false: of an insert before the server receives it, of another
/// one after the server's reply. Returns its port.
async fn proxy(server: String, command: &'static [u8], is_cut: Arc<AtomicBool>) -> u16 {
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
                            let mut parts = sent[..count].windows(command.len());
                            let is_cut_now = parts.any(|part| part == command) && !is_cut.swap(true, SeqCst);
                            if is_cut_now && command == INSERT {
                                return;
                            }
                            server.write_all(&sent[..count]).await.unwrap();
                            if is_cut_now {
                                let _ = server.read(&mut received).await;
                                return;
                            }
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
    let port = proxy(address.to_owned(), INSERT, is_cut.clone()).await;
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

/// The server answers a repeated command with the document that it has stored, without calculated fields.
#[tokio::test]
async fn the_replies_to_the_commands_of_a_share_are_lost() {
    let Some(url) = url(REPLICA_SET) else { return };
    let address = url.strip_prefix("mongodb://").unwrap().split('/').next().unwrap();
    let is_cut = Arc::new(AtomicBool::new(true));
    let port = proxy(address.to_owned(), FIND_AND_MODIFY, is_cut.clone()).await;
    let settings = Settings {
        collection: format!("t{}", OwnerToken::fresh().as_str()),
        ..Settings::default()
    };
    let through = format!("mongodb://127.0.0.1:{port}/holdfast?directConnection=true");
    let engine = connect(&through, &settings).await.unwrap();
    let (one, other) = (shares::share(1, 2), shares::share(1, 2));
    let mut fences = Vec::new();
    for share in [&one, &other] {
        is_cut.store(false, SeqCst);
        fences.push(granted(&engine, share).await);
        assert!(is_cut.load(SeqCst), "the proxy saw no attempt");
        assert_eq!(granted(&engine, share).await, *fences.last().unwrap());
    }
    assert!(fences[0] < fences[1], "{fences:?}");
    is_cut.store(false, SeqCst);
    busy(&engine, &shares::share(1, 2)).await;
    for _ in 0..2 {
        is_cut.store(false, SeqCst);
        assert_eq!(engine.renew(&one, one.ttl).await.unwrap(), Renewed::Extended);
        assert!(is_cut.load(SeqCst), "the proxy saw no renewal");
    }
    is_cut.store(false, SeqCst);
    assert_eq!(engine.release(&one, Duration::ZERO).await.unwrap(), Released::Freed);
    assert!(is_cut.load(SeqCst), "the proxy saw no release");
    assert_eq!(engine.release(&one, Duration::ZERO).await.unwrap(), Released::NotHeld);
    assert_eq!(engine.renew(&one, one.ttl).await.unwrap(), Renewed::Lost);
    engine.locks().drop().await.unwrap();
    engine.close().await;
}
