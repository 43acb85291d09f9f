//! Hearing of a fail-over from the sentinels, and leaving the old master then.
//!
//! A connection to a master that was replaced may live on without a sign: the master hangs, or is cut off from the
//! sentinels but not from this process, and for a while still takes writes that nobody will ever see. So every sentinel
//! is listened to ("Subscribe to Sentinel events to improve responsiveness" in the guidelines that `sentinel.rs` follows).
//! Where that cannot be had, a fail-over is noticed by the first call that fails.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use redis::{ConnectionInfo, RedisResult};
use tokio::task::AbortHandle;

use crate::engine::redis::config::{Sentinels, client};
use crate::engine::redis::connection::Link;

const CHANNEL: &str = "+switch-master";
/// Pauses before a sentinel that cannot be listened to is tried again.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The listening to all sentinels, which ends when this is dropped.
pub(in super::super) struct FailoverMonitor(Vec<AbortHandle>);

impl FailoverMonitor {
    /// Listens on behalf of these links.
    pub(in super::super) fn start(sentinels: &Arc<Sentinels>, links: &[&Arc<Link>], limit: Duration) -> Self {
        let links: Vec<Weak<Link>> = links.iter().map(|link| Arc::downgrade(link)).collect();
        let tasks = sentinels.sentinels.iter().map(|sentinel| {
            let listener = Listener {
                sentinels: sentinels.clone(),
                sentinel: sentinel.clone(),
                links: links.clone(),
                limit,
            };
            tokio::spawn(listener.run()).abort_handle()
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
    /// The longest that connecting may take.
    limit: Duration,
}

impl Listener {
    async fn run(self) {
        let mut pause = FIRST_PAUSE;
        loop {
            match self.listen(&mut pause).await {
                Ok(()) => tracing::debug!("a sentinel has hung up"),
                Err(error) => tracing::debug!(%error, "a sentinel cannot be listened to"),
            }
            tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn listen(&self, pause: &mut Duration) -> RedisResult<()> {
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
        *pause = FIRST_PAUSE;
        // What was told while nobody listened.
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

    /// Gives up every connection to a server that is not the master any more.
    async fn leave_old_master(&self) {
        let Ok(master) = self.sentinels.ask(self.limit).await else {
            return;
        };
        for link in self.links.iter().filter_map(Weak::upgrade) {
            link.leave_unless_at(&master);
        }
    }
}
