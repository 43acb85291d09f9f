//! Pairs on PostgreSQL by holdfast and by advisory locks, with one driver, in one process and one thread.
//!
//! `bench/sections/rust.mjs` starts this program with the URL of a server. Each line of stdin is a measurement: a contender, the
//! number of pairs in flight, and milliseconds (`holdfast 64 800`). The program answers with a line of JSON.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast::engine::Settings;
use holdfast::engine::config::{EngineConfig, connect};
use holdfast::model::{Key, Names};
use holdfast::service::{AcquireOptions, Locks, Outcome};
use holdfast::stall_detector::StallDetector;
use tokio::task::JoinSet;
use tokio_postgres::{Client, NoTls, Statement};

type Failed = Box<dyn Error + Send + Sync>;

/// A connection with prepared statements.
struct Session {
    client: Client,
    lock: Statement,
    unlock: Statement,
}

#[derive(Clone)]
enum Contender {
    Holdfast(Locks, Arc<AcquireOptions>),
    Advisory(Arc<[Session]>),
}

impl Contender {
    /// Creates the contender `holdfast`, or `advisory-pipelined-N` with N connections.
    async fn connect(name: &str, url: &str) -> Result<Self, Failed> {
        if name == "holdfast" {
            let settings = Settings::default();
            let engine = connect(EngineConfig::parse(&[url.to_owned()], &settings)?, &settings).await?;
            let locks = Locks::new(
                engine,
                settings.store_timeout,
                Arc::new(StallDetector::new(|| ())),
                None,
            );
            return Ok(Contender::Holdfast(locks, Arc::default()));
        }
        let count: usize = name.trim_start_matches("advisory-pipelined-").parse()?;
        let mut sessions = Vec::new();
        for _ in 0..count {
            let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
            tokio::spawn(connection);
            sessions.push(Session {
                lock: client.prepare("SELECT pg_try_advisory_lock($1)").await?,
                unlock: client.prepare("SELECT pg_advisory_unlock($1)").await?,
                client,
            });
        }
        Ok(Contender::Advisory(sessions.into()))
    }

    /// Makes pairs one after the other until `end`. Returns the duration of each.
    async fn pairs(self, number: usize, end: Instant) -> Result<Vec<Duration>, Failed> {
        let name = Names::from(Key::new(&format!("bench-{number}"))?);
        let mut took = Vec::new();
        let mut now = Instant::now();
        while took.is_empty() || now < end {
            match &self {
                Contender::Holdfast(locks, options) => {
                    let Outcome::Acquired(lease) = locks.acquire(name.clone(), options.clone(), None).await? else {
                        return Err("holdfast: a free name was busy".into());
                    };
                    if !locks.release(&lease).await? {
                        return Err("holdfast: a lease was lost".into());
                    }
                }
                Contender::Advisory(sessions) => {
                    let session = &sessions[number % sessions.len()];
                    for statement in [&session.lock, &session.unlock] {
                        if !session
                            .client
                            .query_one(statement, &[&(number as i64)])
                            .await?
                            .try_get(0)?
                        {
                            return Err("advisory lock: a free name was busy, or a lock was lost".into());
                        }
                    }
                }
            }
            let then = std::mem::replace(&mut now, Instant::now());
            took.push(now - then);
        }
        Ok(took)
    }

    /// Makes pairs in concurrent tasks. Returns the figures as JSON.
    async fn measure(&self, in_flight: usize, time: Duration) -> Result<serde_json::Value, Failed> {
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for number in 0..in_flight {
            tasks.spawn(self.clone().pairs(number, started + time));
        }
        let mut took = Vec::new();
        while let Some(of_task) = tasks.join_next().await {
            took.extend(of_task??);
        }
        let elapsed = started.elapsed().as_secs_f64();
        took.sort_unstable();
        let percentile = |percent: usize| took[(took.len() * percent).div_ceil(100) - 1].as_nanos() as f64 / 1e3;
        Ok(serde_json::json!({
            "count": took.len(),
            "perSecond": took.len() as f64 / elapsed,
            "p50Us": percentile(50),
            "p99Us": percentile(99),
        }))
    }
}

fn main() -> Result<(), Failed> {
    let url = std::env::args()
        .nth(1)
        .ok_or("the first argument must be the URL of a server")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut contenders = std::collections::HashMap::new();
    for line in std::io::stdin().lines() {
        let line = line?;
        let [name, in_flight, ms] = line.split(' ').collect::<Vec<_>>()[..] else {
            return Err(format!("a line must be a contender and two numbers, and is: {line}").into());
        };
        if !contenders.contains_key(name) {
            contenders.insert(name.to_owned(), runtime.block_on(Contender::connect(name, &url))?);
        }
        let time = Duration::from_millis(ms.parse()?);
        println!(
            "{}",
            runtime.block_on(contenders[name].measure(in_flight.parse()?, time))?
        );
    }
    Ok(())
}
