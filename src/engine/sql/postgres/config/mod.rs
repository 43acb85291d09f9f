//! From a URL, the environment and settings to a store.

use crate::engine::Settings;
use crate::engine::sql::tables::checked_table;
use crate::error::LockError;

pub(super) mod pass_file;
mod target;
#[cfg(test)]
mod tests;

pub(super) use self::target::{ServerConfig, Target};

/// A parsed `postgres://` URL.
#[derive(Clone)]
pub struct PostgresConfig {
    pub(super) target: Target,
    /// The servers without the pooler, for notifications. `None`: those of `target`.
    pub(super) listen: Option<Target>,
    /// The table of the locks: `name`, in the schema [`SCHEMA`](super::statements::SCHEMA), or `schema.name`. It is checked, and
    /// safe inside quotes.
    pub(super) table: String,
    /// The servers and the database, for messages.
    pub(in crate::engine) server: String,
    pub(super) settings: Settings,
}

impl std::fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresConfig")
            .field("server", &self.server)
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}

impl PostgresConfig {
    /// Parses `postgres://` and `postgresql://`. What the URL leaves out is taken from the variables of `settings.environment`.
    ///
    /// # Behavior
    /// Every TLS connection is verified, unless `tls.insecure` is set. Without `sslmode` the connection has TLS if the server
    /// offers it; with TLS settings it must.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` with `target`, `listenUrl`, `table`, a TLS setting, or a variable of the environment. No message
    /// contains a part of a URL.
    pub fn parse(url: &str, settings: &Settings) -> Result<Self, LockError> {
        let target = Target::parse("target", url, settings, None)?;
        let listen = match &settings.listen_url {
            Some(url) => Some(Target::parse("listenUrl", url, settings, Some(&target))?),
            None => None,
        };
        Ok(PostgresConfig {
            server: target.to_string(),
            listen,
            table: checked_table(&settings.table, true)?,
            target,
            settings: settings.clone(),
        })
    }
}
