//! `inspect`, `list`, unusual names, and the limits of a ttl.

use std::collections::BTreeSet;

use super::*;
use crate::engine::EngineExt;

pub(crate) async fn force_release_releases_any_owner(s: Stores) {
    let holder = claim(&["n"], LONG);
    assert!(!s.b.force_release(&key("n")).await.unwrap());
    acquire(&s.a, &holder).await;
    assert!(s.b.force_release(&key("n")).await.unwrap());
    assert_eq!(s.a.inspect(&key("n")).await.unwrap(), None);
    acquire(&s.b, &claim(&["n"], Duration::from_millis(30))).await;
    expiry(&s, Duration::from_millis(50)).await;
    assert!(
        !s.a.force_release(&key("n")).await.unwrap(),
        "an expired lock is not held"
    );
}

pub(crate) async fn inspect_returns_holder_and_remaining_time(s: Stores) {
    assert_eq!(s.a.inspect(&key("n")).await.unwrap(), None);
    let metadata = r#"{"job":"18:00 «report»","n":[1,2]}"#;
    let mut ours = claim(&["n"], LONG);
    ours.metadata = Some(metadata.into());
    let fence = acquire(&s.a, &ours).await;
    let info = s.b.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!(info.name, "n");
    assert_eq!(info.fence, Some(fence));
    let remaining = info.remaining.unwrap();
    assert!(
        remaining <= LONG + CLOCK_ERROR && remaining > LONG - Duration::from_secs(10),
        "{remaining:?}"
    );
    let holder = info.holder.unwrap();
    assert_eq!(holder.process, Process::current());
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_millis() as u64;
    assert!(
        holder.since_ms.abs_diff(now) < 60_000,
        "{} is not about {now}",
        holder.since_ms
    );
    assert_eq!(info.metadata.as_deref(), Some(metadata));
    s.a.renew(&ours, Ttl::clamped(LONG * 2)).await.unwrap();
    let renewed = s.b.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!(
        renewed.metadata.as_deref(),
        Some(metadata),
        "a renewal does not change the metadata"
    );
    assert_eq!(
        renewed.holder.unwrap().since_ms,
        holder.since_ms,
        "a renewal does not change the time of the grant"
    );
    release(&s.a, &ours).await;
    let without = claim(&["n"], SHORT);
    acquire(&s.b, &without).await;
    assert_eq!(
        s.a.inspect(&key("n")).await.unwrap().unwrap().metadata,
        None,
        "the metadata of the former holder"
    );
}

/// `inspect` and `list` count the waiters of both processes, in stores with a queue. A claim of several names waits for one of them.
pub(crate) async fn waiting_calls_are_counted(s: Stores) {
    let count = async |name: &str| {
        let info = s.a.inspect(&key(name)).await.unwrap().unwrap();
        let listed = s.b.list(name, PAGE).await.unwrap();
        assert_eq!(
            listed.into_iter().map(|info| info.waiting).collect::<Vec<_>>(),
            [info.waiting]
        );
        info.waiting
    };
    let holder = claim(&["n", "other"], LONG);
    acquire(&s.a, &holder).await;
    if !s.a.describe().ordered {
        busy(&s.b, &waiting(&["n"], LONG)).await;
        assert_eq!(count("n").await, None);
        return;
    }
    assert_eq!(count("n").await, Some(0));
    busy(&s.b, &claim(&["n"], LONG)).await;
    assert_eq!(count("n").await, Some(0), "a call that does not wait");
    let cancelled = waiting(&["n"], LONG);
    let waiters = [
        (&s.b, waiting(&["n"], LONG)),
        (&s.b, waiting(&["m", "n"], LONG)),
        (&s.a, waiting(&["n"], LONG)),
    ];
    busy(&s.a, &cancelled).await;
    for (engine, waiter) in &waiters {
        busy(engine, waiter).await;
    }
    assert_eq!((count("n").await, count("other").await), (Some(4), Some(0)));
    release(&s.a, &cancelled).await;
    assert_eq!(count("n").await, Some(3));
    release(&s.a, &holder).await;
    for (left, (engine, waiter)) in [2, 1, 0].into_iter().zip(&waiters) {
        acquire(engine, waiter).await;
        assert_eq!(count("n").await, Some(left));
        release(engine, waiter).await;
    }
}

pub(crate) async fn list_takes_the_prefix_literally(s: Stores) {
    let names = [
        "a*b", "a*c", "axb", "a%b", "a_b", "a[x]b", "a?b", "a.b", "a\\b", "b", "é1", "é2",
    ];
    for name in names {
        acquire(&s.a, &claim(&[name], LONG)).await;
    }
    let short = claim(&["a*gone"], Duration::from_millis(30));
    acquire(&s.a, &short).await;
    expiry(&s, Duration::from_millis(60)).await;
    let listed = |prefix: &'static str| {
        let b = s.b.clone();
        async move {
            b.list(prefix, PAGE)
                .await
                .unwrap()
                .into_iter()
                .map(|info| info.name)
                .collect::<Vec<_>>()
        }
    };
    assert_eq!(listed("a*").await, ["a*b", "a*c"]);
    assert_eq!(listed("a%").await, ["a%b"]);
    assert_eq!(listed("a_").await, ["a_b"]);
    assert_eq!(listed("a[").await, ["a[x]b"]);
    assert_eq!(listed("a?").await, ["a?b"]);
    assert_eq!(listed("a.").await, ["a.b"]);
    assert_eq!(listed("a\\").await, ["a\\b"]);
    assert_eq!(listed("é").await, ["é1", "é2"]);
    assert_eq!(listed("nothing").await, Vec::<String>::new());
    let mut all: Vec<&str> = names.to_vec();
    all.sort_unstable();
    assert_eq!(listed("").await, all);
}

/// Names are compared byte by byte.
pub(crate) async fn unusual_names_are_distinct(s: Stores) {
    let long_one = "x".repeat(512);
    let long_two = format!("{}y", "x".repeat(511));
    let names: Vec<&str> = vec![
        "a", "A", "á", "a\u{301}", " a", "a ", "a\n", "a\r\n", "a\0", "a\0b", "{a}", "{}", "{}a", "a{", "a}", "}a{",
        "{a}b", "*", "**", "$a", ".a", "a.b", "日本", "💥", "ß", "SS", "ſ", "'", "\"", "\\", "%", "_", "1", "01",
        &long_one, &long_two,
    ];
    let mut fences = BTreeSet::new();
    let claims: Vec<Claim> = names.iter().map(|name| claim(&[name], LONG)).collect();
    for ours in &claims {
        fences.insert(acquire(&s.a, ours).await.0);
    }
    let listed: BTreeSet<String> =
        s.b.list("", PAGE)
            .await
            .unwrap()
            .into_iter()
            .map(|info| info.name)
            .collect();
    assert_eq!(
        listed,
        names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>()
    );
    for (name, ours) in names.iter().zip(&claims) {
        busy(&s.b, &claim(&[name], LONG)).await;
        assert_eq!(s.b.renew(ours, ours.ttl).await.unwrap(), Renewed::Extended, "{name:?}");
    }
    let all = claim(&names, LONG);
    busy(&s.b, &all).await;
    for (name, ours) in names.iter().zip(&claims) {
        assert_eq!(release(&s.b, ours).await, Released::Freed, "{name:?}");
        assert_eq!(s.a.inspect(&key(name)).await.unwrap(), None, "{name:?}");
    }
    acquire(&s.a, &all).await;
    assert_eq!(release(&s.a, &all).await, Released::Freed);
}

pub(crate) async fn a_ttl_of_one_millisecond(s: Stores) {
    let mut last = Fence(0);
    for _ in 0..20 {
        let mut attempts = 0;
        let fence = loop {
            attempts += 1;
            assert!(attempts < 100, "no grant");
            match s.a.try_acquire(&claim(&["n"], Duration::from_millis(1))).await {
                Ok(Acquired::Granted { fence }) => break fence,
                Ok(Acquired::Held { .. }) => sleep(Duration::from_millis(5)).await,
                // A quorum allows so short an attempt 50 ms, for which a machine may stall.
                Err(error) => assert!(error.retryable, "{error}"),
            }
        };
        assert!(fence > last);
        last = fence;
        sleep(Duration::from_millis(5)).await;
    }
    acquire(&s.b, &claim(&["n"], SHORT)).await;
}

/// The store neither overflows nor forgets its fencing token before the lease ends.
pub(crate) async fn the_maximum_ttl(s: Stores) {
    let ours = claim(&["n"], crate::model::MAX_TTL);
    acquire(&s.a, &ours).await;
    let (_, retry_after) = busy(&s.b, &claim(&["n"], LONG)).await;
    // In MongoDB a new lease may have a margin.
    let margin = if s.a.describe().name == "mongodb" { 4 } else { 0 };
    let longest = crate::model::MAX_TTL + Duration::from_secs(margin);
    assert!(retry_after.is_none_or(|after| after <= longest), "{retry_after:?}");
    let info = s.b.inspect(&key("n")).await.unwrap().unwrap();
    assert!(
        info.remaining.unwrap() > crate::model::MAX_TTL - Duration::from_secs(60),
        "{info:?}"
    );
    assert_eq!(s.a.renew(&ours, ours.ttl).await.unwrap(), Renewed::Extended);
    assert_eq!(release(&s.a, &ours).await, Released::Freed);
}
