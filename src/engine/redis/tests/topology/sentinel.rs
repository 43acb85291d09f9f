//! A master under Sentinel, and its failover.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Instant;

use super::replicas::acquire_with_replicas;
use super::*;
use crate::engine::{EngineExt, Renewed};
use crate::error::EngineError;

fn with_short_timeout(prefix: &str, min_replicas: u32) -> Settings {
    Settings {
        store_timeout: Duration::from_secs(2),
        min_replicas,
        ..settings(prefix)
    }
}

async fn connect(url: &str, min_replicas: u32) -> Result<Arc<RedisEngine>, EngineError> {
    RedisEngine::connect(RedisConfig::parse(url, &with_short_timeout("lock:", min_replicas)).unwrap()).await
}

/// Connects with up to five attempts: the machine may stand still for most of the short timeout.
async fn connected(url: &str, min_replicas: u32) -> Arc<RedisEngine> {
    let mut engine = None;
    one_succeeds(async |_| {
        engine = Some(connect(url, min_replicas).await?);
        Ok::<_, EngineError>(())
    })
    .await;
    engine.unwrap()
}

/// Renews like the service, which repeats it until the end of the failover.
async fn renewed(engine: &RedisEngine, claim: &Claim) -> bool {
    let renewal = tokio::time::timeout(Duration::from_millis(500), engine.renew(claim, claim.ttl)).await;
    match renewal {
        Ok(Ok(outcome)) => outcome == Renewed::Extended,
        Ok(Err(error)) => {
            assert!(error.retryable, "{error}");
            false
        }
        Err(_) => false,
    }
}

/// Fails over while a lease is held and renewed, and a waiter waits for it.
async fn survives(end: impl FnOnce(&mut Server)) {
    // The engine has no time limits for its calls. A call that stays with the old master would wait without end.
    tokio::time::timeout(Duration::from_secs(240), fail_over(end))
        .await
        .expect("a call stays with the old master");
}

async fn fail_over(end: impl FnOnce(&mut Server)) {
    let Some(mut setup) = SentinelSetup::start().await else {
        return;
    };
    let (ours, theirs) = (connected(&setup.url(), 1).await, connected(&setup.url(), 1).await);
    let (mut first, mut second) = (claim("n"), waiting("n"));
    // It is held until the old master is a replica.
    second.ttl = Ttl::clamped(4 * LONG);
    // Longer than the 30 s for which sentinels do nothing after their machine was suspended.
    first.ttl = Ttl::clamped(2 * LONG);
    let before = acquire_with_replicas(&ours, &first).await;
    let mut subscription = enqueue(&theirs, &second).await;
    assert_eq!(setup.master().await.port, setup.servers[0].port);

    end(&mut setup.servers[0]);
    let ended = Instant::now();
    within(60, "a renewal at the new master", async || renewed(&ours, &first).await).await;
    assert!(ended.elapsed() < 2 * LONG, "within the lease");
    assert_ne!(setup.master().await.port, setup.servers[0].port);
    tokio::time::timeout(LONG, subscription.changed())
        .await
        .expect("a notification after the change of connection, without a call");
    within(60, "a busy answer from the new master", async || {
        matches!(theirs.try_acquire(&second).await, Ok(Acquired::Held { .. }))
    })
    .await;
    release(&ours, &first).await;
    let after = loop {
        match theirs.try_acquire(&second).await {
            Ok(Acquired::Granted { fence }) => break fence,
            Ok(Acquired::Held { .. }) => tokio::time::timeout(LONG, subscription.changed())
                .await
                .expect("a notification from the new master"),
            // The remaining replica may still copy the data of the new master.
            Err(error) => {
                assert!(error.retryable, "{error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    assert!(after > before);

    // The old master returns as a replica, and no engine uses it as the master.
    let old = &mut setup.servers[0];
    if old.process.try_wait().unwrap().is_some() {
        old.process = spawn(old.port, old.dir.path(), &[]).unwrap();
        assert!(old.wait_until_ready().await);
    } else {
        old.resume();
    }
    within(60, "the old master is a replica", async || {
        setup.servers[0].role().await == "slave"
    })
    .await;
    let late = connected(&setup.url(), 1).await;
    assert!(matches!(
        late.try_acquire(&claim("n")).await.unwrap(),
        Acquired::Held { .. }
    ));
    release(&theirs, &second).await;
}

#[tokio::test]
async fn a_lease_survives_the_crash_of_its_master() {
    survives(Server::stop).await;
}

#[tokio::test]
async fn a_lease_survives_a_master_that_hangs() {
    survives(|master| master.suspend()).await;
}

#[cfg(unix)]
#[tokio::test]
async fn the_connection_on_an_event_loop_leads_to_the_master_and_ends_with_a_failover() {
    let Some(setup) = SentinelSetup::start().await else {
        return;
    };
    let fast = |min_replicas| Settings {
        event_loop: Some(TestLoop::here()),
        ..with_short_timeout("lock:", min_replicas)
    };
    let connect = async |settings| {
        RedisEngine::connect(RedisConfig::parse(&setup.url(), &settings).unwrap())
            .await
            .unwrap()
    };
    let ours = connect(fast(0)).await;
    let number = || ours.link().current().map(|connection| connection.generation);
    let before = number();
    assert!(before.is_some());
    let first = claim("n");
    let fence = acquire(&ours, &first).await;

    // It hangs: its connections stay open.
    setup.servers[0].suspend();
    let (engine, in_flight) = (ours.clone(), claim("in flight"));
    let mut in_flight = tokio::spawn(async move { engine.try_acquire(&in_flight).await });
    within(60, "a new master", async || {
        setup.master().await.port != setup.servers[0].port
    })
    .await;
    within(60, "the end of the connection, without a call", async || {
        number() != before
    })
    .await;
    // A late reply of the old master would be no grant.
    let rejected = tokio::time::timeout(LONG, &mut in_flight)
        .await
        .expect("the end of the call");
    assert!(rejected.unwrap().unwrap_err().retryable);
    setup.servers[0].resume();
    within(60, "a connection to the new master", async || {
        let next = claim("m");
        match ours.try_acquire(&next).await {
            Ok(Acquired::Granted { fence: next_fence }) => assert!(next_fence > fence),
            Ok(held) => panic!("{held:?}"),
            Err(error) => assert!(error.retryable, "{error}"),
        }
        // An attempt whose answer was an error may have been granted.
        let _ = ours.release(&next, Duration::ZERO).await;
        number().is_some()
    })
    .await;
    assert_ne!(number(), before);
}

/// Starts a server that answers every command like a sentinel: with this address, or that it does not know the name.
fn fake_sentinel(master: Option<u16>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let answer = match master.map(|port| port.to_string()) {
        Some(port) => format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}\r\n", port.len()),
        None => "*-1\r\n".to_owned(),
    };
    std::thread::spawn(move || {
        for mut client in listener.incoming().map_while(|client| client.ok()) {
            let answer = answer.clone();
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(1..) = client.read(&mut buffer) {
                    if client.write_all(answer.as_bytes()).is_err() {
                        break;
                    }
                }
            });
        }
    });
    port
}

fn url_of(sentinels: &[u16]) -> String {
    let hosts: Vec<String> = sentinels.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    format!("redis+sentinel://{}/{MASTER}", hosts.join(","))
}

#[tokio::test]
async fn the_answer_of_most_sentinels_counts_and_a_hung_one_causes_no_delay() {
    let Some(master) = Server::start(&[]).await else { return };
    let Some(replica) = master.replica(&[]).await else {
        return;
    };
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let (right, wrong) = (fake_sentinel(Some(master.port)), fake_sentinel(Some(replica.port)));
    let (also_right, ignorant) = (fake_sentinel(Some(master.port)), fake_sentinel(None));
    let silent = mute.local_addr().unwrap().port();
    for sentinels in [
        &[right][..],
        &[silent, right, also_right],
        &[wrong, right, also_right],
        &[ignorant, free_port(), right],
    ] {
        let ours = connected(&url_of(sentinels), 0).await;
        let first = claim("n");
        acquire(&ours, &first).await;
        release(&ours, &first).await;
    }
    let config = RedisConfig::parse(&url_of(&[silent, right, also_right]), &Settings::default()).unwrap();
    // Each sentinel has a quarter of the limit.
    one_is_faster(config.limit / 8, async || {
        let started = Instant::now();
        crate::engine::redis::connection::dial::locate(&config).await.unwrap();
        started.elapsed()
    })
    .await;

    let error = connect(&url_of(&[wrong]), 0).await.unwrap_err();
    let expected = format!(
        "redis: connect failed: the sentinels name 127.0.0.1:{} as the master, but its role is \"slave\"",
        replica.port
    );
    assert!(error.retryable && error.to_string().starts_with(&expected), "{error}");
}

#[tokio::test]
async fn errors_of_the_sentinels_name_their_cause() {
    let (gone, ignorant) = (free_port(), fake_sentinel(None));
    let error = connect(&url_of(&[ignorant, fake_sentinel(None)]), 0).await.unwrap_err();
    assert!(
        !error.retryable,
        "all of them answered, and none knows the name: {error}"
    );
    let start = format!("redis: connect failed: no sentinel names a master {MASTER:?} (");
    assert!(error.to_string().starts_with(&start), "{error}");
    let each = format!("127.0.0.1:{ignorant}: does not know that name");
    assert!(error.to_string().contains(&each), "{error}");

    let error = connect(&url_of(&[ignorant, gone]), 0).await.unwrap_err();
    assert!(error.retryable, "one of them may know the name: {error}");
    assert!(
        error.to_string().contains(&format!("127.0.0.1:{gone}: ")) && error.to_string().contains(&each),
        "{error}"
    );

    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = mute.local_addr().unwrap().port();
    one_is_faster(Duration::from_secs(2), async || {
        let started = Instant::now();
        let error = connect(&url_of(&[silent, gone]), 0).await.unwrap_err();
        assert!(error.retryable && error.to_string().contains("timed out"), "{error}");
        started.elapsed()
    })
    .await;

    // The sentinels work, and the master that they name does not.
    let error = connect(&url_of(&[fake_sentinel(Some(gone))]), 0).await.unwrap_err();
    let expected = format!("no connection to 127.0.0.1:{gone}: ");
    assert!(error.retryable && error.to_string().contains(&expected), "{error}");
    let error = connect(&url_of(&[fake_sentinel(Some(silent))]), 0).await.unwrap_err();
    let expected = format!("no connection to the master {MASTER:?} of the sentinels 127.0.0.1:");
    assert!(error.retryable && error.to_string().contains(&expected), "{error}");

    let Some(server) = Server::start(&[]).await else { return };
    let error = connect(&url_of(&[server.port]), 0).await.unwrap_err();
    assert!(!error.retryable, "it is no sentinel: {error}");
}

#[tokio::test]
async fn sentinels_and_servers_have_separate_logins() {
    let Some(server) = Server::start(&["--requirepass", "server's"]).await else {
        return;
    };
    let lines = format!(
        "requirepass \"sentinel's\"\nsentinel monitor {MASTER} 127.0.0.1 {} 1\n\
         sentinel auth-pass {MASTER} \"server's\"\n\
         user asker on \">asker's\" -@all +auth +sentinel|get-master-addr-by-name\n",
        server.port
    );
    let Some(sentinel) = Server::sentinel(&lines).await else {
        return;
    };
    let url = |login: &str, options: &str| {
        format!(
            "redis+sentinel://{login}127.0.0.1:{}/{MASTER}/3{options}",
            sentinel.port
        )
    };
    let server_login = ":server's@";
    for options in [
        "?sentinelPassword=sentinel's",
        "?sentinelUsername=asker&sentinelPassword=asker's",
    ] {
        let ours = connected(&url(server_login, options), 0).await;
        acquire(&ours, &claim(options)).await;
    }
    let mut other = OtherClient::connect(&format!("redis://:server's@127.0.0.1:{}/3", server.port)).await;
    assert_eq!(
        other.run::<i64>("DBSIZE").await,
        5,
        "two locks, their records, and the last token, in database 3"
    );
    let refused = async |login: &str, options: &str| {
        let error = connect(&url(login, options), 0).await.unwrap_err();
        assert!(!error.retryable && !error.to_string().contains("'s"), "{error}");
        error.to_string()
    };
    assert!(refused(server_login, "").await.contains(": NOAUTH"));
    let wrong = refused(server_login, "?sentinelPassword=wrong").await;
    assert!(wrong.contains("refuses the login (check sentinelUsername"), "{wrong}");
    assert!(refused("", "?sentinelPassword=sentinel's").await.contains("NOAUTH"));
}
