//! A lease goes into other hands: one holder before, one after, never two (promises 1 and 3).

use super::*;
use crate::model::LockInfo;

/// The old owner's claim as the new owner makes it out of the token that it was given.
fn handed(from: &Claim) -> Claim {
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

/// Transfers to a fresh owner, and gives that owner's claim.
async fn transferred(engine: &SharedEngine, from: &Claim) -> Claim {
    let to = OwnerToken::fresh();
    assert_eq!(engine.transfer(&handed(from), &to).await.unwrap(), Renewed::Extended);
    owned_by(&handed(from), &to)
}

async fn renewed(engine: &SharedEngine, claim: &Claim) -> Renewed {
    engine.renew(claim, claim.ttl).await.unwrap()
}

async fn seen(engine: &SharedEngine, name: &str) -> LockInfo {
    engine.inspect(&key(name)).await.unwrap().unwrap()
}

/// Everything that must be the same after a transfer that did not happen. What remains goes down by itself.
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
        let fence = take(&s.a, &old).await;
        let before = seen(&s.a, "n").await.holder.unwrap();
        let new = transferred(&s.b, &old).await;

        assert_eq!(renewed(&s.a, &old).await, Renewed::Lost);
        assert_eq!(free(&s.a, &old).await, Released::NotHeld);
        assert_eq!(s.a.release(&old, SHORT).await.unwrap(), Released::NotHeld);
        busy(&s.a, &old).await;
        assert_eq!(
            s.a.transfer(&old, &OwnerToken::fresh()).await.unwrap(),
            Renewed::Lost,
            "there is nothing left to hand over"
        );
        busy(&s.a, &claim(&["n"], LONG)).await;

        let after = seen(&s.a, "n").await;
        assert_eq!(after.fence, Some(fence));
        assert_eq!(after.metadata.as_deref(), metadata);
        let holder = after.holder.unwrap();
        assert_eq!(holder.process, elsewhere());
        assert_eq!(holder.since_ms, before.since_ms);

        assert_eq!(renewed(&s.b, &new).await, Renewed::Extended);
        assert_eq!(
            take(&s.b, &new).await,
            fence,
            "a retry by the owner finds its own lease"
        );
        let third = transferred(&s.a, &new).await;
        assert_eq!(seen(&s.b, "n").await.fence, Some(fence));
        assert_eq!(seen(&s.b, "n").await.metadata.as_deref(), metadata);
        assert_eq!(free(&s.b, &new).await, Released::NotHeld);
        assert_eq!(free(&s.a, &third).await, Released::Freed);
        assert_eq!(s.b.inspect(&key("n")).await.unwrap(), None);
        let next = claim(&["n"], LONG);
        assert!(take(&s.a, &next).await > fence);
        free(&s.a, &next).await;
    }
}

/// The reply was lost: the same call once more.
pub(crate) async fn a_transfer_is_idempotent(s: Stores) {
    let mut old = claim(&["m", "n"], Duration::from_millis(1500));
    old.metadata = Some("1".into());
    let fence = take(&s.a, &old).await;
    let new = transferred(&s.b, &old).await;
    sleep(Duration::from_millis(900)).await;
    let again = s.b.transfer(&handed(&old), &new.owner).await.unwrap();
    assert_eq!(again, Renewed::Extended);
    sleep(Duration::from_millis(900)).await;
    for name in ["m", "n"] {
        let info = seen(&s.a, name).await;
        assert_eq!(
            (info.fence, info.metadata.as_deref()),
            (Some(fence), Some("1")),
            "{name}"
        );
        assert_eq!(info.holder.unwrap().process, elsewhere(), "{name}");
    }
    assert_eq!(renewed(&s.a, &old).await, Renewed::Lost);
    assert_eq!(free(&s.b, &new).await, Released::Freed);
    let late = s.b.transfer(&handed(&old), &new.owner).await.unwrap();
    assert_eq!(late, Renewed::Lost, "what was released is not held");
    for name in ["m", "n"] {
        assert_eq!(s.a.inspect(&key(name)).await.unwrap(), None, "{name}");
    }

    // The first call got half the way.
    take(&s.a, &old).await;
    let to = OwnerToken::fresh();
    let half = owned_by(&claim(&["m"], LONG), &old.owner);
    assert_eq!(s.b.transfer(&half, &to).await.unwrap(), Renewed::Extended);
    assert_eq!(s.b.transfer(&old, &to).await.unwrap(), Renewed::Extended);
    assert_eq!(free(&s.a, &old).await, Released::NotHeld);
    assert_eq!(free(&s.b, &owned_by(&old, &to)).await, Released::Freed);
}

pub(crate) async fn a_transfer_of_what_is_gone_changes_nothing(s: Stores) {
    let to = OwnerToken::fresh();
    let never = claim(&["n"], LONG);
    assert_eq!(s.a.transfer(&never, &to).await.unwrap(), Renewed::Lost);

    let expired = claim(&["n"], Duration::from_millis(40));
    take(&s.a, &expired).await;
    sleep(Duration::from_millis(70)).await;
    assert_eq!(s.b.transfer(&expired, &to).await.unwrap(), Renewed::Lost);
    assert_eq!(s.b.inspect(&key("n")).await.unwrap(), None, "nothing is re-created");

    let forced = claim(&["n"], LONG);
    take(&s.a, &forced).await;
    s.b.force_release(&key("n")).await.unwrap();
    assert_eq!(s.b.transfer(&forced, &to).await.unwrap(), Renewed::Lost);
    assert_eq!(s.b.inspect(&key("n")).await.unwrap(), None);

    let mut successor = claim(&["n"], LONG);
    successor.metadata = Some("1".into());
    take(&s.a, &successor).await;
    let before = seen(&s.a, "n").await;
    for stranger in [&expired, &forced] {
        assert_eq!(s.b.transfer(&handed(stranger), &to).await.unwrap(), Renewed::Lost);
    }
    unchanged(&s.a, "n", &before).await;
    assert_eq!(free(&s.b, &owned_by(&successor, &to)).await, Released::NotHeld);
    assert_eq!(renewed(&s.a, &successor).await, Renewed::Extended);

    assert_eq!(s.a.release(&successor, LONG).await.unwrap(), Released::Freed);
    assert_eq!(
        s.b.transfer(&successor, &to).await.unwrap(),
        Renewed::Lost,
        "the owner has let go"
    );
}

pub(crate) async fn a_transfer_of_several_names_is_all_or_nothing(s: Stores) {
    const NAMES: [&str; 3] = ["a", "b", "c"];
    let whole = claim(&NAMES, LONG);
    let fence = take(&s.a, &whole).await;
    let new = transferred(&s.b, &whole).await;
    assert_eq!(renewed(&s.a, &whole).await, Renewed::Lost);
    assert_eq!(free(&s.a, &whole).await, Released::NotHeld);
    for name in NAMES {
        assert_eq!(seen(&s.a, name).await.fence, Some(fence), "{name}");
    }
    assert_eq!(renewed(&s.b, &new).await, Renewed::Extended);
    assert_eq!(free(&s.b, &new).await, Released::Freed);

    // Whichever is missing, or somebody else's by now, the others stay as they are.
    for (index, gone) in NAMES.into_iter().enumerate() {
        let mut old = claim(&NAMES, LONG);
        old.metadata = Some("1".into());
        take(&s.a, &old).await;
        let others = [NAMES[(index + 1) % 3], NAMES[(index + 2) % 3]];
        let before = [seen(&s.a, others[0]).await, seen(&s.a, others[1]).await];
        assert!(s.b.force_release(&key(gone)).await.unwrap());
        let to = OwnerToken::fresh();
        let mut more = handed(&old);
        more.ttl = Ttl::clamped(LONG * 2);
        assert_eq!(s.b.transfer(&more, &to).await.unwrap(), Renewed::Lost, "without {gone}");
        assert_eq!(s.a.inspect(&key(gone)).await.unwrap(), None);
        let successor = claim(&[gone], LONG);
        take(&s.b, &successor).await;
        assert_eq!(
            s.b.transfer(&more, &to).await.unwrap(),
            Renewed::Lost,
            "{gone} is taken"
        );
        for info in &before {
            unchanged(&s.b, &info.name, info).await;
            let part = claim(&[&info.name], LONG);
            assert_eq!(free(&s.b, &owned_by(&part, &to)).await, Released::NotHeld);
            assert_eq!(
                renewed(&s.a, &owned_by(&part, &old.owner)).await,
                Renewed::Extended,
                "{} is still the old owner's",
                info.name
            );
        }
        assert_eq!(renewed(&s.b, &successor).await, Renewed::Extended);
        assert_eq!(free(&s.b, &successor).await, Released::Freed);
        free(&s.a, &old).await;
    }
}

pub(crate) async fn a_transfer_extends_and_never_shortens(s: Stores) {
    for names in [&["n"][..], &["m", "n"]] {
        let mut old = claim(names, LONG);
        old.metadata = Some("1".into());
        take(&s.a, &old).await;
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
        assert_eq!(free(&s.a, &last).await, Released::Freed);
    }
}

/// Two processes were given the same token.
pub(crate) async fn transfers_racing_for_one_lease_have_one_winner(s: Stores) {
    for round in 0..20 {
        let names: &[&str] = if round % 2 == 0 { &["n"] } else { &["a", "b", "c"] };
        let old = claim(names, LONG);
        take(&s.a, &old).await;
        let rivals = [OwnerToken::fresh(), OwnerToken::fresh()];
        let (one, two) = tokio::join!(s.a.transfer(&old, &rivals[0]), s.b.transfer(&old, &rivals[1]));
        let answers = [one.unwrap(), two.unwrap()];
        assert!(
            matches!(
                answers,
                [Renewed::Extended, Renewed::Lost] | [Renewed::Lost, Renewed::Extended]
            ),
            "{answers:?}"
        );
        assert_eq!(free(&s.a, &old).await, Released::NotHeld);
        for (answer, rival) in answers.into_iter().zip(&rivals) {
            if answer == Renewed::Lost {
                assert_eq!(free(&s.b, &owned_by(&old, rival)).await, Released::NotHeld);
            }
        }
        for (answer, rival) in answers.into_iter().zip(&rivals) {
            if answer == Renewed::Extended {
                assert_eq!(free(&s.b, &owned_by(&old, rival)).await, Released::Freed);
            }
        }
        // Nothing of it is left. (Several names in a cluster take longer than the shortest ttl.)
        let next = claim(names, LONG);
        take(&s.a, &next).await;
        assert_eq!(free(&s.a, &next).await, Released::Freed);
    }
}

/// A name goes away in the middle: the others are all one owner's.
pub(crate) async fn a_transfer_racing_a_forced_release_leaves_one_owner(s: Stores) {
    for _ in 0..40 {
        let old = claim(&["a", "b", "c"], LONG);
        take(&s.a, &old).await;
        let to = OwnerToken::fresh();
        let forced = async {
            tokio::time::sleep(Duration::from_micros(fastrand::u64(0..3000))).await;
            s.b.force_release(&key("b")).await.unwrap()
        };
        let (answer, forced) = tokio::join!(s.a.transfer(&old, &to), forced);
        assert!(forced);
        let (owner, stranger) = match answer.unwrap() {
            Renewed::Extended => (&to, &old.owner),
            Renewed::Lost => (&old.owner, &to),
        };
        for name in ["a", "c"] {
            let part = claim(&[name], LONG);
            assert_eq!(
                free(&s.b, &owned_by(&part, stranger)).await,
                Released::NotHeld,
                "{name}"
            );
            assert_eq!(free(&s.b, &owned_by(&part, owner)).await, Released::Freed, "{name}");
        }
        assert_eq!(s.a.inspect(&key("b")).await.unwrap(), None);
    }
}

/// Whoever waited for the old owner waits for the new one.
pub(crate) async fn a_transferred_lock_wakes_its_waiters(s: Stores) {
    let (old, waiter) = (claim(&["n"], LONG), waiting(&["n"], LONG));
    take(&s.a, &old).await;
    let mut subscription = s.b.subscribe(&waiter, &key("n")).await.unwrap();
    busy(&s.b, &waiter).await;
    let new = transferred(&s.a, &old).await;
    busy(&s.b, &waiter).await;
    assert_eq!(free(&s.a, &old).await, Released::NotHeld);
    busy(&s.b, &waiter).await;
    assert_eq!(free(&s.a, &new).await, Released::Freed);
    woken(&mut subscription).await;
    take(&s.b, &waiter).await;
    free(&s.b, &waiter).await;
}
