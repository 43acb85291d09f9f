//! The end of a service: a drain, if there is one, and the close.
//!
//! A drain ends waits and rejects new calls. The calls of a holder (extend, release) are rejected only by the close. A close ends the
//! leases in two steps: each one becomes lost, and when the event loop has delivered the losses, the store releases them. So a job has
//! seen its signal abort before the next holder is granted the name.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::Locks;
use super::options::{DRAIN_CHECK_INTERVAL, MIN_CLOSE_STEP, UNUSED_CHECK_INTERVAL};

impl Locks {
    /// Ends waits and rejects new calls with `LOCK_CLOSED`.
    pub fn end_calls(&self) {
        self.shared.draining.cancel();
    }

    /// Records whether jobs run: a drain waits for them, also after the end of their leases.
    pub fn set_runs_jobs(&self, runs_jobs: bool) {
        self.shared.runs_jobs.store(runs_jobs, Relaxed);
    }

    /// Ends the calls, and waits until all leases and jobs have ended, for `limit` at most.
    ///
    /// # Behavior
    /// Leases continue: they are renewed, and can be extended and released. A close ends the drain.
    pub async fn drain(&self, limit: Duration) {
        self.end_calls();
        let shared = &self.shared;
        let drained = async {
            while shared.counters.lock().held > 0 || shared.runs_jobs.load(Relaxed) {
                tokio::time::sleep(DRAIN_CHECK_INTERVAL).await;
            }
        };
        tokio::select! {
            () = drained => {}
            () = shared.closing.cancelled() => {}
            () = tokio::time::sleep(limit) => {}
        }
    }

    /// Closes a service without an owner, as soon as it has no lease, call or job. Returns whether this call closed it.
    pub async fn close_unused(&self) -> bool {
        let shared = &self.shared;
        while shared.counters.lock().held > 0
            || !shared.calls.is_empty()
            || shared.runs_jobs.load(Relaxed)
            || !shared.abandoned.is_empty()
        {
            tokio::select! {
                () = shared.closing.cancelled() => return false,
                () = tokio::time::sleep(UNUSED_CHECK_INTERVAL) => {}
            }
        }
        if shared.closing.is_cancelled() {
            return false;
        }
        self.close().await;
        true
    }

    /// Closes the service like [`Locks::close_after`], for holders that see a loss at once.
    pub async fn close(&self) -> usize {
        self.close_after(std::future::ready(())).await
    }

    /// Releases what is held, ends waits with `LOCK_CLOSED`, and closes the engine. Later calls fail with `LOCK_CLOSED`. May be
    /// called again.
    ///
    /// # Behavior
    /// The leases that are held become lost for their holders. They are released in the store after `losses_delivered`, which
    /// completes when the holders have seen that: the next holder is granted the name later. The close ends within
    /// `store_timeout`, or up to 1 s later when the store or the holders do not answer. Returns the number of claims that the store
    /// may still have: their releases had no answer until then. Returns 0 if an earlier call has closed the service.
    pub async fn close_after(&self, losses_delivered: impl Future<Output = ()>) -> usize {
        let shared = &self.shared;
        let mut unreleased = 0;
        shared
            .closed
            .get_or_init(|| async {
                self.end_calls();
                shared.closing.cancel();
                let deadline = tokio::time::Instant::now() + shared.store_timeout;
                // The minimum for a step after the deadline.
                let timeout = || deadline.max(tokio::time::Instant::now() + MIN_CLOSE_STEP);
                shared.calls.close();
                let _ = tokio::time::timeout_at(timeout(), shared.calls.wait()).await;
                let mut ended = shared.scheduler.held();
                ended.retain(|lease| lease.end_for_close(shared));
                if !ended.is_empty() {
                    let _ = tokio::time::timeout_at(timeout(), losses_delivered).await;
                }
                for lease in ended {
                    lease.release_for_close(shared);
                }
                let _ = tokio::time::timeout_at(timeout(), shared.abandoned.emptied()).await;
                unreleased = shared.abandoned.unreleased();
                shared.abandoned.close();
                shared.ended.cancel();
                shared.leases_by_name.lock().clear();
                shared.background.close();
                let _ = tokio::time::timeout_at(timeout(), shared.background.wait()).await;
                let _ = tokio::time::timeout_at(timeout(), shared.engine.close()).await;
            })
            .await;
        unreleased
    }

    /// Returns the warning of a close that left claims in the store.
    pub fn unreleased_warning(&self, count: usize) -> String {
        let (timeout, address) = (
            self.shared.store_timeout.as_millis(),
            self.shared.engine.describe().address,
        );
        let store = [self.engine_name(), " ", &address].concat();
        format!(
            "close() ended with {count} locks or waits whose release had no answer from {} within {timeout} ms (storeTimeoutMs): each \
             lock stays busy until its ttl ends. Release locks before close(), use drainMs, or raise storeTimeoutMs",
            store.trim_end()
        )
    }
}
