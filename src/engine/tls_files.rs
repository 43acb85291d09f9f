//! The TLS settings of a service, as its caller gives them.

use std::fmt;
use std::path::PathBuf;

/// The TLS settings: paths of PEM files, or their text.
///
/// # Behavior
/// `Debug` shows no text: it may contain a private key.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate authorities, instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// The client's certificate (MongoDB: certificate and private key in one file).
    pub cert_file: Option<PathBuf>,
    /// The client's private key.
    pub key_file: Option<PathBuf>,
    /// The text of `ca_file`, instead of the file.
    pub ca: Option<String>,
    /// The text of `cert_file`, instead of the file.
    pub cert: Option<String>,
    /// The text of `key_file`, instead of the file.
    pub key: Option<String>,
    /// Redis: the name in the server's certificate, instead of the host of the URL.
    pub server_name: Option<String>,
    /// Accepts any certificate. For tests only.
    pub insecure: bool,
}

impl TlsFiles {
    /// Rejects `tls.servername`, which only Redis has. `advice` is appended to the error.
    #[cfg(any(
        feature = "etcd",
        feature = "mongodb",
        feature = "mysql",
        feature = "postgres",
        feature = "zookeeper"
    ))]
    pub(super) fn reject_server_name(&self, advice: &str) -> Result<(), crate::error::LockError> {
        match self.server_name {
            Some(_) => Err(crate::error::LockError::invalid(
                "tls.servername",
                &format!("is for Redis: {advice}"),
                "a name",
            )),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for TlsFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsFiles")
            .field("ca_file", &self.ca_file)
            .field("cert_file", &self.cert_file)
            .field("key_file", &self.key_file)
            .field("server_name", &self.server_name)
            .field("insecure", &self.insecure)
            .finish_non_exhaustive()
    }
}
