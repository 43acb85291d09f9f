//! What is seen of the servers: while connecting, because the driver goes on looking until its time is over, also where
//! nothing but another URL or certificate can help; and later, when another one is the primary.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mongodb::Client;
use mongodb::bson::oid::ObjectId;
use mongodb::bson::{Document, doc};
use mongodb::event::EventHandler;
use mongodb::event::sdam::SdamEvent;
use mongodb::options::{ClientOptions, ServerAddress, Tls, TlsOptions};
use tokio::sync::{Notify, watch};

use super::trouble;
use crate::clock::Moment;

/// How long a look at one server may take.
const LOOK: Duration = Duration::from_secs(2);

/// The servers of the URL, as far as they were seen.
#[derive(Debug)]
pub(super) struct Sight {
    hosts: Vec<ServerAddress>,
    set: Option<String>,
    has_tls: bool,
    seen: Mutex<HashMap<ServerAddress, Seen>>,
    news: Notify,
    election: watch::Sender<Option<ObjectId>>,
    /// The last answer of a server to the driver's monitor, in nanoseconds of [`Moment`].
    answered: AtomicU64,
}

/// How one server was seen last.
#[derive(Debug, Clone)]
enum Seen {
    /// It answered, or there is hope that it will.
    Hope,
    /// It hung up without a word. Nobody has looked yet whether it would speak with TLS, or without.
    HungUp,
    /// Only a human can help.
    Mistake(String),
}

/// The election by which a server is the primary of a replica set, if it is: each has a larger one than those before.
fn election(hello: &Document) -> Option<ObjectId> {
    hello.get_object_id("electionId").ok()
}

impl Sight {
    pub(super) fn new(options: &ClientOptions) -> Arc<Self> {
        Arc::new(Sight {
            hosts: options.hosts.clone(),
            set: options.repl_set_name.clone(),
            has_tls: matches!(options.tls, Some(Tls::Enabled(_))),
            seen: Mutex::default(),
            news: Notify::new(),
            election: watch::Sender::new(None),
            answered: AtomicU64::new(0),
        })
    }

    fn seen(&self) -> MutexGuard<'_, HashMap<ServerAddress, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be called by the driver.
    pub(super) fn handler(self: &Arc<Self>) -> EventHandler<SdamEvent> {
        let sight = self.clone();
        EventHandler::callback(move |event| match event {
            SdamEvent::ServerHeartbeatSucceeded(heartbeat) => {
                sight.answered.store(Moment::now().to_nanos(), Relaxed);
                let seen = sight.wrong_set(&heartbeat.reply).map_or(Seen::Hope, Seen::Mistake);
                let election = election(&heartbeat.reply);
                // A primary that was cut off and does not know yet that there is another has an older one.
                sight.election.send_if_modified(|last| {
                    let is_new = election > *last;
                    *last = election.max(*last);
                    is_new
                });
                sight.note(heartbeat.server_address, seen);
            }
            SdamEvent::ServerHeartbeatFailed(heartbeat) => {
                let text = heartbeat.failure.kind.to_string();
                let told = trouble::of_error(&text);
                if !told.passes {
                    sight.note(heartbeat.server_address, Seen::Mistake(told.text));
                } else if trouble::is_hang_up(&text) && !sight.seen().contains_key(&heartbeat.server_address) {
                    sight.note(heartbeat.server_address, Seen::HungUp);
                }
            }
            _ => {}
        })
    }

    /// The last election of a primary that was seen.
    pub(super) fn election(&self) -> watch::Receiver<Option<ObjectId>> {
        self.election.subscribe()
    }

    /// Whether a server answered the driver's monitor after `moment`.
    pub(super) fn has_seen_a_server_since(&self, moment: Moment) -> bool {
        self.answered.load(Relaxed) > moment.to_nanos()
    }

    fn note(&self, server: ServerAddress, seen: Seen) {
        self.seen().insert(server, seen);
        self.news.notify_one();
    }

    /// What is wrong with a server's replica set. The driver drops servers of another one without a word.
    fn wrong_set(&self, hello: &Document) -> Option<String> {
        let wanted = self.set.as_deref()?;
        let found = match hello.get_str("setName") {
            Ok(found) if found == wanted => return None,
            Ok(found) => format!("it belongs to the replica set {found:?}"),
            // A member that starts.
            Err(_) if hello.get_bool("isreplicaset").unwrap_or(false) => return None,
            Err(_) if hello.get_str("msg").is_ok_and(|msg| msg == "isdbgrid") => {
                "it is the router of a sharded cluster".to_owned()
            }
            Err(_) => "it belongs to no replica set".to_owned(),
        };
        Some(format!("{found}, and the URL asks for the replica set {wanted:?}"))
    }

    /// Waits until it is certain of every server of the URL that only a human can help.
    pub(super) async fn mistake(&self) -> String {
        loop {
            self.news.notified().await;
            let mut told = Vec::new();
            for host in &self.hosts {
                let seen = self.seen().get(host).cloned();
                let seen = match seen {
                    Some(Seen::HungUp) => {
                        let seen = self.look(host).await;
                        self.seen().insert(host.clone(), seen.clone());
                        seen
                    }
                    Some(seen) => seen,
                    None => Seen::Hope,
                };
                if let Seen::Mistake(text) = seen {
                    told.push(format!("{host} ({text})"));
                }
            }
            if told.len() == self.hosts.len() {
                return format!("no server can be used: {}", told.join(", "));
            }
        }
    }

    /// Whether a server that hung up speaks without TLS when it was asked with, or the other way round. It is told nothing
    /// but hello: no user, no password, no certificate.
    async fn look(&self, host: &ServerAddress) -> Seen {
        let trusting = TlsOptions::builder().allow_invalid_certificates(true).build();
        let options = ClientOptions::builder()
            .hosts(vec![host.clone()])
            .direct_connection(true)
            .tls((!self.has_tls).then_some(Tls::Enabled(trusting)))
            .server_selection_timeout(LOOK)
            .connect_timeout(LOOK)
            .build();
        let Ok(client) = Client::with_options(options) else {
            return Seen::Hope;
        };
        let answer = client.database("admin").run_command(doc! { "hello": 1 }).await;
        client.shutdown().immediate(true).await;
        // A server that wants to see a certificate speaks TLS, too, before it says so or hangs up.
        let spoke = answer.map_or_else(|error| trouble::is_within_tls(&error.to_string()), |_| true);
        match (spoke, self.has_tls) {
            (false, _) => Seen::Hope,
            (true, true) => Seen::Mistake("it does not speak TLS".to_owned()),
            (true, false) => {
                Seen::Mistake("it speaks nothing but TLS: tls=true or the option tls is missing".to_owned())
            }
        }
    }
}
