//! Tests of the file: several services on it, and errors.

use super::processes::Process;
use super::*;
use crate::engine::EngineExt;

#[tokio::test]
async fn prefixes_keep_services_apart() {
    let folder = folder();
    let settings = |prefix: &str| Settings {
        key_prefix: Some(prefix.into()),
        ..Settings::default()
    };
    let a = SqliteEngine::connect(config(folder.path(), &settings("a:")))
        .await
        .unwrap();
    let b = SqliteEngine::connect(config(folder.path(), &settings("b:")))
        .await
        .unwrap();
    assert!(granted(&a, &claim(&["n", "m"], 60_000)).await);
    assert!(granted(&b, &claim(&["n"], 60_000)).await);
    let names = async |engine: &SqliteEngine, prefix| {
        engine
            .list(prefix, PAGE)
            .await
            .unwrap()
            .into_iter()
            .map(|info| info.name)
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&a, "").await, ["m", "n"]);
    assert_eq!(names(&b, "").await, ["n"]);
    assert_eq!(names(&a, "n").await, ["n"]);
    assert_eq!(a.inspect(&key("m")).await.unwrap().unwrap().name, "m");
    let all = open(folder.path()).await;
    assert_eq!(names(&all, "").await, ["a:m", "a:n", "b:n"]);
}

#[tokio::test]
async fn a_separate_table_is_a_separate_store() {
    let folder = folder();
    let settings = Settings {
        table: "Order".into(),
        ..Settings::default()
    };
    let own = SqliteEngine::connect(config(folder.path(), &settings)).await.unwrap();
    assert!(granted(&own, &claim(&["n"], 60_000)).await);
    assert!(granted(&*open(folder.path()).await, &claim(&["n"], 60_000)).await);
    assert_eq!(count(&mut raw(folder.path()).await, "\"Order\"").await, 1);
}

#[tokio::test]
async fn a_deleted_file_is_detected() {
    let folder = folder();
    let (a, b) = (open(folder.path()).await, open(folder.path()).await);
    let before = claim(&["n"], 60_000);
    assert!(granted(&a, &before).await);
    let waiter = waiting(&["n"], 60_000);
    let mut changes = a.subscribe(&waiter, &key("n")).await.unwrap();
    std::fs::remove_dir_all(folder.path().join("deep")).unwrap();
    if cfg!(unix) {
        assert!(
            granted(&b, &claim(&["n"], 60_000)).await,
            "b sees the new file, which is empty"
        );
        assert_eq!(a.renew(&before, before.ttl).await.unwrap(), Renewed::Lost, "so does a");
        changes.changed().await;
        assert!(!granted(&a, &waiter).await);
    }
}

#[tokio::test]
async fn a_store_that_is_busy_for_too_long_is_a_retryable_error() {
    let folder = folder();
    let settings = Settings {
        store_timeout: Duration::from_millis(150),
        ..Settings::default()
    };
    // The short timeout is for the calls, and not for the tables.
    drop(open(folder.path()).await);
    let engine = SqliteEngine::connect(config(folder.path(), &settings)).await.unwrap();
    let mut stranger = raw(folder.path()).await;
    stranger.execute("BEGIN IMMEDIATE").await.unwrap();
    let ours = claim(&["n"], 60_000);
    let started = Instant::now();
    let (acquired, renewed) = tokio::join!(engine.try_acquire(&ours), engine.renew(&ours, ours.ttl));
    let (acquired, renewed) = (acquired.unwrap_err(), renewed.unwrap_err());
    assert!(acquired.retryable && renewed.retryable, "{acquired}");
    assert!(acquired.to_string().contains("acquire") && renewed.to_string().contains("renew"));
    assert!(started.elapsed() >= Duration::from_millis(150));
    assert_eq!(engine.inspect(&key("n")).await.unwrap(), None, "reading needs no lock");
    stranger.execute("ROLLBACK").await.unwrap();
    assert!(granted(&engine, &ours).await);
}

#[tokio::test]
async fn permanent_errors_are_not_retryable() {
    let folder = folder();
    let file = folder.path().join("deep/locks.sqlite");
    let refused = async |what: &str| {
        let error = SqliteEngine::connect(config(folder.path(), &Settings::default()))
            .await
            .unwrap_err();
        assert!(!error.retryable, "{error}");
        let message = error.to_string();
        assert!(message.contains(what) && message.contains("locks.sqlite"), "{message}");
    };
    std::fs::write(folder.path().join("deep"), "a file where the folder should be").unwrap();
    refused("folder").await;
    std::fs::remove_file(folder.path().join("deep")).unwrap();
    std::fs::create_dir_all(&file).unwrap();
    refused("unable to open").await;
    std::fs::remove_dir(&file).unwrap();
    std::fs::write(&file, "no database, but long enough to be taken for one".repeat(100)).unwrap();
    refused("not a database").await;
    std::fs::remove_file(&file).unwrap();
    let mut theirs = SqliteConnectOptions::new()
        .filename(&file)
        .create_if_missing(true)
        .connect()
        .await
        .unwrap();
    theirs
        .execute("CREATE TABLE locks (door TEXT, key TEXT)")
        .await
        .unwrap();
    refused("no such column").await;
    assert_eq!(
        count(&mut theirs, "sqlite_schema").await,
        1,
        "another program's file got tables of holdfast"
    );
    theirs.close().await.unwrap();
}

/// A call that fails for a reason of its own does not make others fail.
#[tokio::test]
async fn a_bad_call_fails_alone() {
    let folder = folder();
    let engine = open(folder.path()).await;
    raw(folder.path())
        .await
        .execute(
            "CREATE TRIGGER bad BEFORE INSERT ON locks WHEN new.name = x'626164' BEGIN SELECT raise(ABORT, 'bad'); END",
        )
        .await
        .unwrap();
    let claims = [
        claim(&["good"], 60_000),
        claim(&["bad"], 60_000),
        claim(&["fine"], 60_000),
    ];
    let (good, bad, fine) = tokio::join!(
        engine.try_acquire(&claims[0]),
        engine.try_acquire(&claims[1]),
        engine.try_acquire(&claims[2])
    );
    assert!(matches!(good.unwrap(), Acquired::Granted { .. }));
    assert!(!bad.unwrap_err().retryable);
    assert!(matches!(fine.unwrap(), Acquired::Granted { .. }));
}

#[tokio::test]
async fn close_answers_earlier_calls_and_later_ones_fail() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let ours = claim(&["n"], 60_000);
    let (acquired, ()) = tokio::join!(engine.try_acquire(&ours), engine.close());
    assert!(matches!(acquired.unwrap(), Acquired::Granted { .. }));
    engine.close().await;
    assert!(!engine.try_acquire(&ours).await.unwrap_err().retryable);
    assert!(
        !folder.path().join("deep/locks.sqlite-wal").exists(),
        "the last connection cleans up"
    );
    assert_eq!(
        open(folder.path()).await.release(&ours, Duration::ZERO).await.unwrap(),
        Released::Freed
    );
}

#[tokio::test]
#[cfg(unix)]
async fn only_this_user_can_read_the_default_store() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder();
    let path = |name: &str| folder.path().join("deep").join(name);
    let rights = |path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    // The second time, the folder and the database are those of an earlier version.
    for _ in 0..2 {
        let config = SqliteConfig {
            own_folder: true,
            ..config(folder.path(), &Settings::default())
        };
        let engine = SqliteEngine::connect(config).await.unwrap();
        assert!(granted(&engine, &claim(&["n"], 1)).await);
        assert_eq!(rights(path("")), 0o700);
        for suffix in ["", "-wal", "-shm"] {
            assert_eq!(rights(path(&format!("locks.sqlite{suffix}"))), 0o600, "{suffix}");
        }
        engine.close().await;
        std::fs::set_permissions(path("locks.sqlite"), PermissionsExt::from_mode(0o644)).unwrap();
    }
}

/// Beside a reader of another program SQLite cannot use the log from its beginning again.
#[tokio::test]
async fn the_log_is_cut_when_a_reader_has_ended() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let log = folder.path().join("deep/locks.sqlite-wal");
    let size = || std::fs::metadata(&log).unwrap().len();
    let write = async || {
        let mut ours = claim(&["n"], 60_000);
        ours.metadata = Some(format!("\"{}\"", "x".repeat(200_000)).into());
        assert!(granted(&engine, &ours).await);
        engine.release(&ours, Duration::ZERO).await.unwrap();
    };
    let mut reader = raw(folder.path()).await;
    reader.execute("BEGIN; SELECT count(*) FROM locks").await.unwrap();
    while size() < 20 << 20 {
        write().await;
    }
    reader.execute("COMMIT").await.unwrap();
    // The first commits copy the log to the database, and the next one begins a new log.
    for _ in 0..5 {
        write().await;
    }
    assert!(size() < 10 << 20, "{} bytes", size());
}

/// Another process: the limit of descriptors concerns the whole process.
#[tokio::test]
async fn a_call_without_a_descriptor_is_retryable() {
    if cfg!(not(unix)) {
        return;
    }
    let folder = folder();
    let output = Process::start("without descriptors", folder.path()).end();
    assert!(output.contains("it was refused, and then opened"), "{output}");
}
