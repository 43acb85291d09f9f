//! Tests with several real processes on one file: this test binary, which executes only `child`.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use super::*;
use crate::engine::EngineExt;

const ROLE: &str = "HOLDFAST_SQLITE_TEST_ROLE";
const FOLDER: &str = "HOLDFAST_SQLITE_TEST_FOLDER";
/// The name that all processes want.
const NAME: &str = "contended";

pub(super) struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    pub(super) fn start(role: &str, folder: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "engine::sql::sqlite::tests::processes::child",
            "--ignored",
            "--nocapture",
        ]);
        command
            .env(ROLE, role)
            .env(FOLDER, folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        Process(command.spawn().unwrap())
    }

    /// Waits until it prints that it is ready.
    pub(super) fn ready(&mut self) {
        let mut output = BufReader::new(self.0.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("ready") {
            line.clear();
            assert!(
                output.read_line(&mut line).unwrap() > 0,
                "a child ended before it was ready"
            );
        }
        self.0.stdout = Some(output.into_inner());
    }

    /// Returns its output. It must succeed.
    pub(super) fn end(mut self) -> String {
        let mut output = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        assert!(self.0.wait().unwrap().success(), "a child failed: {output}");
        output
    }
}

/// Executes the role of a child. Does nothing in the test suite itself.
#[tokio::test]
#[ignore = "the role of the other processes in the tests of this file"]
async fn child() {
    let (Ok(role), Some(folder)) = (std::env::var(ROLE), std::env::var_os(FOLDER).map(PathBuf::from)) else {
        return;
    };
    let engine = open(&folder).await;
    println!("ready");
    match role.as_str() {
        "connect" => {
            let ours = claim(&[OwnerToken::fresh().as_str()], 60_000);
            assert!(granted(&engine, &ours).await);
        }
        "count" => {
            for _ in 0..50 {
                let ours = waiting(&[NAME], 60_000);
                acquire(&engine, &ours).await;
                let file = folder.join("counter");
                let seen: u64 = std::fs::read_to_string(&file).unwrap().parse().unwrap();
                std::fs::write(&file, (seen + 1).to_string()).unwrap();
                assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
            }
        }
        "churn" => loop {
            // Every kind of write, until the parent's kill.
            let (one, set) = (waiting(&[NAME], 200), waiting(&["x", "y", NAME], 200));
            let _ = tokio::join!(
                engine.try_acquire(&one),
                engine.try_acquire(&set),
                engine.renew(&one, one.ttl)
            );
            let _ = tokio::join!(
                engine.release(&one, Duration::ZERO),
                engine.release(&set, Duration::from_millis(1))
            );
        },
        "attempt" | "queue" => {
            let (done, slow) = pairs(&engine, NAME, Duration::from_secs(2), role == "queue").await;
            println!("pairs {done} {}", slow.as_micros());
        }
        #[cfg(unix)]
        "without descriptors" => {
            let second = folder.join("second");
            let connect = || SqliteEngine::connect(config(&second, &Settings::default()));
            let limit = |rlim_cur| {
                let limit = libc::rlimit {
                    rlim_cur,
                    rlim_max: 1024,
                };
                // SAFETY: the function reads the limit during the call.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
            };
            // New descriptors would have larger numbers.
            limit(3);
            let error = connect().await.unwrap_err();
            let text = error.to_string();
            assert!(error.retryable && text.contains("Too many open files"), "{text}");
            assert!(
                granted(&engine, &claim(&["n"], 60_000)).await,
                "the open file is usable"
            );
            limit(1024);
            connect().await.unwrap().close().await;
            println!("it was refused, and then opened");
        }
        // Acquires the name that follows, and closes without a release.
        role if role.starts_with("acquire ") => {
            println!("granted {}", granted(&engine, &claim(&[&role[8..]], 60_000)).await)
        }
        other => panic!("no such role: {other}"),
    }
    engine.close().await;
}

/// Acquires as the service does: subscribes, makes an attempt, waits for a wake-up or the time to retry.
async fn acquire(engine: &SqliteEngine, claim: &Claim) {
    let mut subscription = engine.subscribe(claim, &claim.keys()[0]).await.unwrap();
    while let Acquired::Held { retry_after, .. } = engine.try_acquire(claim).await.unwrap() {
        let _ = tokio::time::timeout(retry_after.unwrap(), subscription.changed()).await;
    }
}

#[tokio::test]
async fn many_processes_open_a_missing_file_at_once() {
    for _ in 0..3 {
        let folder = folder();
        let children: Vec<Process> = (0..12).map(|_| Process::start("connect", folder.path())).collect();
        children.into_iter().for_each(|child| drop(child.end()));
        assert_eq!(open(folder.path()).await.list("", PAGE).await.unwrap().len(), 12);
    }
}

#[tokio::test]
async fn processes_exclude_each_other() {
    let folder = folder();
    std::fs::write(folder.path().join("counter"), "0").unwrap();
    let children: Vec<Process> = (0..4).map(|_| Process::start("count", folder.path())).collect();
    children.into_iter().for_each(|child| drop(child.end()));
    assert_eq!(std::fs::read_to_string(folder.path().join("counter")).unwrap(), "200");
}

/// After a SIGKILL at any point, also during a transaction, the file is still usable.
#[tokio::test]
async fn a_killed_process_leaves_a_usable_file() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let mut last = crate::model::Fence(0);
    for round in 0..12 {
        let mut child = Process::start("churn", folder.path());
        child.ready();
        tokio::time::sleep(Duration::from_millis(fastrand::u64(5..60))).await;
        drop(child);
        // The child's leases and positions expire after 200 ms.
        tokio::time::sleep(Duration::from_millis(220)).await;
        let ours = claim(&[NAME, "x", "y"], 60_000);
        match engine.try_acquire(&ours).await.unwrap() {
            Acquired::Granted { fence } => assert!(fence > std::mem::replace(&mut last, fence), "round {round}"),
            held => panic!("round {round}: {held:?}"),
        }
        assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
    }
    let check: String = raw(folder.path())
        .await
        .fetch_one("PRAGMA integrity_check")
        .await
        .unwrap()
        .get(0);
    assert_eq!(check, "ok");
}

/// Returns the number of pairs of acquire and release in `time`, and the 99th percentile of the attempts.
async fn pairs(engine: &SqliteEngine, name: &str, time: Duration, in_queue: bool) -> (u64, Duration) {
    let end = Instant::now() + time;
    let (mut done, mut attempts) = (0, Vec::new());
    while Instant::now() < end {
        let ours = if in_queue {
            waiting(&[name], 60_000)
        } else {
            claim(&[name], 60_000)
        };
        let started = Instant::now();
        if in_queue {
            acquire(engine, &ours).await;
        } else if !granted(engine, &ours).await {
            attempts.push(started.elapsed());
            continue;
        }
        attempts.push(started.elapsed());
        engine.release(&ours, Duration::ZERO).await.unwrap();
        done += 1;
    }
    attempts.sort();
    (done, attempts[attempts.len() * 99 / 100])
}

/// `cargo test … measure -- --ignored --nocapture --exact engine::sql::sqlite::tests::processes::measure`
#[tokio::test]
#[ignore = "a measurement"]
async fn measure() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let time = Duration::from_secs(2);
    let (done, slow) = pairs(&engine, "n", time, false).await;
    println!("one after another: {} pairs/s, acquire p99 {slow:?}", done / 2);
    for width in [8, 64] {
        let names: Vec<String> = (0..width).map(|n| n.to_string()).collect();
        let all = futures_util::future::join_all(names.iter().map(|name| pairs(&engine, name, time, false))).await;
        println!(
            "{width} at a time: {} pairs/s",
            all.iter().map(|(done, _)| done).sum::<u64>() / 2
        );
    }
    for (role, what) in [
        ("attempt", "4 processes, one name, single attempts"),
        ("queue", "4 processes, one name, waiting in the queue"),
    ] {
        let children: Vec<Process> = (0..4).map(|_| Process::start(role, folder.path())).collect();
        let figures = children.into_iter().map(|child| {
            let output = child.end();
            let words: Vec<&str> = output.split_whitespace().collect();
            let at = words.iter().position(|word| *word == "pairs").unwrap();
            (
                words[at + 1].parse::<u64>().unwrap(),
                Duration::from_micros(words[at + 2].parse().unwrap()),
            )
        });
        let figures: Vec<(u64, Duration)> = figures.collect();
        let all = figures.iter().map(|(done, _)| done).sum::<u64>() / 2;
        println!("{what}: {all} pairs/s in all; each in 2 s, and its p99: {figures:?}");
    }
}
