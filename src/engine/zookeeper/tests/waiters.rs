//! Waiters, their watches and hand-offs, and entries of other programs.

use std::sync::atomic::Ordering::Relaxed;

use super::proxy::Proxy;
use super::*;
use crate::engine::contract::refs;
use crate::engine::{EngineExt, RESERVATION, Subscription};

async fn subscribe(engine: &EntryEngine, claim: &Claim) -> Box<dyn Subscription> {
    engine.subscribe(claim, &claim.keys()[0]).await.unwrap()
}

/// The deletion of the holder's entry is the grant of the next one: no attempt is needed.
#[tokio::test]
async fn a_release_hands_the_name_off() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let (a, b) = (open(&url, &prefix).await, open(&url, &prefix).await);
    let holder = claim(&["n"], LONG);
    let mut last = acquire(&a, &holder).await;
    let mut waiters = Vec::new();
    for index in 0..6 {
        let engine = if index % 2 == 0 { &a } else { &b };
        let mut waiter = waiting(&["n"], LONG);
        waiter.needs_token = index != 3;
        let subscription = subscribe(engine, &waiter).await;
        busy(engine, &waiter).await;
        waiters.push((engine, waiter, subscription));
    }
    a.release(&holder, Duration::ZERO).await.unwrap();
    for (engine, waiter, subscription) in &mut waiters {
        woken(subscription).await;
        let hand_off = subscription.take_hand_off().expect("a grant");
        assert!(hand_off.until <= Moment::now() + RESERVATION, "{hand_off:?}");
        if waiter.needs_token {
            assert!(hand_off.fence > last, "{hand_off:?} after {last:?}");
            last = hand_off.fence;
            let info = a.inspect(&waiter.keys()[0]).await.unwrap().unwrap();
            assert_eq!(info.fence, Some(last), "it is written a moment later");
        }
        assert_eq!(engine.renew(waiter, waiter.ttl).await.unwrap(), Renewed::Extended);
        assert_eq!(engine.release(waiter, Duration::ZERO).await.unwrap(), Released::Freed);
    }
    assert_eq!(a.inspect(&key("n")).await.unwrap(), None);
}

/// A hand-off that its waiter does not take ends soon, and the waiter makes a new attempt.
#[tokio::test]
async fn a_hand_off_that_is_not_taken_ends() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let (a, b) = (open(&url, &prefix).await, open(&url, &prefix).await);
    let (holder, hung, next) = (claim(&["n"], LONG), waiting(&["n"], LONG), waiting(&["n"], LONG));
    acquire(&a, &holder).await;
    let mut of_hung = subscribe(&a, &hung).await;
    busy(&a, &hung).await;
    let mut of_next = subscribe(&b, &next).await;
    busy(&b, &next).await;
    a.release(&holder, Duration::ZERO).await.unwrap();
    woken(&mut of_next).await;
    assert!(of_next.take_hand_off().is_some());
    woken(&mut of_hung).await;
    assert_eq!(of_hung.take_hand_off(), None);
    busy(&a, &hung).await;
    b.release(&next, Duration::ZERO).await.unwrap();
    woken(&mut of_hung).await;
}

/// A transferred or kept lock never leaves its name free for the waiters after it.
#[tokio::test]
async fn a_transfer_grants_nothing_to_the_waiters() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let (a, b) = (open(&url, &prefix).await, open(&url, &prefix).await);
    let mut holder = claim(&["n"], LONG);
    acquire(&a, &holder).await;
    let waiter = waiting(&["n"], LONG);
    let mut subscription = subscribe(&b, &waiter).await;
    busy(&b, &waiter).await;
    for index in 0..10 {
        let to = OwnerToken::fresh();
        let engine = if index % 2 == 0 { &b } else { &a };
        assert_eq!(engine.transfer(&holder, &to).await.unwrap(), Renewed::Extended);
        holder.owner = to;
    }
    b.release(&holder, Duration::from_millis(300)).await.unwrap();
    let early = tokio::time::timeout(Duration::from_millis(200), subscription.changed()).await;
    assert!(early.is_err() && subscription.take_hand_off().is_none());
    woken(&mut subscription).await;
    assert!(subscription.take_hand_off().is_some());
}

/// Nodes that Curator's `InterProcessMutex` and other clients create exclude this engine, and the other way round.
#[tokio::test]
async fn entries_of_other_programs_count() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let engine = open(&url, &prefix).await;
    let other = other_client(&url).await;
    let folder = engine.store.layout.folder(&key("n"));
    let create = |path: &str, kind| Request::create(path, b"10.0.0.1", client::Access::Everyone, kind);
    other.call(create(&folder, Kind::Container)).await.unwrap();
    let path = format!("{folder}/_c_{}-lock-", "00112233-4455-6677-8899-aabbccddeeff");
    let created = other
        .call(create(&path, Kind::EphemeralSequential))
        .await
        .unwrap()
        .created()
        .unwrap();
    assert_eq!(busy(&engine, &claim(&["n"], LONG)).await, None, "its end is not known");
    let info = engine.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!((info.holder, info.fence, info.remaining), (None, None, None));
    let waiter = waiting(&["n"], LONG);
    let mut subscription = subscribe(&engine, &waiter).await;
    busy(&engine, &waiter).await;
    let last = other
        .call(create(&format!("{folder}/lock-"), Kind::EphemeralSequential))
        .await
        .unwrap();
    let last = last.created().unwrap();
    other.call(Request::delete(&created, -1)).await.unwrap();
    woken(&mut subscription).await;
    assert!(subscription.take_hand_off().is_some());
    // The recipe of the other program: it waits until its node is the first.
    let names = other
        .call(Request::children(&folder))
        .await
        .unwrap()
        .children()
        .unwrap();
    let children = layout::Child::all(&names);
    assert!(
        children[0].is_of(&waiter.owner) && last.ends_with(&children[1].name),
        "{children:?}"
    );
    engine.release(&waiter, Duration::ZERO).await.unwrap();
    busy(&engine, &claim(&["n"], LONG)).await;
    assert!(
        engine.force_release(&key("n")).await.unwrap(),
        "also an entry of another program"
    );
    acquire(&engine, &claim(&["n"], LONG)).await;
}

/// Empty folders are containers, which the server removes. An attempt creates them again.
#[tokio::test]
async fn folders_disappear_and_attempts_create_them() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let engine = open(&url, &prefix).await;
    let other = other_client(&url).await;
    let sets = [&["n"][..], &["n", "o", "p"]];
    let mut last = Fence(0);
    for round in 0..20 {
        let ours = claim(sets[round % 2], LONG);
        let fence = acquire(&engine, &ours).await;
        assert!(fence > last, "the tokens of a new folder");
        last = fence;
        engine.release(&ours, Duration::ZERO).await.unwrap();
        for name in ["n", "o", "p"] {
            let _ = other
                .call(Request::delete(&engine.store.layout.folder(&key(name)), -1))
                .await;
        }
    }
}

/// A call that ends early leaves no empty folder: the server removes no container that had no node.
#[tokio::test]
async fn a_folder_is_created_with_its_first_entry() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let (engine, other) = (open(&url, &prefix).await, other_client(&url).await);
    for round in 0..100 {
        let name = format!("n{round}");
        let ours = claim(&[&name, "o"][..1 + round % 2], LONG);
        // Each of its requests is sent, and one after the other is not answered any more.
        let limit = Duration::from_micros(fastrand::u64(..3000));
        let _ = tokio::time::timeout(limit, engine.try_acquire(&ours)).await;
        let _ = engine.release(&ours, Duration::ZERO).await.unwrap();
        let folder = Request::data(&engine.store.layout.folder(&key(&name)));
        if let Ok(reply) = other.call(folder).await {
            assert!(reply.changes_of_children().unwrap() > 0, "an empty folder is left");
        }
    }
}

/// More waiters than a packet has room for, in one process and in the order of their arrival.
#[tokio::test]
async fn many_waiters_of_one_name() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let (a, b) = (open(&url, &prefix).await, open(&url, &prefix).await);
    let holder = claim(&["n"], LONG);
    acquire(&a, &holder).await;
    let claims: Vec<Arc<Claim>> = (0..640).map(|_| Arc::new(waiting(&["n"], LONG))).collect();
    let mut subscriptions = Vec::new();
    for claim in &claims {
        subscriptions.push(subscribe(&b, claim).await);
    }
    for batch in claims.chunks(64) {
        let mut count = 0;
        let mut answer = |_: usize, acquired: Result<Acquired>| {
            assert!(matches!(acquired.unwrap(), Acquired::Held { .. }));
            count += 1;
        };
        b.try_acquire_all(&refs(batch), &mut answer).await;
        assert_eq!(count, batch.len());
    }
    assert_eq!(a.inspect(&key("n")).await.unwrap().unwrap().waiting, Some(640));
    a.release(&holder, Duration::ZERO).await.unwrap();
    let mut last = Fence(0);
    for (claim, subscription) in claims.iter().zip(&mut subscriptions).take(40) {
        woken(subscription).await;
        let fence = subscription.take_hand_off().expect("the next one in order").fence;
        assert!(fence > last);
        last = fence;
        b.release(claim, Duration::ZERO).await.unwrap();
    }
    let listed = a.list("", PAGE).await.unwrap();
    assert_eq!(listed.len(), 1);
}

/// The entries of a name are read once, for its first waiter: the mirror has the order when the answer to a creation arrives.
#[tokio::test]
async fn further_waiters_read_no_entries() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let proxy = Proxy::start(&url).await;
    let (engine, other) = (open(&proxy.url, &prefix).await, other_client(&url).await);
    let holder = claim(&["n"], LONG);
    acquire(&engine, &holder).await;
    let folder = engine.store.layout.folder(&key("n"));
    let create = |path: &str| Request::create(path, b"", client::Access::Everyone, Kind::EphemeralSequential);
    let theirs = vec![create(&format!("{folder}/{}-", "x".repeat(4096))); 100];
    let created = other.call(Request::multi(&theirs)).await.unwrap().parts().unwrap();
    let first = waiting(&["n"], LONG);
    let mut subscription = subscribe(&engine, &first).await;
    busy(&engine, &first).await;
    while engine.store.local.mirror(&key("n"), |_| ()).is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let before = proxy.received.load(Relaxed);
    let claims: Vec<Claim> = (0..100).map(|_| waiting(&["n"], LONG)).collect();
    for claim in &claims {
        busy(&engine, claim).await;
    }
    let read = proxy.received.load(Relaxed) - before;
    assert!(read < 100 * 2000, "{read} bytes, and the entries have 400 kB");
    let info = engine.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!(info.waiting, Some(201));
    // A waiter that enters while its name is free holds it.
    let deletions = created.iter().map(|part| match part {
        client::Part::Created(path) => Request::delete(path, -1),
        other => panic!("{other:?}"),
    });
    other
        .call(Request::multi(&deletions.collect::<Vec<_>>()))
        .await
        .unwrap();
    for claim in claims.iter().chain([&holder]) {
        engine.release(claim, Duration::ZERO).await.unwrap();
    }
    handed_off(&mut subscription).await;
    engine.release(&first, Duration::ZERO).await.unwrap();
    acquire(&engine, &waiting(&["n"], LONG)).await;
}

/// Ten thousand entries of another program: the folder's list has half a megabyte, and each entry is an event.
#[tokio::test]
async fn ten_thousand_entries_of_one_name() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let engine = open(&url, &prefix).await;
    let other = other_client(&url).await;
    let folder = engine.store.layout.folder(&key("n"));
    let create = |path: &str, kind| Request::create(path, b"", client::Access::Everyone, kind);
    other.call(create(&folder, Kind::Container)).await.unwrap();
    let path = format!("{folder}/_c_00112233-4455-6677-8899-aabbccddeeff-lock-");
    let entries = vec![create(&path, Kind::EphemeralSequential); 500];
    for _ in 0..20 {
        other.call(Request::multi(&entries)).await.unwrap();
    }
    busy(&engine, &claim(&["n"], LONG)).await;
    busy(&engine, &claim(&["m", "n"], LONG)).await;
    let waiter = waiting(&["n"], LONG);
    let mut subscription = subscribe(&engine, &waiter).await;
    busy(&engine, &waiter).await;
    let info = engine.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!(info.waiting, Some(10_000));
    assert_eq!(engine.list("", PAGE).await.unwrap().len(), 1);
    let names = other
        .call(Request::children(&folder))
        .await
        .unwrap()
        .children()
        .unwrap();
    let theirs: Vec<_> = layout::Child::all(&names);
    for batch in theirs[..10_000].chunks(500) {
        let delete = |child: &layout::Child| Request::delete(&format!("{folder}/{}", child.name), -1);
        other
            .call(Request::multi(&batch.iter().map(delete).collect::<Vec<_>>()))
            .await
            .unwrap();
    }
    tokio::time::timeout(Duration::from_secs(20), subscription.changed())
        .await
        .unwrap();
    assert!(subscription.take_hand_off().is_some());
    assert_eq!(engine.release(&waiter, Duration::ZERO).await.unwrap(), Released::Freed);
}
