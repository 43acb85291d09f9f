//! Connects an engine: options, and the first commands.

use std::sync::Arc;
use std::time::Duration;

use mongodb::Database;
use mongodb::bson::{Document, doc};
use mongodb::options::{
    Acknowledgment, ClientOptions, CollectionOptions, HostInfo, ReadConcern, ReadPreference, SelectionCriteria,
    ServerAddress, WriteConcern,
};
use tokio::time::{Instant, timeout_at};

use crate::engine::Result;
use crate::engine::mongodb::config::ClientSettings;
use crate::engine::mongodb::connection::checks;
use crate::engine::mongodb::connection::clock::{SharedReading, read_clock};
use crate::engine::mongodb::connection::openings::OpenConnections;
use crate::engine::mongodb::connection::pool::{Namespace, Pool};
use crate::engine::mongodb::connection::server_monitor::ServerMonitor;
use crate::engine::mongodb::error::{CONNECT, ENGINE, Failure};
use crate::engine::mongodb::ops::clock_offset::ClockOffset;
use crate::engine::mongodb::ops::fence::{Clock, ServerClock};
use crate::engine::mongodb::queue::Queue;
use crate::engine::mongodb::ttl_index::TtlIndex;
use crate::engine::mongodb::unwritten_tokens::UnwrittenTokens;
use crate::engine::mongodb::{Core, MongodbConfig, MongodbEngine, ttl_index};
use crate::error::EngineError;

/// MongoDB 5.0, the first that has `$$NOW` in the filter of a delete.
const OLDEST_WIRE_VERSION: i32 = 13;
/// Maximum number of connections for calls, unless the URL sets `maxPoolSize`. With the driver's default of 10, many callers
/// would queue behind each other's waits for the majority.
const POOL: u32 = 64;

/// The limits of a `wtimeout`: 0 would mean no limit, and the driver sends milliseconds in 32 bits.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_secs(1_000_000);

impl MongodbEngine {
    /// Connects to the servers, reads the kind of the deployment, and creates the TTL index.
    ///
    /// # Behavior
    /// Resolves a `mongodb+srv` name. Each step ends before the store timeout, so that the error has a reason. An error that
    /// only another configuration can prevent is returned at once.
    ///
    /// # Errors
    /// Retryable when no server can be reached; not retryable when the password, a right, a certificate, the replica
    /// set's name, the server's version or the collection's indexes are wrong.
    pub async fn connect(config: MongodbConfig) -> Result<Arc<Self>> {
        let steps = Steps::new(config.timeout.mul_f64(0.95));
        let options = steps.step("of the DNS", options(&config)).await;
        let mut options = options.map_err(|error| of_name(error, &config))?;
        let monitor = ServerMonitor::new(&options);
        options.sdam_event_handler = Some(monitor.handler());
        let open = Arc::new(OpenConnections::default());
        options.cmap_event_handler = Some(open.handler());
        let settings = ClientSettings {
            options,
            tls: config.tls.clone(),
        };
        // Fails for invalid certificates.
        let client = settings.client().map_err(|error| {
            let failure = Failure(error);
            EngineError::new(ENGINE, CONNECT, failure.is_out_of_descriptors(), failure)
        })?;
        let database = client.database(&config.database);
        let hello = send_hello(&database, &settings.options, &monitor);
        let hello = steps.step("to the first command", hello).await?;
        let is_set = hello.contains_key("setName");
        let is_router = hello.get_str("msg").is_ok_and(|msg| msg == "isdbgrid");
        let is_cluster = is_set || is_router;
        let namespace = Namespace {
            database: config.database.clone(),
            collection: config.collection.clone(),
            options: collection_options(&config),
            release_concern: release_concern(&config),
        };
        // One connection of the pool is for the change stream.
        let size = settings.options.max_pool_size.unwrap_or(POOL).saturating_sub(1);
        let pool = Pool::new(
            client,
            settings,
            namespace,
            monitor.clone(),
            (size, open),
            config.timeout,
        );
        let connected = pool.connected();
        let check = checks::check(&connected, is_router, config.warnings.as_deref());
        steps.step("to the check of the collection", check).await?;
        let index = ttl_index::ensure(&connected.locks);
        steps.step("to the check of the TTL index", index).await?;
        let reading = async { read_clock(&database).await.map_err(|failure| failure.during(CONNECT)) };
        let reading = steps.step("to the second command", reading).await?;
        let index = TtlIndex::new(pool.clone());
        let queue = || {
            Queue::new(
                pool.clone(),
                config.prefix.clone(),
                config.timeout,
                monitor.election(),
                index.clone(),
                is_set,
            )
        };
        let core = Core {
            queue: is_cluster.then(queue),
            unwritten: is_set.then(|| UnwrittenTokens::new(pool.clone())),
            index,
            attempts: Arc::default(),
            clock_offset: ClockOffset::new(reading),
            reading: SharedReading::default(),
            clock: ServerClock::new(if is_cluster { Clock::Cluster } else { Clock::Process }),
            address: config.address(),
            prefix: config.prefix,
            pool,
        };
        Ok(Arc::new(MongodbEngine(Arc::new(core))))
    }
}

impl MongodbConfig {
    /// Returns the servers of the URL, for messages.
    pub(in crate::engine) fn address(&self) -> String {
        match (&self.srv, &self.connection.host_info) {
            (Some(srv), _) => srv.name.clone(),
            (_, HostInfo::HostIdentifiers(hosts)) => listed(hosts),
            _ => String::new(),
        }
    }
}

/// The time limit of all steps of `connect`.
struct Steps {
    limit: Duration,
    deadline: Instant,
}

impl Steps {
    fn new(limit: Duration) -> Self {
        let deadline = Instant::now() + limit;
        Steps { limit, deadline }
    }

    /// Waits for a step. Fails with a retryable error, "no answer `what` within … ms", at the deadline of `connect`.
    async fn step<T>(&self, what: &str, step: impl Future<Output = Result<T>>) -> Result<T> {
        timeout_at(self.deadline, step).await.unwrap_or_else(|_| {
            let message = format!("no answer {what} within {} ms", self.limit.as_millis());
            Err(EngineError::new(ENGINE, CONNECT, true, message))
        })
    }
}

/// Sends the first command, and checks its answer.
async fn send_hello(database: &Database, options: &ClientOptions, monitor: &ServerMonitor) -> Result<Document> {
    let hello = tokio::select! {
        hello = database.run_command(doc! { "hello": 1 }) => {
            hello.map_err(|error| failed(options, monitor.explain(Failure(error))))?
        }
        reasons = monitor.unusable() => return Err(EngineError::new(ENGINE, CONNECT, false, reasons)),
    };
    if hello.get_i32("maxWireVersion").unwrap_or(0) < OLDEST_WIRE_VERSION {
        let message = "the server is older than MongoDB 5.0, the oldest version that holdfast supports";
        return Err(EngineError::new(ENGINE, CONNECT, false, message));
    }
    check_primary(options, &hello)?;
    Ok(hello)
}

/// Adds the name to an error of its resolution.
fn of_name(error: EngineError, config: &MongodbConfig) -> EngineError {
    match &config.srv {
        Some(srv) => {
            let message = format!(
                "the servers of mongodb+srv://{} cannot be resolved: {}",
                srv.name, error.source
            );
            EngineError::new(ENGINE, CONNECT, error.retryable, message)
        }
        None => error,
    }
}

async fn options(config: &MongodbConfig) -> Result<ClientOptions> {
    let mut connection = config.connection.clone();
    if let Some(srv) = &config.srv {
        srv.resolve(&mut connection)
            .await
            .map_err(|why| EngineError::new(ENGINE, CONNECT, true, why))?;
    }
    let mut options = ClientOptions::parse(connection)
        .await
        .map_err(|error| Failure(error).during(CONNECT))?;
    // Shorter than the store timeout of the caller, so that the error has the driver's reason.
    let selection = config.timeout.mul_f64(0.9);
    options.server_selection_timeout = Some(
        options
            .server_selection_timeout
            .map_or(selection, |own| own.min(selection)),
    );
    options.connect_timeout.get_or_insert(config.timeout);
    // `maxPoolSize` limits the connections for calls. The change stream of a replica set has one more.
    options.max_pool_size = Some(options.max_pool_size.unwrap_or(POOL).saturating_add(1));
    options.app_name.get_or_insert_with(|| "holdfast".to_owned());
    Ok(options)
}

/// Describes the failure of the first command, without the password.
fn failed(options: &ClientOptions, failure: Failure) -> EngineError {
    let reason = failure.to_string();
    let user = options.credential.as_ref().and_then(|credential| {
        let source = credential.source.as_deref().unwrap_or_default();
        Some((credential.username.as_deref()?, source))
    });
    let message = match user {
        Some((user, source)) if failure.is_authentication() => {
            format!("cannot log in as user {user:?} of the database {source:?} (authSource): {reason}")
        }
        _ if failure.is_server_selection() && is_elsewhere(&options.hosts, &reason) => format!(
            "{reason}; these are the members as the replica set itself names them (directConnection=true keeps to the URL's host)"
        ),
        _ => return failure.during(CONNECT),
    };
    EngineError::new(ENGINE, CONNECT, failure.retryable(), message)
}

/// Whether a message names only servers that are not in the URL: a member of the set returned other addresses.
fn is_elsewhere(hosts: &[ServerAddress], message: &str) -> bool {
    message.starts_with("no server ") && !hosts.iter().any(|host| message.contains(&host.to_string()))
}

/// Fails where a direct connection leads to a member that is not the primary: the driver does not contact the others.
fn check_primary(options: &ClientOptions, hello: &Document) -> Result<()> {
    let is_direct = options.direct_connection == Some(true);
    let Some(set) = hello.get_str("setName").ok().filter(|_| is_direct) else {
        return Ok(());
    };
    if hello.get_bool("isWritablePrimary").unwrap_or(false) {
        return Ok(());
    }
    let message = format!(
        "directConnection=true leads to {}, which is not the primary of the replica set {set:?} (now {}): only the primary keeps \
         locks",
        listed(&options.hosts),
        hello.get_str("primary").unwrap_or("none"),
    );
    Err(EngineError::new(ENGINE, CONNECT, true, message))
}

fn listed(hosts: &[ServerAddress]) -> String {
    hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn collection_options(config: &MongodbConfig) -> CollectionOptions {
    let mut write_concern = config.connection.write_concern.clone().unwrap_or_default();
    write_concern.w.get_or_insert(Acknowledgment::Majority);
    // Shorter than the store timeout: while too few members are up, the server then still answers that a name is busy.
    let unconfirmed = config.timeout.mul_f64(0.8).clamp(SHORTEST_WAIT, LONGEST_WAIT);
    write_concern.w_timeout.get_or_insert(unconfirmed);
    CollectionOptions::builder()
        .write_concern(write_concern)
        // An attempt decides by the primary's current data, so `inspect` reads the same.
        .read_concern(ReadConcern::local())
        .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
        .build()
}

/// Returns the write concern of releases: that of the primary alone, with the URL's `journal`.
fn release_concern(config: &MongodbConfig) -> WriteConcern {
    let of_url = config.connection.write_concern.as_ref();
    let mut concern = WriteConcern::from(Acknowledgment::Nodes(1));
    concern.journal = of_url.and_then(|of_url| of_url.journal);
    concern
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_with_other_host_names_is_detected() {
        let hosts = [ServerAddress::parse("db.example:27018").unwrap()];
        let is_elsewhere = |message| is_elsewhere(&hosts, message);
        assert!(is_elsewhere(
            "no server can be reached: mongo1:27017 (its name cannot be resolved)"
        ));
        assert!(!is_elsewhere(
            "no server can be reached: mongo1:27017 (?), db.example:27018 (a secondary)"
        ));
    }
}
