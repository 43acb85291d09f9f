//! Reads the certificates of the TLS settings.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use redis::{Client, ClientTlsConfig, ConnectionInfo, ErrorKind, RedisError, RedisResult, TlsCertificates};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::engine::TlsFiles;

/// A wrong setting, and what is wrong with it.
pub(in super::super) struct WrongFile {
    pub(in super::super) setting: &'static str,
    pub(in super::super) rule: &'static str,
    pub(in super::super) how: String,
}

/// Reads the files into the form that the driver expects.
pub(in super::super) fn certificates(files: &TlsFiles) -> Result<TlsCertificates, WrongFile> {
    let root_cert = certificate(["tls.ca", "tls.caFile"], &files.ca, &files.ca_file)?;
    let client_cert = certificate(["tls.cert", "tls.certFile"], &files.cert, &files.cert_file)?;
    let client_key = pem(["tls.key", "tls.keyFile"], &files.key, &files.key_file)?;
    let client_tls = match (client_cert, client_key) {
        (None, None) => None,
        (None, Some((setting, _))) => {
            return Err(WrongFile {
                setting: "tls.certFile",
                rule: "must be set for a private key",
                how: format!("only {setting}"),
            });
        }
        // One file may contain both, as for MongoDB.
        (Some(cert), key) => Some(ClientTlsConfig {
            client_key: key.map_or_else(|| cert.clone(), |(_, key)| key),
            client_cert: cert,
        }),
    };
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

/// Creates the TLS configuration of a fast path, with the current TLS files. It trusts what the driver's [`client`] trusts.
///
/// # Errors
/// When a file cannot be used.
pub(in super::super) fn tls_config(files: &TlsFiles) -> io::Result<Arc<ClientConfig>> {
    let unusable = |wrong: WrongFile| io::Error::other(format!("{}: {}", wrong.setting, wrong.how));
    let TlsCertificates { client_tls, root_cert } = certificates(files).map_err(unusable)?;
    let mut roots = RootCertStore::empty();
    match root_cert {
        Some(pem) => {
            for certificate in CertificateDer::pem_slice_iter(&pem) {
                let certificate = certificate.map_err(io::Error::other)?;
                roots.add(certificate).map_err(io::Error::other)?;
            }
        }
        None => _ = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs),
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots);
    let mut config = match client_tls {
        None => config.with_no_client_auth(),
        Some(ClientTlsConfig {
            client_cert,
            client_key,
        }) => {
            let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&client_cert).collect();
            let key = PrivateKeyDer::from_pem_slice(&client_key).map_err(io::Error::other)?;
            config
                .with_client_auth_cert(chain.map_err(io::Error::other)?, key)
                .map_err(io::Error::other)?
        }
    };
    // Each connection reads the files again, so that no session is resumed.
    config.resumption = Resumption::disabled();
    if files.insecure {
        config.enable_sni = false;
        config
            .dangerous()
            .set_certificate_verifier(Arc::new(TrustAll(provider)));
    }
    Ok(Arc::new(config))
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
