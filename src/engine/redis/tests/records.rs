//! The record of a grant, which `inspect` reads: of a busy service, and where the server refuses to write it at first.

use std::time::{SystemTime, UNIX_EPOCH};

use ::redis::RedisResult;

use futures_util::future::join_all;

use super::outages::stall::opened;
use super::*;
use crate::engine::{EngineExt, Renewed};

/// Sends one command on a connection of its own, and blocks this thread until the reply: no task of this runtime runs meanwhile.
fn blocking<T: FromRedisValue>(server: &Server, line: &str) -> RedisResult<T> {
    blocking_words(server, &line.split(' ').collect::<Vec<_>>())
}

fn blocking_words<T: FromRedisValue>(server: &Server, words: &[&str]) -> RedisResult<T> {
    let mut connection = ::redis::Client::open(server.url())?.get_connection()?;
    ::redis::Cmd::new().arg(words).query(&mut connection)
}

/// Blocks this thread until a condition holds.
fn block_until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(10), "not within 10 s: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns how many calls of a script by its hash the server has refused. `None`: a script runs.
fn refused(server: &Server) -> Option<u64> {
    let stats: String = blocking(server, "INFO commandstats").ok()?;
    let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:"));
    let fields = line.into_iter().flat_map(|line| line.split(','));
    let counts = fields.filter_map(|field| field.split_once('=').filter(|(name, _)| name.ends_with("ed_calls")));
    Some(counts.map(|(_, count)| count.parse::<u64>().unwrap()).sum())
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

/// Makes the server refuse writes between a grant and its record.
async fn a_refused_record_is_written_later(begin: impl FnOnce(&Server), end: impl FnOnce(&Server)) {
    let Some(server) = Server::start(&[]).await else { return };
    let ours = opened(&server, true).await;
    // The server knows the script of the records from here on.
    let warm = claim("warm");
    acquire(&ours, &warm).await;
    assert!(ours.inspect(&key("warm")).await.unwrap().unwrap().holder.is_some());
    release(&ours, &warm).await;
    let before = refused(&server).unwrap();
    let began = now_ms();
    let fence = acquire(&ours, &claim("n")).await;
    let granted = now_ms();
    begin(&server);
    // At least one repetition is refused as well. Where the machine stands still, that counts as one of these pauses.
    for _ in 0..15 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    eventually("a repetition is refused", async || {
        refused(&server).is_none_or(|count| count >= before + 2)
    })
    .await;
    end(&server);
    assert!(refused(&server).unwrap() >= before + 2);
    let mut record: Option<String> = None;
    eventually("the record is written", async || {
        record = blocking(&server, "GET holdfast:fence:{lock:n}").unwrap();
        record.is_some()
    })
    .await;
    let info = ours.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!(info.fence, Some(fence));
    let since = info.holder.unwrap().since_ms;
    // A key's PTTL is rounded.
    assert!(
        (began - 2..=granted + 2).contains(&since),
        "{since} is not in {began}..={granted}"
    );
}

fn run(server: &Server, line: &str) {
    let _: ::redis::Value = blocking(server, line).unwrap();
}

#[tokio::test]
async fn a_record_refused_for_lack_of_memory_is_written_later() {
    a_refused_record_is_written_later(
        |server| run(server, "CONFIG SET maxmemory 1"),
        |server| run(server, "CONFIG SET maxmemory 0"),
    )
    .await;
}

#[tokio::test]
async fn a_record_refused_while_a_script_runs_is_written_later() {
    a_refused_record_is_written_later(
        |server| {
            run(server, "CONFIG SET lua-time-limit 20");
            let mut connection = ::redis::Client::open(server.url()).unwrap().get_connection().unwrap();
            std::thread::spawn(move || {
                // Ends with an error when it is killed.
                let _: RedisResult<()> = ::redis::cmd("EVAL")
                    .arg("while true do end")
                    .arg(0)
                    .query(&mut connection);
            });
            let is_busy = || blocking::<String>(server, "PING").is_err_and(|error| error.code() == Some("BUSY"));
            block_until("the script is slow", is_busy);
        },
        |server| {
            run(server, "SCRIPT KILL");
            block_until("the script has ended", || blocking::<String>(server, "PING").is_ok());
        },
    )
    .await;
}

#[tokio::test]
async fn a_record_refused_after_a_failed_snapshot_is_written_later() {
    let snapshot = |server: &Server| server.dir.path().join("dump.rdb");
    // The last snapshot has ended when the server may begin another one.
    let status = |server: &Server| -> String { blocking(server, "INFO persistence").unwrap() };
    let save = |server: &Server, result: &str| {
        run(server, "BGSAVE");
        let wanted = ["rdb_bgsave_in_progress:0", &format!("rdb_last_bgsave_status:{result}")];
        block_until("the snapshot", || {
            let status = status(server);
            wanted.iter().all(|line| status.contains(line))
        });
    };
    a_refused_record_is_written_later(
        |server| {
            // A server that takes no snapshots by itself refuses nothing.
            let _: String = blocking_words(server, &["CONFIG", "SET", "save", "100000000 1"]).unwrap();
            // A file cannot replace a directory.
            std::fs::create_dir(snapshot(server)).unwrap();
            save(server, "err");
        },
        |server| {
            std::fs::remove_dir(snapshot(server)).unwrap();
            save(server, "ok");
        },
    )
    .await;
}

/// The number of grants of a busy service.
const MANY: usize = 200;

/// Acquires many names, and returns the claims with their tokens.
async fn acquire_many(engine: &RedisEngine) -> Vec<(Claim, Fence)> {
    let claims: Vec<Claim> = (0..MANY).map(|i| claim(&format!("n{i:03}"))).collect();
    let fences = join_all(claims.iter().map(|claim| acquire(engine, claim))).await;
    claims.into_iter().zip(fences).collect()
}

/// Returns how often the server has executed `SET`. A grant is one, and its record another one.
fn sets(server: &Server) -> usize {
    let stats: String = blocking(server, "INFO commandstats").unwrap();
    let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_set:calls="));
    calls.map_or(0, |calls| calls.split(',').next().unwrap().parse().unwrap())
}

#[tokio::test]
async fn a_busy_service_stores_no_records_of_locks_that_it_releases_soon() {
    let Some(server) = Server::start(&[]).await else { return };
    let ours = opened(&server, true).await;
    let mut fewest = usize::MAX;
    // A round in which the machine stands still has records.
    for _ in 0..10 {
        let before = sets(&server);
        let held = acquire_many(&ours).await;
        // Some ticks.
        tokio::time::sleep(Duration::from_millis(5)).await;
        join_all(held.iter().map(|(claim, _)| release(&ours, claim))).await;
        fewest = fewest.min(sets(&server) - before);
        if fewest < MANY + MANY / 2 {
            return;
        }
    }
    panic!("{fewest} SET for {MANY} locks");
}

#[tokio::test]
async fn all_records_of_a_busy_service_are_stored_while_the_locks_are_held() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, others) = (opened(&server, true).await, opened(&server, false).await);
    let held = acquire_many(&ours).await;
    let list = others.list("n", PAGE).await.unwrap();
    let fences: Vec<Option<Fence>> = list.into_iter().map(|info| info.fence).collect();
    assert_eq!(fences, held.iter().map(|(_, fence)| Some(*fence)).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_transfer_waits_for_the_record() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, others) = (opened(&server, true).await, opened(&server, false).await);
    let (last, fence) = acquire_many(&ours).await.pop().unwrap();
    let to = OwnerToken::fresh();
    assert_eq!(others.transfer(&last, &to).await.unwrap(), Renewed::Extended);
    let info = others.inspect(&last.keys()[0]).await.unwrap().unwrap();
    assert_eq!(info.fence, Some(fence));
}
