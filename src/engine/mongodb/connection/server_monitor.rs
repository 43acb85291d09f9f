//! The state of the servers, from the events of the driver's monitor.
//!
//! The driver searches for a server until its timeout, also where only another URL or certificate can help. So while an engine
//! connects, the monitor detects this. Later it detects the election of another primary, and describes the servers in errors.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mongodb::bson::Document;
use mongodb::bson::oid::ObjectId;
use mongodb::event::EventHandler;
use mongodb::event::sdam::{SdamEvent, TopologyDescription};
use mongodb::options::{ClientOptions, ServerAddress, Tls};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::clock::Moment;
use crate::engine::mongodb::connection::diagnostics;
use crate::engine::mongodb::error::Failure;
use crate::engine::probe::{self, Peer};

/// The port of a server where the URL has none.
const DEFAULT_PORT: u16 = 27017;

/// The majority counts as late if it is further behind the primary than this, in milliseconds.
const LATE_MS: i64 = 2000;

/// How long an unconfirmed write marks the set as without majority, if the primary does not report in this time.
const UNCONFIRMED_FOR: Duration = Duration::from_secs(15);

/// The state of the servers of a URL.
#[derive(Debug)]
pub(crate) struct ServerMonitor {
    hosts: Vec<ServerAddress>,
    set: Option<String>,
    has_tls: bool,
    servers: Mutex<HashMap<ServerAddress, ServerState>>,
    changed: Notify,
    topology: Mutex<Topology>,
    election: watch::Sender<Option<ObjectId>>,
    /// The last answer of a server to the driver's monitor, in nanoseconds of [`Moment`].
    answered: AtomicU64,
    /// The end of the state "without majority", in nanoseconds of [`Moment`]. 0: there is a majority.
    without_majority_until: AtomicU64,
}

/// The state of one server.
#[derive(Debug, Clone)]
enum ServerState {
    /// It answered, or may answer later.
    Usable,
    /// It closed the connection without an answer, and was not probed yet.
    Disconnected,
    /// It can only be used with another configuration.
    Unusable(String),
}

/// The driver's description of all servers.
#[derive(Debug, Default)]
struct Topology {
    /// The client that reports it. A client that was replaced reports an empty description at its end.
    id: Option<ObjectId>,
    description: Option<TopologyDescription>,
}

/// Returns the election that made a server the primary of a replica set, if it is the primary. Later elections are larger.
fn election(hello: &Document) -> Option<ObjectId> {
    hello.get_object_id("electionId").ok()
}

/// Whether the majority of the members has not confirmed the last writes of a primary. `None`: the server is no primary of a set.
fn is_majority_late(hello: &Document) -> Option<bool> {
    let is_primary = hello.get_bool("isWritablePrimary").unwrap_or(false);
    let last = hello.get_document("lastWrite").ok().filter(|_| is_primary)?;
    let ms = |field| last.get_datetime(field).ok().map(|date| date.timestamp_millis());
    Some(ms("lastWriteDate")?.saturating_sub(ms("majorityWriteDate")?) > LATE_MS)
}

impl ServerMonitor {
    pub(crate) fn new(options: &ClientOptions) -> Arc<Self> {
        Arc::new(ServerMonitor {
            hosts: options.hosts.clone(),
            set: options.repl_set_name.clone(),
            has_tls: matches!(options.tls, Some(Tls::Enabled(_))),
            servers: Mutex::default(),
            changed: Notify::new(),
            topology: Mutex::default(),
            election: watch::Sender::new(None),
            answered: AtomicU64::new(0),
            without_majority_until: AtomicU64::new(0),
        })
    }

    /// Returns the handler for the events of the driver.
    pub(crate) fn handler(self: &Arc<Self>) -> EventHandler<SdamEvent> {
        let monitor = self.clone();
        EventHandler::callback(move |event| match event {
            SdamEvent::ServerHeartbeatSucceeded(heartbeat) => {
                monitor.answered.store(Moment::now().to_nanos(), Relaxed);
                if let Some(is_late) = is_majority_late(&heartbeat.reply) {
                    let until = if is_late { u64::MAX } else { 0 };
                    monitor.without_majority_until.store(until, Relaxed);
                }
                let mismatch = monitor.replica_set_mismatch(&heartbeat.reply);
                let state = mismatch.map_or(ServerState::Usable, ServerState::Unusable);
                let election = election(&heartbeat.reply);
                // A primary that is cut off from its set reports an older election.
                monitor.election.send_if_modified(|last| {
                    let is_new = election > *last;
                    *last = election.max(*last);
                    is_new
                });
                monitor.update(heartbeat.server_address, state);
            }
            SdamEvent::ServerHeartbeatFailed(heartbeat) => {
                let text = heartbeat.failure.kind.to_string();
                let diagnosis = diagnostics::of_error(&text);
                if !diagnosis.is_transient {
                    monitor.update(heartbeat.server_address, ServerState::Unusable(diagnosis.text));
                } else if diagnostics::is_disconnect(&text)
                    && !monitor.servers.lock().contains_key(&heartbeat.server_address)
                {
                    monitor.update(heartbeat.server_address, ServerState::Disconnected);
                }
            }
            SdamEvent::TopologyOpening(opening) => {
                *monitor.topology.lock() = Topology {
                    id: Some(opening.topology_id),
                    description: None,
                };
            }
            SdamEvent::TopologyDescriptionChanged(change) => {
                let mut topology = monitor.topology.lock();
                if topology.id == Some(change.topology_id) {
                    topology.description = Some(change.new_description);
                }
            }
            _ => {}
        })
    }

    /// Returns the last election of a primary.
    pub(crate) fn election(&self) -> watch::Receiver<Option<ObjectId>> {
        self.election.subscribe()
    }

    /// Whether a server answered the driver's monitor after `moment`.
    pub(crate) fn has_seen_a_server_since(&self, moment: Moment) -> bool {
        self.answered.load(Relaxed) > moment.to_nanos()
    }

    /// Whether the members of the replica set confirm no writes: too few of them are up, or they are late. The primary reports it
    /// every ten seconds.
    pub(crate) fn is_without_majority(&self) -> bool {
        self.without_majority_until.load(Relaxed) > Moment::now().to_nanos()
    }

    /// Records that the members did not confirm a write in time. The state ends with the primary's next report, or after
    /// [`UNCONFIRMED_FOR`]: a router sends no reports.
    pub(crate) fn note_unconfirmed(&self) {
        let until = (Moment::now() + UNCONFIRMED_FOR).to_nanos();
        self.without_majority_until.fetch_max(until, Relaxed);
    }

    /// Replaces the failure to find a usable server by a description of the servers.
    pub(crate) fn explain(&self, failure: Failure) -> Failure {
        match &self.topology.lock().description {
            Some(topology) if failure.is_selection_timeout() => Failure::no_server(diagnostics::of_topology(topology)),
            _ => failure,
        }
    }

    fn update(&self, server: ServerAddress, state: ServerState) {
        self.servers.lock().insert(server, state);
        self.changed.notify_one();
    }

    /// Describes the difference between a server's replica set and the one of the URL. The driver ignores servers of another
    /// set without an error.
    fn replica_set_mismatch(&self, hello: &Document) -> Option<String> {
        let expected = self.set.as_deref()?;
        let found = match hello.get_str("setName") {
            Ok(found) if found == expected => return None,
            Ok(found) => format!("it belongs to the replica set {found:?}"),
            // A member that starts.
            Err(_) if hello.get_bool("isreplicaset").unwrap_or(false) => return None,
            Err(_) if hello.get_str("msg").is_ok_and(|msg| msg == "isdbgrid") => {
                "it is the router of a sharded cluster".to_owned()
            }
            Err(_) => "it belongs to no replica set".to_owned(),
        };
        Some(format!("{found}, and the URL asks for the replica set {expected:?}"))
    }

    /// Waits until every server of the URL can only be used with another configuration. Returns the reasons.
    pub(crate) async fn unusable(&self) -> String {
        let mut silence = std::pin::pin!(tokio::time::sleep(probe::HANDSHAKE));
        let mut has_waited = false;
        loop {
            let is_silent = tokio::select! {
                () = self.changed.notified() => false,
                () = &mut silence, if !has_waited => true,
            };
            has_waited |= is_silent;
            let mut reasons = Vec::new();
            for host in &self.hosts {
                let known = self.servers.lock().get(host).cloned();
                let state = match known {
                    Some(ServerState::Disconnected) => {
                        let state = self.probe(host, false).await;
                        self.servers.lock().insert(host.clone(), state.clone());
                        state
                    }
                    Some(state) => state,
                    None if is_silent => {
                        let state = self.probe(host, true).await;
                        if matches!(state, ServerState::Unusable(_)) {
                            self.servers.lock().insert(host.clone(), state.clone());
                        }
                        state
                    }
                    None => ServerState::Usable,
                };
                if let ServerState::Unusable(reason) = state {
                    reasons.push(format!("{host} ({reason})"));
                }
            }
            if reasons.len() == self.hosts.len() {
                return format!("no server can be used: {}", reasons.join(", "));
            }
        }
    }

    /// Finds out why a server closed the connection, or (`is_silent`) has not answered yet: it may be slow.
    async fn probe(&self, host: &ServerAddress, is_silent: bool) -> ServerState {
        let ServerAddress::Tcp { host, port } = host else {
            return ServerState::Usable;
        };
        let port = port.unwrap_or(DEFAULT_PORT);
        let has_tls = match probe::identify(host, port).await {
            Some(Peer::Redis) => {
                let reason = "it is a Redis server: begin the URL with redis://, or check the port";
                return ServerState::Unusable(reason.to_owned());
            }
            Some(Peer::Tls) => true,
            // MongoDB answers the probe on a port with TLS as well.
            Some(Peer::Mongodb) if !is_silent => probe::speaks_tls(host, port).await,
            // A proxy that routes by the first bytes may answer with HTTP.
            _ => return ServerState::Usable,
        };
        let reason = match (has_tls, self.has_tls) {
            (true, false) => {
                "it speaks nothing but TLS: set tls=true in the URL, or the option tls, or use the port without TLS"
            }
            (false, true) => "it does not speak TLS: omit tls=true and the option tls, or use the port with TLS",
            _ => return ServerState::Usable,
        };
        ServerState::Unusable(reason.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn without_a_report_an_unconfirmed_write_counts_for_a_while() {
        let monitor = ServerMonitor::new(&ClientOptions::default());
        assert!(!monitor.is_without_majority());
        monitor.note_unconfirmed();
        assert!(monitor.is_without_majority());
        tokio::time::advance(UNCONFIRMED_FOR).await;
        assert!(!monitor.is_without_majority());
    }
}
