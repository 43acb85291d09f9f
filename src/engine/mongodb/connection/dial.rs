//! Connects an engine: options, and the first commands.

use std::sync::Arc;
use std::time::Duration;

use mongodb::Database;
use mongodb::bson::{Document, doc};
use mongodb::options::{
    Acknowledgment, ClientOptions, CollectionOptions, HostInfo, ReadConcern, ReadPreference, SelectionCriteria,
    WriteConcern,
};
use tokio::time::{Instant, timeout_at};

use crate::engine::Result;
use crate::engine::mongodb::config::ClientSettings;
use crate::engine::mongodb::connection::checks;
use crate::engine::mongodb::connection::clock::{SharedReading, read_clock};
use crate::engine::mongodb::connection::openings::OpenConnections;
use crate::engine::mongodb::connection::pool::{Namespace, Pool};
use crate::engine::mongodb::connection::server_monitor::ServerMonitor;
use crate::engine::mongodb::connection::session::one_member;
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
        let limit = config.timeout.mul_f64(0.95);
        let deadline = Instant::now() + limit;
        let mut options = timeout_at(deadline, options(&config))
            .await
            .unwrap_or_else(|_| Err(late(limit, "of the DNS")))
            .map_err(|error| of_name(error, &config))?;
        let monitor = ServerMonitor::new(&options);
        options.sdam_event_handler = Some(monitor.handler());
        let open = Arc::new(OpenConnections::default());
        options.cmap_event_handler = Some(open.handler());
        let target = Target::new(&options);
        let settings = ClientSettings {
            options,
            pem: config.pem.clone(),
        };
        // Fails for invalid certificates.
        let client = settings.client().map_err(|error| {
            let failure = Failure(error);
            EngineError::new(ENGINE, CONNECT, failure.is_out_of_descriptors(), failure)
        })?;
        let database = client.database(&config.database);
        let hello = send_hello(&database, &target, &monitor, (deadline, limit)).await?;
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
        timeout_at(
            deadline,
            checks::check(&connected, is_router, config.warnings.as_deref()),
        )
        .await
        .unwrap_or_else(|_| Err(late(limit, "to the check of the collection")))?;
        timeout_at(deadline, ttl_index::ensure(&connected.locks))
            .await
            .unwrap_or_else(|_| Err(late(limit, "to the check of the TTL index")))?;
        let reading = async { read_clock(&database).await.map_err(|failure| failure.during(CONNECT)) };
        let reading = timeout_at(deadline, reading)
            .await
            .unwrap_or_else(|_| Err(late(limit, "to the second command")))?;
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
            (_, HostInfo::HostIdentifiers(hosts)) => {
                hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
            }
            _ => String::new(),
        }
    }
}

/// Sends the first command, and checks its answer. `limit`: the distance of the deadline from the start, for the error.
async fn send_hello(
    database: &Database,
    target: &Target,
    monitor: &ServerMonitor,
    (deadline, limit): (Instant, Duration),
) -> Result<Document> {
    let greeting = async {
        tokio::select! {
            hello = database.run_command(doc! { "hello": 1 }) => {
                hello.map_err(|error| target.failed(monitor.explain(Failure(error))))
            }
            reasons = monitor.unusable() => Err(EngineError::new(ENGINE, CONNECT, false, reasons)),
        }
    };
    let hello = timeout_at(deadline, greeting)
        .await
        .unwrap_or_else(|_| Err(late(limit, "to the first command")))?;
    if hello.get_i32("maxWireVersion").unwrap_or(0) < OLDEST_WIRE_VERSION {
        let message = "the server is older than MongoDB 5.0, the oldest version that holdfast supports";
        return Err(EngineError::new(ENGINE, CONNECT, false, message));
    }
    target.check_primary(&hello)?;
    Ok(hello)
}

/// Creates the error of a step without an answer.
fn late(limit: Duration, what: &str) -> EngineError {
    EngineError::new(
        ENGINE,
        CONNECT,
        true,
        format!("no answer {what} within {} ms", limit.as_millis()),
    )
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

/// The parts of the options that explain a failure, without a password.
struct Target {
    hosts: Vec<String>,
    user: Option<(String, String)>,
    is_direct: bool,
}

impl Target {
    fn new(options: &ClientOptions) -> Self {
        Target {
            hosts: options.hosts.iter().map(ToString::to_string).collect(),
            user: options.credential.as_ref().and_then(|credential| {
                Some((
                    credential.username.clone()?,
                    credential.source.clone().unwrap_or_default(),
                ))
            }),
            is_direct: options.direct_connection == Some(true),
        }
    }

    /// Describes the failure of the first command.
    fn failed(&self, failure: Failure) -> EngineError {
        let reason = failure.to_string();
        let message = match &self.user {
            Some((user, source)) if failure.is_authentication() => {
                format!("cannot log in as user {user:?} of the database {source:?} (authSource): {reason}")
            }
            _ if failure.is_server_selection() && self.is_elsewhere(&reason) => format!(
                "{reason}; these are the members as the replica set itself names them (directConnection=true keeps to the \
                 URL's host)"
            ),
            _ => return failure.during(CONNECT),
        };
        EngineError::new(ENGINE, CONNECT, failure.retryable(), message)
    }

    /// Whether a message names only servers that are not in the URL: a member of the set returned other addresses.
    fn is_elsewhere(&self, message: &str) -> bool {
        message.starts_with("no server ") && !self.hosts.iter().any(|host| message.contains(host))
    }

    /// Fails where a direct connection leads to a member that is not the primary: the driver does not contact the others.
    fn check_primary(&self, hello: &Document) -> Result<()> {
        let Some(set) = hello.get_str("setName").ok().filter(|_| self.is_direct) else {
            return Ok(());
        };
        if hello.get_bool("isWritablePrimary").unwrap_or(false) {
            return Ok(());
        }
        let message = format!(
            "directConnection=true leads to {}, which is not the primary of the replica set {set:?} (now {}): only the \
             primary keeps locks",
            self.hosts.join(", "),
            hello.get_str("primary").unwrap_or("none"),
        );
        Err(EngineError::new(ENGINE, CONNECT, true, message))
    }
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
    let mut concern = one_member();
    concern.journal = config
        .connection
        .write_concern
        .as_ref()
        .and_then(|of_url| of_url.journal);
    concern
}

#[cfg(test)]
mod tests {
    use super::*;
    use mongodb::options::ServerAddress;

    #[test]
    fn a_set_with_other_host_names_is_detected() {
        let options = ClientOptions::builder()
            .hosts(vec![ServerAddress::parse("db.example:27018").unwrap()])
            .build();
        let target = Target::new(&options);
        assert!(target.is_elsewhere("no server can be reached: mongo1:27017 (its name cannot be resolved)"));
        assert!(!target.is_elsewhere("no server can be reached: mongo1:27017 (?), db.example:27018 (a secondary)"));
    }
}
