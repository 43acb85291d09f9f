//! Many renewals in few scripts.

use super::*;
use crate::engine::{EngineExt, Renewal, Renewed};
use crate::error::EngineError;

type Answer = std::result::Result<Renewed, EngineError>;

/// Renews each claim with this ttl, and returns the answers in the order of the claims.
pub(super) async fn renew_all(engine: &RedisEngine, claims: &[Claim], ttl: Duration) -> Vec<Answer> {
    let ttl = Ttl::clamped(ttl);
    let renewals: Vec<Renewal<'_>> = claims.iter().map(|claim| Renewal { claim, ttl }).collect();
    let mut answers: Vec<Option<Answer>> = claims.iter().map(|_| None).collect();
    engine
        .renew_all(&renewals, &mut |index: usize, answer: Answer| {
            assert!(answers[index].replace(answer).is_none(), "a second answer for {index}");
        })
        .await;
    answers.into_iter().map(|answer| answer.expect("an answer")).collect()
}

async fn held(engine: &RedisEngine, count: usize) -> Vec<Claim> {
    let claims: Vec<Claim> = (0..count).map(|i| claim(&format!("n{i}"))).collect();
    for claim in &claims {
        acquire(engine, claim).await;
    }
    claims
}

#[tokio::test]
async fn many_leases_share_a_script() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let claims = held(&ours, 1000).await;
    // The records of the grants are written a moment later.
    other.recorded(1000).await;
    other.run::<()>("SCRIPT FLUSH").await;
    other.run::<()>("CONFIG RESETSTAT").await;
    for round in 1..=5 {
        let answers = renew_all(&ours, &claims, LONG * (round + 1)).await;
        assert!(answers.iter().all(|answer| matches!(answer, Ok(Renewed::Extended))));
    }
    let scripts = other.scripts().await;
    assert!(scripts <= 100, "{scripts} scripts for 5000 renewals");
    let left: i64 = other.run("PTTL lock:n999").await;
    assert!((170_000..=180_000).contains(&left), "{left}");
}

#[tokio::test]
async fn a_key_of_another_type_is_a_lost_lease_and_does_not_affect_the_others() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let claims = held(&ours, 10).await;
    other.run::<()>("DEL lock:n3").await;
    other.run::<()>("HSET lock:n3 field 1").await;
    for (index, answer) in renew_all(&ours, &claims, 2 * LONG).await.into_iter().enumerate() {
        let expected = if index == 3 { Renewed::Lost } else { Renewed::Extended };
        assert_eq!(answer.unwrap(), expected, "{index}");
    }
    assert_eq!(ours.renew(&claims[3], claims[3].ttl).await.unwrap(), Renewed::Lost);
    assert_eq!(other.run::<String>("TYPE lock:n3").await, "hash");
    assert_eq!(other.run::<i64>("PTTL lock:n3").await, -1);
}

/// The server refuses a script as a whole when one of its keys is out of bounds.
#[tokio::test]
async fn a_lease_that_the_server_refuses_does_not_affect_the_others() {
    let Some(server) = Server::start(&[]).await else { return };
    let (admin, mut other) = (server.engine().await, server.other().await);
    let claims = held(&admin, 10).await;
    other
        .run::<()>("ACL SETUSER some on >pw ~lock:n* ~holdfast:* &* +@all -@dangerous")
        .await;
    let ours = engine(&format!("redis://some:pw@127.0.0.1:{}", server.port), "lock:").await;
    let mut mixed = claims.clone();
    mixed[4] = claim("forbidden");
    for (index, answer) in renew_all(&ours, &mixed, 2 * LONG).await.into_iter().enumerate() {
        match answer {
            Err(error) => assert!(index == 4 && error.to_string().contains("NOPERM"), "{index}: {error}"),
            Ok(answer) => assert!(index != 4 && answer == Renewed::Extended, "{index}"),
        }
    }
}

#[tokio::test]
async fn an_outage_is_an_error_for_each() {
    let Some(mut server) = Server::start(&[]).await else {
        return;
    };
    let ours = server.engine().await;
    let claims = held(&ours, 200).await;
    server.stop();
    for answer in renew_all(&ours, &claims, LONG).await {
        let error = answer.unwrap_err();
        assert!(error.retryable && error.op == "renew", "{error}");
    }
}

#[tokio::test]
async fn a_lease_of_thousands_of_names_is_renewed_as_one() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let keys: Vec<Key> = (0..9000).map(|i| key(&format!("many{i}"))).collect();
    let many = Claim::new(
        &keys,
        OwnerToken::fresh(),
        Ttl::clamped(LONG),
        Arc::new(Process::current()),
    );
    acquire(&ours, &many).await;
    let claims = [claim("before"), many, claim("after")];
    acquire(&ours, &claims[0]).await;
    acquire(&ours, &claims[2]).await;
    for answer in renew_all(&ours, &claims, 2 * LONG).await {
        assert_eq!(answer.unwrap(), Renewed::Extended);
    }
    for name in ["before", "many0", "many8999", "after"] {
        assert!(other.run::<i64>(&format!("PTTL lock:{name}")).await > 31_000, "{name}");
    }
    other.run::<()>("DEL lock:many8999").await;
    let answers = renew_all(&ours, &claims, 3 * LONG).await;
    let answers: Vec<Renewed> = answers.into_iter().map(Result::unwrap).collect();
    assert_eq!(answers, [Renewed::Extended, Renewed::Lost, Renewed::Extended]);
    assert!(other.run::<i64>("PTTL lock:many0").await <= 60_000);
}
