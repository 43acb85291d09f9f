//! The record of a grant for `inspect`.

use redis::Cmd;

use crate::engine::redis::keys::{Layout, Part, RECORD_KEPT_MS};
use crate::engine::redis::scripts::RECORD;
use crate::model::{Claim, Fence, Key};

/// The record of a grant.
pub(in super::super) struct Record {
    pub(in super::super) claim: Claim,
    pub(in super::super) fence: Fence,
    /// On a node of a quorum: the number of the round, and the time of the grant in ms since 1970.
    pub(in super::super) attempt: Option<(u64, u64)>,
}

impl Record {
    /// Returns the call that stores it.
    pub(in super::super) fn call(&self, layout: &Layout) -> Cmd {
        let Record { claim, fence, attempt } = self;
        let names = claim.keys().iter().map(Key::as_str);
        let mut call = RECORD.call(layout, &[Part::Lock, Part::Fence], names);
        let (owner, process) = (claim.owner.as_str(), &claim.process);
        let (value, by, since_ms) = match attempt {
            None => (owner.to_owned(), format!("{} {}", process.pid, process.host), None),
            Some((number, since_ms)) => {
                let by = format!("{}:{number} {}", process.pid, process.host);
                (format!("{owner}.{number}"), by, Some(since_ms))
            }
        };
        call.arg(value)
            .arg(fence.0)
            .arg(by)
            .arg(RECORD_KEPT_MS)
            .arg(claim.ttl.as_millis());
        if let Some(since_ms) = since_ms {
            call.arg(since_ms);
        }
        call
    }
}
