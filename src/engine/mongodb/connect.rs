//! From a config to an engine: options, and the first talk.

use std::sync::{Arc, Mutex, PoisonError};

use mongodb::Client;
use mongodb::bson::{DateTime, doc};
use mongodb::event::EventHandler;
use mongodb::event::sdam::SdamEvent;
use mongodb::options::{
    Acknowledgment, ClientOptions, CollectionOptions, ReadConcern, ReadPreference, SelectionCriteria, WriteConcern,
};

use super::estimate::{Estimate, Look};
use super::failure::{ENGINE, Failure};
use super::fence::Clock;
use super::waiting::Line;
use super::{MongodbConfig, MongodbEngine, index};
use crate::clock::Moment;
use crate::engine::Result;
use crate::error::EngineError;

/// What this is called in errors.
pub(super) const OP: &str = "connect";
/// MongoDB 4.4, the first whose `findAndModify` can show `$$NOW` in its answer.
const OLDEST_WIRE_VERSION: i32 = 9;
/// The connections that one engine opens at most, unless the URL says otherwise. The driver's own default of 10 would
/// make a crowd of callers queue behind each other's waits for the majority.
const POOL: u32 = 64;

impl MongodbEngine {
    /// Connects: finds the servers, asks one what it is, and makes sure of the TTL index.
    ///
    /// # Behavior
    /// A `mongodb+srv` name is resolved here. Gives up when no server is found in nine tenths of the time that
    /// connecting may take, so that there is time left to say why.
    ///
    /// # Errors
    /// Retryable when no server can be reached; not retryable when the password, a right, a certificate, the replica
    /// set's name, the server's version or the collection's indexes are wrong.
    pub async fn connect(config: MongodbConfig) -> Result<Arc<Self>> {
        let seen = Arc::new(Mutex::new(None));
        let mut options = options(&config).await.map_err(|error| Failure(error).during(OP))?;
        let wanted = options.repl_set_name.clone();
        options.sdam_event_handler = Some(note_set_name(seen.clone()));
        // Bad certificate files are found here.
        let client =
            Client::with_options(options).map_err(|error| EngineError::new(ENGINE, OP, false, Failure(error)))?;
        let database = client.database(&config.database);
        let sent = Moment::now();
        let hello = match database.run_command(doc! { "hello": 1 }).await.map_err(Failure) {
            Ok(hello) => hello,
            Err(failure) => return Err(unreachable(failure, wanted, &seen)),
        };
        let answered = Moment::now();
        if hello.get_i32("maxWireVersion").unwrap_or(0) < OLDEST_WIRE_VERSION {
            return Err(EngineError::new(ENGINE, OP, false, "MongoDB 4.4 or newer is needed"));
        }
        let is_cluster = hello.contains_key("setName") || hello.get_str("msg").is_ok_and(|msg| msg == "isdbgrid");
        let locks = database.collection_with_options(&config.collection, collection_options(&config));
        index::ensure(&locks).await?;
        // Without the server's clock the first end that is written is wrong, and will be corrected.
        let shown = hello.get_datetime("localTime").copied().unwrap_or(DateTime::MIN);
        let line = || Line::new(locks.clone(), config.prefix.clone(), config.timeout);
        Ok(Arc::new(MongodbEngine {
            line: is_cluster.then(line),
            estimate: Estimate::new(Look { shown, sent, answered }),
            release_concern: release_concern(&config).filter(|_| !is_cluster),
            clock: if is_cluster { Clock::Cluster } else { Clock::Process },
            prefix: config.prefix,
            client,
            locks,
        }))
    }
}

async fn options(config: &MongodbConfig) -> mongodb::error::Result<ClientOptions> {
    let mut options = ClientOptions::parse(config.connection.clone()).await?;
    // Less than the limit of whoever waits for this: the driver's reason is worth more than "no answer".
    let selection = config.timeout.mul_f64(0.9);
    options.server_selection_timeout = Some(
        options
            .server_selection_timeout
            .map_or(selection, |own| own.min(selection)),
    );
    options.connect_timeout.get_or_insert(config.timeout);
    options.max_pool_size.get_or_insert(POOL);
    options.app_name.get_or_insert_with(|| "holdfast".to_owned());
    Ok(options)
}

fn collection_options(config: &MongodbConfig) -> CollectionOptions {
    let mut write_concern = config.connection.write_concern.clone().unwrap_or_default();
    write_concern.w.get_or_insert(Acknowledgment::Majority);
    CollectionOptions::builder()
        .write_concern(write_concern)
        // What a try sees is the primary's present, so that is what an inspection shows.
        .read_concern(ReadConcern::local())
        .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
        .build()
}

/// How a standalone server acknowledges a release, unless the URL says how it does: at once. A release that is lost in a
/// crash leaves the name busy until its lease ends, and makes nobody lose anything. (Whoever waits for a majority waits
/// there for the journal.)
fn release_concern(config: &MongodbConfig) -> Option<WriteConcern> {
    match &config.connection.write_concern {
        Some(_) => None,
        None => Some(WriteConcern::builder().w(Acknowledgment::Nodes(1)).build()),
    }
}

/// Remembers which replica set the servers say they belong to: the driver drops those of another set without a word.
fn note_set_name(seen: Arc<Mutex<Option<String>>>) -> EventHandler<SdamEvent> {
    EventHandler::callback(move |event| {
        if let SdamEvent::ServerHeartbeatSucceeded(heartbeat) = event {
            let name = heartbeat
                .reply
                .get_str("setName")
                .map_or("no replica set".to_owned(), |name| format!("{name:?}"));
            *seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(name);
        }
    })
}

/// Why the first command failed.
fn unreachable(failure: Failure, wanted: Option<String>, seen: &Mutex<Option<String>>) -> EngineError {
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner).take();
    match (wanted, seen) {
        (Some(wanted), Some(seen)) if failure.is_server_selection() && seen != format!("{wanted:?}") => {
            EngineError::new(
                ENGINE,
                OP,
                false,
                format!("the URL asks for the replica set {wanted:?}, but the server that answers belongs to {seen}"),
            )
        }
        _ => failure.during(OP),
    }
}
