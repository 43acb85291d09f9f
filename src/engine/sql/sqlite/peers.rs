//! The connections of this process to one database.
//!
//! In SQLite, all connections of a process to one database share one memory mapping of the log's index. After the log or its
//! index was deleted, a new connection would combine the new log with the mapping of the deleted index while any old
//! connection is open. So all old connections are closed before a new one is opened.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, MutexGuard, watch};

use super::identity::FileId;

static DATABASES: LazyLock<Mutex<HashMap<FileId, Weak<Peers>>>> = LazyLock::new(Mutex::default);

/// The connections to one database.
#[derive(Debug, Default)]
pub(super) struct Peers {
    open: watch::Sender<Open>,
    /// Locked while one of them is being closed.
    closing: AsyncMutex<()>,
}

#[derive(Debug, Default)]
struct Open {
    /// Incremented when a connection finds that the files were deleted or replaced.
    epoch: u64,
    /// Number of connections of this epoch.
    current: usize,
    /// Number of connections of earlier epochs.
    outdated: usize,
}

/// Registration of one connection. Dropping it unregisters the connection.
#[derive(Debug)]
pub(super) struct Peer {
    peers: Arc<Peers>,
    epoch: u64,
}

impl Peers {
    /// Waits until no outdated connection is open, then registers a new one.
    pub(super) async fn join(database: FileId) -> Peer {
        let peers = {
            let mut databases = DATABASES.lock();
            databases.retain(|_, peers| peers.strong_count() > 0);
            let known = databases.get(&database).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let peers = Arc::new(Peers::default());
                databases.insert(database, Arc::downgrade(&peers));
                peers
            })
        };
        let mut changes = peers.open.subscribe();
        loop {
            let mut joined = None;
            peers.open.send_if_modified(|open| {
                if open.outdated == 0 {
                    open.current += 1;
                    joined = Some(open.epoch);
                }
                false
            });
            if let Some(epoch) = joined {
                return Peer { peers, epoch };
            }
            // The sender lives as long as `peers`.
            let _ = changes.changed().await;
        }
    }
}

impl Peer {
    /// Makes all connections of this epoch outdated, this one included.
    pub(super) fn outdate(&self) {
        self.peers.open.send_if_modified(|open| {
            let is_first = open.epoch == self.epoch;
            if is_first {
                open.epoch += 1;
                open.outdated += std::mem::take(&mut open.current);
            }
            is_first
        });
    }

    /// Waits until no other connection is being closed. The returned guard is held during the close.
    ///
    /// The last connection copies the log to the database when it is closed. Two that were closed at the same time would each
    /// find the other one open, and neither would copy a log that was deleted.
    pub(super) async fn closing(&self) -> MutexGuard<'_, ()> {
        self.peers.closing.lock().await
    }

    /// Waits until this connection is outdated.
    pub(super) async fn outdated(&self) {
        let _ = self
            .peers
            .open
            .subscribe()
            .wait_for(|open| open.epoch > self.epoch)
            .await;
    }

    pub(super) fn is_outdated(&self) -> bool {
        self.peers.open.borrow().epoch > self.epoch
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.peers.open.send_modify(|open| {
            if open.epoch == self.epoch {
                open.current -= 1;
            } else {
                open.outdated -= 1;
            }
        });
    }
}
