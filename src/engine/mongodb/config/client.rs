//! Creates clients of the driver, also with certificates as text: the driver reads certificates from files only.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use mongodb::Client;
use mongodb::error::Result;
use mongodb::options::{ClientOptions, Tls};

use crate::engine::TlsFiles;

/// PEM text of the TLS settings.
#[derive(Clone, Default)]
pub(crate) struct PemText {
    ca: Option<String>,
    /// Certificate and private key: the driver expects one file with both.
    cert_and_key: Option<String>,
}

impl PemText {
    pub(super) fn of(tls: &TlsFiles) -> Self {
        let parts: Vec<&str> = [&tls.cert, &tls.key]
            .into_iter()
            .flatten()
            .map(String::as_str)
            .collect();
        PemText {
            ca: tls.ca.clone(),
            cert_and_key: (!parts.is_empty()).then(|| parts.join("\n")),
        }
    }

    /// Returns each text, with the name of its setting.
    pub(super) fn parts(&self) -> [(&'static str, Option<&str>); 2] {
        [
            ("tls.ca", self.ca.as_deref()),
            ("tls.cert", self.cert_and_key.as_deref()),
        ]
    }
}

/// What a client is created from.
#[derive(Clone)]
pub(crate) struct ClientSettings {
    pub(crate) options: ClientOptions,
    pub(crate) pem: PemText,
}

impl ClientSettings {
    /// Creates a client.
    ///
    /// # Behavior
    /// PEM text is in files of the temporary folder during this call. The driver (mongodb 3.9.1, `sdam/topology.rs`) reads them
    /// here and not again.
    ///
    /// # Errors
    /// A file cannot be written, or has not the content that the driver expects.
    pub(crate) fn client(&self) -> Result<Client> {
        let mut options = self.options.clone();
        let mut files = Vec::new();
        if let Some(Tls::Enabled(tls)) = &mut options.tls {
            for (setting, text) in self.pem.parts() {
                let Some(text) = text else { continue };
                let file = TemporaryFile::write(setting, text)?;
                match setting {
                    "tls.ca" => tls.ca_file_path = Some(file.0.clone()),
                    _ => tls.cert_key_file_path = Some(file.0.clone()),
                }
                files.push(file);
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

/// A file in the system's temporary folder that only this user can read. It is removed when this is dropped.
struct TemporaryFile(PathBuf);

impl TemporaryFile {
    fn write(setting: &str, text: &str) -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("holdfast-{}.pem", uuid::Uuid::new_v4()));
        let written = create(&path).and_then(|mut file| {
            let this = TemporaryFile(path.clone());
            file.write_all(text.as_bytes()).map(|()| this)
        });
        written.map_err(|error| {
            let path = path.display();
            let text = format!("{setting} cannot be written to {path}, where the driver of MongoDB reads it: {error}");
            io::Error::new(error.kind(), text)
        })
    }
}

fn create(path: &Path) -> io::Result<std::fs::File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        // A cleaner of temporary files may have removed it.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_in_a_private_file_that_is_removed() {
        let file = TemporaryFile::write("tls.ca", "authority").unwrap();
        let path = file.0.clone();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "authority");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn certificate_and_key_are_one_text() {
        let tls = TlsFiles {
            cert: Some("certificate".into()),
            key: Some("key".into()),
            ..TlsFiles::default()
        };
        let [(_, ca), (_, both)] = PemText::of(&tls)
            .parts()
            .map(|(setting, text)| (setting, text.map(str::to_owned)));
        assert_eq!((ca, both), (None, Some("certificate\nkey".to_owned())));
    }
}
