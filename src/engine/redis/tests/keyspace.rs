//! The keys in the server, as other tools see them.

use super::*;
use crate::engine::{EngineExt, Renewed};

fn token(claim: &Claim) -> String {
    claim.owner.as_str().to_owned()
}

#[tokio::test]
async fn the_lock_is_what_other_tools_write_and_respect() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let mut first = claim("n");
    first.metadata = Some("{}".into());
    acquire(&ours, &first).await;
    assert_eq!(other.run::<String>("GET lock:n").await, token(&first));
    let left: i64 = other.run("PTTL lock:n").await;
    assert!((29_000..=30_000).contains(&left), "{left}");
    assert_eq!(other.run::<Option<String>>("SET lock:n theirs NX PX 5000").await, None);
    release(&ours, &first).await;
    assert_eq!(
        other.run::<Vec<String>>("KEYS *").await,
        ["holdfast:last"],
        "the companions are deleted with the lock"
    );

    assert_eq!(
        other
            .run::<Option<String>>("SET lock:n theirs NX PX 5000")
            .await
            .as_deref(),
        Some("OK")
    );
    let second = claim("n");
    // The script reads the remaining time, which plain commands do not.
    ours.link().connection().await.unwrap().wire.use_scripts_only();
    let Acquired::Held { key: busy, retry_after } = ours.try_acquire(&second).await.unwrap() else {
        panic!()
    };
    assert_eq!(busy, key("n"));
    assert!((Duration::from_secs(4)..=Duration::from_secs(5)).contains(&retry_after.unwrap()));
    let seen = ours.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!(
        (seen.fence, seen.holder, seen.metadata),
        (None, None, None),
        "the companions belong to the earlier holder"
    );
    assert!(seen.remaining.is_some());
    assert_eq!(ours.release(&second, Duration::ZERO).await.unwrap(), Released::NotHeld);
    assert_eq!(other.run::<String>("GET lock:n").await, "theirs");

    other.run::<()>("PERSIST lock:n").await;
    assert!(matches!(
        ours.try_acquire(&second).await.unwrap(),
        Acquired::Held { retry_after: None, .. }
    ));
    assert_eq!(ours.inspect(&key("n")).await.unwrap().unwrap().remaining, None);
    assert_eq!(ours.list("", PAGE).await.unwrap().len(), 1);
    assert!(ours.force_release(&key("n")).await.unwrap());
    acquire(&ours, &second).await;
}

#[tokio::test]
async fn a_record_outlives_its_lease_and_a_fence_is_larger_than_the_stored_one() {
    const KEPT: i64 = 61 * 60 * 1000;
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let mut first = claim("n");
    let fence = acquire(&ours, &first).await;
    let record: String = other.run("GET holdfast:fence:{lock:n}").await;
    assert!(
        record.starts_with(&format!("{} {} ", fence.0, token(&first))),
        "{record}"
    );
    let left = async |other: &mut OtherClient| other.run::<i64>("PTTL holdfast:fence:{lock:n}").await - KEPT;
    assert!((29_000..=30_000).contains(&left(&mut other).await));
    assert_eq!(
        ours.renew(&first, Ttl::clamped(2 * LONG)).await.unwrap(),
        Renewed::Extended
    );
    // A renewal changes it after an hour at the latest.
    let after_renewal = left(&mut other).await;
    assert!((29_000..=60_000).contains(&after_renewal), "{after_renewal}");
    first.ttl = Ttl::clamped(3 * LONG);
    let to = OwnerToken::fresh();
    assert_eq!(ours.transfer(&first, &to).await.unwrap(), Renewed::Extended);
    assert!((89_000..=90_000).contains(&left(&mut other).await));
    let record = record.replace(&token(&first), to.as_str());
    assert_eq!(other.run::<String>("GET holdfast:fence:{lock:n}").await, record);
    first.ttl = Ttl::clamped(LONG);
    first.owner = to.clone();
    assert_eq!(ours.transfer(&first, &to).await.unwrap(), Renewed::Extended);
    assert!((89_000..=90_000).contains(&left(&mut other).await));
    assert_eq!(ours.release(&first, 4 * LONG).await.unwrap(), Released::Freed);
    let kept = ours.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!(kept.fence, Some(fence), "a name that stays busy still has its record");

    // A clock that was set back: the last token counts, of any name.
    other.run::<()>("DEL lock:n").await;
    other.run::<()>("SET holdfast:last 9000000000000000").await;
    assert_eq!(acquire(&ours, &claim("n")).await, Fence(9_000_000_000_000_001));
    assert_eq!(acquire(&ours, &claim("m")).await, Fence(9_000_000_000_000_002));
    let set = [key("a"), key("b"), key("c")];
    let set = Claim::new(
        &set,
        OwnerToken::fresh(),
        Ttl::clamped(LONG),
        Arc::new(Process::current()),
    );
    assert_eq!(acquire(&ours, &set).await, Fence(9_000_000_000_000_003));
    assert_eq!(other.run::<String>("GET holdfast:last").await, "9000000000000003");
    // A value that is no number does not count, and is replaced.
    other.run::<()>("SET holdfast:last garbage").await;
    assert!(acquire(&ours, &claim("o")).await > fence);
    assert_eq!(other.run::<String>("GET holdfast:last").await.len(), 16);
}

/// After any number of renewals the record outlives its lease by 61 minutes, or up to an hour less.
#[tokio::test]
async fn a_record_outlives_its_lease_over_many_renewals() {
    const HOUR: u64 = 60 * 60 * 1000;
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let first = claim("n");
    acquire(&ours, &first).await;
    let (seconds, _): (u64, u64) = other.run("TIME").await;
    // The second full hour from now: an hour away at least.
    let mark = HOUR - seconds * 1000 % HOUR + HOUR;
    let mut leads = Vec::new();
    let minute = 60_000;
    for until in [
        mark / 2,
        mark - 2 * minute,
        mark - minute,
        mark + minute,
        mark + 2 * minute,
        mark + HOUR - 3 * minute,
    ] {
        let ttl = Ttl::clamped(Duration::from_millis(until));
        assert_eq!(ours.renew(&first, ttl).await.unwrap(), Renewed::Extended);
        let lock: u64 = other.run("PTTL lock:n").await;
        let fence: u64 = other.run("PTTL holdfast:fence:{lock:n}").await;
        leads.push((fence - lock) / 1000);
    }
    let full = 61 * 60;
    assert!(leads.iter().all(|lead| (60..=full).contains(lead)), "{leads:?}");
    assert!(full - leads[3] <= 1, "the end moved past a full hour: {leads:?}");
    assert!(full - leads[4] >= 59, "and then it did not: {leads:?}");
}

#[tokio::test]
async fn a_retry_of_a_holder_whose_companion_was_evicted_is_granted() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let first = claim("n");
    let fence = acquire(&ours, &first).await;
    other.run::<()>("DEL holdfast:fence:{lock:n}").await;
    assert!(acquire(&ours, &first).await > fence);
}

/// A transfer does not change companions that are missing or belong to another owner.
#[tokio::test]
async fn a_transfer_creates_no_companions() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (first, to) = (claim("n"), OwnerToken::fresh());
    acquire(&ours, &first).await;
    other.run::<()>("DEL holdfast:fence:{lock:n}").await;
    other.run::<()>("SET holdfast:metadata:{lock:n} abc").await;
    other.run::<()>("PERSIST lock:n").await;
    assert_eq!(ours.transfer(&first, &to).await.unwrap(), Renewed::Extended);
    assert_eq!(other.run::<String>("GET lock:n").await, to.as_str());
    assert_eq!(other.run::<i64>("PTTL lock:n").await, -1);
    assert_eq!(other.run::<i64>("EXISTS holdfast:fence:{lock:n}").await, 0);
    assert_eq!(other.run::<String>("GET holdfast:metadata:{lock:n}").await, "abc");
    let third = OwnerToken::fresh();
    other.run::<()>("DEL holdfast:metadata:{lock:n}").await;
    other.run::<()>("HSET holdfast:metadata:{lock:n} field 1").await;
    let mut second = first.clone();
    second.owner = to;
    assert_eq!(ours.transfer(&second, &third).await.unwrap(), Renewed::Extended);
    assert_eq!(other.run::<String>("TYPE holdfast:metadata:{lock:n}").await, "hash");
}

#[tokio::test]
async fn metadata_belongs_to_the_holder() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let mut first = claim("n");
    first.metadata = Some("{\"a\":1}".into());
    acquire(&ours, &first).await;
    let lasts_as_long = async |other: &mut OtherClient| {
        let lock: i64 = other.run("PTTL lock:n").await;
        let metadata: i64 = other.run("PTTL holdfast:metadata:{lock:n}").await;
        assert!(metadata > 0 && (lock - metadata).abs() < 1000, "{lock} {metadata}");
    };
    lasts_as_long(&mut other).await;
    ours.renew(&first, Ttl::clamped(2 * LONG)).await.unwrap();
    lasts_as_long(&mut other).await;
    let to = OwnerToken::fresh();
    first.ttl = Ttl::clamped(3 * LONG);
    assert_eq!(ours.transfer(&first, &to).await.unwrap(), Renewed::Extended);
    lasts_as_long(&mut other).await;
    assert_eq!(other.run::<String>("GET lock:n").await, to.as_str());
    assert_eq!(
        other.run::<String>("GET holdfast:metadata:{lock:n}").await,
        format!("{} {{\"a\":1}}", to.as_str())
    );
    // The lock is deleted by hand, and the next holder has no metadata.
    other.run::<()>("DEL lock:n").await;
    acquire(&ours, &claim("n")).await;
    assert_eq!(ours.inspect(&key("n")).await.unwrap().unwrap().metadata, None);
}

#[tokio::test]
async fn a_key_of_another_type_is_an_error_and_is_not_changed() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    other.run::<()>("HSET lock:n field 1").await;
    let both = Claim::new(
        &[key("a"), key("n")],
        OwnerToken::fresh(),
        Ttl::clamped(LONG),
        Arc::new(Process::current()),
    );
    for error in [
        ours.try_acquire(&claim("n")).await.unwrap_err(),
        ours.try_acquire(&both).await.unwrap_err(),
        ours.inspect(&key("n")).await.unwrap_err(),
        ours.force_release(&key("n")).await.unwrap_err(),
        ours.transfer(&claim("n"), &OwnerToken::fresh()).await.unwrap_err(),
    ] {
        assert!(!error.retryable, "{error}");
        let shown = error.to_string();
        assert!(
            shown.contains("has a value of another type: ") && shown.contains("WRONGTYPE"),
            "{shown}"
        );
    }
    assert_eq!(ours.list("", PAGE).await.unwrap(), []);
    assert_eq!(other.run::<String>("TYPE lock:n").await, "hash");
    assert_eq!(other.run::<i64>("DBSIZE").await, 1);
}

#[tokio::test]
async fn a_counter_of_another_type_fails_a_release_that_needs_a_token() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let (holder, next) = (claim("n"), waiting("n"));
    acquire(&ours, &holder).await;
    let mut subscription = enqueue(&theirs, &next).await;
    other.run::<()>("DEL holdfast:last").await;
    other.run::<()>("HSET holdfast:last field 1").await;
    let error = ours.release(&holder, Duration::ZERO).await.unwrap_err();
    assert!(!error.retryable && error.to_string().contains("WRONGTYPE"), "{error}");
    assert_eq!(other.run::<String>("GET lock:n").await, holder.owner.as_str());
    assert_eq!(other.run::<String>("TYPE holdfast:last").await, "hash");
    assert_eq!(subscription.take_hand_off(), None);
    other.run::<()>("DEL holdfast:last").await;
    release(&ours, &holder).await;
    notified(&mut subscription).await;
    assert_eq!(other.run::<String>("GET lock:n").await, next.owner.as_str());
}

#[tokio::test]
async fn an_empty_prefix_separates_names_and_companions() {
    let Some(server) = Server::start(&[]).await else { return };
    let ours = engine(&server.url(), "").await;
    let mut other = server.other().await;
    let names = [
        "n",
        "holdfast:fence:{n}",
        "holdfast:lock:n",
        "holdfast:metadata:{n}",
        "holdfast:",
    ];
    let claims = names.map(|name| {
        let mut ours = claim(name);
        ours.metadata = Some("1".into());
        ours
    });
    for ours_now in &claims {
        acquire(&ours, ours_now).await;
    }
    other.run::<()>("LPUSH list 1").await;
    let listed = async |prefix: &str| {
        ours.list(prefix, PAGE)
            .await
            .unwrap()
            .into_iter()
            .map(|info| info.name)
            .collect::<Vec<_>>()
    };
    let mut sorted = names.to_vec();
    sorted.sort_unstable();
    assert_eq!(listed("").await, sorted);
    assert_eq!(listed("holdfast:f").await, ["holdfast:fence:{n}"]);
    assert_eq!(listed("hold").await, sorted[..4]);
    assert_eq!(other.run::<String>("GET n").await, token(&claims[0]));
    for ours_now in &claims {
        assert!(matches!(
            ours.try_acquire(&claim(ours_now.keys()[0].as_str())).await.unwrap(),
            Acquired::Held { .. }
        ));
        release(&ours, ours_now).await;
    }
    assert_eq!(listed("").await, Vec::<String>::new());
}

#[tokio::test]
async fn a_long_list_is_complete_and_without_repeats() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let script =
        "for i = 1, 3000 do redis.call('SET', 'lock:' .. i, 'x', 'PX', 60000) redis.call('SET', 'no:' .. i, 'x') end";
    other.args::<()>(&["EVAL", script, "0"]).await;
    let names: Vec<String> = ours
        .list("", PAGE)
        .await
        .unwrap()
        .into_iter()
        .map(|info| info.name)
        .collect();
    let mut expected: Vec<String> = (1..=3000).map(|i| i.to_string()).collect();
    expected.sort_unstable();
    assert_eq!(names, expected);
    assert_eq!(ours.list("299", PAGE).await.unwrap().len(), 11);
}
