//! The session of an attempt. It ends what the server may still execute of the attempt.
//!
//! A write without an answer may be executed much later, and a release that overtakes it finds nothing to release. So the writes of an
//! attempt that create something use one session. The driver numbers them, for retries, and the server refuses a write whose number is
//! smaller than the last one (`TransactionTooOld`). One more write in the session, which changes nothing, waits for the writes that the
//! server has begun, and prevents those that it has not begun. A release of an attempt without an answer starts with this write.
//!
//! `docs/proofs/release-after-attempt.md` has the cases in which there are no such numbers.

use std::sync::Arc;

use mongodb::ClientSession;
use mongodb::bson::{Bson, doc};
use mongodb::options::{Acknowledgment, WriteConcern};
use tokio::sync::{MappedMutexGuard, Mutex, MutexGuard};

use crate::engine::mongodb::Outcome;
use crate::engine::mongodb::connection::pool::{Class, Connected, Pool};
use crate::engine::mongodb::fields::OWNER;

/// A session, and the client that it belongs to.
pub(crate) struct Session {
    pub(crate) connected: Arc<Connected>,
    pub(crate) session: ClientSession,
}

/// The session of an attempt. It is started with the first write.
#[derive(Clone, Default)]
pub(crate) struct AttemptSession(Arc<Mutex<Option<Session>>>);

impl AttemptSession {
    /// Returns the session for a write.
    pub(crate) async fn get(&self, pool: &Pool) -> Outcome<MappedMutexGuard<'_, Session>> {
        let mut slot = self.0.lock().await;
        let session = match slot.take() {
            Some(session) => session,
            None => {
                let connected = pool.connected();
                let session = connected.client.start_session().causal_consistency(false).await?;
                Session { connected, session }
            }
        };
        Ok(MutexGuard::map(slot, |slot| slot.insert(session)))
    }

    /// Waits until the server executes nothing more of the attempt. `id`: its first document.
    ///
    /// # Errors
    /// Those of the write. Then the server may still execute something.
    pub(crate) async fn end(&self, pool: &Arc<Pool>, id: Bson) -> Outcome<()> {
        // Before the permit: an earlier call may be in progress, whose caller was dropped.
        let mut slot = self.0.clone().lock_owned().await;
        let current = pool.clone();
        let write = || async move {
            // A client that was replaced does not answer.
            if let Some(Session { connected, session }) = &mut *slot
                && Arc::ptr_eq(connected, &current.connected())
            {
                let none = doc! { "_id": id, OWNER: { "$in": Bson::Array(Vec::new()) } };
                connected.releases.delete_one(none).session(session).await?;
            }
            *slot = None;
            Ok(())
        };
        pool.call(Class::EndSession, write).await
    }
}

/// Returns the write concern of a hand-off: that of the primary alone, with its journal. Where the primary is a part of every
/// majority, a write becomes visible to change streams with the next flush of the journal, after up to 100 ms unless a write
/// waits for it.
pub(crate) fn journaled() -> WriteConcern {
    WriteConcern::builder()
        .w(Acknowledgment::Nodes(1))
        .journal(true)
        .build()
}
