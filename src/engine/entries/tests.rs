//! Waiters, their mirrors, and the races between an attempt and the changes of the store.

pub(in crate::engine) mod shares;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;

use super::EntryEngine;
use super::local::*;
use super::mirror::*;
use super::record::UNKNOWN;
use crate::clock::Moment;
use crate::engine::{Acquired, Engine, EngineExt, HandOff, Released, Renewed, Subscription};
use crate::model::{Claim, Fence, Key, OwnerToken, Process, Share, Ttl};

struct Fixture {
    entries: Arc<LocalEntries>,
    watches: UnboundedReceiver<Watch>,
    grants: UnboundedReceiver<Granted>,
    key: Key,
    /// The entries with which claims entered last.
    entered: HashMap<OwnerToken, Entry>,
}

/// Returns the list, and claims that wait for one name.
fn fixture<const N: usize>() -> (Fixture, [Claim; N]) {
    let (entries, watches, grants) = LocalEntries::new();
    let (key, process) = (Key::new("n").unwrap(), Arc::new(Process::current()));
    let ttl = Ttl::clamped(Duration::from_secs(30));
    let claims = std::array::from_fn(|_| {
        let keys = std::slice::from_ref(&key);
        Claim::new(keys, OwnerToken::fresh(), ttl, process.clone())
    });
    let fixture = Fixture {
        entries,
        watches,
        grants,
        key,
        entered: HashMap::new(),
    };
    (fixture, claims)
}

fn id(claim: &Claim) -> Arc<str> {
    claim.owner.as_str().into()
}

fn entry(id: &Arc<str>, number: u64) -> Entry {
    let (id, position, share) = (id.clone(), number, Share::LOCK);
    Entry { id, position, share }
}

impl Fixture {
    fn enter(&mut self, claim: &Claim, number: u64) -> Vec<Granted> {
        let entry = entry(&id(claim), number);
        self.entered.insert(claim.owner.clone(), entry.clone());
        self.entries.enter(&claim.owner, &self.key, entry);
        self.grants()
    }

    fn grants(&mut self) -> Vec<Granted> {
        std::iter::from_fn(|| self.grants.try_recv().ok()).collect()
    }

    fn opened(&mut self, revision: u64, entries: impl IntoIterator<Item = Entry>) -> Vec<Granted> {
        self.entries.opened(&self.key, revision, entries);
        self.grants()
    }

    fn created(&mut self, claim: &Claim, revision: u64) -> Vec<Granted> {
        let change = Change::Created(entry(&id(claim), revision));
        self.entries.changed(&self.key, revision, vec![change]);
        self.grants()
    }

    fn deleted(&mut self, id: Arc<str>, revision: u64) -> Vec<Granted> {
        self.entries.changed(&self.key, revision, vec![Change::Deleted(id)]);
        self.grants()
    }

    fn granted(&self, claim: &Claim, revision: u64) -> Vec<Granted> {
        let (owner, entry) = (claim.owner.clone(), self.entered[&claim.owner].clone());
        vec![Granted { owner, entry, revision }]
    }
}

async fn is_woken(subscription: &mut EntrySubscription) -> bool {
    tokio::time::timeout(Duration::ZERO, subscription.changed())
        .await
        .is_ok()
}

#[tokio::test]
async fn the_deletion_of_the_holder_grants_the_next_waiter_once() {
    let (mut f, [first, second]) = fixture();
    let mut subscription = f.entries.subscribe(&first);
    assert_eq!(f.enter(&first, 8), []);
    assert_eq!(f.watches.try_recv(), Ok(Watch::Open(f.key.clone())));
    let holder: Arc<str> = "holder".into();
    assert!(f.entries.begin_read(&f.key));
    // The read shows this change, too.
    assert_eq!(f.deleted("earlier".into(), 9), []);
    let read = [entry(&holder, 5), entry(&id(&first), 8)];
    assert_eq!(f.opened(10, read), []);
    // Events before the read, and one after it.
    assert_eq!(f.deleted(holder.clone(), 9), []);
    assert_eq!(f.created(&second, 12), []);
    assert_eq!(f.enter(&second, 12), []);
    assert!(f.watches.try_recv().is_err(), "one watch per name");
    assert!(!is_woken(&mut subscription).await);
    assert_eq!(f.deleted(holder, 13), f.granted(&first, 13));
    let until = Moment::now() + Duration::from_secs(4);
    let fence = Fence(13);
    assert!(f.entries.grant(&first.owner, HandOff { fence, until }));
    assert!(is_woken(&mut subscription).await);
    assert_eq!(subscription.take_hand_off().unwrap().fence, fence);
    assert_eq!(subscription.take_hand_off(), None);
    assert!(!f.entries.grant(&first.owner, HandOff { fence, until }), "it has left");
    assert_eq!(f.deleted(id(&first), 14), f.granted(&second, 14));
    f.entries.leave(&second.owner);
    assert_eq!(f.watches.try_recv(), Ok(Watch::Close(f.key.clone())));
    drop(subscription);
    assert!(f.entries.state.lock().waiters.is_empty());
}

#[tokio::test]
async fn one_deletion_grants_all_first_waiters_that_fit() {
    let (mut f, [first, second, heavy, last]) = fixture();
    let of = |claim: &Claim, number, permits| Entry {
        share: Share::new(permits, 4).unwrap(),
        ..entry(&id(claim), number)
    };
    let claims = [(&first, 2), (&second, 2), (&heavy, 3), (&last, 1)];
    let waiting: Vec<Entry> = (2..)
        .zip(claims)
        .map(|(number, (claim, permits))| of(claim, number, permits))
        .collect();
    for ((claim, _), entry) in claims.iter().zip(&waiting) {
        f.entered.insert(claim.owner.clone(), entry.clone());
        f.entries.enter(&claim.owner, &f.key, entry.clone());
    }
    assert!(f.entries.begin_read(&f.key));
    let holder: Arc<str> = "holder".into();
    // Another program wrote it.
    assert_eq!(f.opened(6, [entry(&holder, 1)].into_iter().chain(waiting)), []);
    let both: Vec<Granted> = [f.granted(&first, 7), f.granted(&second, 7)]
        .into_iter()
        .flatten()
        .collect();
    assert_eq!(f.deleted(holder, 7), both);
    assert_eq!(f.deleted("other".into(), 8), [], "once");
    f.entries.leave(&first.owner);
    assert_eq!(f.deleted(id(&first), 9), []);
    // A waiter leaves, and the one behind it fits.
    f.entries.leave(&heavy.owner);
    assert_eq!(f.deleted(id(&heavy), 10), f.granted(&last, 10));
}

#[tokio::test]
async fn a_mirror_with_the_entry_before_the_last_one_grants_nothing() {
    let (mut f, [waiter, other]) = fixture();
    assert_eq!(f.enter(&waiter, 8), []);
    assert!(f.entries.begin_read(&f.key));
    let holder: Arc<str> = "holder".into();
    assert_eq!(f.opened(8, [entry(&holder, 5), entry(&id(&waiter), 8)]), []);
    assert_eq!(f.created(&other, 9), []);
    assert_eq!(f.deleted(holder, 10), f.granted(&waiter, 10));
    // The entry expired at 11, before this event: the other claim holds the name.
    assert_eq!(f.enter(&waiter, 12), []);
    assert_eq!(f.deleted(id(&waiter), 11), []);
    assert!(f.entries.begin_read(&f.key));
    assert_eq!(f.opened(13, [entry(&id(&other), 9), entry(&id(&waiter), 12)]), []);
    assert_eq!(f.deleted(id(&other), 14), f.granted(&waiter, 14));
}

#[tokio::test]
async fn a_waiter_whose_entry_is_gone_makes_a_new_attempt() {
    let (mut f, [waiter, other]) = fixture();
    let mut subscription = f.entries.subscribe(&waiter);
    // Deleted by an event.
    assert_eq!(f.enter(&waiter, 2), []);
    assert_eq!(f.enter(&other, 3), []);
    assert!(f.entries.begin_read(&f.key));
    let read = [
        entry(&"holder".into(), 1),
        entry(&id(&waiter), 2),
        entry(&id(&other), 3),
    ];
    assert_eq!(f.opened(4, read), []);
    assert_eq!(f.deleted(id(&waiter), 5), []);
    assert!(
        !is_woken(&mut subscription).await,
        "the next read shows all that are gone"
    );
    assert!(f.entries.begin_read(&f.key));
    assert_eq!(f.opened(6, [entry(&"holder".into(), 1), entry(&id(&other), 3)]), []);
    assert!(is_woken(&mut subscription).await);
    // Created and deleted before the answer to the attempt.
    assert!(!f.entries.waits(&waiter.owner));
    assert_eq!(f.created(&waiter, 7), []);
    assert_eq!(f.deleted(id(&waiter), 8), []);
    assert_eq!(f.enter(&waiter, 7), []);
    assert!(is_woken(&mut subscription).await && !f.entries.waits(&waiter.owner));
    // Missing in a read after the answer.
    assert_eq!(f.enter(&waiter, 9), []);
    assert!(f.entries.lost(&f.key) && !f.entries.lost(&f.key));
    assert_eq!(f.deleted("holder".into(), 9), [], "no decision without a watch");
    assert!(f.entries.begin_read(&f.key));
    assert!(!is_woken(&mut subscription).await && f.entries.waits(&waiter.owner));
    assert_eq!(f.opened(20, [entry(&id(&other), 3)]), f.granted(&other, 20));
    assert!(is_woken(&mut subscription).await);
    // Created after the read, whose answer arrives later: an event reports it.
    f.entries.lost(&f.key);
    assert!(f.entries.begin_read(&f.key));
    assert_eq!(f.enter(&waiter, 31), []);
    assert_eq!(f.opened(30, [entry(&id(&other), 3)]), []);
    assert!(!is_woken(&mut subscription).await);
    assert_eq!(f.deleted(id(&waiter), 30), [], "that of an earlier one");
    assert_eq!(f.created(&waiter, 31), []);
    assert!(!is_woken(&mut subscription).await && f.entries.waits(&waiter.owner));
    assert_eq!(f.deleted(id(&waiter), 32), []);
    assert!(f.entries.begin_read(&f.key));
    // Missing in a read during the attempt.
    assert_eq!(f.opened(40, [entry(&id(&other), 3)]), []);
    assert!(is_woken(&mut subscription).await);
    assert_eq!(f.enter(&waiter, 35), []);
    assert!(is_woken(&mut subscription).await);
    assert_eq!(f.enter(&waiter, 41), []);
    assert!(!is_woken(&mut subscription).await);
    f.entries.wake_name(&f.key);
    // After the other one, which came first.
    let woken = tokio::time::timeout(Duration::from_secs(10), subscription.changed());
    assert!(woken.await.is_ok());
    f.entries.leave(&other.owner);
    f.entries.leave(&waiter.owner);
    for _ in 0..3 {
        assert_eq!(f.watches.try_recv(), Ok(Watch::Open(f.key.clone())));
        assert_eq!(f.watches.try_recv(), Ok(Watch::Close(f.key.clone())));
    }
    assert!(!f.entries.begin_read(&f.key));
}

/// ZooKeeper reports the end of a session as deletions in any order, of which the last ones may be missing.
#[tokio::test(start_paused = true)]
async fn waiters_whose_entries_are_gone_enter_again_in_their_order() {
    for is_read in [true, false] {
        let (mut f, [first, second, third]) = fixture();
        let mut subscriptions = [&first, &second, &third].map(|claim| f.entries.subscribe(claim));
        let claims = [(&first, 2), (&second, 3), (&third, 4)];
        for (claim, number) in claims {
            assert_eq!(f.enter(claim, number), []);
        }
        assert!(f.entries.begin_read(&f.key));
        let read = claims.map(|(claim, number)| entry(&id(claim), number));
        let holder = entry(&"holder".into(), 1);
        assert_eq!(f.opened(4, [holder].into_iter().chain(read)), []);
        assert_eq!(f.deleted(id(&third), 5), []);
        assert_eq!(f.deleted(id(&first), 6), []);
        let [of_first, of_second, of_third] = &mut subscriptions;
        assert!(!is_woken(of_first).await && !is_woken(of_third).await);
        if is_read {
            assert!(f.entries.begin_read(&f.key));
            assert_eq!(f.opened(7, []), []);
        } else {
            // The watch cannot be opened.
            assert!(!f.entries.lost(&f.key));
            f.entries.wake_name(&f.key);
        }
        assert!(is_woken(of_first).await);
        assert!(!is_woken(of_second).await && !is_woken(of_third).await);
        for later in [of_second, of_third] {
            let woken = tokio::time::timeout(Duration::from_secs(10), later.changed());
            assert!(woken.await.is_ok());
        }
    }
}

#[tokio::test]
async fn a_set_moves_to_another_name() {
    let (mut f, [set]) = fixture();
    let next = Key::new("o").unwrap();
    assert_eq!(f.enter(&set, 1), []);
    f.entries.enter(&set.owner, &next, entry(&id(&set), 2));
    assert_eq!(f.grants(), []);
    let expected = [
        Watch::Open(f.key.clone()),
        Watch::Close(f.key.clone()),
        Watch::Open(next.clone()),
    ];
    for watch in expected {
        assert_eq!(f.watches.try_recv(), Ok(watch));
    }
    assert!(f.entries.begin_read(&next));
    f.entries.opened(&next, 3, [entry(&id(&set), 2)]);
    assert_eq!(f.grants().len(), 1);
    f.entries.leave(&set.owner);
    assert!(f.entries.state.lock().waiters.is_empty());
}

/// An entry that is deleted in the background, for example that of a hand-off that was not taken: an attempt of the same claim must
/// not count on it, because the deletion may be executed after the attempt.
pub(in crate::engine) async fn an_entry_that_is_being_deleted_holds_nothing(engine: &EntryEngine) {
    let process = Arc::new(Process::current());
    for names in [&["n"][..], &["n", "o"]] {
        let keys: Vec<Key> = names.iter().map(|name| Key::new(name).unwrap()).collect();
        let ours = Claim::new(
            &keys,
            OwnerToken::fresh(),
            Ttl::clamped(Duration::from_secs(30)),
            process.clone(),
        );
        let granted = async || matches!(engine.try_acquire(&ours).await.unwrap(), Acquired::Granted { .. });
        assert!(granted().await);
        let core = &engine.core;
        core.ending.send_modify(|ending| _ = ending.insert(ours.owner.clone()));
        let own = core.claims.remove(&ours.owner).unwrap();
        assert_eq!(
            engine.renew(&ours, ours.ttl).await.unwrap(),
            Renewed::Lost,
            "it is not adopted"
        );
        let deleting = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert!(core.store.delete(&own.entries).await.unwrap());
            core.ending.send_modify(|ending| _ = ending.remove(&ours.owner));
        };
        let (is_granted, ()) = tokio::join!(granted(), deleting);
        assert!(is_granted, "after the deletion");
        for key in &keys {
            assert!(engine.inspect(key).await.unwrap().is_some(), "it has a new entry");
        }
        assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
    }
}

/// The reply to an attempt is lost, the lock is released by force, and another claim holds it before the retry.
pub(in crate::engine) async fn a_retry_with_a_new_entry_has_a_new_token(engine: &EntryEngine) {
    let keys = [Key::new("n").unwrap()];
    let [ours, other] = [(); 2].map(|()| {
        let ttl = Ttl::clamped(Duration::from_secs(5));
        Claim::new(&keys, OwnerToken::fresh(), ttl, Arc::new(Process::current()))
    });
    let token = async |claim: &Claim| match engine.try_acquire(claim).await.unwrap() {
        Acquired::Granted { fence } => fence,
        held => panic!("{held:?}"),
    };
    let first = token(&ours).await;
    assert_eq!(token(&ours).await, first);
    assert!(engine.force_release(&keys[0]).await.unwrap());
    let second = token(&other).await;
    assert_eq!(engine.release(&other, Duration::ZERO).await.unwrap(), Released::Freed);
    assert!(first < second && second < token(&ours).await);
    assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
}

/// The data of an entry is written again and again while its lease ends: the deletion finds another version each time.
pub(in crate::engine) async fn a_lease_that_ends_while_it_is_written_is_deleted(engine: &EntryEngine) {
    let (core, process, ttl) = (&engine.core, Arc::new(Process::current()), Duration::from_millis(100));
    for round in 0..4 {
        let keys = [Key::new(&format!("n{round}")).unwrap()];
        let ours = Claim::new(&keys, OwnerToken::fresh(), Ttl::clamped(ttl), process.clone());
        assert!(matches!(
            engine.try_acquire(&ours).await.unwrap(),
            Acquired::Granted { .. }
        ));
        // As during a write of this process.
        core.records.remove(&ours.owner);
        core.claims.update(&ours.owner, |_, own| {
            own.entries.iter_mut().for_each(|entry| entry.version = UNKNOWN);
            None
        });
        let writing = async {
            let end = Moment::now() + 4 * ttl;
            while !end.is_past() {
                let seen = core.store.read(&keys, Some(&ours.owner)).await.unwrap();
                let entries: Vec<_> = seen.into_iter().filter_map(|seen| seen.own).collect();
                if entries.is_empty() {
                    return;
                }
                core.store.write(entries, Some(&ours.owner), ours.ttl).await.unwrap();
            }
        };
        tokio::join!(writing, async {
            tokio::time::sleep(ttl / 2).await;
            let end = Moment::now() + Duration::from_secs(10);
            while engine.inspect(&keys[0]).await.unwrap().is_some() {
                assert!(!end.is_past(), "the entry is left");
                tokio::time::sleep(ttl).await;
            }
        });
    }
}
