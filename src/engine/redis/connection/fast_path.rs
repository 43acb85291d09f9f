//! Opens, replaces and closes the fast path beside a connection.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;

use super::{FastPathSlot, Link, dial};
use crate::clock::Moment;
use crate::engine::redis::fast_path::FastPath;
use crate::engine::redis::scripts::RECORD;

/// The pause before a fast path that broke, or could not be opened, is opened again. Meanwhile calls use the ordinary
/// connection.
const FAST_PATH_PAUSE: Duration = Duration::from_secs(1);
/// How long the records that a fast path left are sent again.
const RECORDED_WITHIN: Duration = Duration::from_secs(60);

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
                self.runtime.spawn(async move { link.open_fast_path().await });
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

    /// Ends the fast path. Its unstored records are sent on the ordinary connection.
    fn end_fast_path(self: &Arc<Self>, fast_path: &FastPath) {
        fast_path.end();
        let records = fast_path.take_records();
        if records.is_empty() {
            return;
        }
        let link = Arc::downgrade(self);
        self.runtime.spawn(async move {
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
        });
    }

    /// Closes the fast path together with the ordinary connection.
    pub(super) fn lose_fast_path(self: &Arc<Self>) {
        let mut slot = self.fast_path_slot();
        if let FastPathSlot::Open(fast_path) = &*slot {
            self.end_fast_path(fast_path);
            *slot = FastPathSlot::Empty(Moment::now() + FAST_PATH_PAUSE);
        }
    }

    /// Opens the fast path, if there is an event loop to serve it and the server is reached by plain TCP.
    pub(in super::super) async fn open_fast_path(self: &Arc<Self>) {
        let Some(event_loop) = &self.config.event_loop else {
            return;
        };
        let opened = tokio::time::timeout(self.limit(), dial::fast_path(&self.config)).await;
        let mut slot = self.fast_path_slot();
        if let FastPathSlot::Closed = *slot {
            return;
        }
        if let FastPathSlot::Open(before) = &*slot {
            self.end_fast_path(before);
        }
        *slot = match opened {
            Ok(Ok(Some(fast_path))) => {
                fast_path.clone().serve_on(&**event_loop);
                FastPathSlot::Open(fast_path)
            }
            Ok(Ok(None)) => FastPathSlot::Closed,
            _ => FastPathSlot::Empty(Moment::now() + FAST_PATH_PAUSE),
        };
    }
}
