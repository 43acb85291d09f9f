//! The DNS records of a name. The caller provides the resolver: JavaScript has one.

use futures_util::future::BoxFuture;

/// The records of a name, for one service.
pub struct Records {
    /// Host and port of each SRV record.
    pub servers: Vec<(String, u16)>,
    /// The TXT records of the name.
    pub texts: Vec<String>,
}

/// Resolves a service and a name. The error is text. A name without records is no error.
pub type Resolver = dyn Fn(&str, &str) -> BoxFuture<'static, Result<Records, String>> + Send + Sync;
