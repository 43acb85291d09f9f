//! The TLS settings as a configuration of rustls.

use std::io;
use std::sync::{Arc, LazyLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use super::Pem;
use crate::engine::TlsFiles;

/// What is verified of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum Verified {
    /// The certificate and its name.
    Full,
    /// The certificate, for any name.
    Authority,
}

/// The certificates of the system, which are read once: this takes some milliseconds.
static SYSTEM_ROOTS: LazyLock<Arc<RootCertStore>> = LazyLock::new(|| {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    Arc::new(roots)
});

/// Creates the TLS configuration of a client, with the current TLS files.
///
/// # Errors
/// When a file cannot be used.
pub(in crate::engine) fn client_config(files: &TlsFiles, verified: Verified) -> io::Result<ClientConfig> {
    let Pem { authorities, client } = Pem::read(files)?;
    let roots = match authorities {
        Some(pem) => {
            let mut roots = RootCertStore::empty();
            for certificate in CertificateDer::pem_slice_iter(&pem) {
                let certificate = certificate.map_err(io::Error::other)?;
                roots.add(certificate).map_err(io::Error::other)?;
            }
            Arc::new(roots)
        }
        None => SYSTEM_ROOTS.clone(),
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
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
                .map_err(|error| io::Error::other(format!("the client certificate and its private key: {error}")))?
        }
    };
    // Each connection reads the files again, so that no session is resumed.
    config.resumption = Resumption::disabled();
    let authorities = match verified {
        _ if files.insecure => None,
        Verified::Full => return Ok(config),
        Verified::Authority => {
            let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider.clone()).build();
            Some(verifier.map_err(io::Error::other)?)
        }
    };
    config.enable_sni = !files.insecure;
    let verifier = Arc::new(Lenient { provider, authorities });
    config.dangerous().set_certificate_verifier(verifier);
    Ok(config)
}

/// Trusts a certificate of the authorities for any name, or every server (`tls.insecure`).
#[derive(Debug)]
struct Lenient {
    provider: Arc<CryptoProvider>,
    /// `None`: every server is trusted.
    authorities: Option<Arc<WebPkiServerVerifier>>,
}

impl ServerCertVerifier for Lenient {
    fn verify_server_cert(
        &self,
        end: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        use CertificateError::{NotValidForName, NotValidForNameContext};
        let verified = self.authorities.as_ref();
        // rustls verifies the name last.
        match verified.map(|authorities| authorities.verify_server_cert(end, chain, name, ocsp, now)) {
            None | Some(Err(rustls::Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. }))) => {
                Ok(ServerCertVerified::assertion())
            }
            Some(other) => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        match &self.authorities {
            None => Ok(HandshakeSignatureValid::assertion()),
            Some(authorities) => authorities.verify_tls12_signature(message, cert, signed),
        }
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        match &self.authorities {
            None => Ok(HandshakeSignatureValid::assertion()),
            Some(authorities) => authorities.verify_tls13_signature(message, cert, signed),
        }
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
