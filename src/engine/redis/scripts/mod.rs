//! The Lua scripts of a single server and of a cluster, and their calls.
//!
//! Every verb is a script: one or more files with headers, joined here. A script is called by `EVALSHA`, and sent in full if the server
//! does not have it.
//!
//! # The queue
//! `queue.lua` has the queue of a name, and the hand-off inside the script that ends a lock. `docs/proofs/hand-off.md` shows that the
//! hand-off is a grant. A waiter counts as dead in three cases: its process receives no messages (the publication had no receiver), its
//! process sent no heartbeat for 4.5 s, or it got a name by hand-off and sent no command. The hand-off lasts no longer than the liveness
//! of the process, and shortens that liveness to the waiter's ttl. So a suspended process delays the waiters behind it once, and not once
//! for each of its waiters.
//!
//! The script that finds a dead waiter removes it and marks its process, whose next heartbeat is answered with "try again": its waiters
//! enter again with their numbers. One script removes 256 at most, so that 100 000 dead waiters never block the server for more than a few
//! milliseconds. An unfinished script reports it, and the engine calls again, at once (an attempt) or in the background (a release). An
//! unfinished attempt of a waiter is in the queue already, so that no later attempt in its pipeline is granted before it.
//!
//! A hand-off that is shorter than the heartbeat interval is published to one other process as well, which sends a heartbeat when it ends.
//!
//! # Releases
//! `release_one.lua` is the rule for one name, with waiters and minimum hold. It is part of [`RELEASE`] and [`FORCE_RELEASE`]. In the
//! first, `release_held.lua` comes first and serves the usual case, names without waiters. So a change of the rule may concern both files.
//! A quorum has files of its own in `redis/quorum/scripts/`.
//!
//! # Shared names
//! `shared/` has the scripts of semaphores and read/write locks, which have no plain commands. The queue, its hand-off and its messages are
//! those of a lock: `shared/holders.lua` says which waiter fits, and what it gets. So one script hands off to all first waiters that fit.
//! Where no caller releases, the heartbeat of the waiters' processes finds that a lease has ended.
//!
//! # Fencing tokens
//! The next token is the larger of the last + 1 and the server's clock in µs. One key, `holdfast:last`, has the last token of all names,
//! so that nothing is stored per name. A cluster has no such key, nor has a server with several shards (`?sharded=true`): it would be in
//! one slot, or block a slot's names while the slot moves. There the companion key of a name outlives its lease by about a day. After
//! that, the clock alone makes the next token larger.

use std::sync::LazyLock;

use redis::{Arg, Cmd};

use super::keys::{Layout, Name, Part, companion};
use crate::model::Key;

/// A script, and the SHA1 by which the server knows it.
pub(super) struct Script {
    source: &'static str,
    sha: String,
    /// Whether its last key is that of the last fencing token, where there is one.
    takes_last: bool,
}

/// Returns the script for a lock, or the one for a shared name, whose keys, arguments and answer are the same.
pub(super) fn script_of<'s>(key: &Key, lock: &'s Script, shared: &'s Script) -> &'s Script {
    if key.is_shared() { shared } else { lock }
}

/// Defines the scripts of a module, from files beside it.
macro_rules! scripts {
    ($($(#[$on:meta])? $name:ident = $($file:literal)+;)*) => {
        $(
            $(#[$on])?
            #[doc = concat!("The script of", $(" `", $file, "`",)+ ". Its header describes its arguments and its answer.")]
            pub(super) static $name: LazyLock<Script> =
                LazyLock::new(|| Script::new(concat!($(include_str!($file)),+)));
        )*
    };
}

pub(super) use scripts;

scripts! {
    ACQUIRE = "last.lua" "acquire_free.lua" "queue.lua" "acquire.lua";
    HEARTBEAT = "last.lua" "queue.lua" "heartbeat.lua";
    RENEW = "renew.lua";
    TRANSFER = "transfer.lua";
    RELEASE = "last.lua" "release/arguments.lua" "release/release_held.lua" "queue.lua" "release/release_one.lua" "release/release.lua";
    RELEASE_SPLIT = "release/release_split.lua";
    FORCE_RELEASE = "last.lua" "queue.lua" "release/release_one.lua" "release/force_release.lua";
    REMOVE_WAITER = "last.lua" "queue.lua" "release/release_one.lua" "remove_waiter.lua";
    INSPECT = "inspect.lua";
    RECORD = "record.lua";
    RIGHTS = "last.lua" "rights.lua";
    SHARED_ACQUIRE = "last.lua" "queue.lua" "shared/holders.lua" "shared/acquire.lua";
    SHARED_HEARTBEAT = "last.lua" "queue.lua" "shared/holders.lua" "heartbeat.lua";
    SHARED_RENEW = "queue.lua" "shared/holders.lua" "shared/renew.lua";
    SHARED_RELEASE = "last.lua" "release/arguments.lua" "queue.lua" "shared/holders.lua" "shared/release_one.lua" "release/release.lua";
    SHARED_FORCE_RELEASE = "last.lua" "queue.lua" "shared/holders.lua" "shared/release_one.lua" "shared/force_release.lua";
    SHARED_REMOVE_WAITER = "last.lua" "queue.lua" "shared/holders.lua" "shared/release_one.lua" "remove_waiter.lua";
    SHARED_INSPECT = "shared/inspect.lua";
}

impl Script {
    pub(super) fn new(source: &'static str) -> Self {
        let sha = redis::Script::new(source).get_hash().to_owned();
        let takes_last = source.contains("local LAST = ");
        Script {
            source,
            sha,
            takes_last,
        }
    }

    /// Returns the SHA1 by which the server knows the script.
    pub(super) fn sha(&self) -> &str {
        &self.sha
    }

    /// Returns the text of the script.
    pub(super) fn source(&self) -> &'static str {
        self.source
    }

    /// Returns `EVALSHA` with the keys of all names, part by part. The caller appends the arguments.
    pub(super) fn call<'n, N: Into<Name<'n>>>(
        &self,
        layout: &Layout,
        parts: &[Part],
        names: impl Iterator<Item = N> + Clone,
    ) -> Cmd {
        const COMMON: usize = 160;
        const PER_KEY: usize = 40;
        let names = names.map(Into::into);
        let last = layout.last().filter(|_| self.takes_last);
        let count = names.clone().count() * parts.len() + usize::from(last.is_some());
        let bytes: usize = names.clone().map(|name| name.text.len() + PER_KEY).sum();
        let mut cmd = Cmd::with_capacity(count + 8, bytes * parts.len() + COMMON);
        cmd.arg("EVALSHA").arg(&self.sha).arg(count);
        let (mut lock, mut key) = (String::with_capacity(2 * PER_KEY), String::with_capacity(4 * PER_KEY));
        for part in parts {
            for name in names.clone() {
                layout.lock(name, &mut lock);
                companion(*part, &lock, &mut key);
                cmd.arg(&key);
            }
        }
        if let Some(last) = last {
            cmd.arg(last);
        }
        cmd
    }

    /// Returns the same call with the text of the script, for a server that does not know the script.
    pub(super) fn with_source(&self, call: &Cmd) -> Cmd {
        let mut cmd = Cmd::new();
        cmd.arg("EVAL").arg(self.source);
        for arg in call.args_iter().skip(2) {
            if let Arg::Simple(bytes) = arg {
                cmd.arg(bytes);
            }
        }
        cmd
    }
}
