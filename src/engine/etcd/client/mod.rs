//! A client of etcd: one HTTP/2 connection to one of the members, with gRPC's framing.
//!
//! It sends only what holdfast needs. A request is answered or fails; nothing is repeated here, except after a new login.
//!
//! - It leaves a member that answers no request for a second, if there are others (`liveness.rs`), and one without a leader, which the
//!   header `hasleader` makes it report.
//! - etcd executes the requests of a connection in any order. So the answer to an attempt whose caller was dropped is awaited, and a
//!   release of its claim waits for it (`Store::wait_for_answers`).
//! - All watches share a stream (`watches.rs`). The probe of a connection is a request, because etcd closes connections with frequent
//!   pings.

mod connection;
mod framing;
mod liveness;
pub(super) mod messages;
mod status;
mod watches;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::{BoxFuture, Shared};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt, TryFutureExt};
use parking_lot::Mutex;
use prost::Message;
use tokio::time::{sleep, timeout};

use self::connection::Connection;
use self::framing::{decoded, encoded};
use self::messages::{AuthenticateRequest, AuthenticateResponse, RangeRequest, RangeResponse};
pub(super) use self::status::Kind;
use self::status::Status;
#[cfg(test)]
pub(super) use self::watches::Watch;
pub(super) use self::watches::Watches;
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::engine::entries;
use crate::engine::entries::servers::Servers;
use crate::model::{Claim, OwnerToken};

/// The delay before the next member is tried while the one before it has not answered (RFC 8305, "Connection Attempt Delay").
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// The life of a connection after which the next one is opened without a delay.
const SHORT_LIFE: Duration = Duration::from_secs(1);
/// The longest time for opening a connection, including its TLS handshake.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

const RANGE: &str = "/etcdserverpb.KV/Range";
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";

/// A request that failed.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub status: Status,
    /// The member, or all of them.
    address: String,
    /// Whether the server may have received it.
    is_sent: bool,
}

impl Failure {
    fn not_sent(status: Status, address: String) -> Self {
        Failure {
            status,
            address,
            is_sent: false,
        }
    }

    fn of(connection: &Connection, status: Status) -> Self {
        Failure {
            status,
            address: connection.server.to_string(),
            is_sent: true,
        }
    }
}

pub(super) type Outcome<T> = Result<T, Failure>;

impl From<Failure> for entries::Failure {
    fn from(failure: Failure) -> Self {
        entries::Failure {
            text: format!("{} ({})", failure.status, failure.address),
            passes: failure.status.is_passing(),
            is_sent: failure.is_sent,
        }
    }
}

type Opening = Shared<BoxFuture<'static, Outcome<Arc<Connection>>>>;

/// A client. It opens a connection with its first request, and another one when that is lost.
pub(super) struct Client {
    servers: Arc<Servers>,
    state: Mutex<State>,
    /// Whether any request was answered.
    has_answered: AtomicBool,
    /// Held during a login.
    login: tokio::sync::Mutex<()>,
}

struct State {
    current: Option<Arc<Connection>>,
    opening: Option<Opening>,
    /// The index of the member that is tried first.
    first: usize,
    /// The token of the login; empty: the server has no users.
    token: Option<Arc<str>>,
    is_closed: bool,
    /// When the last connection was begun, and the delays after short ones.
    begun: Option<Moment>,
    backoff: Backoff,
}

impl Client {
    pub(super) fn new(servers: Servers) -> Self {
        // The processes distribute themselves over the members.
        let first = fastrand::usize(..servers.list.len());
        Client {
            servers: Arc::new(servers),
            has_answered: AtomicBool::new(false),
            state: Mutex::new(State {
                first,
                current: None,
                opening: None,
                token: None,
                is_closed: false,
                begun: None,
                backoff: Backoff::for_store(),
            }),
            login: tokio::sync::Mutex::default(),
        }
    }

    /// Returns the members for messages.
    pub(super) fn address(&self) -> String {
        self.servers.to_string()
    }

    /// Makes a request. `attempt`: the claim of an attempt, which is marked as sent.
    pub(super) async fn call<A: Message + Default>(
        &self,
        path: &str,
        request: &impl Message,
        attempt: Option<&Claim>,
    ) -> Outcome<A> {
        let (bytes, connection) = self.send(path, encoded(request), attempt).await?;
        decoded(bytes).map_err(|status| self.failed(&connection, status))
    }

    /// Reads keys.
    pub(super) async fn range(&self, request: &RangeRequest) -> Outcome<RangeResponse> {
        self.call(RANGE, request, None).await
    }

    /// Compiled once for all kinds of requests.
    fn send<'a>(
        &'a self,
        path: &'a str,
        message: bytes::Bytes,
        attempt: Option<&'a Claim>,
    ) -> BoxFuture<'a, Outcome<(bytes::BytesMut, Arc<Connection>)>> {
        let sending = async move {
            let mut is_repeated = false;
            loop {
                let connection = self.connection().await?;
                let token = self.token(&connection).await?;
                let answer = connection.unary(path, token.as_deref(), message.clone(), attempt).await;
                self.has_answered
                    .fetch_or(!matches!(answer, Err(Status { kind: Kind::Broken, .. })), Relaxed);
                match answer {
                    Ok(bytes) => return Ok((bytes, connection)),
                    Err(status) if status.needs_login() && !is_repeated => {
                        self.forget_token(token.as_ref());
                        is_repeated = true;
                    }
                    Err(status) => return Err(self.failed(&connection, status)),
                }
            }
        };
        sending.boxed()
    }

    /// Waits until no attempt of an owner is without an answer.
    pub(super) async fn wait_for_answers(&self, owner: &OwnerToken) {
        let current = self.state.lock().current.clone();
        if let Some(connection) = current {
            connection.wait_for_answers(owner).await;
        }
    }

    /// Closes the connection. Later requests fail.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        if let Some(connection) = state.current.take() {
            connection.close();
        }
    }

    /// Returns the connection. Opens one if there is none: the task continues when this future is dropped.
    async fn connection(&self) -> Outcome<Arc<Connection>> {
        let opening = {
            let mut state = self.state.lock();
            let state = &mut *state;
            if let Some(current) = state.current.as_ref().filter(|current| !current.is_closed()) {
                return Ok(current.clone());
            }
            if state.is_closed {
                let status = Status::broken("the service is closed");
                return Err(Failure::not_sent(status, self.address()));
            }
            let open = || {
                let begun = state.begun.replace(Moment::now());
                // A server may close each connection at once.
                let delay = match begun.is_some_and(|begun| begun.elapsed() < SHORT_LIFE) {
                    true => state.backoff.delay(),
                    false => {
                        state.backoff.reset();
                        Duration::ZERO
                    }
                };
                let opening = open(self.servers.clone(), state.first, delay).boxed().shared();
                tokio::spawn(opening.clone().map(drop).boxed());
                opening
            };
            state.opening.get_or_insert_with(open).clone()
        };
        let opened = opening.clone().await;
        let mut state = self.state.lock();
        if state.opening.as_ref().is_some_and(|current| current.ptr_eq(&opening)) {
            state.opening = None;
            match &opened {
                Ok(connection) if state.is_closed => connection.close(),
                Ok(connection) => state.current = Some(connection.clone()),
                Err(_) => state.first = state.first.wrapping_add(1),
            }
        }
        drop(state);
        opened
    }

    /// Leaves a member that has failed, if there is another one.
    fn failed(&self, connection: &Arc<Connection>, status: Status) -> Failure {
        let servers = &self.servers.list;
        if matches!(status.kind, Kind::OfMember | Kind::Broken | Kind::Wrong) {
            let mut state = self.state.lock();
            let is_current = state
                .current
                .as_ref()
                .is_some_and(|current| Arc::ptr_eq(current, connection));
            if is_current && (servers.len() > 1 || status.kind == Kind::Broken) {
                state.current = None;
                // Also for the watches: nothing would detect that a connection without requests is dead.
                connection.close();
                let index = servers.iter().position(|server| *server == connection.server);
                state.first = index.unwrap_or_default() + 1;
            }
        }
        match self.has_answered.load(Relaxed) {
            true => Failure::of(connection, status),
            false => Failure::of(connection, connection.explained(status)),
        }
    }

    /// Returns the token of the login. `None`: there is no login in the URL.
    async fn token(&self, connection: &Arc<Connection>) -> Outcome<Option<Arc<str>>> {
        let Some((name, password)) = &self.servers.login else {
            return Ok(None);
        };
        let known = || self.state.lock().token.clone();
        if let Some(token) = known() {
            return Ok(Some(token));
        }
        let _login = self.login.lock().await;
        if let Some(token) = known() {
            return Ok(Some(token));
        }
        let request = AuthenticateRequest {
            name: name.clone(),
            password: password.clone(),
        };
        let answer = connection.unary(AUTHENTICATE, None, encoded(&request), None).await;
        let token: Arc<str> = match answer.and_then(decoded::<AuthenticateResponse>) {
            Ok(answer) => answer.token.into(),
            Err(status) if status.kind == Kind::NoUsers => "".into(),
            Err(status) => {
                let mut failure = self.failed(connection, status);
                failure.is_sent = false;
                return Err(failure);
            }
        };
        self.state.lock().token = Some(token.clone());
        Ok(Some(token))
    }

    fn forget_token(&self, token: Option<&Arc<str>>) {
        let mut state = self.state.lock();
        if state.token.as_ref() == token {
            state.token = None;
        }
    }
}

/// Connects to the first member that answers, beginning with the one at `first`, after `pause`.
async fn open(servers: Arc<Servers>, first: usize, pause: Duration) -> Outcome<Arc<Connection>> {
    sleep(pause).await;
    let count = servers.list.len();
    let mut waiting = (0..count).filter_map(|index| servers.list.get((first % count + index) % count));
    let mut attempts = FuturesUnordered::new();
    let mut failed: Option<Failure> = None;
    loop {
        let mut delay = Duration::MAX;
        if let Some(server) = waiting.next() {
            delay = ATTEMPT_DELAY;
            let opening = timeout(OPEN_TIMEOUT, Connection::open(server, servers.tls.as_ref(), count == 1));
            let text = format!("no connection within {} ms", OPEN_TIMEOUT.as_millis());
            let late = move |_| Err(Status::broken(text));
            let opening = opening.map(move |opened| opened.unwrap_or_else(late));
            attempts.push(opening.map_err(|status| Failure::not_sent(status, server.to_string())));
        }
        match timeout(delay, attempts.next()).await {
            // The next member is tried, too.
            Err(_) => {}
            Ok(Some(Ok(connection))) => return Ok(Arc::new(connection)),
            Ok(Some(Err(failure))) => {
                tracing::debug!(?failure, "cannot connect");
                // A permanent error only if no member has another one.
                if failure.status.is_passing() || failed.as_ref().is_none_or(|failed| !failed.status.is_passing()) {
                    failed = Some(failure);
                }
            }
            Ok(None) => break,
        }
    }
    Err(failed.unwrap_or_else(|| Failure::not_sent(Status::broken("no server"), servers.to_string())))
}
