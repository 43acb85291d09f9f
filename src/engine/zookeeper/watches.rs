//! The watches of names: what they report changes the mirrors.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;

use super::client::{self, Event, Failure, Request, code};
use super::layout::Child;
use super::store::Zookeeper;
use crate::engine::entries::{Change, Watch};
use crate::model::Key;

/// The time until a watch that the server has refused is tried again.
const WATCH_RETRY: Duration = Duration::from_secs(1);

impl Zookeeper {
    pub(super) fn receive_events(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        self.client.set_events(Box::new(move |event| {
            if let Some(store) = weak.upgrade() {
                store.handle(event);
            }
        }));
    }

    /// Handles an event, on the task of the connection.
    fn handle(self: &Arc<Self>, event: Event<'_>) {
        match event {
            Event::Connected => {
                for name in self.local.names() {
                    self.local.lost(&name);
                    self.open_watch(&name);
                }
            }
            Event::Node { path, change } => {
                let Some((name, child)) = self.layout.split(path) else {
                    return;
                };
                let Some(child) = Child::parse(child) else { return };
                let change = match change {
                    client::Change::Created => Change::Created(child.mirrored()),
                    client::Change::Deleted => Change::Deleted(child.id()),
                    client::Change::Other => return,
                };
                self.local.changed(&name, self.next_revision(), vec![change]);
            }
        }
    }

    fn next_revision(&self) -> u64 {
        self.revision.fetch_add(1, Relaxed) + 1
    }

    /// Opens and closes the watches of names.
    pub(super) async fn run_watches(weak: Weak<Self>, mut watches: UnboundedReceiver<Watch>) {
        while let (Some(watch), Some(store)) = (watches.recv().await, weak.upgrade()) {
            match watch {
                Watch::Open(name) => store.open_watch(&name),
                Watch::Close(name) => {
                    let request = Request::remove_watches(&store.layout.folder(&name));
                    store.client.call_in_order(request, |_| {});
                }
            }
        }
    }

    /// Opens the watch of a name and reads its entries.
    fn open_watch(self: &Arc<Self>, key: &Key) {
        let folder = self.layout.folder(key);
        let (weak, name) = (Arc::downgrade(self), key.clone());
        self.client.call_in_order(Request::add_watch(&folder), move |answer| {
            let Some(store) = weak.upgrade() else { return };
            match answer {
                Ok(_) => _ = store.local.begin_read(&name),
                Err(failure) => store.watch_failed(name, &failure),
            }
        });
        let (weak, name) = (Arc::downgrade(self), key.clone());
        self.client.call_in_order(Request::children(&folder), move |answer| {
            let Some(store) = weak.upgrade() else { return };
            let names = match answer.and_then(|reply| Ok(reply.children()?.0)) {
                Ok(names) => names,
                // The server has removed the empty folder.
                Err(Failure::Refused(code::NO_NODE)) => Vec::new(),
                Err(failure) => return store.watch_failed(name, &failure),
            };
            let entries = Child::all(&names).into_iter().map(|child| child.mirrored());
            store.local.opened(&name, store.next_revision(), entries);
        });
    }

    /// Makes the waiters of a name attempt, because the server has refused the watch. (After a broken connection, all are opened.)
    fn watch_failed(self: &Arc<Self>, name: Key, failure: &Failure) {
        tracing::debug!(?failure, %name, "no watch");
        if !matches!(failure, Failure::Refused(_) | Failure::Malformed) {
            return;
        }
        let weak = Arc::downgrade(self);
        tokio::spawn(Box::pin(async move {
            tokio::time::sleep(WATCH_RETRY).await;
            if let Some(store) = weak.upgrade().filter(|store| store.local.names().contains(&name)) {
                store.local.wake_name(&name);
                store.open_watch(&name);
            }
        }));
    }
}
