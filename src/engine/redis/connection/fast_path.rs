//! Opens, replaces and closes the fast path beside a connection.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;

use super::{FastPathSlot, Link, dial};
use crate::clock::Moment;
use crate::engine::redis::fast_path::FastPath;
use crate::engine::redis::scripts::RECORD;

/// How long a lane that broke, or could not be opened, is not tried again: meanwhile calls go the ordinary way.
const FAST_PATH_PAUSE: Duration = Duration::from_secs(1);
/// For how long it is tried to write down what a lane left.
const RECORDED_WITHIN: Duration = Duration::from_secs(60);

impl Link {
    pub(super) fn fast_path_slot(&self) -> MutexGuard<'_, FastPathSlot> {
        self.fast_path.lock()
    }

    /// The fast lane, for a call on the event loop's own thread. `None`: the call goes the ordinary way.
    pub(in super::super) fn fast_path(self: &Arc<Self>) -> Option<Arc<FastPath>> {
        self.config
            .event_loop
            .as_ref()
            .filter(|event_loop| event_loop.is_here())?;
        let mut slot = self.fast_path_slot();
        match &*slot {
            FastPathSlot::Open(fast_path) if fast_path.is_open() && !fast_path.health().is_lost(self.patience()) => {
                return Some(fast_path.clone());
            }
            FastPathSlot::Open(fast_path) => {
                self.give_up(fast_path);
                *slot = FastPathSlot::Empty(Moment::now() + FAST_PATH_PAUSE);
                drop(slot);
                // The server's name may lead to another one by now: both connections go to the same.
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

    /// Lets a lane be opened when there are calls for it, though it could not be, or has not been, when this link was made.
    pub(in super::super) fn allow_fast_path(&self) {
        *self.fast_path_slot() = FastPathSlot::Empty(Moment::now());
    }

    /// Ends a lane. What it has not written down goes by the connection beside it.
    fn give_up(self: &Arc<Self>, fast_path: &FastPath) {
        fast_path.end();
        let records = fast_path.take_records();
        if records.is_empty() {
            return;
        }
        let link = Arc::downgrade(self);
        self.runtime.spawn(async move {
            let end = Moment::now() + RECORDED_WITHIN;
            for call in records {
                // The other connection may be broken as well.
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

    /// Gives up the lane with the connection beside it.
    pub(super) fn lose_fast_path(self: &Arc<Self>) {
        let mut slot = self.fast_path_slot();
        if let FastPathSlot::Open(fast_path) = &*slot {
            self.give_up(fast_path);
            *slot = FastPathSlot::Empty(Moment::now() + FAST_PATH_PAUSE);
        }
    }

    /// Opens the fast lane, where there is an event loop to serve it and the server is reached by plain TCP.
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
            self.give_up(before);
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
