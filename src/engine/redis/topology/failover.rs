//! Subscribes to failovers at the sentinels, and closes connections to the old master.
//!
//! A connection to a replaced master may stay open: the master hangs, or is cut off from the sentinels but not from this
//! process, and for some time accepts writes that will be lost. So the events of every sentinel are subscribed ("Subscribe
//! to Sentinel events to improve responsiveness" in the guidelines that `sentinel.rs` follows). Without a subscription, the
//! first failed call shows a failover.

use std::convert::Infallible;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use redis::{ConnectionInfo, RedisResult};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::backoff::Backoff;
use crate::engine::Warnings;
use crate::engine::redis::config::{Sentinels, show_address};
use crate::engine::redis::connection::Link;
use crate::engine::redis::connection::dial::Dialed;
use crate::engine::redis::error::Failure;
use crate::engine::redis::ops::inspect::text;

const CHANNEL: &str = "+switch-master";
/// The backoff for a sentinel without a subscription.
const RESUBSCRIBE: Backoff = Backoff::new(Duration::from_millis(300), Duration::from_secs(45)).with_jitter(2.0 / 3.0);
/// How long no sentinel may be subscribed before a warning.
const WARN_AFTER: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 60 });

/// The subscriptions to all sentinels. They end when this is dropped.
pub(in super::super) struct FailoverMonitor(Vec<AbortHandle>);

impl FailoverMonitor {
    /// Subscribes for these links.
    pub(in super::super) fn start(
        sentinels: &Arc<Sentinels>,
        links: &[&Arc<Link>],
        limit: Duration,
        warnings: Option<Arc<Warnings>>,
    ) -> Self {
        let links: Vec<Weak<Link>> = links.iter().map(|link| Arc::downgrade(link)).collect();
        let subscribed = Arc::new(watch::Sender::new((0, String::new())));
        let warning = warn_without_subscription(sentinels.clone(), subscribed.subscribe(), warnings);
        let warning = tokio::spawn(warning.boxed()).abort_handle();
        let tasks = sentinels.sentinels.iter().map(|sentinel| {
            let listener = Listener {
                sentinels: sentinels.clone(),
                sentinel: sentinel.clone(),
                links: links.clone(),
                limit,
                subscribed: subscribed.clone(),
            };
            tokio::spawn(listener.run().boxed()).abort_handle()
        });
        FailoverMonitor(tasks.chain([warning]).collect())
    }
}

/// Warns when no sentinel has been subscribed for a while. `subscribed`: the number of subscribed sentinels, and the last error.
async fn warn_without_subscription(
    sentinels: Arc<Sentinels>,
    mut subscribed: watch::Receiver<(usize, String)>,
    warnings: Option<Arc<Warnings>>,
) {
    let Some(warnings) = warnings else { return };
    loop {
        let any = subscribed.wait_for(|(count, _)| *count > 0);
        let any = tokio::time::timeout(WARN_AFTER, any).await;
        match any.map(|any| any.is_ok()) {
            Ok(true) => {}
            Ok(false) => return,
            Err(_) => {
                let error = subscribed.borrow().1.clone();
                return warnings.warn(format!(
                    "{sentinels}: none has accepted a subscription to {CHANNEL} for {} s, so the calls after a failover fail \
                     until they time out; the last error: {error}",
                    WARN_AFTER.as_secs()
                ));
            }
        }
        if subscribed.wait_for(|(count, _)| *count == 0).await.is_err() {
            return;
        }
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
    /// The number of subscribed sentinels, and the last error.
    subscribed: Arc<watch::Sender<(usize, String)>>,
}

impl Listener {
    async fn run(self) {
        let mut backoff = RESUBSCRIBE;
        loop {
            let Err(error) = self.listen(&mut backoff).await;
            let error = Failure::connect(&show_address(self.sentinel.addr()).into(), error).to_string();
            tracing::debug!(error, "no subscription to a sentinel");
            self.subscribed.send_modify(|(_, last)| *last = error);
            tokio::time::sleep(backoff.delay()).await;
        }
    }

    /// Listens until the connection ends.
    async fn listen(&self, backoff: &mut Backoff) -> RedisResult<Infallible> {
        let subscribing = async {
            let mut dialed = Dialed::connect(&self.sentinel, self.sentinels.tls.as_ref()).await?;
            dialed.log_in_to_sentinel(self.sentinel.redis_settings()).await?;
            dialed.ask(redis::cmd("SUBSCRIBE").arg(CHANNEL)).await?;
            RedisResult::Ok(dialed)
        };
        let mut listening = match tokio::time::timeout(self.limit, subscribing).await {
            Ok(listening) => listening?,
            Err(_) => return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
        };
        backoff.reset();
        self.subscribed.send_modify(|(count, _)| *count += 1);
        // An event before the subscription was lost.
        self.leave_old_master().await;
        let ended = loop {
            let event = match listening.next().await {
                Ok(event) => event,
                Err(error) => break error,
            };
            // <name of the master> <old host> <old port> <new host> <new port>
            let event = event.as_sequence().and_then(|fields| text(fields.get(2)?));
            if event.and_then(|event| event.rsplitn(5, ' ').nth(4)) == Some(&*self.sentinels.master) {
                self.leave_old_master().await;
            }
        };
        // Between the increment and this line only the end of the task ends this function, and then the warning task ends, too.
        self.subscribed.send_modify(|(count, _)| *count -= 1);
        Err(ended)
    }

    /// Closes every connection to a server that is not the master any more.
    async fn leave_old_master(&self) {
        let Ok((host, port)) = self.sentinels.ask(self.limit).await else {
            return;
        };
        for link in self.links.iter().filter_map(Weak::upgrade) {
            link.leave_others(&link.config().at(host.clone(), port));
        }
    }
}
