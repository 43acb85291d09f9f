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

/// How long after a failed attempt to connect the parts of the queue take turns on the open connections.
const TURN_TAKING: Duration = Duration::from_secs(1);

/// The connection of a task.
pub(super) struct LazySession<S: Server> {
    server: Arc<S>,
    session: Option<S::Session>,
    /// The last failure to connect.
    failed: Option<(Instant, Failure)>,
    /// Whether the connection was open when its current task began.
    was_open: bool,
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
            was_open: false,
        }
    }

    fn is_open(&self) -> bool {
        self.session.is_some()
    }

    /// Returns until when the parts of the queue take turns because this connection could not be opened. `None`: it is open, or no attempt
    /// has failed.
    fn turns_end(&self) -> Option<Instant> {
        let failed = self.failed.as_ref().filter(|_| !self.is_open());
        failed.map(|(at, _)| *at + TURN_TAKING)
    }

    pub(super) fn connections(&self) -> &Connections {
        self.server.connections()
    }

    /// Returns the connection. Opens it if necessary.
    pub(super) async fn session(&mut self) -> Outcome<&mut S::Session> {
        let is_usable = match &mut self.session {
            Some(session) => !session.connection().is_outdated() && session.check_before_use().await,
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
pub(super) struct IdleSessions<S: Server> {
    sessions: Vec<LazySession<S>>,
    /// The number of connections with a task that were open when the task began.
    open_in_use: usize,
    /// The number of turns so far. Modulo 3, the part that is next.
    turn: usize,
}

impl<S: Server> IdleSessions<S> {
    pub(super) fn new(first: LazySession<S>) -> Self {
        IdleSessions {
            sessions: vec![first],
            open_in_use: 0,
            turn: 0,
        }
    }

    /// Adds a connection whose task has ended. Those that are open are used first.
    pub(super) fn keep(&mut self, mut lazy: LazySession<S>) {
        self.open_in_use -= usize::from(std::mem::take(&mut lazy.was_open));
        let position = if lazy.is_open() { self.sessions.len() } else { 0 };
        self.sessions.insert(position, lazy);
    }

    /// Removes a connection for a task, or creates one.
    pub(super) fn take(&mut self, server: &Arc<S>) -> LazySession<S> {
        let new = || LazySession::new(server.clone(), None);
        let mut lazy = self.sessions.pop().unwrap_or_else(new);
        lazy.was_open = lazy.is_open();
        self.open_in_use += usize::from(lazy.was_open);
        lazy
    }

    /// Returns the parts of the queue that can be executed now, and whether the parts take turns. While they do, returns a single part that
    /// has jobs, and increments `turn`. `free`: the parts without a task.
    pub(super) fn executable(&mut self, free: [bool; 3], jobs: &Receiver) -> ([bool; 3], bool) {
        if self.turns_end().is_none_or(|end| end <= Instant::now()) {
            return (free, false);
        }
        let is_any_open = self.sessions.last().is_some_and(LazySession::is_open);
        let parts = match (is_any_open, self.open_in_use) {
            (false, 0) => free,
            (false, _) => [false; 3],
            (true, _) => {
                let parts = jobs.first_of(free, self.turn);
                self.turn += 1;
                parts
            }
        };
        (parts, true)
    }

    /// Returns until when the parts of the queue take turns. `None`: no connection failed to open.
    fn turns_end(&self) -> Option<Instant> {
        self.sessions.iter().filter_map(LazySession::turns_end).max()
    }

    /// Waits until the parts of the queue no longer take turns. Never completes if they do not take turns.
    pub(super) async fn turns_ended(&self) {
        match self.turns_end() {
            Some(end) => tokio::time::sleep_until(end).await,
            None => std::future::pending().await,
        }
    }
}
