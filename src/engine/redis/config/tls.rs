//! Reads the files of the TLS settings.

use std::path::Path;

use redis::{Client, ClientTlsConfig, ConnectionInfo, ErrorKind, RedisError, RedisResult, TlsCertificates};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::engine::TlsFiles;

/// A wrong setting, and what is wrong with it.
pub(in super::super) struct WrongFile {
    pub(in super::super) setting: &'static str,
    pub(in super::super) how: String,
}

/// Reads the files into the form that the driver expects.
pub(in super::super) fn certificates(files: &TlsFiles) -> Result<TlsCertificates, WrongFile> {
    let client_tls = match (&files.cert_file, &files.key_file) {
        (None, None) => None,
        (None, Some(_)) => {
            return Err(WrongFile {
                setting: "tls.certFile",
                how: "only tls.keyFile".into(),
            });
        }
        // One file may contain both, as for MongoDB.
        (Some(cert), key) => Some(ClientTlsConfig {
            client_cert: certificate_file("tls.certFile", cert)?,
            client_key: file("tls.keyFile", key.as_ref().unwrap_or(cert))?,
        }),
    };
    let root_cert = files
        .ca_file
        .as_ref()
        .map(|path| certificate_file("tls.caFile", path))
        .transpose()?;
    Ok(TlsCertificates { client_tls, root_cert })
}

/// Creates the driver's client, with the current TLS files.
pub(in super::super) fn client(server: ConnectionInfo, tls: Option<&TlsFiles>) -> RedisResult<Client> {
    let Some(files) = tls else {
        return Client::open(server);
    };
    // rustls has no default crypto provider here. A second call keeps the provider of the first one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let certificates = certificates(files).map_err(|wrong| {
        RedisError::from((
            ErrorKind::Io,
            "a TLS file cannot be used",
            format!("{}: {}", wrong.setting, wrong.how),
        ))
    })?;
    Client::build_with_tls(server, certificates)
}

/// Reads a PEM file with at least one certificate. An empty one would trust no server, which looks like a wrong server.
fn certificate_file(setting: &'static str, path: &Path) -> Result<Vec<u8>, WrongFile> {
    let pem = file(setting, path)?;
    match CertificateDer::pem_slice_iter(&pem).next() {
        Some(Ok(_)) => Ok(pem),
        _ => Err(WrongFile {
            setting,
            how: format!("{path:?} without a certificate"),
        }),
    }
}

fn file(setting: &'static str, path: &Path) -> Result<Vec<u8>, WrongFile> {
    std::fs::read(path).map_err(|error| WrongFile {
        setting,
        how: format!("{path:?} ({error})"),
    })
}

#[cfg(test)]
mod tests {
    use redis::ConnectionAddr;

    use super::*;
    use crate::engine::Settings;
    use crate::engine::redis::RedisConfig;

    #[test]
    fn tls_settings_are_checked() {
        let with = |url: &str, tls: TlsFiles| {
            RedisConfig::parse(
                url,
                &Settings {
                    tls,
                    ..Settings::default()
                },
            )
        };
        let message = |url, tls| with(url, tls).unwrap_err().message;
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("empty.pem");
        std::fs::write(&empty, "").unwrap();

        let insecure = TlsFiles {
            insecure: true,
            ..TlsFiles::default()
        };
        assert!(message("redis://h", insecure.clone()).contains("rediss://"));
        let config = with("rediss://h", insecure).unwrap();
        assert!(matches!(
            config.server.addr(),
            ConnectionAddr::TcpTls { insecure: true, .. }
        ));
        let missing = TlsFiles {
            ca_file: Some("/does/not/exist.pem".into()),
            ..TlsFiles::default()
        };
        let shown = message("rediss://h", missing);
        assert!(
            shown.starts_with("tls.caFile ") && shown.contains("/does/not/exist.pem"),
            "{shown}"
        );
        let hollow = TlsFiles {
            ca_file: Some(empty.clone()),
            ..TlsFiles::default()
        };
        assert!(message("rediss://h", hollow).contains("without a certificate"));
        let lonely = TlsFiles {
            key_file: Some(empty),
            ..TlsFiles::default()
        };
        assert!(message("rediss://h", lonely).starts_with("tls.certFile "));
    }
}
