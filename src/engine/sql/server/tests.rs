//! What the tests of all dialects need.

use std::sync::Arc;
use std::time::Duration;

use super::slot::open;
use super::{Server, ServerEngine, Session};
use crate::engine::{Acquired, Engine, Released};
use crate::model::{Claim, Key, OwnerToken, Process, Ttl};

pub(in crate::engine::sql) const LONG: Duration = Duration::from_secs(30);

/// Returns the URL of a server. `None`: there is none; the test is skipped, or fails if `CI` is set.
pub(in crate::engine::sql) fn url_of(variable: &str) -> Option<String> {
    let url = std::env::var(variable).ok();
    if url.is_none() {
        assert!(std::env::var_os("CI").is_none(), "{variable} is not set");
        println!("skipped: {variable} is not set");
    }
    url
}

pub(in crate::engine::sql) fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

pub(in crate::engine::sql) fn claim(names: &[&str]) -> Claim {
    let keys: Vec<Key> = names.iter().map(|name| key(name)).collect();
    let process = Arc::new(Process::current());
    Claim::new(&keys, OwnerToken::fresh(), Ttl::clamped(LONG), process)
}

pub(in crate::engine::sql) fn waiting(names: &[&str]) -> Claim {
    let mut claim = claim(names);
    claim.waiting = true;
    claim
}

pub(in crate::engine::sql) async fn acquire(engine: &Arc<impl Engine>, claim: &Claim) {
    let acquired = engine.try_acquire(claim).await.unwrap();
    assert!(matches!(acquired, Acquired::Granted { .. }), "{acquired:?}");
}

pub(in crate::engine::sql) async fn busy(engine: &Arc<impl Engine>, claim: &Claim) {
    let acquired = engine.try_acquire(claim).await.unwrap();
    assert!(matches!(acquired, Acquired::Held { .. }), "{acquired:?}");
}

pub(in crate::engine::sql) async fn release(engine: &Arc<impl Engine>, claim: &Claim) -> Released {
    engine.release(claim, Duration::ZERO).await.unwrap()
}

/// A check reads how long the lease has lasted, and how many waiters of other processes are ahead of those of this one.
#[allow(private_bounds, reason = "only the dialects implement it")]
pub(in crate::engine::sql) async fn a_check_counts_the_waiters_ahead<S: Server>(
    ours: &Arc<ServerEngine<S>>,
    theirs: &Arc<ServerEngine<S>>,
) {
    acquire(ours, &claim(&["n"])).await;
    let queue = [theirs, theirs, ours].map(|engine| (engine, waiting(&["n"])));
    let mut subscriptions = Vec::new();
    for (engine, waiter) in &queue {
        subscriptions.push(engine.subscribe(waiter, &key("n")).await.unwrap());
        busy(engine, waiter).await;
    }
    let mut session = open(&ours.server).await.unwrap();
    let mut ages = Vec::new();
    for (engine, ahead) in [(ours, 2), (theirs, 0)] {
        let process = &engine.waiters.process;
        let checked = session.check(process, &[b"n".to_vec()], false).await.unwrap();
        let name = &checked.names[0];
        assert!(name.has_waiters);
        assert_eq!(name.ahead, ahead);
        ages.push(name.lease.as_ref().unwrap().age);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(ages[1] > ages[0], "{ages:?}");
}

/// Waits until a condition holds, for 10 s at most.
pub(in crate::engine::sql) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let check = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let checked = tokio::time::timeout(Duration::from_secs(10), check).await;
    checked.unwrap_or_else(|_| panic!("not within 10 s: {what}"));
}
