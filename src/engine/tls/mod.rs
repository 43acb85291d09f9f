//! The TLS settings of clients: reads their certificates.

use std::io;
use std::path::PathBuf;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::TlsFiles;
use super::errors::{Row, find, rows};
use crate::error::LockError;

#[cfg(any(feature = "etcd", feature = "postgres", feature = "redis", feature = "zookeeper"))]
mod client;

#[cfg(any(feature = "etcd", feature = "postgres", feature = "redis", feature = "zookeeper"))]
pub(in crate::engine) use self::client::{Verified, client_config};

/// What to do about errors of TLS, by the texts of rustls. The number is that of a store's addition.
const ADVICE: &[Row<usize>] = rows! {
    // Two authorities of one name: the signature does not match.
    ": UnknownIssuer|peer certificate: BadSignature" => 0, "the certificate of the server is from an authority that is not trusted here: \
        set tls.caFile or tls.ca to the certificate of that authority";
    ": NotValidForName|not valid for name" => 1, "the certificate of the server is for another host name: use the name in \
        the certificate as the host of the URL";
    ": certificate expired|peer certificate: Expired" => 2, "renew the certificate of the server, or correct the clock of this machine";
    ": alert: CertificateRequired|alert: UnknownCA|alert: BadCertificate" => 2,
        "the server requires a client certificate that it trusts: set tls.certFile and tls.keyFile (or tls.cert and tls.key)";
};

/// Returns what to do about an error of TLS, if that is known. `additions`: what else helps against the certificate of an
/// unknown authority, and against one for another name.
pub(in crate::engine) fn advice(text: &str, additions: [&str; 2]) -> Option<String> {
    let (number, advice) = find(ADVICE, "", text)?;
    Some(format!("{advice}{}", additions.get(number).unwrap_or(&"")))
}

/// A wrong setting, and what is wrong with it.
pub(in crate::engine) struct WrongFile {
    pub setting: &'static str,
    pub rule: &'static str,
    pub how: String,
}

impl WrongFile {
    fn new(setting: &'static str, rule: &'static str, how: impl Into<String>) -> Self {
        let how = how.into();
        WrongFile { setting, rule, how }
    }
}

impl From<WrongFile> for io::Error {
    fn from(wrong: WrongFile) -> Self {
        io::Error::other(format!("{}: {}", wrong.setting, wrong.how))
    }
}

impl From<WrongFile> for LockError {
    fn from(wrong: WrongFile) -> Self {
        LockError::invalid(wrong.setting, wrong.rule, wrong.how)
    }
}

/// The PEM of the TLS settings.
pub(in crate::engine) struct Pem {
    /// The certificate authorities. `None`: the system's.
    pub authorities: Option<Vec<u8>>,
    /// The client's certificate and its private key.
    pub client: Option<(Vec<u8>, Vec<u8>)>,
}

impl Pem {
    /// Reads the files of the settings.
    pub(in crate::engine) fn read(files: &TlsFiles) -> Result<Self, WrongFile> {
        let authorities = certificate(["tls.ca", "tls.caFile"], &files.ca, &files.ca_file)?;
        let client_cert = certificate(["tls.cert", "tls.certFile"], &files.cert, &files.cert_file)?;
        let client_key = pem(["tls.key", "tls.keyFile"], &files.key, &files.key_file)?;
        let client = match (client_cert, client_key) {
            (None, None) => None,
            (None, Some((setting, _))) => {
                let how = format!("only {setting}");
                return Err(WrongFile::new("tls.certFile", "must be set for a private key", how));
            }
            // One file may contain both, as for MongoDB.
            (Some(cert), None) => {
                let rule = "must be set, because the PEM text of the certificate has no private key";
                let wrong = |_| WrongFile::new("tls.keyFile", rule, "only tls.certFile or tls.cert");
                let _ = PrivateKeyDer::from_pem_slice(&cert).map_err(wrong)?;
                Some((cert.clone(), cert))
            }
            (Some(cert), Some((setting, key))) => {
                let rule = "must be PEM with a private key that is not encrypted";
                let _ = PrivateKeyDer::from_pem_slice(&key).map_err(|_| WrongFile::new(setting, rule, "other text"))?;
                Some((cert, key))
            }
        };
        Ok(Pem { authorities, client })
    }
}

/// Reads PEM with at least one certificate. Without one it would trust no server, which looks like a wrong server.
fn certificate(
    settings: [&'static str; 2],
    text: &Option<String>,
    file: &Option<PathBuf>,
) -> Result<Option<Vec<u8>>, WrongFile> {
    let Some((setting, pem)) = pem(settings, text, file)? else {
        return Ok(None);
    };
    if let Some(Ok(_)) = CertificateDer::pem_slice_iter(&pem).next() {
        return Ok(Some(pem));
    }
    Err(match file {
        Some(path) if text.is_none() => WrongFile::new(setting, FILE, format!("{path:?} without a certificate")),
        _ => {
            let rule = "must be the text of a PEM file (-----BEGIN CERTIFICATE-----), not its path";
            WrongFile::new(setting, rule, "text without a certificate")
        }
    })
}

const FILE: &str = "must be a PEM file";

/// Returns the text of a setting, or the content of its file, with the name of the setting. `settings`: the names of both.
fn pem(
    settings: [&'static str; 2],
    text: &Option<String>,
    file: &Option<PathBuf>,
) -> Result<Option<(&'static str, Vec<u8>)>, WrongFile> {
    let [of_text, of_file] = settings;
    match (text, file) {
        (Some(text), _) => Ok(Some((of_text, text.clone().into_bytes()))),
        (None, Some(path)) => match std::fs::read(path) {
            Ok(pem) => Ok(Some((of_file, pem))),
            Err(error) => Err(WrongFile::new(of_file, FILE, format!("{path:?} ({error})"))),
        },
        (None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::{ServerName, UnixTime};
    use rustls::{AlertDescription, CertificateError, Error};

    use super::*;

    /// The texts of rustls are the signs of [`ADVICE`].
    #[test]
    fn errors_of_certificates_have_advice() {
        let name = ServerName::try_from("h").unwrap().to_owned();
        let time = UnixTime::since_unix_epoch(std::time::Duration::ZERO);
        let of_name = CertificateError::NotValidForNameContext {
            expected: name,
            presented: vec!["other".into()],
        };
        let of_time = CertificateError::ExpiredContext { time, not_after: time };
        for (errors, expected) in [
            (
                vec![CertificateError::UnknownIssuer, CertificateError::BadSignature],
                "not trusted here",
            ),
            (vec![CertificateError::NotValidForName, of_name], "another host name"),
            (vec![CertificateError::Expired, of_time], "renew the certificate"),
        ] {
            for error in errors {
                let text = Error::InvalidCertificate(error).to_string();
                let advice = advice(&text, [""; 2]).unwrap_or_else(|| panic!("{text}"));
                assert!(advice.contains(expected), "{text}: {advice}");
            }
        }
        for alert in [
            AlertDescription::CertificateRequired,
            AlertDescription::UnknownCA,
            AlertDescription::BadCertificate,
        ] {
            let text = Error::AlertReceived(alert).to_string();
            let advice = advice(&text, [""; 2]).unwrap_or_else(|| panic!("{text}"));
            assert!(advice.contains("a client certificate"), "{text}: {advice}");
        }
        assert_eq!(advice("received fatal alert: HandshakeFailure", [""; 2]), None);
    }
}
