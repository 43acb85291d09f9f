//! The task of a client: keeps a connection, and reads and writes on it.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::connection::{self, Connection};
use super::evidence::{self, Evidence};
use super::messages::{EVENT, Request, code};
use super::replies::{self, Connected, Reply};
use super::{ConnectFailure, Failure, SessionState, Shared, Sink, answer};
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::engine::entries::servers::Io;
use crate::engine::target::Server;

/// The longest message of a server that is kept, in bytes: that of the children of a node with some 200 000 of them.
const MAX_REPLY: usize = 16 << 20;
/// The length of the number, the zxid and the code of a message.
const HEAD: usize = 16;
/// The least room for a read, in bytes.
const IN_SIZE: usize = 16 << 10;
const UNEXPECTED: &str = "the server sent a message that is not one of ZooKeeper's protocol";
/// How many bytes are encoded before they are written.
const OUT_LIMIT: usize = 256 << 10;
/// A server without an answer for this long, or for a sixth of the session timeout, is left.
const SILENCE: Duration = Duration::from_millis(1500);
/// The delays between attempts while no server can be reached.
const RECONNECT: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(500));

pub(super) struct Session {
    shared: Arc<Shared>,
    current: Connected,
    last_zxid: i64,
    next_server: usize,
}

fn fail_queued(shared: &Shared, failure: &Failure) {
    let (urgent, requests) = {
        let mut queue = shared.queue.lock();
        (std::mem::take(&mut queue.urgent), std::mem::take(&mut queue.requests))
    };
    for pending in urgent.into_iter().chain(requests) {
        answer(pending.sink, Err(failure.clone()));
    }
}

impl Session {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        // Otherwise all processes would use the first server of their common list.
        let next_server = fastrand::usize(..shared.servers.list.len());
        Session {
            shared,
            current: Connected::default(),
            last_zxid: 0,
            next_server,
        }
    }

    /// Keeps a connection open until the client is closed, beginning with `first`.
    pub(super) async fn run(mut self, first: Connection) {
        let (shared, mut backoff) = (self.shared.clone(), RECONNECT);
        let mut opened = Ok(first);
        loop {
            let mut delay = backoff.delay();
            match opened {
                Ok(connection) => {
                    let began = Instant::now();
                    match self.serve(connection).await {
                        Ok(()) => break,
                        Err(error) => tracing::debug!(%error, address = %shared.address.lock(), "the connection broke"),
                    }
                    // A server may close each connection at once.
                    if began.elapsed() > Duration::from_secs(1) {
                        backoff.reset();
                        delay = Duration::ZERO;
                    }
                }
                Err(failure) => fail_queued(&shared, &Failure::Unreachable(failure)),
            }
            opened = tokio::select! {
                biased;
                () = shared.closing.cancelled() => break,
                opened = async { sleep(delay).await; self.open().await } => opened,
            };
        }
        shared.queue.lock().is_closed = true;
        fail_queued(&shared, &Failure::Closed);
        // Nothing is certain any more.
        shared.state.send_modify(|state| state.id = 0);
        shared.ended.cancel();
    }

    /// Connects to the first server that opens the session.
    pub(super) async fn open(&mut self) -> Result<Connection, ConnectFailure> {
        let mut failures: Vec<String> = Vec::new();
        let mut passes = false;
        for _ in 0..self.shared.servers.list.len() {
            let server = self.shared.servers.list[self.next_server].clone();
            self.next_server = (self.next_server + 1) % self.shared.servers.list.len();
            *self.shared.address.lock() = server.to_string();
            match self.open_at(&server).await {
                Ok(connection) => return Ok(connection),
                Err(failure) => {
                    passes |= failure.passes;
                    failures.push(format!("{server}: {}", failure.text));
                }
            }
        }
        Err(ConnectFailure::not_sent(failures.join("; "), passes))
    }

    async fn open_at(&mut self, server: &Server) -> Result<Connection, ConnectFailure> {
        let (servers, session_timeout) = (&self.shared.servers, self.shared.session_timeout);
        let limit = match self.current.id {
            // A new session is committed by a majority, which may take longer than the greeting of a session that moves.
            0 => SILENCE * 2,
            // The server may have chosen another timeout.
            _ => silence(self.shared.state.borrow().timeout),
        };
        for _ in 0..2 {
            let opening = connection::open(server, servers, session_timeout, &self.current, self.last_zxid);
            let late = |_| {
                Err(ConnectFailure::not_sent(
                    format!("no session within {} ms", limit.as_millis()),
                    true,
                ))
            };
            if let Some(connection) = timeout(limit, opening).await.unwrap_or_else(late)? {
                return Ok(connection);
            }
            // The server has closed that connection: the next one gets a new session.
            self.current = Connected::default();
        }
        Err(ConnectFailure::not_sent("the server opened no session", true))
    }

    /// Uses a connection until it breaks, which is an error, or the client is closed.
    async fn serve(&mut self, connection: Connection) -> io::Result<()> {
        let timeout = Duration::from_millis(connection.session.timeout_ms.into());
        let has_moved = self.current.id == connection.session.id;
        let evidence = Evidence::new(timeout, connection.sent, connection.answered);
        self.current = connection.session;
        let shared = self.shared.clone();
        shared.state.send_modify(|state| {
            *state = SessionState {
                id: self.current.id,
                timeout,
                // A majority commits a new session. The leader alone moves one.
                until: if has_moved { state.until } else { evidence.until() },
                longest: state.longest.max(timeout / 2),
            };
        });
        let (reader, writer) = tokio::io::split(connection.stream);
        let mut link = Link {
            shared: &shared,
            last_zxid: &mut self.last_zxid,
            session: self.current.id,
            next_sync: Instant::now() + evidence::interval(timeout),
            sync_interval: evidence::interval(timeout),
            evidence,
            silence: silence(timeout),
            last_heard: Instant::now(),
            number: 0,
            in_flight: VecDeque::new(),
            input: Input::default(),
            out: BytesMut::new(),
        };
        let ended = link.run(reader, writer).await;
        let why: Arc<str> = match &ended {
            Err(error) => error.to_string().into(),
            Ok(()) => "the client was closed".into(),
        };
        for (_, sink, _) in link.in_flight.drain(..) {
            answer(sink, Err(Failure::Broken(why.clone())));
        }
        shared.ended_connections.send_modify(|count| *count += 1);
        ended
    }
}

/// Returns how long a server may leave a request without an answer before the client tries another one.
fn silence(session_timeout: Duration) -> Duration {
    SILENCE.min(session_timeout / 6)
}

/// Writes bytes, and removes what is written. May be dropped and called again.
async fn write(writer: &mut WriteHalf<Box<dyn Io>>, out: &mut BytesMut) -> io::Result<()> {
    writer.write_all_buf(out).await?;
    writer.flush().await
}

/// The bytes that were received from a server.
#[derive(Default)]
struct Input {
    bytes: BytesMut,
    /// How many bytes of a message that was cut have not arrived yet.
    rest: usize,
}

impl Input {
    /// Returns the next message. `true`: it is longer than [`MAX_REPLY`], and cut behind its head.
    fn next(&mut self) -> Result<Option<(BytesMut, bool)>, &'static str> {
        let passed = self.rest.min(self.bytes.len());
        self.bytes.advance(passed);
        self.rest -= passed;
        let length = self.bytes.first_chunk().map(|length| i32::from_be_bytes(*length));
        let length = usize::try_from(length.unwrap_or_default()).map_err(|_| UNEXPECTED)?;
        let is_long = length > MAX_REPLY;
        let kept = if is_long { HEAD } else { length };
        let missing = (size_of::<i32>() + kept).saturating_sub(self.bytes.len());
        if missing > 0 {
            self.bytes.reserve(missing.max(IN_SIZE));
            return Ok(None);
        }
        self.bytes.advance(size_of::<i32>());
        self.rest = length - kept;
        Ok(Some((self.bytes.split_to(kept), is_long)))
    }
}

/// An open connection.
struct Link<'a> {
    shared: &'a Shared,
    last_zxid: &'a mut i64,
    session: i64,
    evidence: Evidence,
    next_sync: Instant,
    sync_interval: Duration,
    silence: Duration,
    last_heard: Instant,
    number: i32,
    /// With the numbers of the requests, and until when the session lasts if they are committed.
    in_flight: VecDeque<(i32, Sink, Option<Moment>)>,
    input: Input,
    out: BytesMut,
}

impl Link<'_> {
    async fn run(&mut self, mut reader: ReadHalf<Box<dyn Io>>, mut writer: WriteHalf<Box<dyn Io>>) -> io::Result<()> {
        let mut is_flushed = true;
        loop {
            self.encode();
            is_flushed &= self.out.is_empty();
            // Without requests the server owes no answer.
            let silent_at = (!self.in_flight.is_empty()).then(|| self.last_heard + self.silence);
            let timer = silent_at.map_or(self.next_sync, |at| at.min(self.next_sync));
            tokio::select! {
                biased;
                read = reader.read_buf(&mut self.input.bytes) => {
                    if read? == 0 {
                        return Err(io::Error::other("the server closed the connection"));
                    }
                    self.last_heard = Instant::now();
                    self.receive().map_err(io::Error::other)?;
                }
                () = self.shared.closing.cancelled() => {
                    self.close(&mut reader, &mut writer).await;
                    return Ok(());
                }
                written = write(&mut writer, &mut self.out), if !is_flushed => {
                    written?;
                    is_flushed = true;
                }
                () = self.shared.wake.notified() => {}
                () = sleep_until(timer) => {}
            }
            let now = Instant::now();
            if now > timer + self.silence / 4 {
                // This process was suspended: the server has had no time to answer.
                self.last_heard = now;
            }
            if now >= self.next_sync {
                self.next_sync = now + self.sync_interval;
                self.push(Request::sync("/"), Sink::Sync(Moment::now()));
            }
            if silent_at.is_some_and(|at| now >= at && self.last_heard + self.silence <= now) {
                let text = format!("no answer within {} ms", self.silence.as_millis());
                return Err(io::Error::other(text));
            }
        }
    }

    /// Encodes queued requests.
    fn encode(&mut self) {
        while self.out.len() < OUT_LIMIT {
            let next = {
                let mut queue = self.shared.queue.lock();
                queue.urgent.pop_front().or_else(|| queue.requests.pop_front())
            };
            match next {
                Some(pending) if pending.sink.is_dropped() => {}
                Some(pending) => self.push(pending.request, pending.sink),
                None => return,
            }
        }
    }

    fn push(&mut self, request: Request, sink: Sink) {
        if self.in_flight.is_empty() {
            // The time before a request is no silence.
            self.last_heard = Instant::now();
        }
        self.number = self.number.checked_add(1).unwrap_or(1);
        request.write(self.number, &mut self.out);
        let until = request.is_commit().then(|| self.evidence.until());
        self.in_flight.push_back((self.number, sink, until));
    }

    /// Handles all frames that have arrived.
    fn receive(&mut self) -> Result<(), &'static str> {
        while let Some((frame, is_cut)) = self.input.next()? {
            self.handle(&frame, is_cut)?;
        }
        if self.input.bytes.is_empty() && self.input.bytes.capacity() > OUT_LIMIT {
            self.input.bytes = BytesMut::new();
        }
        Ok(())
    }

    fn handle(&mut self, frame: &[u8], is_cut: bool) -> Result<(), &'static str> {
        let (head, body) = replies::head(frame).map_err(|_| UNEXPECTED)?;
        if head.number == EVENT {
            let (change, path) = replies::event(body).map_err(|_| UNEXPECTED)?;
            self.shared.events.get().inspect(|sink| sink(path, change));
            return Ok(());
        }
        let (number, sink, until) = self.in_flight.pop_front().ok_or(UNEXPECTED)?;
        if number != head.number {
            answer(sink, Err(Failure::Broken(UNEXPECTED.into())));
            return Err(UNEXPECTED);
        }
        *self.last_zxid = head.zxid.max(*self.last_zxid);
        if let (Sink::Sync(sent), code::OK) = (&sink, head.code) {
            self.evidence.answered(*sent, Moment::now());
        }
        if let (Some(until), code::OK) = (until, head.code)
            && replies::is_executed(body)
        {
            self.shared.state.send_if_modified(|state| {
                let is_later = until > state.until;
                state.until = until.max(state.until);
                is_later
            });
        }
        let reply = match head.code {
            code::OK if is_cut => Err(Failure::LongReply("nodes".into())),
            code::OK => Ok(Reply {
                body: body.to_vec(),
                session: self.session,
            }),
            code => Err(Failure::Refused(code)),
        };
        answer(sink, reply);
        match head.code {
            code::SESSION_EXPIRED => Err("the session has expired"),
            code::SESSION_MOVED => Err("the session has moved to another connection"),
            _ => Ok(()),
        }
    }

    /// Ends the session: sends what is queued, and waits until the server closes the connection.
    async fn close(&mut self, reader: &mut ReadHalf<Box<dyn Io>>, writer: &mut WriteHalf<Box<dyn Io>>) {
        self.encode();
        Request::close().write(0, &mut self.out);
        let closing = async {
            write(writer, &mut self.out).await?;
            let mut rest = vec![0; 4096];
            while reader.read(&mut rest).await? > 0 {}
            io::Result::Ok(())
        };
        let _ = timeout(self.silence, closing).await;
    }
}
