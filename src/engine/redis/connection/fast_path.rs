//! Opens, replaces and closes the fast path beside a connection.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::MutexGuard;
use redis::ConnectionAddr;

use super::{FastPathSlot, Link, Slot, dial};
use crate::clock::Moment;
use crate::engine::redis::error::{Failure, broken};
use crate::engine::redis::fast_path::{FastPath, Record};
use crate::engine::redis::scripts::RECORD;

/// The pause before a fast path that broke, or could not be opened, is opened again. Meanwhile calls use the ordinary
/// connection.
const FAST_PATH_PAUSE: Duration = Duration::from_secs(1);
/// How long the records that a fast path left are sent again.
const RECORDED_WITHIN: Duration = Duration::from_secs(60);

/// A fast path to a node of a cluster is closed when no call has used it for this time.
const UNUSED: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 60 });

/// Closes a fast path that is not used any more. The next call opens another one.
async fn retire(link: Weak<Link>, number: u64) {
    loop {
        tokio::time::sleep(UNUSED).await;
        let Some(link) = link.upgrade() else { return };
        let mut slot = link.fast_path_slot();
        let FastPathSlot::Open(fast_path) = &*slot else { return };
        if fast_path.number() != number {
            return;
        }
        // Under the lock of the slot, from which callers get the fast path.
        if !link.fast_path_used.swap(false, Relaxed) && fast_path.is_idle() {
            fast_path.end();
            *slot = FastPathSlot::Empty(Moment::now());
            return;
        }
    }
}

/// Runs the watchdog of a fast path, and handles its end. Calls notice the end as well; a service that makes none has its records
/// stored all the same.
async fn watch(link: Weak<Link>, fast_path: Weak<FastPath>, watchdog: impl Future<Output = ()>) {
    watchdog.await;
    if let (Some(link), Some(fast_path)) = (link.upgrade(), fast_path.upgrade()) {
        link.end_fast_path(&fast_path);
    }
}

impl Link {
    pub(super) fn fast_path_slot(&self) -> MutexGuard<'_, FastPathSlot> {
        self.fast_path.lock()
    }

    /// Returns the fast path for a call on the event loop's own thread. `None`: the call uses the ordinary connection.
    pub(in super::super) fn fast_path(self: &Arc<Self>) -> Option<Arc<FastPath>> {
        self.config
            .event_loop
            .as_ref()
            .filter(|event_loop| event_loop.is_here())?;
        let mut slot = self.fast_path_slot();
        match &*slot {
            FastPathSlot::Open(fast_path)
                if fast_path.is_open() && !fast_path.health().is_lost(self.silence_limit()) =>
            {
                self.fast_path_used.store(true, Relaxed);
                return Some(fast_path.clone());
            }
            FastPathSlot::Open(fast_path) => {
                self.end_fast_path(fast_path);
                *slot = FastPathSlot::Empty(Moment::now() + FAST_PATH_PAUSE);
                drop(slot);
                // The server's name may have another address now. Both connections must lead to the same server.
                let generation = self.state().generation;
                self.lose(generation);
            }
            FastPathSlot::Empty(next) if next.is_past() => {
                *slot = FastPathSlot::Opening;
                let link = self.clone();
                self.runtime
                    .spawn(FutureExt::boxed(async move { link.open_fast_path().await }));
            }
            FastPathSlot::Empty(_) | FastPathSlot::Opening | FastPathSlot::Closed => {}
        }
        None
    }

    /// Returns the fast path, if it is open, from any thread.
    pub(in super::super) fn current_fast_path(&self) -> Option<Arc<FastPath>> {
        match &*self.fast_path_slot() {
            FastPathSlot::Open(fast_path) if fast_path.is_open() => Some(fast_path.clone()),
            _ => None,
        }
    }

    /// Allows the fast path to be opened by the first call that needs it.
    pub(in super::super) fn allow_fast_path(&self) {
        *self.fast_path_slot() = FastPathSlot::Empty(Moment::now());
    }

    /// Defers the record of a grant to the end of the tick.
    pub(in super::super) fn record_later(self: &Arc<Self>, fast_path: &FastPath, record: Record) {
        fast_path.record_later(record);
        // It may have ended before, on another thread.
        if !fast_path.is_open() {
            self.end_fast_path(fast_path);
        }
    }

    /// Ends the fast path. Its unstored records are sent on the ordinary connection.
    fn end_fast_path(self: &Arc<Self>, fast_path: &FastPath) {
        fast_path.end();
        let records = fast_path.take_records();
        if records.is_empty() {
            return;
        }
        let link = Arc::downgrade(self);
        self.runtime.spawn(FutureExt::boxed(async move {
            let end = Moment::now() + RECORDED_WITHIN;
            for call in records {
                // The ordinary connection may be broken as well.
                while let Some(link) = link.upgrade() {
                    match link.run(&RECORD, &call).await {
                        Err(failure) if failure.retryable() && !end.is_past() => {
                            drop(link);
                            tokio::time::sleep(FAST_PATH_PAUSE).await;
                        }
                        _ => break,
                    }
                }
            }
        }));
    }

    /// Closes the fast path together with the ordinary connection.
    pub(super) fn lose_fast_path(self: &Arc<Self>) {
        let mut slot = self.fast_path_slot();
        if let FastPathSlot::Open(fast_path) = &*slot {
            self.end_fast_path(fast_path);
            *slot = FastPathSlot::Empty(Moment::now() + FAST_PATH_PAUSE);
        }
    }

    /// Returns the address of the server. `None`: sentinels report it, and there is no connection now.
    fn current_address(&self) -> Option<ConnectionAddr> {
        if self.config.sentinels().is_none() {
            return Some(self.config.server.addr().clone());
        }
        match &self.state().slot {
            Slot::Open(connection) if !connection.health.is_dead() => Some(connection.address.clone()),
            _ => None,
        }
    }

    /// Opens the fast path, if there is an event loop to serve it and the server is reached by TCP, with or without TLS.
    ///
    /// Under Sentinel it leads to the server of the ordinary connection, and ends with that: a failover closes both.
    pub(in super::super) async fn open_fast_path(self: &Arc<Self>) {
        let Some(event_loop) = &self.config.event_loop else {
            return;
        };
        let opening = async {
            let Some(address) = self.current_address() else {
                return Err(Failure::Call(broken()));
            };
            let opened = dial::fast_path(&self.config, &address).await?;
            Ok(opened.map(|fast_path| (fast_path, address)))
        };
        let opened = tokio::time::timeout(self.limit(), opening).await;
        let opened = opened.unwrap_or_else(|_| Err(Failure::timed_out()));
        let mut slot = self.fast_path_slot();
        match &*slot {
            FastPathSlot::Closed => return,
            // Another task was faster, and calls are in flight there.
            FastPathSlot::Open(before) if before.is_open() => return,
            FastPathSlot::Open(before) => self.end_fast_path(before),
            FastPathSlot::Empty(_) | FastPathSlot::Opening => {}
        }
        *slot = match opened {
            // Under the lock of the slot: a connection that is replaced from here on ends this fast path.
            Ok(Some((fast_path, address))) if self.current_address().as_ref() != Some(&address) => {
                fast_path.end();
                FastPathSlot::Empty(Moment::now() + FAST_PATH_PAUSE)
            }
            Ok(Some((fast_path, _))) => {
                fast_path.clone().serve_on(&**event_loop);
                let (link, watched) = (Arc::downgrade(self), Arc::downgrade(&fast_path));
                self.runtime.spawn(watch(link, watched, fast_path.watchdog()).boxed());
                if !self.config.seeds().is_empty() {
                    self.runtime
                        .spawn(retire(Arc::downgrade(self), fast_path.number()).boxed());
                }
                FastPathSlot::Open(fast_path)
            }
            Ok(None) => FastPathSlot::Closed,
            Err(failure) => {
                tracing::debug!(%failure, address = &*self.address, "no fast path");
                FastPathSlot::Empty(Moment::now() + FAST_PATH_PAUSE)
            }
        };
    }
}
