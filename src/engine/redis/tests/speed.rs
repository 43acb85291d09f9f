//! A measurement, not a test: `cargo test … redis::tests::speed -- --ignored --nocapture`.

use super::*;
use crate::engine::{Renewal, Renewed};

const PAIRS: u32 = 20_000;

#[tokio::test]
#[ignore = "a measurement"]
async fn acquire_and_release_one_after_the_other() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let process = Arc::new(Process::current());
    let mut cpu = Vec::new();
    let mut started = std::time::Instant::now();
    for round in 0..PAIRS + 1000 {
        if round == 1000 {
            other.run::<()>("CONFIG RESETSTAT").await;
            cpu.push(used_cpu(&mut other).await);
            started = std::time::Instant::now();
        }
        let claim = Claim::new(&[key("n")], OwnerToken::fresh(), Ttl::clamped(LONG), process.clone());
        acquire(&ours, &claim).await;
        release(&ours, &claim).await;
    }
    let elapsed = started.elapsed();
    cpu.push(used_cpu(&mut other).await);
    let started = std::time::Instant::now();
    for _ in 0..2 * PAIRS {
        ours.link().call(&::redis::cmd("PING")).await.unwrap();
    }
    let floor = started.elapsed();
    cpu.push(used_cpu(&mut other).await);
    let commands: String = other.run("INFO commandstats").await;
    let per_pair = |seconds: f64| seconds * 1e6 / f64::from(PAIRS);
    for (what, elapsed, cpu) in [
        ("acquire and release", elapsed, cpu[1] - cpu[0]),
        ("two PINGs", floor, cpu[2] - cpu[1]),
    ] {
        let (elapsed, cpu) = (per_pair(elapsed.as_secs_f64()), per_pair(cpu));
        eprintln!("{what}: {elapsed:.1} µs, of the server's CPU {cpu:.1} µs");
    }
    eprintln!("{}", commands.lines().find(|line| line.contains("evalsha")).unwrap());
}

#[tokio::test]
#[ignore = "a measurement"]
async fn ten_thousand_renewals_in_one_call() {
    const ROUNDS: u32 = 10;
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let claims: Vec<Claim> = (0..10_000).map(|i| claim(&format!("order:{i}"))).collect();
    for claim in &claims {
        acquire(&ours, claim).await;
    }
    other.run::<()>("CONFIG RESETSTAT").await;
    let started = std::time::Instant::now();
    for round in 1..=ROUNDS {
        let ttl = Ttl::clamped(LONG + Duration::from_secs(round.into()));
        let renewals: Vec<Renewal<'_>> = claims.iter().map(|claim| Renewal { claim, ttl }).collect();
        let mut extended = 0;
        ours.renew_all(&renewals, &mut |_, answer: crate::engine::Result<Renewed>| {
            extended += usize::from(answer.unwrap() == Renewed::Extended);
        })
        .await;
        assert_eq!(extended, claims.len());
    }
    eprintln!("{:?} for 10 000 renewals", started.elapsed() / ROUNDS);
    let commands: String = other.run("INFO commandstats").await;
    commands.lines().for_each(|line| eprintln!("{line}"));
}

async fn used_cpu(other: &mut OtherClient) -> f64 {
    let info: String = other.run("INFO cpu").await;
    let field = |name: &str| {
        info.lines()
            .find_map(|line| line.strip_prefix(name)?.parse::<f64>().ok())
            .unwrap()
    };
    field("used_cpu_user:") + field("used_cpu_sys:")
}
