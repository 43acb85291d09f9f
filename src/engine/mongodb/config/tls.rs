//! The TLS settings, and those of the URL.

use mongodb::options::{Tls, TlsOptions};

use crate::engine::TlsFiles;
use crate::engine::tls::Pem;
use crate::error::LockError;

/// Adds the settings to the URL's TLS options. Checks the content of all files and texts; [`ClientSettings`] adds those that the driver
/// does not read itself.
///
/// # Errors
/// `LOCK_INVALID_ARGUMENT` with the setting (or `target`, for a file of the URL) when a file is missing, or a file or a text has the
/// wrong content.
///
/// [`ClientSettings`]: super::ClientSettings
pub(super) fn with_settings(of_url: Option<Tls>, files: &TlsFiles) -> Result<Option<Tls>, LockError> {
    if *files == TlsFiles::default() {
        if let Some(Tls::Enabled(options)) = &of_url {
            check_files(options)?;
        }
        return Ok(of_url);
    }
    Pem::read(files)?;
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

/// Checks the files of the URL. For the driver a file without a certificate is an authority without certificates, and the error would
/// then be about the server.
fn check_files(options: &TlsOptions) -> Result<(), LockError> {
    let files = TlsFiles {
        ca_file: options.ca_file_path.clone(),
        cert_file: options.cert_key_file_path.clone(),
        ..TlsFiles::default()
    };
    let checked = Pem::read(&files).map_err(|wrong| {
        let (rule, how) = match wrong.setting {
            "tls.caFile" => ("must name in tlsCAFile a PEM file with a certificate", wrong.how),
            setting => (
                "must name in tlsCertificateKeyFile a PEM file with a certificate and its private key",
                match (setting, &files.cert_file) {
                    ("tls.keyFile", Some(path)) => format!("{path:?} without a private key"),
                    _ => wrong.how,
                },
            ),
        };
        LockError::invalid("target", rule, how)
    });
    checked.map(drop)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::engine::Settings;
    use crate::engine::mongodb::MongodbConfig;

    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n";

    fn parse(url: &str) -> Result<MongodbConfig, LockError> {
        MongodbConfig::parse(url, &Settings::default())
    }

    /// Creates a file in the folder.
    fn file(dir: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn files_without_the_required_parts_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let empty = file(&dir, "empty.pem", "");
        let cert = file(&dir, "cert.pem", CERTIFICATE);
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
        let of_url = |option: &str, path: &PathBuf| {
            let url = format!("mongodb://u:secret@h/?tls=true&{option}={}", path.display());
            parse(&url).unwrap_err().message
        };
        for (message, setting, reason) in [
            (refused(Some(&missing), None), "tls.caFile ", "missing.pem"),
            (refused(Some(&empty), None), "tls.caFile ", "without a certificate"),
            (refused(None, Some(&missing)), "tls.certFile ", "missing.pem"),
            (refused(Some(&cert), Some(&cert)), "tls.keyFile ", "no private key"),
            (
                of_url("tlsCAFile", &empty),
                "target must name in tlsCAFile ",
                "without a certificate",
            ),
            (
                of_url("tlsCertificateKeyFile", &missing),
                "target must name in tlsCertificateKeyFile ",
                "missing.pem",
            ),
            (
                of_url("tlsCertificateKeyFile", &cert),
                "target must name in tlsCertificateKeyFile ",
                "cert.pem\" without a private key",
            ),
        ] {
            assert!(message.starts_with(setting) && message.contains(reason), "{message}");
            assert!(!message.contains("secret"), "{message}");
        }
    }

    #[test]
    fn certificates_enable_tls() {
        let dir = tempfile::tempdir().unwrap();
        let authority = file(&dir, "ca.pem", CERTIFICATE);
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
            key: Some("key".to_owned()),
            ..TlsFiles::default()
        };
        assert!(
            with("mongodb://h/?tls=true", key)
                .unwrap_err()
                .message
                .starts_with("tls.certFile ")
        );
        assert!(matches!(
            parse("mongodb://h/?tls=true").unwrap().connection.tls,
            Some(Tls::Enabled(_))
        ));
    }
}
