//! Checks the rights of the user when an engine connects.
//!
//! Without this check a missing right would be detected when a lock is released or waited for, after other commands have acquired
//! it.

use std::sync::Arc;

use futures_util::future::{try_join, try_join_all};
use redis::Value;

use super::Route;
use crate::engine::redis::connection::Link;
use crate::engine::redis::connection::eviction::warn_of_eviction;
use crate::engine::redis::error::Failure;
use crate::engine::redis::keys::{Layout, Part};
use crate::engine::redis::scripts::RIGHTS;

/// Maximum number of random names that are tried until the slot of one is on a given server of a cluster.
const NAMES: usize = 256;

impl Route {
    /// Checks the rights of the user on the server that has just answered and, in a cluster, on each other master. Warns of servers
    /// that evict locks. Ignores other masters that do not answer.
    ///
    /// # Errors
    /// See [`Route::check_rights`].
    pub(in super::super) async fn check_all(&self, greeted: &Arc<Link>, layout: &Layout) -> Result<(), Failure> {
        let servers = self.servers().await?.into_iter();
        let others: Vec<_> = servers.filter(|server| !Arc::ptr_eq(server, greeted)).collect();
        let others = try_join_all(others.iter().map(async |server| {
            match tokio::time::timeout(server.limit() / 4, self.check(server, layout, None)).await {
                Ok(Err(failure)) if !failure.retryable() => Err(failure),
                _ => Ok(()),
            }
        }));
        try_join(self.check(greeted, layout, None), others).await.map(|_| ())
    }

    /// Checks the rights of the user on one server, and warns if it evicts locks. `channel` as for [`Route::check_rights`].
    ///
    /// # Errors
    /// See [`Route::check_rights`].
    pub(in super::super) async fn check(
        &self,
        server: &Arc<Link>,
        layout: &Layout,
        channel: Option<&str>,
    ) -> Result<(), Failure> {
        let warning = tokio::time::timeout(server.limit() / 4, warn_of_eviction(server));
        let (checked, _) = tokio::join!(self.check_rights(server, layout, channel), warning);
        checked
    }

    /// Runs a script that changes nothing with `EVAL` and `EVALSHA`, and in it every command that the other scripts use. Then
    /// subscribes to a channel, as waiters do (not on a quorum). `channel`: the prefix of the channels of a quorum; `None` for any other server.
    ///
    /// # Errors
    /// The first refusal. Retryable errors are ignored, because they do not concern rights.
    async fn check_rights(&self, server: &Arc<Link>, layout: &Layout, channel: Option<&str>) -> Result<(), Failure> {
        let Some((name, slot)) = self.name_on(server, layout).await else {
            return Ok(());
        };
        let mut call = RIGHTS.call(layout, &[Part::Fence, Part::Queue], std::iter::once(&*name));
        let mut lock = String::new();
        layout.lock(&*name, &mut lock);
        match channel {
            Some(prefix) => call.arg(format!("{prefix}{lock}")).arg("quorum"),
            None => call.arg(self.channel_prefix(slot) + &name),
        };
        let connection = server.connection().await?;
        let calls = [call.clone(), call];
        let answers = match server.run_in_order(&connection, &RIGHTS, &calls, None).await {
            Ok(answers) => answers,
            Err(failure) => vec![Err(failure)],
        };
        for answer in answers {
            match answer {
                Ok(Value::Array(refused)) => match &refused[..] {
                    [] => {}
                    [Value::BulkString(command), Value::BulkString(error)] => {
                        let [command, error] = [command, error].map(|text| String::from_utf8_lossy(text));
                        let text = format!("the server refuses {command}, which locks need: {error}");
                        return Err(Failure::WrongServer(text));
                    }
                    _ => return Err(Failure::Unexpected("rights.lua")),
                },
                Ok(_) => return Err(Failure::Unexpected("rights.lua")),
                Err(failure) if failure.retryable() || failure.is_moving() => {}
                Err(failure) => return Err(failure),
            }
        }
        if channel.is_some() {
            return Ok(());
        }
        match self.listen(slot, &name, Arc::new(|_| {})).await {
            Err(failure) if !failure.retryable() && !failure.is_moving() => Err(failure),
            _ => Ok(()),
        }
    }

    /// Returns a random name that a server has, and its slot.
    async fn name_on(&self, server: &Arc<Link>, layout: &Layout) -> Option<(String, u16)> {
        for _ in 0..NAMES {
            let name = format!("holdfast-check-{:016x}", fastrand::u64(..));
            let slot = self.slot(layout, &*name);
            match self {
                Route::Cluster(cluster) if !Arc::ptr_eq(&cluster.serving(slot).await.ok()?, server) => {}
                _ => return Some((name, slot)),
            }
        }
        None
    }
}
