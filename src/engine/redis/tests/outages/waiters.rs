//! Servers in trouble while somebody waits in a queue, and how the engine gets over it by itself.

use super::*;

fn signal(server: &Server, name: &str) {
    let pid = server.process.id().to_string();
    assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
}

#[tokio::test]
async fn a_server_that_loads_its_data_is_a_passing_error() {
    let Some(mut server) = Server::start(&[]).await else {
        return;
    };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let holder = claim("n");
    let before = take(&ours, &holder).await;
    let first = waiting("n");
    let mut first_told = wait(&ours, &first).await;
    other
        .args::<()>(&[
            "EVAL",
            "for i = 1, 4000 do redis.call('SET', 'filler:' .. i, i) end",
            "0",
        ])
        .await;
    other.run::<()>("SAVE").await;
    server.stop();
    let slowly = [
        "--key-load-delay",
        "400",
        "--loading-process-events-interval-bytes",
        "1024",
    ];
    server.process = spawn(server.port, server.dir.path(), &slowly).unwrap();
    assert!(server.answers().await);
    let mut loading = 0;
    eventually("the data is there", async || {
        match ours.try_acquire(&claim("m")).await {
            Ok(_) => true,
            Err(error) => {
                assert!(error.retryable, "{error}");
                loading += u32::from(error.to_string().contains("LOADING"));
                false
            }
        }
    })
    .await;
    assert!(loading > 0);
    // What it holds, and who waits, is as it was.
    told(&mut first_told).await;
    assert!(matches!(ours.try_acquire(&first).await.unwrap(), Acquired::Held { .. }));
    free(&ours, &holder).await;
    told(&mut first_told).await;
    assert!(take(&ours, &first).await > before);
}

#[tokio::test]
async fn a_hung_server_costs_no_waiter_its_place() {
    let Some(server) = Server::start(&[]).await else { return };
    let settings = Settings {
        store_timeout: Duration::from_millis(400),
        ..settings("lock:")
    };
    let ours = RedisEngine::connect(RedisConfig::parse(&server.url(), &settings).unwrap())
        .await
        .unwrap();
    let (theirs, holder) = (server.engine().await, claim("n"));
    take(&theirs, &holder).await;
    let (first, second) = (waiting("n"), waiting("n"));
    let mut first_told = wait(&ours, &first).await;
    let mut second_told = wait(&theirs, &second).await;
    signal(&server, "-STOP");
    // The sign of life meets with silence, and has each waiter look for itself.
    told(&mut first_told).await;
    let error = tokio::time::timeout(Duration::from_millis(400), ours.try_acquire(&first)).await;
    assert!(error.is_err() || error.unwrap().unwrap_err().retryable);
    signal(&server, "-CONT");
    eventually("it answers", async || ours.inspect(&key("n")).await.is_ok()).await;
    free(&theirs, &holder).await;
    told(&mut first_told).await;
    eventually("its turn", async || {
        matches!(ours.try_acquire(&first).await, Ok(Acquired::Granted { .. }))
    })
    .await;
    free(&ours, &first).await;
    told(&mut second_told).await;
    eventually("the next one's turn", async || {
        matches!(theirs.try_acquire(&second).await, Ok(Acquired::Granted { .. }))
    })
    .await;
}

#[tokio::test]
async fn a_refused_hand_off_is_done_later_and_in_order() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let troubles = [
        ("CONFIG SET maxmemory 1", "OOM", "CONFIG SET maxmemory 0"),
        ("REPLICAOF 127.0.0.1 1", "READONLY", "REPLICAOF NO ONE"),
        (
            "CONFIG SET min-replicas-to-write 1",
            "NOREPLICAS",
            "CONFIG SET min-replicas-to-write 0",
        ),
    ];
    for (begin, code, end) in troubles {
        let (holder, first, second) = (claim("n"), waiting("n"), waiting("n"));
        take(&ours, &holder).await;
        let mut first_told = wait(&theirs, &first).await;
        let mut second_told = wait(&ours, &second).await;
        other.run::<()>(begin).await;
        let error = ours.release(&holder, Duration::ZERO).await.unwrap_err();
        assert!(error.retryable && error.to_string().contains(code), "{error}");
        // Nothing of it was done: the name is still the holder's.
        assert_eq!(other.run::<String>("GET lock:n").await, holder.owner.as_str(), "{code}");
        other.run::<()>(end).await;
        free(&ours, &holder).await;
        told(&mut first_told).await;
        eventually("its turn", async || {
            matches!(theirs.try_acquire(&first).await, Ok(Acquired::Granted { .. }))
        })
        .await;
        free(&theirs, &first).await;
        told(&mut second_told).await;
        eventually("the next one's turn", async || {
            matches!(ours.try_acquire(&second).await, Ok(Acquired::Granted { .. }))
        })
        .await;
        free(&ours, &second).await;
    }
}

#[tokio::test]
async fn who_found_no_place_at_the_server_gets_one_later() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (holder, first) = (claim("n"), waiting("n"));
    take(&ours, &holder).await;
    let mut first_told = wait(&ours, &first).await;
    other.run::<()>("CONFIG SET maxclients 1").await;
    other.run::<()>("CLIENT KILL TYPE pubsub").await;
    let error = loop {
        if let Err(error) = ours.try_acquire(&claim("m")).await
            && error.to_string().contains("max number of clients")
        {
            break error;
        }
    };
    assert!(error.retryable, "{error}");
    other.run::<()>("CONFIG SET maxclients 100").await;
    eventually("there is a place", async || ours.inspect(&key("n")).await.is_ok()).await;
    told(&mut first_told).await;
    free(&ours, &holder).await;
    take(&ours, &first).await;
}
