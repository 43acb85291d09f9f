//! The operations on locks, one file per verb.
//!
//! - `acquire.rs`: one attempt. `acquire_names.rs`: its first step, the names. `stamp.rs`: its last step, the fencing token.
//! - `clock_offset.rs`: the estimate of the server's clock. `fence.rs`: the source of the fencing token.
//! - `attempts.rs`: attempts that were dropped or not answered. `batch.rs`: the attempts of several waiters, and the releases of
//!   several claims.
//! - `renew.rs`, `release.rs`, `transfer.rs`, `inspect.rs`: the other verbs.
//!
//! # An attempt
//! A plain insert, the cheapest write, succeeds when the name is free. On a replica set it is the whole grant of a lease of 5 s or longer.
//! On a standalone server it is the whole grant of a claim without a token. In all other cases (other claims on a standalone server, a
//! sharded cluster, a shorter lease, an expired document, a retry, an estimate that does not fit, and once a minute, to read the server's
//! clock) a stamp follows, which verifies or corrects the end of the lease. Before a stamp the first write needs the primary's
//! acknowledgement only.
//!
//! If a document exists, a read decides whether the name is busy. A waiting call, or one that finds the name free, makes a
//! `findOneAndUpdate` by `_id` with upsert and a pipeline: it acquires the document when it is missing or past its end by `$$NOW`, enters
//! the queue, or leaves it unchanged. While the primary reports that the majority is late, an attempt reads first, because an insert that
//! finds the name busy waits for the members as well. Each write has a `wtimeout` below the store timeout, so that its answer still
//! arrives.
//!
//! Several names are acquired in sort order. If one is busy, those before it are rolled back, including those that were reserved for it.
//! The attempts of up to 64 waiters for one name are one command: the pipeline of the first attempt, and a step that enters the others.
//!
//! A release deletes the document, because for a gist process any document means busy. Its write concern is the primary's acknowledgement:
//! if it is rolled back, the name stays busy, and the majority confirms a later grant only together with it.

pub(super) mod acquire;
mod acquire_names;
pub(super) mod attempts;
pub(super) mod batch;
pub(super) mod clock_offset;
pub(super) mod fence;
mod inspect;
mod release;
mod renew;
pub(super) mod stamp;
mod transfer;
