//! TLS of clients: reads the certificates of the TLS settings.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use super::TlsFiles;

/// A wrong setting, and what is wrong with it.
pub(in crate::engine) struct WrongFile {
    pub setting: &'static str,
    pub rule: &'static str,
    pub how: String,
}

impl From<WrongFile> for io::Error {
    fn from(wrong: WrongFile) -> Self {
        io::Error::other(format!("{}: {}", wrong.setting, wrong.how))
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
                return Err(WrongFile {
                    setting: "tls.certFile",
                    rule: "must be set for a private key",
                    how: format!("only {setting}"),
                });
            }
            // One file may contain both, as for MongoDB.
            (Some(cert), key) => {
                let key = key.map_or_else(|| cert.clone(), |(_, key)| key);
                Some((cert, key))
            }
        };
        Ok(Pem { authorities, client })
    }
}

/// What is verified of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum Verified {
    /// The certificate and its name.
    Full,
    /// The certificate, for any name.
    #[cfg_attr(
        not(feature = "postgres"),
        allow(dead_code, reason = "only PostgreSQL has this mode")
    )]
    Authority,
}

/// Creates the TLS configuration of a client, with the current TLS files.
///
/// # Errors
/// When a file cannot be used.
pub(in crate::engine) fn client_config(files: &TlsFiles, verified: Verified) -> io::Result<ClientConfig> {
    let Pem { authorities, client } = Pem::read(files)?;
    let mut roots = RootCertStore::empty();
    match authorities {
        Some(pem) => {
            for certificate in CertificateDer::pem_slice_iter(&pem) {
                let certificate = certificate.map_err(io::Error::other)?;
                roots.add(certificate).map_err(io::Error::other)?;
            }
        }
        None => _ = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs),
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let roots = Arc::new(roots);
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots.clone());
    let mut config = match client {
        None => config.with_no_client_auth(),
        Some((cert, key)) => {
            let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&cert).collect();
            let key = PrivateKeyDer::from_pem_slice(&key).map_err(io::Error::other)?;
            config
                .with_client_auth_cert(chain.map_err(io::Error::other)?, key)
                .map_err(io::Error::other)?
        }
    };
    // Each connection reads the files again, so that no session is resumed.
    config.resumption = Resumption::disabled();
    if files.insecure {
        config.enable_sni = false;
        let verifier = Arc::new(TrustAll(provider));
        config.dangerous().set_certificate_verifier(verifier);
    } else if verified == Verified::Authority {
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider)
            .build()
            .map_err(io::Error::other)?;
        config.dangerous().set_certificate_verifier(Arc::new(AnyName(verifier)));
    }
    Ok(config)
}

/// Trusts every server (`tls.insecure`).
#[derive(Debug)]
struct TrustAll(Arc<CryptoProvider>);

impl ServerCertVerifier for TrustAll {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Trusts a certificate of the authorities for any name.
#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        end: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        use CertificateError::{NotValidForName, NotValidForNameContext};
        // rustls verifies the name last.
        match self.0.verify_server_cert(end, chain, name, ocsp, now) {
            Err(rustls::Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. })) => {
                Ok(ServerCertVerified::assertion())
            }
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, cert, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
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
    match (CertificateDer::pem_slice_iter(&pem).next(), file) {
        (Some(Ok(_)), _) => Ok(Some(pem)),
        (_, Some(path)) if text.is_none() => Err(WrongFile {
            setting,
            rule: FILE,
            how: format!("{path:?} without a certificate"),
        }),
        _ => Err(WrongFile {
            setting,
            rule: "must be the text of a PEM file (-----BEGIN CERTIFICATE-----), not its path",
            how: "text without a certificate".into(),
        }),
    }
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
            Err(error) => Err(WrongFile {
                setting: of_file,
                rule: FILE,
                how: format!("{path:?} ({error})"),
            }),
        },
        (None, None) => Ok(None),
    }
}
