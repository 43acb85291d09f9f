//! A connection that is opened again where necessary.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::error::{Failure, Kind};
use super::session::{Server, Session};

/// The time after a failed attempt to connect during which calls fail with it.
const CONNECT_PAUSE: Duration = Duration::from_millis(50);

/// A connection that is opened when it is needed.
pub(super) struct Slot {
    server: Arc<Server>,
    session: Option<Session>,
    /// The last failure to connect.
    failed: Option<(Instant, Failure)>,
}

impl Slot {
    pub(super) fn new(server: Arc<Server>, session: Option<Session>) -> Self {
        Slot {
            server,
            session,
            failed: None,
        }
    }

    /// Returns the connection. Opens it if necessary.
    pub(super) async fn session(&mut self) -> Result<&Session, Failure> {
        if self.session.as_ref().is_none_or(Session::is_unusable) {
            self.session = None;
            if let Some((at, failure)) = &self.failed
                && at.elapsed() < CONNECT_PAUSE
            {
                return Err(failure.clone());
            }
            match self.server.open(None).await {
                Ok(session) => self.session = Some(session),
                Err(failure) => {
                    self.failed = Some((Instant::now(), failure.clone()));
                    return Err(failure);
                }
            }
        }
        let closed = || Failure::unexpected(&self.server.address, "no connection");
        self.session.as_ref().ok_or_else(closed)
    }

    /// Returns the outcome of statements. After a failure that breaks the connection, the next call opens a new one.
    pub(super) fn settle<T>(&mut self, outcome: Result<T, Failure>) -> Result<T, Failure> {
        let is_broken = |failure: &Failure| matches!(failure.kind(), Kind::Broken | Kind::Pooled | Kind::NoTable);
        if let Err(failure) = &outcome
            && is_broken(failure)
            && let Some(session) = self.session.take()
            && failure.is_silence()
        {
            session.outdate_others();
        }
        outcome
    }
}
