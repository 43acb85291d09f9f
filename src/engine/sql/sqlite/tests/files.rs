//! Tests of files that are deleted while they are open, and of dropped POSIX locks.

use super::processes::Process;
use super::*;
use crate::engine::EngineExt;

/// Whether another process is granted a name. It keeps the lease.
fn granted_elsewhere(folder: &Path, name: &str) -> bool {
    let output = Process::start(&format!("acquire {name}"), folder).end();
    assert!(output.contains("granted "), "{output}");
    output.contains("granted true")
}

fn file(folder: &Path, suffix: &str) -> std::path::PathBuf {
    folder.join(format!("deep/locks.sqlite{suffix}"))
}

/// Deletes the write-ahead log and its index.
#[cfg(unix)]
fn delete_log(folder: &Path) {
    for suffix in ["-wal", "-shm"] {
        std::fs::remove_file(file(folder, suffix)).unwrap();
    }
}

/// Acquires a lock for 10 s at most. Each failure must be retryable.
#[cfg(unix)]
async fn acquire_with_retries(engine: &SqliteEngine, claim: &Claim) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        match engine.try_acquire(claim).await {
            Ok(acquired) => {
                assert!(matches!(acquired, Acquired::Granted { .. }), "{acquired:?}");
                return;
            }
            Err(error) => {
                assert!(error.retryable && error.to_string().contains("-wal"), "{error}");
                assert!(tokio::time::Instant::now() < deadline, "{error}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Checks that this process and another one see each other's locks.
async fn share_one_store(engine: &SqliteEngine, folder: &Path) {
    for round in 0..2 {
        let fresh = || format!("{round} {}", OwnerToken::fresh().as_str());
        let (here, there) = (fresh(), fresh());
        assert!(granted(engine, &claim(&[&here], 60_000)).await);
        assert!(!granted_elsewhere(folder, &here), "two holders of {here}");
        assert!(granted_elsewhere(folder, &there));
        assert!(
            !granted(engine, &claim(&[&there], 60_000)).await,
            "two holders of {there}"
        );
    }
    let mut raw = raw(folder).await;
    let check: String = raw.fetch_one("PRAGMA integrity_check").await.unwrap().get(0);
    assert_eq!(check, "ok");
    raw.close().await.unwrap();
}

#[tokio::test]
#[cfg(unix)]
async fn a_deleted_log_is_detected() {
    for suffixes in [&["-wal", "-shm"][..], &["-wal"], &["-shm"]] {
        let folder = folder();
        let (a, b) = (open(folder.path()).await, open(folder.path()).await);
        let before = claim(&["before"], 60_000);
        assert!(granted(&a, &before).await);
        for suffix in suffixes {
            std::fs::remove_file(file(folder.path(), suffix)).unwrap();
        }
        // No other process has opened the file: the leases of this process are still there.
        assert_eq!(
            a.renew(&before, before.ttl).await.unwrap(),
            Renewed::Extended,
            "{suffixes:?}"
        );
        share_one_store(&a, folder.path()).await;
        share_one_store(&b, folder.path()).await;
    }
}

/// Another process opens the file first, and makes a log of its own.
#[tokio::test]
#[cfg(unix)]
async fn a_replaced_log_is_detected() {
    let folder = folder();
    let (a, b) = (open(folder.path()).await, open(folder.path()).await);
    assert!(granted(&a, &claim(&["before"], 60_000)).await);
    delete_log(folder.path());
    assert!(granted_elsewhere(folder.path(), "elsewhere"));
    assert!(!granted(&a, &claim(&["elsewhere"], 60_000)).await, "two holders");
    assert!(!granted(&b, &claim(&["elsewhere"], 60_000)).await, "two holders");
    share_one_store(&a, folder.path()).await;
}

/// POSIX drops all locks of a process on a file when the process closes any descriptor of it. The next other process that
/// closes the database then takes itself for the last one, and deletes the log.
#[tokio::test]
#[cfg(unix)]
async fn a_process_that_reads_its_own_files_still_shares_the_store() {
    let folder = folder();
    let (a, b) = (open(folder.path()).await, open(folder.path()).await);
    let before = claim(&["before"], 60_000);
    assert!(granted(&a, &before).await);
    for suffix in ["", "-wal", "-shm"] {
        std::fs::read(file(folder.path(), suffix)).unwrap();
    }
    assert!(!granted_elsewhere(folder.path(), "before"));
    assert!(
        !file(folder.path(), "-wal").exists(),
        "the case that this test is about"
    );
    assert!(granted(&a, &claim(&["after"], 60_000)).await);
    assert!(!granted_elsewhere(folder.path(), "after"), "two holders");
    assert_eq!(a.renew(&before, before.ttl).await.unwrap(), Renewed::Extended);
    share_one_store(&b, folder.path()).await;
}

/// The engine gives no answer from a file that no other process sees.
#[tokio::test]
#[cfg(unix)]
async fn a_commit_to_deleted_files_is_an_error() {
    let folder = folder();
    let engine = open(folder.path()).await;
    // The second round begins right after the engine opened the files again.
    for name in ["first", "second"] {
        let mut stranger = raw(folder.path()).await;
        stranger.execute("BEGIN IMMEDIATE").await.unwrap();
        let ours = claim(&[name], 60_000);
        let call = tokio::spawn({
            let (engine, ours) = (engine.clone(), ours.clone());
            async move { engine.try_acquire(&ours).await }
        });
        sent(&ours).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        std::fs::remove_file(file(folder.path(), "-wal")).unwrap();
        stranger.execute("ROLLBACK").await.unwrap();
        stranger.close().await.unwrap();
        let error = call.await.unwrap().unwrap_err();
        assert!(error.retryable && error.to_string().contains("-wal"), "{error}");
        acquire_with_retries(&engine, &ours).await;
    }
    share_one_store(&engine, folder.path()).await;
}

#[tokio::test]
#[cfg(unix)]
async fn a_log_that_is_deleted_twice_is_detected_twice() {
    let folder = folder();
    let engine = open(folder.path()).await;
    delete_log(folder.path());
    assert!(granted(&engine, &claim(&["first"], 60_000)).await);
    delete_log(folder.path());
    let second = claim(&["second"], 60_000);
    acquire_with_retries(&engine, &second).await;
    assert!(!granted_elsewhere(folder.path(), "second"), "two holders");
    share_one_store(&engine, folder.path()).await;
}
