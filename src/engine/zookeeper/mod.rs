//! `zookeeper://`: ZooKeeper 3.6 and later.
//!
//! A lock is the oldest of the sequential nodes in the folder of its name, as in Curator's recipe. The nodes are ephemeral: they
//! end with the session of the process. So no lease lasts longer than half of the session timeout without a renewal, which reads
//! the node and has evidence that the session lasts (`client/evidence.rs`). A node that keeps a name busy after its release
//! outlasts the session (`kept.rs`).
//!
//! - `store.rs`, `nodes.rs`: the requests. `layout.rs`: the paths. `kept.rs`: names that stay busy. `config.rs`: the URL. `error.rs`:
//!   errors.
//! - `client/`: jute, and the session.
//!
//! `engine/entries/` has the rules.
//!
//! # Requests
//! - An attempt sends the creations of its nodes, in one `multi`, together with the read of all its names at one point in time
//!   (`nodes.rs`). If an open mirror shows a node before the new one, a waiter reads nothing: the list of a long queue is large. After a
//!   lost reply an attempt creates a second node: the oldest one of an owner counts, and the others are deleted.
//! - A renewal is a sync and multi-reads of 100 nodes. It writes nothing. An attempt, a renewal and a transfer return only when the
//!   session certainly lasts for the whole lease (`Store::keep`).
//! - The fencing token is written to the node 50 ms after the grant, because most locks are released before. `inspect` and `list` wait for
//!   it.
//! - Data is written with the version that this engine knows. So the timer of a lease that another engine has restored deletes nothing.

mod client;
mod config;
mod error;
mod kept;
mod layout;
mod nodes;
mod store;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use self::client::Client;
pub use self::config::ZookeeperConfig;
use self::store::Zookeeper;
use super::Result;
use super::entries::{EntryEngine, Failure};

/// Opens a session, and creates the path of the URL if it is missing.
///
/// # Errors
/// When no server can be reached, or the login is refused.
pub(super) async fn connect(config: ZookeeperConfig) -> Result<Arc<EntryEngine>> {
    Ok(Arc::new(open(config).await?.1))
}

async fn open(config: ZookeeperConfig) -> Result<(Arc<Zookeeper>, EntryEngine)> {
    let failed = |failure: Failure| failure.of(store::NAME, "connect");
    let store_timeout = config.servers.store_timeout;
    let client = Client::connect(config.servers, config.session_timeout)
        .await
        .map_err(failed)?;
    let create = |local| Zookeeper::new(client, config.layout, local);
    let running = CancellationToken::new();
    let (store, engine) = EntryEngine::new(create, running.clone(), store_timeout);
    tokio::spawn(Box::pin(running.run_until_cancelled_owned(store.clone().end_kept())));
    let chroot = store.chroot().await.map_err(|refusal| store.failure(refusal));
    chroot.map_err(failed)?;
    Ok((store, engine))
}
