//! Where a MongoDB is, from its URL. No name is resolved here.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use mongodb::options::{Acknowledgment, ConnectionString, Tls, TlsOptions};

use super::url;
use crate::engine::{Settings, TlsFiles};
use crate::error::LockError;

/// The database of a URL that names none. The official Node.js driver takes this one, and so the gist's users have it.
const DEFAULT_DATABASE: &str = "test";

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
        let mut connection = match ConnectionString::parse(url::without_passed_over(url)) {
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
        if let Some(Tls::Enabled(options)) = &of_url {
            let (ca, cert) = (&options.ca_file_path, &options.cert_key_file_path);
            check_file("target", "name in tlsCAFile", ca.as_deref(), &[CERTIFICATE])?;
            check_file(
                "target",
                "name in tlsCertificateKeyFile",
                cert.as_deref(),
                &[CERTIFICATE, KEY],
            )?;
        }
        return Ok(of_url);
    }
    check_file("tls.caFile", "be", files.ca_file.as_deref(), &[CERTIFICATE])?;
    check_file("tls.certFile", "be", files.cert_file.as_deref(), &[CERTIFICATE, KEY])?;
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

/// How the parts of a PEM file end their first lines.
const CERTIFICATE: &str = "CERTIFICATE-----";
const KEY: &str = "PRIVATE KEY-----";

/// Looks for what a PEM file has to have. The driver takes a file without a certificate for an authority that vouches for
/// nobody, which then looks like a wrong server.
fn check_file(argument: &str, verb: &str, path: Option<&Path>, parts: &[&str]) -> Result<(), LockError> {
    let Some(path) = path else { return Ok(()) };
    let what = if parts.contains(&KEY) {
        "a certificate and its private key"
    } else {
        "a certificate"
    };
    let rule = format!("must {verb} a PEM file with {what}");
    let wrong = |how: &dyn fmt::Display| LockError::invalid(argument, &rule, format_args!("{path:?} ({how})"));
    let text = std::fs::read(path).map_err(|error| wrong(&error))?;
    let text = String::from_utf8_lossy(&text);
    match parts.iter().find(|part| !text.contains(**part)) {
        Some(&KEY) => Err(wrong(&"no private key in it")),
        Some(_) => Err(wrong(&"no certificate in it")),
        None => Ok(()),
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

    /// A file that looks like a PEM file.
    fn file(dir: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn files_must_have_what_they_are_for() {
        let dir = tempfile::tempdir().unwrap();
        let empty = file(&dir, "empty.pem", "");
        let cert = file(&dir, "cert.pem", "-----BEGIN CERTIFICATE-----\n");
        let missing = dir.path().join("missing.pem");
        let refused = |ca_file: Option<&PathBuf>, cert_file: Option<&PathBuf>| {
            let tls = TlsFiles {
                ca_file: ca_file.cloned(),
                cert_file: cert_file.cloned(),
                ..TlsFiles::default()
            };
            let settings = Settings {
                tls,
                ..Settings::default()
            };
            MongodbConfig::parse("mongodb://h", &settings).unwrap_err().message
        };
        for (told, setting, reason) in [
            (refused(Some(&missing), None), "tls.caFile ", "missing.pem"),
            (refused(Some(&empty), None), "tls.caFile ", "no certificate"),
            (refused(None, Some(&missing)), "tls.certFile ", "missing.pem"),
            (refused(Some(&cert), Some(&cert)), "tls.certFile ", "no private key"),
            (
                parse(&format!("mongodb://u:secret@h/?tls=true&tlsCAFile={}", empty.display()))
                    .unwrap_err()
                    .message,
                "target ",
                "tlsCAFile",
            ),
        ] {
            assert!(told.starts_with(setting) && told.contains(reason), "{told}");
            assert!(!told.contains("secret"), "{told}");
        }
    }

    #[test]
    fn certificates_turn_tls_on() {
        let dir = tempfile::tempdir().unwrap();
        let authority = file(&dir, "ca.pem", "-----BEGIN CERTIFICATE-----\n");
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
            ca_file: Some(authority.clone()),
            insecure: true,
            ..TlsFiles::default()
        };
        let Some(Tls::Enabled(options)) = with("mongodb://h", ca.clone()).unwrap().connection.tls else {
            panic!("no TLS")
        };
        assert_eq!(options.ca_file_path, Some(authority));
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
