//! A MongoDB deployment, from its URL and the settings. No name is resolved here.
//!
//! - `url.rs`: the text of the URL. `srv.rs`: the name of a `mongodb+srv` URL. `tls.rs`: the TLS settings. `client.rs`: the driver's client,
//!   with PEM text.

mod client;
mod srv;
mod tls;
mod url;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use mongodb::options::{Acknowledgment, ConnectionString, HostInfo};

pub(crate) use self::client::ClientSettings;
use self::srv::Srv;
use crate::engine::{Settings, TlsFiles, Warnings};
use crate::error::LockError;

/// The database of a URL without one, as in the official Node.js driver, which users of the gist have.
const DEFAULT_DATABASE: &str = "test";

/// A MongoDB deployment, and the collection of the locks.
#[derive(Clone)]
pub struct MongodbConfig {
    /// With `srv`, its only host is that name.
    pub(crate) connection: ConnectionString,
    pub(crate) srv: Option<Srv>,
    pub(crate) database: String,
    pub(crate) collection: String,
    pub(crate) prefix: String,
    pub(crate) timeout: Duration,
    pub(crate) tls: TlsFiles,
    /// Receives the warnings.
    pub(crate) warnings: Option<Arc<Warnings>>,
}

impl fmt::Debug for MongodbConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the connection, which contains a password.
        f.debug_struct("MongodbConfig")
            .field("database", &self.database)
            .field("collection", &self.collection)
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

impl MongodbConfig {
    /// Parses a `mongodb://` or `mongodb+srv://` URL.
    ///
    /// # Behavior
    /// The database is the URL's, or `test`. Its `w`, `journal` and `wtimeoutMS` apply to every write; without `w` it is the
    /// majority. Its read preference has no effect: locks are on the primary.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` with `target`, `collection`, or the setting under `tls`. No message contains a password.
    pub fn parse(url: &str, settings: &Settings) -> Result<Self, LockError> {
        if let Some(rule) = url::unsupported(url) {
            return Err(LockError::invalid("target", &rule, url::shown(url)));
        }
        let mut connection = match ConnectionString::parse(url::for_driver(url)) {
            Ok(connection) => connection,
            Err(_) => return Err(LockError::invalid("target", &url::reason(url), url::shown(url))),
        };
        if connection
            .write_concern
            .as_ref()
            .is_some_and(|concern| concern.w == Some(Acknowledgment::Nodes(0)))
        {
            return Err(LockError::invalid(
                "target",
                "must not ask for unacknowledged writes",
                "w=0",
            ));
        }
        if let HostInfo::HostIdentifiers(hosts) = &connection.host_info
            && hosts.len() > 1
            && connection.direct_connection == Some(true)
        {
            let got = format!("{} hosts", hosts.len());
            return Err(LockError::invalid(
                "target",
                "must name one host with directConnection=true",
                got,
            ));
        }
        let srv = Srv::of(url, &mut connection, settings)
            .map_err(|rule| LockError::invalid("target", rule, url::shown(url)))?;
        let advice = "the driver of MongoDB expects the host of the URL in the certificate";
        settings.tls.reject_server_name(advice)?;
        connection.tls = tls::with_settings(connection.tls.take(), &settings.tls)?;
        let collection = settings.collection.as_str();
        if collection.is_empty() || collection.contains(['$', '\0']) || collection.starts_with("system.") {
            let rule = "must be the name of a MongoDB collection (not empty, no \"$\", not starting with \"system.\")";
            return Err(LockError::invalid("collection", rule, format_args!("{collection:?}")));
        }
        Ok(MongodbConfig {
            database: connection
                .default_database
                .clone()
                .unwrap_or_else(|| DEFAULT_DATABASE.to_owned()),
            collection: collection.to_owned(),
            prefix: settings.key_prefix.clone().unwrap_or_default(),
            timeout: settings.store_timeout,
            tls: settings.tls.clone(),
            warnings: settings.warnings.clone(),
            connection,
            srv,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    fn parse(url: &str) -> Result<MongodbConfig, LockError> {
        MongodbConfig::parse(url, &Settings::default())
    }

    fn refused(url: &str) -> String {
        let error = parse(url).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.message.starts_with("target "), "{}", error.message);
        error.message
    }

    #[test]
    fn defaults_are_the_same_as_in_the_gist() {
        let config = parse("mongodb://h").unwrap();
        assert_eq!(
            (&*config.database, &*config.collection, &*config.prefix),
            ("test", "locks", "")
        );
        assert_eq!(
            parse("mongodb://u:p@h1:1,h2:2/jobs?replicaSet=rs0").unwrap().database,
            "jobs"
        );
        let settings = Settings {
            collection: "mutex".into(),
            key_prefix: Some("p:".into()),
            ..Settings::default()
        };
        let config = MongodbConfig::parse("mongodb://h/", &settings).unwrap();
        assert_eq!((&*config.collection, &*config.prefix), ("mutex", "p:"));
    }

    #[test]
    fn an_srv_name_is_not_resolved() {
        assert!(parse("mongodb+srv://u:p@cluster0.invalid/jobs?retryWrites=true&w=majority").is_ok());
    }

    #[test]
    fn options_of_the_node_driver_are_accepted() {
        let url = "mongodb://h/?useNewUrlParser=true&useUnifiedTopology=true&socketTimeoutMS=1&compressors=zlib&w=2";
        let config = parse(url).unwrap();
        assert_eq!(
            config.connection.write_concern.unwrap().w,
            Some(Acknowledgment::Nodes(2))
        );
        assert!(parse("mongodb://h/?useUnifiedTopology=true").is_ok());
        assert!(refused("mongodb://h/?replicaStet=rs0").contains("replicastet"));
        assert!(refused("mongodb://h/?w=0").contains("w=0"));
    }

    /// All options of a URL that mongodb 7.8 of npm takes and the Rust driver refuses, or understands in another way.
    #[test]
    fn options_of_the_node_driver_mean_the_same_or_are_refused_in_its_words() {
        let concern = |options: &str| {
            let config = parse(&format!("mongodb://h/?{options}")).unwrap();
            config.connection.write_concern.unwrap_or_default()
        };
        assert_eq!(concern("j=true").journal, Some(true));
        assert_eq!(concern("fsync=true").journal, Some(true));
        assert_eq!(
            concern("w=majority&wtimeout=70").w_timeout,
            Some(Duration::from_millis(70))
        );
        assert_eq!(concern("wtimeoutMS=0").w_timeout, None);
        for ignored in [
            "enableUtf8Validation=false",
            "promoteLongs=false&promoteValues=true&promoteBuffers=true&useBigInt64=true&bsonRegExp=true&raw=false",
            "minHeartbeatFrequencyMS=100&minInternalBufferSize=1&fieldsAsRaw=1&validateOptions=true",
            "authMechanism=DEFAULT&authSource=admin",
            "tlsAllowInvalidHostnames=false",
        ] {
            parse(&format!("mongodb://u:p@h/?{ignored}")).unwrap();
        }
        let unlimited =
            parse("mongodb://h/?maxPoolSize=0&maxIdleTimeMS=0&connectTimeoutMS=0&serverSelectionTimeoutMS=0").unwrap();
        assert_eq!(unlimited.connection.max_pool_size, None);
        assert_eq!(unlimited.connection.max_idle_time, None);
        assert_eq!(unlimited.connection.connect_timeout, None);
        assert_eq!(unlimited.connection.server_selection_timeout, None);
        for (option, advice) in [
            ("authMechanism=MONGODB-AWS", "create a user with a password"),
            ("authMechanism=GSSAPI", "create a user with a password"),
            ("proxyHost=h2", "use a tunnel to the server"),
            ("tlsAllowInvalidHostnames=true", "use the name in the certificate"),
            ("tlsCertificateKeyFilePassword=secret", "decrypt it"),
            ("tlscrlfile=/x", "revoked certificates"),
        ] {
            let message = refused(&format!("mongodb://h/?replicaSet=a&{option}"));
            let name = option.split('=').next().unwrap();
            assert!(
                message
                    .to_lowercase()
                    .contains(&format!("must not have {}", name.to_lowercase())),
                "{message}"
            );
            assert!(message.contains(advice) && !message.contains("feature"), "{message}");
        }
    }

    #[test]
    fn no_password_is_shown() {
        for url in [
            "mongodb://user:secret@h:99999999/db",
            "mongodb://user:secret",
            "mongodb://user:sec%ZZret@h/db",
            "mongodb://user:a/secret@h/db",
            "mongodb://user:a?secret@h/db",
            "mongodb://user:a@secret@h:x/db",
            "mongodb://user:secret@h/d b$",
            "mongodb://user:secret@/db",
            "mongodb://h/?nonsense=1&tlsCertificateKeyFilePassword=secret",
            "mongodb://h/?authMechanism=MONGODB-AWS&authMechanismProperties=AWS_SESSION_TOKEN:secret,secret",
            "mongodb+srv://user:secret@h:1/db",
            "mongodb:",
            "mongodb://",
            "mongodb:secret",
            "mongodb://user:secret@",
            "mongodb://us@er:secret@h",
            "mongodb://user:a%secret@h",
            "mongodb://user:secret@h/?replicaSet",
            "mongodb://user:secret@h/?tls=maybe",
            "mongodb://h:0",
            "mongodb://h:port",
        ] {
            let message = refused(url);
            assert!(
                !message.contains("secret") && !message.contains("ecret"),
                "{url}: {message}"
            );
        }
        assert!(refused("mongodb://user:secret@h1:1,h2:x/db").contains("percent-encoded"));
        let config = parse("mongodb://user:secret@h/db").unwrap();
        assert!(!format!("{config:?}").contains("secret"));
    }

    #[test]
    fn an_invalid_collection_is_rejected() {
        for name in ["", "a$b", "system.users", "a\0"] {
            let settings = Settings {
                collection: name.into(),
                ..Settings::default()
            };
            let error = MongodbConfig::parse("mongodb://h", &settings).unwrap_err();
            assert!(error.message.starts_with("collection "), "{}", error.message);
        }
    }
}
