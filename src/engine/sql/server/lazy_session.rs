//! Connections that are opened when they are needed.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::connection::Connections;
use super::error::{Failure, Kind};
use super::{Outcome, Server, Session};
use crate::engine::sql::jobs::Receiver;

/// The time after a failed attempt to connect during which calls fail with it.
const CONNECT_PAUSE: Duration = Duration::from_millis(50);

/// The time after a failed attempt to connect during which the open connections take turns instead of opening another one.
const TURNS: Duration = Duration::from_secs(1);

/// The connection of a task.
pub(super) struct LazySession<S: Server> {
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

impl<S: Server> LazySession<S> {
    pub(super) fn new(server: Arc<S>, session: Option<S::Session>) -> Self {
        LazySession {
            server,
            session,
            failed: None,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.session.is_some()
    }

    /// Whether it could not be opened a moment ago: the server has no free connection, for example.
    pub(super) fn has_failed(&self) -> bool {
        let is_recent = |(at, _): &(Instant, Failure)| at.elapsed() < TURNS;
        !self.is_open() && self.failed.as_ref().is_some_and(is_recent)
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
            .ok_or_else(|| Failure::new(connections, Kind::Broken, "the connection was not opened".to_owned()))
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

/// The connections without a task. The last one is used next.
pub(super) struct IdleSessions<S: Server>(Vec<LazySession<S>>);

impl<S: Server> IdleSessions<S> {
    pub(super) fn new(first: LazySession<S>) -> Self {
        IdleSessions(vec![first])
    }

    /// Adds a connection. Those that are open are used first.
    pub(super) fn keep(&mut self, lazy: LazySession<S>) {
        let position = if lazy.is_open() { self.0.len() } else { 0 };
        self.0.insert(position, lazy);
    }

    /// Removes a connection, or creates one.
    pub(super) fn take(&mut self, server: &Arc<S>) -> LazySession<S> {
        self.0.pop().unwrap_or_else(|| LazySession::new(server.clone(), None))
    }

    /// Returns those of the parts of a queue that can be executed now. `free`: those without a task.
    pub(super) fn executable(&self, free: [bool; 3], jobs: &Receiver) -> [bool; 3] {
        let is_any_open = self.0.last().is_some_and(LazySession::is_open);
        if !self.0.iter().any(LazySession::has_failed) || (!is_any_open && free == [true; 3]) {
            return free;
        }
        // The connections that are open take turns.
        if is_any_open { jobs.first_of(free) } else { [false; 3] }
    }
}
