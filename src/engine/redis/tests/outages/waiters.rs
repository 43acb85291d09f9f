//! Waiters in a queue while their server fails or refuses calls: they get the name afterwards, in order.

use super::*;
use crate::engine::EngineExt;

fn signal(server: &Server, name: &str) {
    let pid = server.process.id().to_string();
    assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
}

#[tokio::test]
async fn a_server_that_loads_its_data_is_a_retryable_error() {
    let Some(mut server) = Server::start(&[]).await else {
        return;
    };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let holder = claim("n");
    let before = acquire(&ours, &holder).await;
    let first = waiting("n");
    let mut first_subscription = enqueue(&ours, &first).await;
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
    assert!(server.wait_until_ready().await);
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
    // The lock and the queue are unchanged.
    notified(&mut first_subscription).await;
    assert!(matches!(ours.try_acquire(&first).await.unwrap(), Acquired::Held { .. }));
    release(&ours, &holder).await;
    notified(&mut first_subscription).await;
    assert!(acquire(&ours, &first).await > before);
}

#[tokio::test]
async fn waiters_keep_their_positions_while_the_server_hangs() {
    let Some(server) = Server::start(&[]).await else { return };
    let settings = Settings {
        store_timeout: Duration::from_millis(400),
        ..settings("lock:")
    };
    let mut ours = None;
    eventually("the engine is connected", async || {
        let config = RedisConfig::parse(&server.url(), &settings).unwrap();
        ours = RedisEngine::connect(config).await.ok();
        ours.is_some()
    })
    .await;
    let ours = ours.unwrap();
    let (theirs, holder) = (server.engine().await, claim("n"));
    acquire(&theirs, &holder).await;
    let (first, second) = (waiting("n"), waiting("n"));
    let mut first_subscription = enqueue(&ours, &first).await;
    let mut second_subscription = enqueue(&theirs, &second).await;
    signal(&server, "-STOP");
    // The heartbeat is not answered, so each waiter makes an attempt.
    notified(&mut first_subscription).await;
    let error = tokio::time::timeout(Duration::from_millis(400), ours.try_acquire(&first)).await;
    assert!(error.is_err() || error.unwrap().unwrap_err().retryable);
    signal(&server, "-CONT");
    eventually("the server answers", async || ours.inspect(&key("n")).await.is_ok()).await;
    release(&theirs, &holder).await;
    notified(&mut first_subscription).await;
    eventually("the first waiter gets the name", async || {
        matches!(ours.try_acquire(&first).await, Ok(Acquired::Granted { .. }))
    })
    .await;
    release(&ours, &first).await;
    notified(&mut second_subscription).await;
    eventually("the second waiter gets the name", async || {
        matches!(theirs.try_acquire(&second).await, Ok(Acquired::Granted { .. }))
    })
    .await;
}

#[tokio::test]
async fn a_refused_hand_off_is_done_later_and_in_order() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let refusals = [
        ("REPLICAOF 127.0.0.1 1", "READONLY", "REPLICAOF NO ONE"),
        (
            "CONFIG SET min-replicas-to-write 1",
            "NOREPLICAS",
            "CONFIG SET min-replicas-to-write 0",
        ),
    ];
    for (begin, code, end) in refusals {
        let (holder, first, second) = (claim("n"), waiting("n"), waiting("n"));
        acquire(&ours, &holder).await;
        let mut first_subscription = enqueue(&theirs, &first).await;
        let mut second_subscription = enqueue(&ours, &second).await;
        other.run::<()>(begin).await;
        let error = ours.release(&holder, Duration::ZERO).await.unwrap_err();
        assert!(error.retryable && error.to_string().contains(code), "{error}");
        // The release changed nothing: the holder still has the name.
        assert_eq!(other.run::<String>("GET lock:n").await, holder.owner.as_str(), "{code}");
        other.run::<()>(end).await;
        release(&ours, &holder).await;
        notified(&mut first_subscription).await;
        eventually("the first waiter gets the name", async || {
            matches!(theirs.try_acquire(&first).await, Ok(Acquired::Granted { .. }))
        })
        .await;
        release(&theirs, &first).await;
        notified(&mut second_subscription).await;
        eventually("the second waiter gets the name", async || {
            matches!(ours.try_acquire(&second).await, Ok(Acquired::Granted { .. }))
        })
        .await;
        release(&ours, &second).await;
    }
}

#[tokio::test]
async fn a_waiter_without_a_connection_gets_one_later() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (holder, first) = (claim("n"), waiting("n"));
    acquire(&ours, &holder).await;
    let mut first_subscription = enqueue(&ours, &first).await;
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
    eventually("there is a connection", async || ours.inspect(&key("n")).await.is_ok()).await;
    notified(&mut first_subscription).await;
    release(&ours, &holder).await;
    acquire(&ours, &first).await;
}

#[tokio::test]
async fn a_refused_subscription_is_repeated() {
    let Some(server) = Server::start(&[]).await else { return };
    let mut other = server.other().await;
    super::super::security::set_user(&mut other, "pw", &[]).await;
    let url = server.url().replace("://", "://holdfast:pw@");
    let (ours, theirs) = (engine(&url, "lock:").await, server.engine().await);
    let (holder, first) = (claim("n"), waiting("n"));
    acquire(&theirs, &holder).await;
    let mut first_subscription = enqueue(&ours, &first).await;
    let channel = format!("holdfast:to:{}", ours.waiters.process);
    let mut subscribers = async || -> i64 { other.run::<(String, i64)>(&format!("PUBSUB NUMSUB {channel}")).await.1 };
    assert_eq!(subscribers().await, 1);
    // The server closes connections with a subscription that the user may not have any more.
    let mut admin = server.other().await;
    admin.run::<()>("ACL SETUSER holdfast resetchannels").await;
    eventually("the new connection has no subscription", async || {
        let log: Vec<::redis::Value> = admin.run("ACL LOG").await;
        !log.is_empty()
    })
    .await;
    assert_eq!(subscribers().await, 0);
    admin.run::<()>("ACL SETUSER holdfast &holdfast:*").await;
    eventually("the channel is subscribed again", async || subscribers().await == 1).await;
    eventually("the waiter is in the queue", async || {
        matches!(ours.try_acquire(&first).await, Ok(Acquired::Held { .. }))
            && admin.run::<i64>("ZCOUNT holdfast:queue:{lock:n} 0 +inf").await == 1
    })
    .await;
    notified(&mut first_subscription).await;
    release(&theirs, &holder).await;
    notified(&mut first_subscription).await;
    acquire(&ours, &first).await;
}
