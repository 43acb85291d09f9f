//! etcd 3.4 and later: the order of entries is the lock.
//!
//! Each claim has a key below its name, with an etcd lease of its process. The oldest one holds the name. Its deletion is the grant of the
//! next one, whose process learns that from a watch. `engine/entries/` has the rules.
//!
//! - `store.rs`, `txn.rs`: the requests. `layout.rs`: the keys and values. `leases.rs`: the etcd leases. `config.rs`: the URL.
//! - `client/`: HTTP/2 and gRPC.
//!
//! # Requests
//! - An attempt is one transaction: it creates the key if the name is free, and otherwise enters the queue. If a share is granted beside
//!   others, a second one makes its entry that of a lease; one that does not wait reads first. Waiters of one name and
//!   process enter one after the other, because etcd does not order the keys of one transaction.
//! - A renewal compares the revisions of up to 100 keys in a transaction that writes nothing. Every other change reads the entries and
//!   writes their records again, if they are unchanged.
//! - A transfer writes the record of the key, which keeps the position.

mod client;
mod config;
mod layout;
mod leases;
mod store;
#[cfg(test)]
mod tests;
mod txn;

use std::slice;
use std::sync::Arc;

use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;

use self::client::Watches;
pub use self::config::EtcdConfig;
use self::store::Etcd;
use super::Result;
use super::entries::{EntryEngine, Store};
use crate::error::EngineError;
use crate::model::Key;

/// Connects to a member, logs in, and reads a name.
///
/// # Errors
/// Those of the connection, of the login, and a missing permission.
pub(super) async fn connect(config: EtcdConfig) -> Result<Arc<EntryEngine>> {
    Ok(Arc::new(open(config).await?.1))
}

async fn open(config: EtcdConfig) -> Result<(Arc<Etcd>, EntryEngine)> {
    let running = CancellationToken::new();
    let mut members = config.servers.list.len();
    let (watches, changes) = Watches::new();
    let store_timeout = config.servers.store_timeout;
    let create = |local| Etcd::new(config, local, watches);
    let (store, engine) = EntryEngine::new(create, running.clone(), store_timeout);
    let name = Key::new("connect").map_err(|error| EngineError::new(store::NAME, "connect", false, error))?;
    let read = loop {
        match store.read(slice::from_ref(&name), None).await {
            // A member without a leader: the next request goes to another one.
            Err(failure) if failure.is_sent && failure.passes && members > 1 => members -= 1,
            read => break read,
        }
    };
    read.map_err(|failure| failure.of(store::NAME, "connect"))?;
    let keeping = store.clone().keep_waiters();
    let client = store.client.clone();
    let watching = async move { client.serve_watches(changes).await };
    tokio::spawn(running.clone().run_until_cancelled_owned(watching).boxed());
    tokio::spawn(running.run_until_cancelled_owned(keeping).boxed());
    Ok((store, engine))
}
