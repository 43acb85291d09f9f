//! What the DNS says of a name, which the caller asks: JavaScript has a resolver.

use futures_util::future::BoxFuture;

/// The records of a service of a name.
pub struct Records {
    /// Host and port of each SRV record.
    pub servers: Vec<(String, u16)>,
    /// The TXT records of the name.
    pub texts: Vec<String>,
}

/// Resolves a service and a name. The error is text. No record is no error.
pub type Resolver = dyn Fn(&str, &str) -> BoxFuture<'static, Result<Records, String>> + Send + Sync;
