//! From a config to an engine: options, and the first talk.

use std::sync::Arc;
use std::time::Duration;

use mongodb::bson::{DateTime, Document, doc};
use mongodb::options::{
    Acknowledgment, ClientOptions, CollectionOptions, HostInfo, ReadConcern, ReadPreference, SelectionCriteria,
    WriteConcern,
};
use mongodb::{Client, Database};
use tokio::time::{Instant, timeout_at};

use super::estimate::{Estimate, Look};
use super::failure::{ENGINE, Failure};
use super::fence::Clock;
use super::index::IndexKeeper;
use super::pool::{Place, Pool};
use super::sight::Sight;
use super::waiting::Line;
use super::{Core, MongodbConfig, MongodbEngine, index};
use crate::clock::Moment;
use crate::engine::Result;
use crate::error::EngineError;

/// What this is called in errors.
pub(super) const OP: &str = "connect";
/// MongoDB 4.4, the first whose `findAndModify` can show `$$NOW` in its answer.
const OLDEST_WIRE_VERSION: i32 = 9;
/// Maximum number of connections for calls, unless the URL sets `maxPoolSize`. With the driver's default of 10, many callers
/// would queue behind each other's waits for the majority.
const POOL: u32 = 64;

impl MongodbEngine {
    /// Connects: finds the servers, asks one what it is, and makes sure of the TTL index.
    ///
    /// # Behavior
    /// A `mongodb+srv` name is resolved here. Each step gives up before the time that connecting may take is over, so
    /// that there is time left to say why; what only a human can mend is told at once.
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
        let sight = Sight::new(&options);
        options.sdam_event_handler = Some(sight.handler());
        let about = About::new(&options);
        // Bad certificate files are found here.
        let client = Client::with_options(options.clone())
            .map_err(|error| EngineError::new(ENGINE, OP, false, Failure(error)))?;
        let database = client.database(&config.database);
        let greeting = async {
            tokio::select! {
                hello = database.run_command(doc! { "hello": 1 }) => hello.map_err(|error| about.failed(Failure(error))),
                mistake = sight.mistake() => Err(EngineError::new(ENGINE, OP, false, mistake)),
            }
        };
        let hello = timeout_at(deadline, greeting)
            .await
            .unwrap_or_else(|_| Err(late(limit, "to the first command")))?;
        if hello.get_i32("maxWireVersion").unwrap_or(0) < OLDEST_WIRE_VERSION {
            return Err(EngineError::new(ENGINE, OP, false, "MongoDB 4.4 or newer is needed"));
        }
        about.check_primary(&hello)?;
        let is_cluster = hello.contains_key("setName") || hello.get_str("msg").is_ok_and(|msg| msg == "isdbgrid");
        let place = Place {
            database: config.database.clone(),
            collection: config.collection.clone(),
            options: collection_options(&config),
        };
        // One connection of the pool is for the change stream.
        let size = options.max_pool_size.unwrap_or(POOL).saturating_sub(1);
        let pool = Pool::new(client, options, place, sight.clone(), size, config.timeout);
        let locks = pool.locks();
        timeout_at(deadline, index::ensure(&locks)).await.unwrap_or_else(|_| {
            Err(late(
                limit,
                "to the look for the TTL index, or of the members that have to confirm it",
            ))
        })?;
        let look = timeout_at(deadline, look(&database))
            .await
            .unwrap_or_else(|_| Err(late(limit, "to the second command")))?;
        let index = IndexKeeper::new(pool.clone());
        let line = || {
            Line::new(
                pool.clone(),
                config.prefix.clone(),
                config.timeout,
                sight.election(),
                index.clone(),
            )
        };
        let core = Core {
            line: is_cluster.then(line),
            index,
            attempts: Arc::default(),
            estimate: Estimate::new(look),
            release_concern: release_concern(&config).filter(|_| !is_cluster),
            clock: if is_cluster { Clock::Cluster } else { Clock::Process },
            prefix: config.prefix,
            pool,
        };
        Ok(Arc::new(MongodbEngine(Arc::new(core))))
    }
}

/// A look at the server's clock, on a connection that is there already.
async fn look(database: &Database) -> Result<Look> {
    let sent = Moment::now();
    let hello = database.run_command(doc! { "hello": 1 }).await;
    let hello = hello.map_err(|error| Failure(error).during(OP))?;
    // Without it the first end that is written is wrong, and will be corrected.
    let shown = hello.get_datetime("localTime").copied();
    Ok(Look {
        shown: shown.unwrap_or(DateTime::from_millis(0)),
        sent,
        answered: Moment::now(),
    })
}

/// No answer, and to (or of) what.
fn late(limit: Duration, what: &str) -> EngineError {
    EngineError::new(
        ENGINE,
        OP,
        true,
        format!("no answer {what} within {} ms", limit.as_millis()),
    )
}

/// A failure to look up the servers behind a name, with the name.
fn of_name(error: EngineError, config: &MongodbConfig) -> EngineError {
    match &config.connection.host_info {
        HostInfo::DnsRecord(name) => {
            let told = format!(
                "the servers of mongodb+srv://{name} cannot be looked up: {}",
                error.source
            );
            EngineError::new(ENGINE, OP, error.retryable, told)
        }
        _ => error,
    }
}

async fn options(config: &MongodbConfig) -> Result<ClientOptions> {
    let mut options = ClientOptions::parse(config.connection.clone())
        .await
        .map_err(|error| Failure(error).during(OP))?;
    // Less than the limit of whoever waits for this: the driver's reason is worth more than "no answer".
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

/// What of the options helps to explain a failure. No password is in it.
struct About {
    hosts: Vec<String>,
    user: Option<(String, String)>,
    is_direct: bool,
}

impl About {
    fn new(options: &ClientOptions) -> Self {
        About {
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

    /// Why the first command failed.
    fn failed(&self, failure: Failure) -> EngineError {
        let told = failure.to_string();
        match &self.user {
            Some((user, source)) if failure.is_authentication() => {
                let told = format!(
                    "cannot log in as {user:?}, whom the server looks for in the database {source:?} (authSource): {told}"
                );
                return EngineError::new(ENGINE, OP, failure.retryable(), told);
            }
            _ => {}
        }
        if failure.is_server_selection() && self.is_elsewhere(&told) {
            let told = format!(
                "{told}; these are the members as the replica set itself names them (directConnection=true keeps to the \
                 URL's host)"
            );
            return EngineError::new(ENGINE, OP, failure.retryable(), told);
        }
        failure.during(OP)
    }

    /// Whether a report is of other servers than the URL's: a member that answered told the driver to go there.
    fn is_elsewhere(&self, told: &str) -> bool {
        told.starts_with("no server ") && !self.hosts.iter().any(|host| told.contains(host))
    }

    /// Whether writes can be had where the URL leads. The driver goes to no other member when it is told not to.
    fn check_primary(&self, hello: &Document) -> Result<()> {
        let Some(set) = hello.get_str("setName").ok().filter(|_| self.is_direct) else {
            return Ok(());
        };
        if hello.get_bool("isWritablePrimary").unwrap_or(false) {
            return Ok(());
        }
        let told = format!(
            "directConnection=true leads to {}, which is not the primary of the replica set {set:?} (now {}): only the \
             primary keeps locks",
            self.hosts.join(", "),
            hello.get_str("primary").unwrap_or("none"),
        );
        Err(EngineError::new(ENGINE, OP, true, told))
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use mongodb::options::ServerAddress;

    #[test]
    fn a_set_that_names_other_hosts_is_noticed() {
        let options = ClientOptions::builder()
            .hosts(vec![ServerAddress::parse("db.example:27018").unwrap()])
            .build();
        let about = About::new(&options);
        assert!(about.is_elsewhere("no server can be reached: mongo1:27017 (its name cannot be resolved)"));
        assert!(!about.is_elsewhere("no server can be reached: mongo1:27017 (?), db.example:27018 (a secondary)"));
    }
}
