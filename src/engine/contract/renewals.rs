//! Several renewals in one call are independent of each other.

use super::*;
use crate::engine::{EngineExt, Renewal};

/// Renews each claim with its ttl. Panics unless each has one answer.
async fn renew_all(engine: &SharedEngine, wanted: &[(&Claim, Duration)]) -> Vec<Renewed> {
    let renewals: Vec<Renewal<'_>> = wanted
        .iter()
        .map(|(claim, ttl)| Renewal {
            claim,
            ttl: Ttl::clamped(*ttl),
        })
        .collect();
    let mut answers = vec![None; wanted.len()];
    engine
        .renew_all(
            &renewals,
            &mut |index: usize, renewed: crate::engine::Result<Renewed>| {
                let before = answers[index].replace(renewed.unwrap());
                assert_eq!(before, None, "a second answer for {index}");
            },
        )
        .await;
    let answered = answers.into_iter().enumerate();
    answered
        .map(|(index, answer)| answer.unwrap_or_else(|| panic!("no answer for {index}")))
        .collect()
}

async fn remaining(engine: &SharedEngine, name: &str) -> Duration {
    let info = engine.inspect(&key(name)).await.unwrap().unwrap();
    info.remaining.unwrap()
}

/// More than one command of a store that takes several renewals in one command.
const MANY: usize = 230;

pub(crate) async fn each_of_many_renewals_has_one_answer(s: Stores) {
    let names: Vec<String> = (0..MANY).map(|i| format!("n{i}")).collect();
    let claims: Vec<Claim> = names.iter().map(|name| claim(&[name], LONG)).collect();
    for ours in &claims {
        acquire(&s.a, ours).await;
    }
    // Every seventh lease is lost.
    let is_lost = |index: usize| index % 7 == 3;
    let successor = claim(&[&names[10]], LONG);
    for (index, name) in names.iter().enumerate().filter(|(index, _)| is_lost(*index)) {
        assert!(s.b.force_release(&key(name)).await.unwrap());
        if index == 10 {
            acquire(&s.b, &successor).await;
        }
    }
    let wanted: Vec<(&Claim, Duration)> = claims.iter().map(|claim| (claim, 2 * LONG)).collect();
    let answers = renew_all(&s.a, &wanted).await;
    for (index, answer) in answers.into_iter().enumerate() {
        let expected = if is_lost(index) {
            Renewed::Lost
        } else {
            Renewed::Extended
        };
        assert_eq!(answer, expected, "{index}");
    }
    for index in [0, 1, 116, MANY - 1] {
        let left = remaining(&s.b, &names[index]).await;
        assert!(left > LONG + LONG / 2 && left <= 2 * LONG, "{index}: {left:?}");
    }
    assert_eq!(s.b.inspect(&key(&names[3])).await.unwrap(), None, "never re-created");
    assert!(
        remaining(&s.b, &names[10]).await <= LONG + CLOCK_ERROR,
        "the lease of its successor is not extended"
    );
    assert_eq!(release(&s.b, &successor).await, Released::Freed);
}

pub(crate) async fn renewals_of_several_names_are_all_or_nothing(s: Stores) {
    let (whole, torn, single) = (
        claim(&["a", "b", "c"], LONG),
        claim(&["d", "e", "f"], LONG),
        claim(&["g"], LONG),
    );
    for ours in [&whole, &torn, &single] {
        acquire(&s.a, ours).await;
    }
    assert!(s.b.force_release(&key("e")).await.unwrap());
    let never = claim(&["a", "never"], LONG);
    let wanted = [&torn, &whole, &never, &single, &whole].map(|claim| (claim, 2 * LONG));
    use Renewed::{Extended, Lost};
    assert_eq!(
        renew_all(&s.a, &wanted).await,
        [Lost, Extended, Lost, Extended, Extended]
    );
    for name in ["a", "b", "c", "g"] {
        assert!(remaining(&s.b, name).await > LONG + LONG / 2, "{name}");
    }
    assert_eq!(s.b.inspect(&key("e")).await.unwrap(), None);
    assert_eq!(s.b.inspect(&key("never")).await.unwrap(), None);
}

pub(crate) async fn renewals_of_one_call_have_different_ttls(s: Stores) {
    let (long, short, expired) = (
        claim(&["l"], 2 * LONG),
        claim(&["s"], LONG),
        claim(&["e"], Duration::from_millis(60)),
    );
    for ours in [&long, &short, &expired] {
        acquire(&s.a, ours).await;
    }
    expiry(&s, Duration::from_millis(90)).await;
    let wanted = [(&long, SHORT), (&expired, LONG), (&short, 4 * LONG)];
    use Renewed::{Extended, Lost};
    assert_eq!(renew_all(&s.a, &wanted).await, [Extended, Lost, Extended]);
    assert!(remaining(&s.b, "l").await > LONG, "never shortened");
    assert!(remaining(&s.b, "s").await > 3 * LONG);
    assert_eq!(s.b.inspect(&key("e")).await.unwrap(), None, "never re-created");
}

/// Promise 1: after concurrent renewals with different ttls, a lease lasts as long as the longest one.
pub(crate) async fn renewals_of_one_lease_are_all_applied(s: Stores) {
    let mut ttls = [2 * LONG, 20 * LONG, LONG, 2 * LONG];
    for names in [&["n"][..], &["n", "o"], &["n"], &["n", "o"]] {
        let ours = claim(names, LONG);
        acquire(&s.a, &ours).await;
        let wanted = ttls.map(|ttl| (&ours, ttl));
        assert_eq!(renew_all(&s.a, &wanted).await, [Renewed::Extended; 4]);
        assert!(remaining(&s.b, "n").await > 19 * LONG, "{ttls:?}");
        release(&s.a, &ours).await;
        ttls.rotate_left(1);
    }
}

pub(crate) async fn an_empty_list_of_renewals(s: Stores) {
    assert_eq!(renew_all(&s.a, &[]).await, []);
}
