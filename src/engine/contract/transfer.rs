//! A transfer: one holder before it, one after it, never two (promises 1 and 3).

use super::*;
use crate::engine::EngineExt;
use crate::model::LockInfo;

/// Returns the old owner's claim as the new owner creates it from the token.
fn of_new_process(from: &Claim) -> Claim {
    let mut claim = from.clone();
    claim.process = Arc::new(elsewhere());
    claim
}

fn elsewhere() -> Process {
    Process {
        host: "another host".to_owned(),
        pid: 4_000_000_001,
    }
}

fn owned_by(claim: &Claim, owner: &OwnerToken) -> Claim {
    let mut claim = claim.clone();
    claim.owner = owner.clone();
    claim
}

/// Transfers to a new owner. Returns the claim of the new owner.
async fn transferred(engine: &SharedEngine, from: &Claim) -> Claim {
    let to = OwnerToken::fresh();
    assert_eq!(
        engine.transfer(&of_new_process(from), &to).await.unwrap(),
        Renewed::Extended
    );
    owned_by(&of_new_process(from), &to)
}

async fn renewed(engine: &SharedEngine, claim: &Claim) -> Renewed {
    engine.renew(claim, claim.ttl).await.unwrap()
}

async fn seen(engine: &SharedEngine, name: &str) -> LockInfo {
    engine.inspect(&key(name)).await.unwrap().unwrap()
}

/// Checks that a failed transfer did not change a lock. The remaining time may be shorter.
async fn unchanged(engine: &SharedEngine, name: &str, before: &LockInfo) {
    let now = seen(engine, name).await;
    assert!(now.remaining <= before.remaining, "{now:?} after {before:?}");
    assert_eq!(
        (now.fence, now.holder, now.metadata),
        (before.fence, before.holder.clone(), before.metadata.clone()),
        "{name}"
    );
}

pub(crate) async fn a_transfer_changes_the_owner_and_nothing_else(s: Stores) {
    for metadata in [None, Some(r#"{"job":"«report» 7","lines":"a\nb"}"#)] {
        let mut old = claim(&["n"], LONG);
        old.metadata = metadata.map(Into::into);
        let fence = acquire(&s.a, &old).await;
        old.fence = Some(fence);
        let before = seen(&s.a, "n").await.holder.unwrap();
        let new = transferred(&s.b, &old).await;

        assert_eq!(renewed(&s.a, &old).await, Renewed::Lost);
        assert_eq!(release(&s.a, &old).await, Released::NotHeld);
        assert_eq!(s.a.release(&old, SHORT).await.unwrap(), Released::NotHeld);
        busy(&s.a, &old).await;
        assert_eq!(
            s.a.transfer(&old, &OwnerToken::fresh()).await.unwrap(),
            Renewed::Lost,
            "the old owner does not hold it any more"
        );
        busy(&s.a, &claim(&["n"], LONG)).await;

        let after = seen(&s.a, "n").await;
        assert_eq!(after.fence, Some(fence));
        assert_eq!(after.metadata.as_deref(), metadata);
        let holder = after.holder.unwrap();
        assert_eq!(holder.process, elsewhere());
        assert_eq!(holder.since_ms, before.since_ms);

        assert_eq!(renewed(&s.b, &new).await, Renewed::Extended);
        assert_eq!(acquire(&s.b, &new).await, fence, "a retry by the new owner");
        let third = transferred(&s.a, &new).await;
        assert_eq!(seen(&s.b, "n").await.fence, Some(fence));
        assert_eq!(seen(&s.b, "n").await.metadata.as_deref(), metadata);
        assert_eq!(release(&s.b, &new).await, Released::NotHeld);
        assert_eq!(release(&s.a, &third).await, Released::Freed);
        assert_eq!(s.b.inspect(&key("n")).await.unwrap(), None);
        let next = claim(&["n"], LONG);
        assert!(acquire(&s.a, &next).await > fence);
        release(&s.a, &next).await;
    }
}

/// A transfer is repeated after a lost reply.
pub(crate) async fn a_transfer_is_idempotent(s: Stores) {
    let mut old = claim(&["m", "n"], LONG);
    old.metadata = Some("1".into());
    let fence = acquire(&s.a, &old).await;
    old.fence = Some(fence);
    let new = transferred(&s.b, &old).await;
    sleep(Duration::from_millis(2400)).await;
    let asked = Instant::now();
    let again = s.b.transfer(&of_new_process(&old), &new.owner).await.unwrap();
    assert_eq!(again, Renewed::Extended);
    for name in ["m", "n"] {
        let info = seen(&s.a, name).await;
        let left = info.remaining.unwrap();
        assert!(left + asked.elapsed() >= LONG - CLOCK_ERROR, "{name}: {left:?}");
        assert_eq!(
            (info.fence, info.metadata.as_deref()),
            (Some(fence), Some("1")),
            "{name}"
        );
        assert_eq!(info.holder.unwrap().process, elsewhere(), "{name}");
    }
    assert_eq!(renewed(&s.a, &old).await, Renewed::Lost);
    assert_eq!(release(&s.b, &new).await, Released::Freed);
    let late = s.b.transfer(&of_new_process(&old), &new.owner).await.unwrap();
    assert_eq!(late, Renewed::Lost, "released before");
    for name in ["m", "n"] {
        assert_eq!(s.a.inspect(&key(name)).await.unwrap(), None, "{name}");
    }

    // The first call transferred one of two names.
    acquire(&s.a, &old).await;
    let to = OwnerToken::fresh();
    let half = owned_by(&claim(&["m"], LONG), &old.owner);
    assert_eq!(s.b.transfer(&half, &to).await.unwrap(), Renewed::Extended);
    assert_eq!(s.b.transfer(&old, &to).await.unwrap(), Renewed::Extended);
    assert_eq!(release(&s.a, &old).await, Released::NotHeld);
    assert_eq!(release(&s.b, &owned_by(&old, &to)).await, Released::Freed);
}

pub(crate) async fn a_transfer_of_a_lost_lease_changes_nothing(s: Stores) {
    let to = OwnerToken::fresh();
    let never = claim(&["n"], LONG);
    assert_eq!(s.a.transfer(&never, &to).await.unwrap(), Renewed::Lost);

    let expired = claim(&["n"], Duration::from_millis(40));
    acquire(&s.a, &expired).await;
    expiry(&s, Duration::from_millis(70)).await;
    assert_eq!(s.b.transfer(&expired, &to).await.unwrap(), Renewed::Lost);
    assert_eq!(s.b.inspect(&key("n")).await.unwrap(), None, "nothing is re-created");

    let forced = claim(&["n"], LONG);
    acquire(&s.a, &forced).await;
    s.b.force_release(&key("n")).await.unwrap();
    assert_eq!(s.b.transfer(&forced, &to).await.unwrap(), Renewed::Lost);
    assert_eq!(s.b.inspect(&key("n")).await.unwrap(), None);

    let mut successor = claim(&["n"], LONG);
    successor.metadata = Some("1".into());
    acquire(&s.a, &successor).await;
    let before = seen(&s.a, "n").await;
    for other in [&expired, &forced] {
        assert_eq!(s.b.transfer(&of_new_process(other), &to).await.unwrap(), Renewed::Lost);
    }
    unchanged(&s.a, "n", &before).await;
    assert_eq!(release(&s.b, &owned_by(&successor, &to)).await, Released::NotHeld);
    assert_eq!(renewed(&s.a, &successor).await, Renewed::Extended);

    assert_eq!(s.a.release(&successor, LONG).await.unwrap(), Released::Freed);
    assert_eq!(s.b.transfer(&successor, &to).await.unwrap(), Renewed::Lost, "released");
}

pub(crate) async fn a_transfer_of_several_names_is_all_or_nothing(s: Stores) {
    const NAMES: [&str; 3] = ["a", "b", "c"];
    let mut whole = claim(&NAMES, LONG);
    let fence = acquire(&s.a, &whole).await;
    whole.fence = Some(fence);
    let new = transferred(&s.b, &whole).await;
    assert_eq!(renewed(&s.a, &whole).await, Renewed::Lost);
    assert_eq!(release(&s.a, &whole).await, Released::NotHeld);
    for name in NAMES {
        assert_eq!(seen(&s.a, name).await.fence, Some(fence), "{name}");
    }
    assert_eq!(renewed(&s.b, &new).await, Renewed::Extended);
    assert_eq!(release(&s.b, &new).await, Released::Freed);

    // If one name is free or held by another owner, the others are not changed.
    for (index, gone) in NAMES.into_iter().enumerate() {
        let mut old = claim(&NAMES, LONG);
        old.metadata = Some("1".into());
        acquire(&s.a, &old).await;
        let others = [NAMES[(index + 1) % 3], NAMES[(index + 2) % 3]];
        let before = [seen(&s.a, others[0]).await, seen(&s.a, others[1]).await];
        assert!(s.b.force_release(&key(gone)).await.unwrap());
        let to = OwnerToken::fresh();
        let mut more = of_new_process(&old);
        more.ttl = Ttl::clamped(LONG * 2);
        assert_eq!(s.b.transfer(&more, &to).await.unwrap(), Renewed::Lost, "without {gone}");
        assert_eq!(s.a.inspect(&key(gone)).await.unwrap(), None);
        let successor = claim(&[gone], LONG);
        acquire(&s.b, &successor).await;
        assert_eq!(
            s.b.transfer(&more, &to).await.unwrap(),
            Renewed::Lost,
            "{gone} has another owner"
        );
        for info in &before {
            unchanged(&s.b, &info.name, info).await;
            let part = claim(&[&info.name], LONG);
            assert_eq!(release(&s.b, &owned_by(&part, &to)).await, Released::NotHeld);
            assert_eq!(
                renewed(&s.a, &owned_by(&part, &old.owner)).await,
                Renewed::Extended,
                "{} still has the old owner",
                info.name
            );
        }
        assert_eq!(renewed(&s.b, &successor).await, Renewed::Extended);
        assert_eq!(release(&s.b, &successor).await, Released::Freed);
        release(&s.a, &old).await;
    }
}

pub(crate) async fn a_transfer_extends_and_never_shortens(s: Stores) {
    for names in [&["n"][..], &["m", "n"]] {
        let mut old = claim(names, LONG);
        old.metadata = Some("1".into());
        acquire(&s.a, &old).await;
        let mut brief = old.clone();
        brief.ttl = Ttl::clamped(SHORT);
        let mut owner = transferred(&s.b, &brief).await;
        for name in names {
            let remaining = seen(&s.a, name).await.remaining.unwrap();
            assert!(remaining > LONG / 2, "{remaining:?}");
        }
        owner.ttl = Ttl::clamped(LONG * 4);
        let last = transferred(&s.a, &owner).await;
        for name in names {
            let info = seen(&s.b, name).await;
            let remaining = info.remaining.unwrap();
            assert!(remaining > LONG * 3 && remaining <= LONG * 4, "{remaining:?}");
            assert_eq!(info.metadata.as_deref(), Some("1"));
        }
        assert_eq!(release(&s.a, &last).await, Released::Freed);
    }
}

/// Two processes have the same token.
pub(crate) async fn transfers_racing_for_one_lease_have_one_winner(s: Stores) {
    // One node may not have the vote of the grant yet, and the rivals divide the other two.
    let may_divide = s.a.describe().name == "redis" && !s.a.describe().ordered;
    let mut divided = 0;
    for round in 0..20 {
        let names: &[&str] = if round % 2 == 0 { &["n"] } else { &["a", "b", "c"] };
        let old = claim(names, LONG);
        acquire(&s.a, &old).await;
        let rivals = [OwnerToken::fresh(), OwnerToken::fresh()];
        let (one, two) = tokio::join!(
            unlocked(async || s.a.transfer(&old, &rivals[0]).await),
            unlocked(async || s.b.transfer(&old, &rivals[1]).await),
        );
        let answers = [one, two];
        match answers.iter().filter(|answer| **answer == Renewed::Extended).count() {
            0 if may_divide => divided += 1,
            winners => assert_eq!(winners, 1, "{answers:?}"),
        }
        assert_eq!(release(&s.a, &old).await, Released::NotHeld);
        for (answer, rival) in answers.into_iter().zip(&rivals) {
            if answer == Renewed::Lost {
                assert_eq!(release(&s.b, &owned_by(&old, rival)).await, Released::NotHeld);
            }
        }
        for (answer, rival) in answers.into_iter().zip(&rivals) {
            if answer == Renewed::Extended {
                assert_eq!(release(&s.b, &owned_by(&old, rival)).await, Released::Freed);
            }
        }
        // Everything is released. (Several names in a cluster take longer than the shortest ttl.)
        let next = claim(names, LONG);
        acquire(&s.a, &next).await;
        assert_eq!(release(&s.a, &next).await, Released::Freed);
    }
    assert!(divided <= 10, "{divided} of 20 leases without a winner");
}

/// One name is force-released during the transfer: the others have one owner.
pub(crate) async fn a_transfer_racing_a_forced_release_leaves_one_owner(s: Stores) {
    for _ in 0..40 {
        let old = claim(&["a", "b", "c"], LONG);
        acquire(&s.a, &old).await;
        let to = OwnerToken::fresh();
        let forced = async {
            tokio::time::sleep(Duration::from_micros(fastrand::u64(0..3000))).await;
            unlocked(async || s.b.force_release(&key("b")).await).await
        };
        let transfer = unlocked(async || s.a.transfer(&old, &to).await);
        let (answer, forced) = tokio::join!(transfer, forced);
        assert!(forced);
        let (owner, other) = match answer {
            Renewed::Extended => (&to, &old.owner),
            Renewed::Lost => (&old.owner, &to),
        };
        for name in ["a", "c"] {
            let part = claim(&[name], LONG);
            assert_eq!(
                release(&s.b, &owned_by(&part, other)).await,
                Released::NotHeld,
                "{name}"
            );
            assert_eq!(release(&s.b, &owned_by(&part, owner)).await, Released::Freed, "{name}");
        }
        assert_eq!(s.a.inspect(&key("b")).await.unwrap(), None);
    }
}

/// Waiters of the old lease wait for the new owner.
pub(crate) async fn a_transferred_lock_wakes_its_waiters(s: Stores) {
    let (old, waiter) = (claim(&["n"], LONG), waiting(&["n"], LONG));
    acquire(&s.a, &old).await;
    let mut subscription = s.b.subscribe(&waiter, &key("n")).await.unwrap();
    busy(&s.b, &waiter).await;
    let new = transferred(&s.a, &old).await;
    busy(&s.b, &waiter).await;
    assert_eq!(release(&s.a, &old).await, Released::NotHeld);
    busy(&s.b, &waiter).await;
    assert_eq!(release(&s.a, &new).await, Released::Freed);
    woken(&mut subscription).await;
    acquire(&s.b, &waiter).await;
    release(&s.b, &waiter).await;
}
