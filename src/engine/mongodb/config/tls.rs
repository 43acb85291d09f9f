//! The TLS settings, and those of the URL.

use std::fmt;
use std::path::Path;

use mongodb::options::{Tls, TlsOptions};

use super::PemText;
use crate::engine::TlsFiles;
use crate::error::LockError;

/// Adds the files of the settings to the URL's TLS options. Checks the text of the settings, which [`ClientSettings`] adds.
///
/// # Errors
/// `LOCK_INVALID_ARGUMENT` with the setting (or `target`, for a file of the URL) when a file is missing, or a file or a text has the
/// wrong content.
///
/// [`ClientSettings`]: super::ClientSettings
pub(super) fn with_settings(of_url: Option<Tls>, files: &TlsFiles, pem: &PemText) -> Result<Option<Tls>, LockError> {
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
    for ((setting, text), parts) in pem.parts().into_iter().zip([&[CERTIFICATE][..], &[CERTIFICATE, KEY]]) {
        if let Some(why) = text.and_then(|text| missing_part(text, parts)) {
            let rule = format!("must be PEM text with {}", content(parts));
            return Err(LockError::invalid(setting, &rule, format_args!("text with {why}")));
        }
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

/// The ends of the first lines of the parts of a PEM file.
const CERTIFICATE: &str = "CERTIFICATE-----";
const KEY: &str = "PRIVATE KEY-----";

/// Checks that a PEM file has these parts. For the driver a file without a certificate is an authority without certificates,
/// and the error would then be about the server.
fn check_file(argument: &str, verb: &str, path: Option<&Path>, parts: &[&str]) -> Result<(), LockError> {
    let Some(path) = path else { return Ok(()) };
    let rule = format!("must {verb} a PEM file with {}", content(parts));
    let wrong = |how: &dyn fmt::Display| LockError::invalid(argument, &rule, format_args!("{path:?} ({how})"));
    let text = std::fs::read(path).map_err(|error| wrong(&error))?;
    match missing_part(&String::from_utf8_lossy(&text), parts) {
        Some(why) => Err(wrong(&format_args!("{why} in it"))),
        None => Ok(()),
    }
}

/// Describes PEM with these parts.
fn content(parts: &[&str]) -> &'static str {
    match parts.contains(&KEY) {
        true => "a certificate and its private key",
        false => "a certificate",
    }
}

/// Describes the first of the parts that a text does not have, or what is in the place of its line breaks.
fn missing_part(text: &str, parts: &[&str]) -> Option<&'static str> {
    match parts.iter().find(|part| !text.contains(**part)) {
        Some(&KEY) => Some("no private key"),
        Some(_) => Some("no certificate"),
        None => replaced_line_break(text),
    }
}

/// Describes what is in the place of a line break behind the first line of a part.
fn replaced_line_break(text: &str) -> Option<&'static str> {
    let first_lines = text.split("-----BEGIN ").skip(1);
    first_lines.into_iter().find_map(|part| {
        let (_, behind) = part.split_once("-----")?;
        match behind.trim_start_matches([' ', '\t']) {
            text if text.starts_with(['\n', '\r']) || text.is_empty() => None,
            text if text.starts_with('\\') => Some("escaped line breaks (\\n), which must be line breaks"),
            _ if behind.starts_with(' ') => Some("spaces in place of line breaks"),
            _ => Some("no line break behind its first line"),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::engine::Settings;
    use crate::engine::mongodb::MongodbConfig;

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
        for (message, setting, reason) in [
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
            assert!(message.starts_with(setting) && message.contains(reason), "{message}");
            assert!(!message.contains("secret"), "{message}");
        }
    }

    #[test]
    fn text_that_lost_its_line_breaks_is_named() {
        let pem = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
        let parsed = |text: &str| {
            let tls = TlsFiles {
                ca: Some(text.to_owned()),
                ..TlsFiles::default()
            };
            let settings = Settings {
                tls,
                ..Settings::default()
            };
            MongodbConfig::parse("mongodb://h", &settings).map_err(|error| error.message)
        };
        for (lost, why) in [
            ("\\n", "escaped line breaks"),
            ("\\r\\n", "escaped line breaks"),
            (" ", "spaces in place of line breaks"),
            ("", "no line break"),
        ] {
            let message = parsed(&pem.replace('\n', lost)).unwrap_err();
            assert!(message.starts_with("tls.ca ") && message.contains(why), "{message}");
        }
        for kept in ["\n", "\r\n", " \n", "\n  "] {
            parsed(&pem.replace('\n', kept)).unwrap();
        }
    }

    #[test]
    fn certificates_enable_tls() {
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
}
