//! A connection that is opened when it is needed.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::connection::Connections;
use super::error::{Failure, Kind};
use super::{Outcome, Server, Session};

/// The time after a failed attempt to connect during which calls fail with it.
const CONNECT_PAUSE: Duration = Duration::from_millis(50);

/// The connection of a task.
pub(super) struct Slot<S: Server> {
    server: Arc<S>,
    session: Option<S::Session>,
    /// The last failure to connect.
    failed: Option<(Instant, Failure)>,
}

/// Opens a connection within the store timeout, without its set-up.
pub(in crate::engine::sql) async fn connected<C: Session>(
    connections: &Connections,
    connecting: impl Future<Output = Outcome<C>>,
) -> Outcome<C> {
    let limit = connections.store_timeout;
    let opened = timeout(limit, connecting).await;
    let opened = opened.unwrap_or_else(|_| Err(Failure::unanswered(connections, limit, Kind::Broken)));
    opened.map_err(Failure::not_sent)
}

/// Opens a connection within the store timeout. Creates the tables if they are missing.
pub(in crate::engine::sql) async fn open<S: Server>(server: &Arc<S>) -> Outcome<S::Session> {
    let (connections, limit) = (server.connections(), server.connections().store_timeout);
    let mut session = connected(connections, server.connect()).await?;
    if let Ok(ready) = timeout(limit, session.set_up()).await {
        return ready.map(|()| session).map_err(Failure::not_sent);
    }
    drop(session.connection().cancel());
    Err(Failure::unanswered(connections, limit, Kind::Broken).not_sent())
}

/// Opens a connection as [`open`] does, again without prepared statements if there is a pooler.
pub(in crate::engine::sql) async fn open_first<S: Server>(server: &Arc<S>) -> Outcome<S::Session> {
    match open(server).await {
        Err(failure) if failure.kind() == Kind::Pooled => open(server).await,
        opened => opened,
    }
}

impl<S: Server> Slot<S> {
    pub(super) fn new(server: Arc<S>, session: Option<S::Session>) -> Self {
        Slot {
            server,
            session,
            failed: None,
        }
    }

    pub(super) fn connections(&self) -> &Connections {
        self.server.connections()
    }

    /// Returns the connection. Opens it if necessary.
    pub(super) async fn session(&mut self) -> Outcome<&mut S::Session> {
        let is_usable = match &mut self.session {
            Some(session) => !session.connection().is_outdated() && session.is_usable().await,
            None => false,
        };
        if !is_usable {
            self.session = None;
            if let Some((at, failure)) = &self.failed
                && at.elapsed() < CONNECT_PAUSE
            {
                return Err(failure.clone());
            }
            match open(&self.server).await {
                Ok(session) => self.session = Some(session),
                Err(failure) => {
                    self.failed = Some((Instant::now(), failure.clone()));
                    return Err(failure);
                }
            }
        }
        let connections = self.server.connections();
        self.session
            .as_mut()
            .ok_or_else(|| Failure::unexpected(connections, "no connection"))
    }

    /// Returns the outcome of statements. After a failure that breaks the connection, the next call opens a new one.
    pub(super) fn settle<T>(&mut self, outcome: Outcome<T>) -> Outcome<T> {
        let is_broken = |failure: &Failure| matches!(failure.kind(), Kind::Broken | Kind::Pooled | Kind::NoTable);
        if let Err(failure) = &outcome
            && is_broken(failure)
            && let Some(session) = self.session.take()
            && failure.is_silence()
        {
            session.connection().outdate_others();
        }
        outcome
    }
}
