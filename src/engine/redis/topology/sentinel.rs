//! Finds the master by its sentinels.
//!
//! After "Guidelines for Redis clients with Redis Sentinel support" in the Redis manual: ask the sentinels for the address
//! of the master, connect, check by `ROLE` that the server is a master, and repeat all of that for every new connection.
//! Unlike there, the sentinels are asked at the same time, and the majority decides.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{ConnectionInfo, FromRedisValue, RedisResult, Value};

use super::majority::majority_of;
use crate::engine::redis::advice::without_arguments;
use crate::engine::redis::config::{Sentinels, show_address};
use crate::engine::redis::connection::dial::Dialed;
use crate::engine::redis::error::{Failure, NoMaster};

impl Sentinels {
    /// Returns the address that most sentinels report. A sentinel without an answer within `limit` is ignored.
    ///
    /// # Errors
    /// [`NoMaster`] if no sentinel reports one.
    pub(in super::super) async fn ask(&self, limit: Duration) -> Result<(String, u16), NoMaster> {
        let asked = self.sentinels.iter().map(|sentinel| async move {
            let answer = tokio::time::timeout(limit, self.ask_one(sentinel)).await;
            let error = match answer {
                Ok(Ok(Some(address))) => return Ok(address),
                Ok(Ok(None)) => None,
                Ok(Err(error)) => Some(without_arguments(error)),
                Err(_) => Some(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
            };
            Err((show_address(sentinel.addr()), error))
        });
        let unnamed = |refusals: Vec<_>| NoMaster::unnamed(&self.master, &refusals);
        majority_of(asked).await.map_err(unnamed)
    }

    async fn ask_one(&self, sentinel: &ConnectionInfo) -> RedisResult<Option<(String, u16)>> {
        // The caller has a time limit.
        let mut dialed = Dialed::connect(sentinel, self.tls.as_ref()).await?;
        dialed.log_in_to_sentinel(sentinel.redis_settings()).await?;
        let mut ask = redis::cmd("SENTINEL");
        let reply = dialed
            .ask(ask.arg("GET-MASTER-ADDR-BY-NAME").arg(&*self.master))
            .await?;
        Ok(FromRedisValue::from_redis_value(reply)?)
    }
}

impl fmt::Display for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the master {:?} of the sentinels ", self.master)?;
        for (i, sentinel) in self.sentinels.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            write!(f, "{separator}{}", show_address(sentinel.addr()))?;
        }
        Ok(())
    }
}

/// Checks by the answer of `ROLE` that a server is a master: the sentinels may not know of a failover yet, or the server not of its
/// end as master.
pub(in super::super) fn check_master(answer: &Value, address: &Arc<str>) -> Result<(), Failure> {
    match answer.as_sequence() {
        Some([Value::BulkString(role), ..]) if role == b"master" => Ok(()),
        Some([Value::BulkString(role), ..]) => {
            let role = String::from_utf8_lossy(role);
            let text = format!(
                "the sentinels name {address} as the master, but its role is {role:?}: a fail-over is under way"
            );
            Err(Failure::NoMaster(NoMaster {
                text: text.into(),
                passes: true,
                is_of_tls: false,
            }))
        }
        _ => Err(Failure::Unexpected("ROLE")),
    }
}
