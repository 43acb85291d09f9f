//! TLS with HTTP/2.

use std::io;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::status::Status;
use crate::engine::TlsFiles;
use crate::engine::entries::target::Server;
use crate::engine::tls::{CertificateFault, Verified, client_config};

/// A socket, with or without TLS.
pub(super) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Sets up TLS with HTTP/2.
pub(super) async fn secured(server: &Server, files: &TlsFiles, socket: TcpStream) -> Result<Box<dyn Io>, Status> {
    let mut config = client_config(files, Verified::Full).map_err(|error| Status::Wrong(error.to_string()))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    let name = ServerName::try_from(server.host.clone()).map_err(|error| Status::Wrong(error.to_string()))?;
    let connecting = TlsConnector::from(Arc::new(config)).connect(name, socket);
    let stream = connecting.await.map_err(tls_error)?;
    if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
        return Err(Status::Wrong(
            "the server has TLS without HTTP/2: it is not etcd".into(),
        ));
    }
    Ok(Box::new(stream))
}

fn tls_error(error: io::Error) -> Status {
    let of_tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    let Some(of_tls) = of_tls else {
        return Status::Broken(format!("TLS failed: {error}"));
    };
    let advice = match CertificateFault::of(of_tls) {
        Some(CertificateFault::Untrusted) => {
            "; its authority is not trusted here: set tls.caFile or tls.ca to the certificate of that authority"
        }
        Some(CertificateFault::OtherName) => "; use the name in the certificate of the server as the host of the URL",
        Some(CertificateFault::Expired) => {
            return Status::Wrong(format!("TLS failed: {of_tls}; {}", CertificateFault::EXPIRED));
        }
        None if matches!(of_tls, rustls::Error::InvalidMessage(_)) => {
            "; does the server have TLS? Without it the URL begins with etcd://"
        }
        None if matches!(of_tls, rustls::Error::AlertReceived(_)) => {
            "; a server that requires a client certificate needs tls.certFile and tls.keyFile"
        }
        None => "",
    };
    Status::Wrong(format!("TLS failed: {of_tls}{advice}"))
}
