//! Creates clients of the driver, also with certificates as text: the driver reads certificates from files only.

use std::io::{self, Write as _};
use std::path::PathBuf;

use mongodb::Client;
use mongodb::error::Result;
use mongodb::options::{ClientOptions, Tls};
use tempfile::TempPath;

use crate::engine::TlsFiles;
use crate::engine::tls::Pem;

/// What a client is created from.
#[derive(Clone)]
pub(crate) struct ClientSettings {
    pub(crate) options: ClientOptions,
    pub(crate) tls: TlsFiles,
}

impl ClientSettings {
    /// Creates a client.
    ///
    /// # Behavior
    /// What is not in the files that the driver expects is in temporary files during this call. The driver (mongodb 3.9.1,
    /// `sdam/topology.rs`) reads them here and not again.
    ///
    /// # Errors
    /// A file cannot be read or written, or has not the content that the driver expects.
    pub(crate) fn client(&self) -> Result<Client> {
        let mut options = self.options.clone();
        let mut files = Vec::new();
        if let Some(Tls::Enabled(tls)) = &mut options.tls {
            let Pem { authorities, client } = Pem::read(&self.tls).map_err(io::Error::from)?;
            if let Some(text) = authorities.filter(|_| self.tls.ca.is_some()) {
                tls.ca_file_path = Some(write("tls.ca", &text, &mut files)?);
            }
            let has_other_parts = self.tls.cert.is_some() || self.tls.key.is_some() || self.tls.key_file.is_some();
            if let Some((cert, key)) = client.filter(|_| has_other_parts) {
                // The driver expects one file with both.
                let mut parts = vec![cert, key];
                parts.dedup();
                tls.cert_key_file_path = Some(write("tls.cert", &parts.join(&b'\n'), &mut files)?);
            }
        }
        Client::with_options(options)
    }

    /// Whether the Unix sockets of the URL, if it has any, accept connections.
    pub(crate) fn sockets_accept(&self) -> bool {
        self.options.hosts.iter().all(|host| match host {
            #[cfg(unix)]
            mongodb::options::ServerAddress::Unix { path } => std::os::unix::net::UnixStream::connect(path).is_ok(),
            _ => true,
        })
    }
}

/// Writes PEM to a temporary file that only this user can read. It is removed when `files` are dropped.
fn write(setting: &str, pem: &[u8], files: &mut Vec<TempPath>) -> io::Result<PathBuf> {
    let file = tempfile::Builder::new().prefix("holdfast-").suffix(".pem").tempfile();
    let written = file.and_then(|mut file| file.write_all(pem).map(|()| file.into_temp_path()));
    let file = written.map_err(|error| {
        let text =
            format!("{setting} cannot be written to a temporary file, where the driver of MongoDB reads it: {error}");
        io::Error::new(error.kind(), text)
    })?;
    let path = file.to_path_buf();
    files.push(file);
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_in_a_private_file_that_is_removed() {
        let mut files = Vec::new();
        let path = write("tls.ca", b"authority", &mut files).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "authority");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        drop(files);
        assert!(!path.exists());
    }
}
