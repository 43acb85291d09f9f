//! Cancel requests.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::TryFutureExt;
use futures_util::future::MapOk;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::timeout;
use tokio_postgres::CancelToken;
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::engine::core::stream::{Endpoint, Stream};

/// How long the server has to close the connection of a cancel request. PgBouncer keeps a request for 10 s (`cancel_wait_timeout`).
const CLOSE_TIMEOUT: Duration = Duration::from_secs(15);

/// Cancels the statement of a connection.
#[derive(Clone)]
pub(super) struct Canceller {
    pub endpoint: Endpoint,
    pub host: String,
    pub token: CancelToken,
    pub tls: MakeRustlsConnect,
}

impl Canceller {
    /// Cancels the current statement, by a request on another connection, which opens within `limit`. `true`: the server has
    /// closed that connection, and cancels nothing later.
    pub(super) async fn cancel(mut self, limit: Duration) -> bool {
        let Ok(Ok(stream)) = timeout(limit, Stream::connect(&self.endpoint)).await else {
            return false;
        };
        let Ok(tls) = MakeTlsConnect::<UntilClosed<Stream>>::make_tls_connect(&mut self.tls, &self.host);
        let request = self.token.cancel_query_raw(UntilClosed(stream), UntilClosed(tls));
        timeout(CLOSE_TIMEOUT, request).await.is_ok_and(|sent| sent.is_ok())
    }
}

/// A stream whose shutdown waits until the server closes the connection, as libpq does. PostgreSQL closes it after the signal to
/// the process of the statement. PgBouncer 1.18 and 1.19 terminate when the client closes it first.
struct UntilClosed<S>(S);

impl<S: AsyncRead + Unpin> AsyncRead for UntilClosed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for UntilClosed<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut bytes = [0; 64];
        loop {
            let mut buffer = ReadBuf::new(&mut bytes);
            let read = ready!(Pin::new(&mut self.0).poll_read(context, &mut buffer));
            // An error is an end, too: a connection that is reset, or a TLS session without its last message.
            if read.is_err() || buffer.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<S: TlsStream + Unpin> TlsStream for UntilClosed<S> {
    fn channel_binding(&self) -> ChannelBinding {
        self.0.channel_binding()
    }
}

impl<S, T: TlsConnect<S>> TlsConnect<S> for UntilClosed<T>
where
    T::Stream: Unpin,
{
    type Stream = UntilClosed<T::Stream>;
    type Error = T::Error;
    type Future = MapOk<T::Future, fn(T::Stream) -> Self::Stream>;

    fn connect(self, stream: S) -> Self::Future {
        self.0.connect(stream).map_ok(UntilClosed)
    }
}
