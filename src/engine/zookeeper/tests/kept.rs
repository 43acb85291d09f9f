//! Kept entries (`minHoldMs`).

use super::*;
use crate::engine::EngineExt;
use crate::engine::entries::Record;
use crate::engine::zookeeper::nodes::is_done;

/// Creates the node of a kept entry as the first one of `n`, as a process that has ended has left it.
async fn left(engine: &Opened, data: &[u8]) {
    let (layout, name) = (&engine.store.layout, key("n"));
    let owner = layout::Child::prefix_of(&OwnerToken::fresh(), None) + "0000000000";
    let path = layout.entry(&name, &layout::Child::replaced(&owner, None));
    let create = |path: &str, data: &[u8], kind| Request::create(path, data, layout.access, kind);
    let nodes = [
        create(&layout.folder(&name), &[], Kind::Container),
        create(&path, data, Kind::Persistent),
    ];
    let parts = engine.store.client.call(Request::multi(&nodes)).await.unwrap();
    assert_eq!(parts.parts().unwrap().len(), 2);
}

/// Deletes the empty folder of `n`, unless the server has done that.
async fn remove_folder(engine: &Opened) {
    let delete = Request::delete(&engine.store.layout.folder(&key("n")), -1);
    is_done(engine.store.client.call(delete).await).unwrap();
}

fn record(ttl: u64) -> Record {
    Record {
        ttl,
        host: "h".into(),
        pid: 7,
        since: Some(8),
        fence: Some(9),
        ..Record::default()
    }
}

/// No process waits for its end: it is not shown any more, and the next call that reads the name deletes it.
#[tokio::test]
async fn a_kept_name_whose_time_is_over_is_not_shown() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let engine = open(&url, &prefix).await;
    for inspects in [true, false] {
        let began = std::time::Instant::now();
        left(&engine, &record(1500).to_json()).await;
        let mut shown = Vec::new();
        loop {
            let info = match inspects {
                true => engine.inspect(&key("n")).await.unwrap(),
                false => engine.list("", PAGE).await.unwrap().pop(),
            };
            let Some(info) = info else { break };
            shown.push(info.remaining.unwrap());
            assert_eq!((info.fence, info.waiting), (Some(Fence(9)), Some(0)));
            assert!(began.elapsed() < LONG);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(began.elapsed() >= Duration::from_millis(1500), "{:?}", began.elapsed());
        let is_rest = |rest: &Duration| *rest <= Duration::from_millis(1500);
        assert!(
            shown.is_sorted_by(|one, next| one >= next) && shown.iter().all(is_rest),
            "{shown:?}"
        );
        assert!(!engine.force_release(&key("n")).await.unwrap());
        remove_folder(&engine).await;
    }
}

/// Only its own clock counts for a node, and data that no clock reaches are no error.
#[tokio::test]
async fn a_kept_name_without_an_end_stays_until_it_is_released() {
    let Some(url) = url() else { return };
    let engine = open(&url, &prefix()).await;
    for data in [&b"{}"[..], &record(u64::MAX).to_json()] {
        left(&engine, data).await;
        busy(&engine, &claim(&["n"], LONG)).await;
        let ours = waiting(&["n"], LONG);
        let mut subscription = engine.subscribe(&ours, &key("n")).await.unwrap();
        busy(&engine, &ours).await;
        assert!(engine.force_release(&key("n")).await.unwrap());
        handed_off(&mut subscription).await;
        assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
        remove_folder(&engine).await;
    }
}

/// All find its end at the same time.
#[tokio::test]
async fn one_of_many_calls_gets_a_kept_name() {
    let Some(url) = url() else { return };
    let prefix = prefix();
    let engine = open(&url, &prefix).await;
    left(&engine, &record(600).to_json()).await;
    let engines: Vec<_> = futures_util::future::join_all((0..4).map(|_| open(&url, &prefix))).await;
    let tries = engines.iter().flat_map(|engine| [engine; 5]).map(async |engine| {
        let ours = claim(&["n"], LONG);
        let end = Moment::now() + Duration::from_millis(1500);
        let mut grants = 0;
        while !end.is_past() && grants == 0 {
            let acquired = engine.try_acquire(&ours).await.unwrap();
            grants += usize::from(matches!(acquired, Acquired::Granted { .. }));
        }
        grants
    });
    let grants = futures_util::future::join_all(tries).await;
    match grants.iter().sum() {
        0 => _ = acquire(&engine, &claim(&["n"], LONG)).await,
        holders => assert_eq!(holders, 1, "{grants:?}"),
    }
}

/// Its process has ended, and the share before it is held for longer.
#[tokio::test]
async fn a_kept_share_behind_another_one_ends() {
    const KEPT: Duration = Duration::from_millis(600);
    let Some(url) = url() else { return };
    let prefix = prefix();
    let engine = open(&url, &prefix).await;
    let share = |waiting| {
        let keys = [key("n").shared()];
        let ttl = Ttl::new(LONG).unwrap();
        let mut claim = Claim::new(&keys, OwnerToken::fresh(), ttl, Arc::new(Process::current()));
        (claim.share, claim.waiting) = (Share::new(1, 2), waiting);
        claim
    };
    acquire(&engine, &share(false)).await;
    for waiting in [true, false] {
        let (ended, kept, ours) = (open(&url, &prefix).await, share(false), share(waiting));
        acquire(&ended, &kept).await;
        let began = std::time::Instant::now();
        assert_eq!(ended.release(&kept, KEPT).await.unwrap(), Released::Freed);
        ended.close().await;
        if waiting {
            let mut subscription = engine.subscribe(&ours, &key("n").shared()).await.unwrap();
            busy(&engine, &ours).await;
            handed_off(&mut subscription).await;
        } else {
            while let Acquired::Held { .. } = engine.try_acquire(&ours).await.unwrap() {
                assert!(began.elapsed() < LONG);
            }
        }
        assert!(began.elapsed() >= KEPT, "{:?}", began.elapsed());
        assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
    }
}
