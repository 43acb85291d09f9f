//! Subscribes to failovers at the sentinels, and closes connections to the old master.
//!
//! A connection to a replaced master may stay open: the master hangs, or is cut off from the sentinels but not from this
//! process, and for some time accepts writes that will be lost. So the events of every sentinel are subscribed ("Subscribe
//! to Sentinel events to improve responsiveness" in the guidelines that `sentinel.rs` follows). Without a subscription, the
//! first failed call shows a failover.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use redis::{ConnectionInfo, RedisResult};
use tokio::task::AbortHandle;

use crate::backoff::Backoff;
use crate::engine::redis::config::{Sentinels, client};
use crate::engine::redis::connection::Link;

const CHANNEL: &str = "+switch-master";
/// The backoff for a sentinel without a subscription.
const RESUBSCRIBE: Backoff = Backoff::new(Duration::from_millis(300), Duration::from_secs(45)).with_jitter(2.0 / 3.0);

/// The subscriptions to all sentinels. They end when this is dropped.
pub(in super::super) struct FailoverMonitor(Vec<AbortHandle>);

impl FailoverMonitor {
    /// Subscribes for these links.
    pub(in super::super) fn start(sentinels: &Arc<Sentinels>, links: &[&Arc<Link>], limit: Duration) -> Self {
        let links: Vec<Weak<Link>> = links.iter().map(|link| Arc::downgrade(link)).collect();
        let tasks = sentinels.sentinels.iter().map(|sentinel| {
            let listener = Listener {
                sentinels: sentinels.clone(),
                sentinel: sentinel.clone(),
                links: links.clone(),
                limit,
            };
            tokio::spawn(listener.run().boxed()).abort_handle()
        });
        FailoverMonitor(tasks.collect())
    }
}

impl Drop for FailoverMonitor {
    fn drop(&mut self) {
        for task in &self.0 {
            task.abort();
        }
    }
}

struct Listener {
    sentinels: Arc<Sentinels>,
    sentinel: ConnectionInfo,
    links: Vec<Weak<Link>>,
    /// The longest time to connect.
    limit: Duration,
}

impl Listener {
    async fn run(self) {
        let mut backoff = RESUBSCRIBE;
        loop {
            match self.listen(&mut backoff).await {
                Ok(()) => tracing::debug!("a sentinel closed the connection"),
                Err(error) => tracing::debug!(%error, "no subscription to a sentinel"),
            }
            tokio::time::sleep(backoff.delay()).await;
        }
    }

    async fn listen(&self, backoff: &mut Backoff) -> RedisResult<()> {
        let subscribing = async {
            let client = client(self.sentinel.clone(), self.sentinels.tls.as_ref())?;
            let mut listening = client.get_async_pubsub().await?;
            listening.subscribe(CHANNEL).await?;
            RedisResult::Ok(listening)
        };
        let mut listening = match tokio::time::timeout(self.limit, subscribing).await {
            Ok(listening) => listening?,
            Err(_) => return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
        };
        backoff.reset();
        // An event before the subscription was lost.
        self.leave_old_master().await;
        let mut events = listening.on_message();
        while let Some(event) = events.next().await {
            // <name of the master> <old host> <old port> <new host> <new port>
            let event = String::from_utf8_lossy(event.get_payload_bytes());
            if event.rsplitn(5, ' ').nth(4) == Some(&*self.sentinels.master) {
                self.leave_old_master().await;
            }
        }
        Ok(())
    }

    /// Closes every connection to a server that is not the master any more.
    async fn leave_old_master(&self) {
        let Ok(master) = self.sentinels.ask(self.limit).await else {
            return;
        };
        for link in self.links.iter().filter_map(Weak::upgrade) {
            link.leave_unless_at(&master);
        }
    }
}
