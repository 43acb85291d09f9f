//! Where a MongoDB is, from its URL. No name is resolved here.

use std::fmt;
use std::time::Duration;

use mongodb::options::{Acknowledgment, ConnectionString, Tls, TlsOptions};

use crate::engine::{Settings, TlsFiles};
use crate::error::LockError;

/// The database of a URL that names none. The official Node.js driver takes this one, and so the gist's users have it.
const DEFAULT_DATABASE: &str = "test";

/// URL options of other official drivers that say nothing about where the locks are or how safely they are kept. They
/// are passed over, because a URL that served the gist shall serve here: the Rust driver refuses what it does not know.
const PASSED_OVER: [&str; 24] = [
    "autoreconnect",
    "autoselectfamily",
    "autoselectfamilyattempttimeout",
    "buffermaxentries",
    "checkkeys",
    "compressors",
    "family",
    "forceserverobjectid",
    "ignoreundefined",
    "keepalive",
    "keepaliveinitialdelay",
    "monitorcommands",
    "nodelay",
    "poolsize",
    "reconnectinterval",
    "reconnecttries",
    "serializefunctions",
    "sockettimeoutms",
    "timeoutms",
    "usenewurlparser",
    "useunifiedtopology",
    "uuidrepresentation",
    "waitqueuemultiple",
    "zlibcompressionlevel",
];

/// A MongoDB deployment, and where the locks are in it.
#[derive(Clone)]
pub struct MongodbConfig {
    pub(super) connection: ConnectionString,
    pub(super) database: String,
    pub(super) collection: String,
    pub(super) prefix: String,
    pub(super) timeout: Duration,
}

impl fmt::Debug for MongodbConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the connection: there is a password in it.
        f.debug_struct("MongodbConfig")
            .field("database", &self.database)
            .field("collection", &self.collection)
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

impl MongodbConfig {
    /// Understands a `mongodb://` or `mongodb+srv://` URL.
    ///
    /// # Behavior
    /// The database is the URL's, or `test`. Its `w`, `journal` and `wtimeoutMS` hold for every write; without `w` it is
    /// the majority. Its read preference does not matter: locks are on the primary.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` naming `target`, `collection`, or the setting under `tls`. No password is ever shown.
    pub fn parse(url: &str, settings: &Settings) -> Result<Self, LockError> {
        let mut connection = match ConnectionString::parse(without_passed_over(url)) {
            Ok(connection) => connection,
            Err(_) => return Err(LockError::invalid("target", &reason(url), shown(url))),
        };
        if connection
            .write_concern
            .as_ref()
            .is_some_and(|concern| concern.w == Some(Acknowledgment::Nodes(0)))
        {
            return Err(LockError::invalid(
                "target",
                "must not ask for writes that nobody acknowledges",
                "w=0",
            ));
        }
        connection.tls = tls(connection.tls.take(), &settings.tls)?;
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
            connection,
        })
    }
}

/// The URL's TLS with the files of the settings in it.
fn tls(of_url: Option<Tls>, files: &TlsFiles) -> Result<Option<Tls>, LockError> {
    if let Some(key) = &files.key_file {
        let rule = "is not for MongoDB: put the key into the file of tls.certFile, behind the certificate";
        return Err(LockError::invalid("tls.keyFile", rule, format_args!("{key:?}")));
    }
    if *files == TlsFiles::default() {
        return Ok(of_url);
    }
    let mut options = match of_url {
        Some(Tls::Disabled) => {
            return Err(LockError::invalid(
                "tls",
                "contradicts the target",
                "tls=false in the URL",
            ));
        }
        Some(Tls::Enabled(options)) => options,
        None => TlsOptions::default(),
    };
    if files.ca_file.is_some() {
        options.ca_file_path.clone_from(&files.ca_file);
    }
    if files.cert_file.is_some() {
        options.cert_key_file_path.clone_from(&files.cert_file);
    }
    if files.insecure {
        options.allow_invalid_certificates = Some(true);
    }
    Ok(Some(Tls::Enabled(options)))
}

/// The URL without the options that are passed over.
fn without_passed_over(url: &str) -> String {
    let Some((before, options)) = url.split_once('?') else {
        return url.to_owned();
    };
    let kept: Vec<&str> = options
        .split('&')
        .filter(|option| {
            let name = option.split('=').next().unwrap_or_default().to_lowercase();
            !option.is_empty() && !PASSED_OVER.contains(&name.as_str())
        })
        .collect();
    format!("{before}?{}", kept.join("&"))
}

/// What is wrong with a URL, as far as that can be told without showing a secret.
fn reason(url: &str) -> String {
    const ANYWHERE: &str = "must be a MongoDB URL such as mongodb://user:password@host:27017/database?replicaSet=rs0 with \
                            special characters in the user name and the password percent-encoded";
    let url = without_passed_over(url);
    let (Some((scheme, _)), Some((_, options))) = (url.split_once("://"), url.split_once('?')) else {
        return ANYWHERE.to_owned();
    };
    // Behind a question mark in a password follows the rest of it, and some options are secrets themselves.
    let lower = options.to_lowercase();
    if options.contains('@')
        || ["password", "authmechanismproperties"]
            .iter()
            .any(|secret| lower.contains(secret))
    {
        return ANYWHERE.to_owned();
    }
    match ConnectionString::parse(format!("{scheme}://host.example.com/?{options}")) {
        Ok(_) => ANYWHERE.to_owned(),
        Err(error) => match &*error.kind {
            mongodb::error::ErrorKind::InvalidArgument { message, .. } => {
                format!("must be a MongoDB URL with valid options ({message})")
            }
            _ => ANYWHERE.to_owned(),
        },
    }
}

/// A URL that was not understood, without whatever may be a secret in it: nobody knows where its password ends.
fn shown(url: &str) -> String {
    let (scheme, rest) = url
        .split_once("://")
        .unwrap_or((url.split(':').next().unwrap_or_default(), ""));
    let hosts = rest
        .rsplit('@')
        .next()
        .unwrap_or_default()
        .split(['/', '?'])
        .next()
        .unwrap_or_default();
    let is_host = |host: &str| {
        let (name, port) = host.rsplit_once(':').unwrap_or((host, "27017"));
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '[' | ']' | ':');
        !name.is_empty() && name.chars().all(plain) && port.len() <= 5 && port.chars().all(|c| c.is_ascii_digit())
    };
    let is_whole = rest.contains('@') || !hosts.contains(':');
    match hosts.split(',').all(is_host) && is_whole {
        true => format!("{scheme}://…{hosts}…"),
        false => format!("{scheme}://…"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;
    use std::path::PathBuf;

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
    fn defaults_are_those_of_the_gist() {
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
    fn options_of_the_node_driver_are_no_fault() {
        let url = "mongodb://h/?useNewUrlParser=true&useUnifiedTopology=true&socketTimeoutMS=1&compressors=zlib&w=2";
        let config = parse(url).unwrap();
        assert_eq!(
            config.connection.write_concern.unwrap().w,
            Some(Acknowledgment::Nodes(2))
        );
        assert!(parse("mongodb://h/?useUnifiedTopology=true").is_ok());
        assert!(
            refused("mongodb://h/?replicaset=a&tlsAllowInvalidHostnames=true").contains("tlsallowinvalidhostnames")
        );
        assert!(refused("mongodb://h/?replicaStet=rs0").contains("replicastet"));
        assert!(refused("mongodb://h/?w=0").contains("w=0"));
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
    fn certificates_turn_tls_on() {
        let with = |url: &str, tls: TlsFiles| {
            MongodbConfig::parse(
                url,
                &Settings {
                    tls,
                    ..Settings::default()
                },
            )
        };
        let ca = TlsFiles {
            ca_file: Some(PathBuf::from("/ca.pem")),
            insecure: true,
            ..TlsFiles::default()
        };
        let Some(Tls::Enabled(options)) = with("mongodb://h", ca.clone()).unwrap().connection.tls else {
            panic!("no TLS")
        };
        assert_eq!(options.ca_file_path, Some(PathBuf::from("/ca.pem")));
        assert_eq!(options.allow_invalid_certificates, Some(true));
        assert!(
            with("mongodb://h/?tls=false", ca)
                .unwrap_err()
                .message
                .starts_with("tls ")
        );
        let key = TlsFiles {
            key_file: Some(PathBuf::from("/key.pem")),
            ..TlsFiles::default()
        };
        assert!(
            with("mongodb://h/?tls=true", key)
                .unwrap_err()
                .message
                .starts_with("tls.keyFile ")
        );
        assert!(matches!(
            parse("mongodb://h/?tls=true").unwrap().connection.tls,
            Some(Tls::Enabled(_))
        ));
    }

    #[test]
    fn a_collection_must_be_one() {
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
