//! Users with limited rights, and TLS, on several servers.

#[cfg(unix)]
use super::super::connect_checks::no_lock_is_left_without_the_right_to_scripts;
use super::super::connect_checks::{
    MISSING_FOR_QUEUES, Missing, eviction_is_reported, missing_rights_are_named, with_long_timeout,
};
use super::super::security::{Certificates, set_user};
use super::cluster::claim_of;
use super::cluster_nodes::{Nodes, one_each, slot_of_name};
use super::replicas::acquire_with_replicas;
use super::*;
use crate::engine::{EngineExt, Renewed, TlsFiles};

/// Returns the documented additional rights for one topology.
fn rights_for(topology: &str) -> Vec<&'static str> {
    let start = format!("//! - {topology}: `");
    let line = include_str!("../../mod.rs")
        .lines()
        .find_map(|line| line.strip_prefix(&start));
    line.unwrap().split('`').next().unwrap().split(' ').collect()
}

async fn assert_nothing_was_refused(server: &Server) {
    let log: Vec<::redis::Value> = server.other().await.run("ACL LOG").await;
    assert!(log.is_empty(), "{log:?}");
}

#[tokio::test]
async fn the_documented_rights_suffice_under_sentinel_with_replicas() {
    let Some(server) = Server::start(&[]).await else { return };
    let Some(_replica) = server.replica(&[]).await else {
        return;
    };
    let user = include_str!("../../mod.rs")
        .lines()
        .find_map(|line| line.strip_prefix("//! user "))
        .unwrap();
    let lines = format!(
        "user {}\nsentinel monitor {MASTER} 127.0.0.1 {} 1\n",
        user.replace(">PASSWORD", "\">asker's\""),
        server.port
    );
    let Some(sentinel) = Server::sentinel(&lines).await else {
        return;
    };
    set_user(
        &mut server.other().await,
        "server's",
        &[rights_for("under Sentinel"), rights_for("with `minReplicas`")].concat(),
    )
    .await;
    let url = format!(
        "redis+sentinel://holdfast:server's@127.0.0.1:{}/{MASTER}?sentinelUsername=holdfast&sentinelPassword=asker's",
        sentinel.port
    );
    let settings = Settings {
        min_replicas: 1,
        ..with_long_timeout()
    };
    let ours = RedisEngine::connect(RedisConfig::parse(&url, &settings).unwrap())
        .await
        .unwrap();
    let first = claim("n");
    acquire_with_replicas(&ours, &first).await;
    release(&ours, &first).await;
    assert_nothing_was_refused(&server).await;
    let mut asker = sentinel.other().await;
    let mut subscribers = async || {
        let clients: String = asker.run("CLIENT LIST TYPE pubsub").await;
        clients.lines().count()
    };
    within(60, "a subscriber", async || subscribers().await == 1).await;
    ours.close().await;
    within(60, "no subscriber of the sentinel is left", async || {
        subscribers().await == 0
    })
    .await;
}

#[tokio::test]
async fn the_documented_rights_suffice_in_a_cluster() {
    let Some(nodes) = Nodes::start(0).await else { return };
    for node in &nodes.nodes {
        set_user(&mut node.other().await, "pw", &rights_for("in a cluster")).await;
    }
    let url = nodes.url().replace("://", "://holdfast:pw@");
    let ours = engine(&url, "lock:").await;
    let names = one_each();
    let all = claim_of(&names);
    acquire(&ours, &all).await;
    let waiter = waiting(&names[0]);
    let mut subscription = enqueue(&ours, &waiter).await;
    release(&ours, &all).await;
    subscription.changed().await;
    acquire(&ours, &waiter).await;
    let slot = slot_of_name(&names[0]);
    nodes.open(slot, 0, 1).await;
    nodes.move_keys(slot, 0, 1).await;
    let kept = ours.renew(&waiter, waiter.ttl);
    let (kept, ()) = tokio::join!(kept, nodes.close(slot, 0, 1));
    assert_eq!(kept.unwrap(), Renewed::Extended);
    release(&ours, &waiter).await;
    assert!(ours.list("", PAGE).await.unwrap().is_empty());
    for node in &nodes.nodes {
        assert_nothing_was_refused(node).await;
    }
}

#[tokio::test]
async fn a_right_that_is_missing_on_one_node_is_named() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let rights = rights_for("in a cluster");
    for node in &nodes.nodes {
        set_user(&mut node.other().await, "pw", &rights).await;
    }
    let url = nodes.url().replace("://", "://holdfast:pw@");
    let also: [Missing; 2] = [(&["-zcount"], "ZCOUNT"), (&["-ssubscribe"], "'ssubscribe' command")];
    for node in &nodes.nodes[1..] {
        missing_rights_are_named(node, &rights, &also, async || {
            RedisEngine::connect(RedisConfig::parse(&url, &with_long_timeout()).unwrap()).await
        })
        .await;
    }
}

/// Starts a server with the documented user, and a sentinel that reports it. Returns them and the URL.
async fn under_sentinel() -> Option<(Server, Server, String)> {
    let server = Server::start(&[]).await?;
    let watch = format!("sentinel monitor {MASTER} 127.0.0.1 {} 1\n", server.port);
    let sentinel = Server::sentinel(&watch).await?;
    set_user(&mut server.other().await, "pw", &rights_for("under Sentinel")).await;
    let url = format!("redis+sentinel://holdfast:pw@127.0.0.1:{}/{MASTER}", sentinel.port);
    Some((server, sentinel, url))
}

#[tokio::test]
async fn a_right_that_is_missing_under_sentinel_is_named() {
    let Some((server, _sentinel, url)) = under_sentinel().await else {
        return;
    };
    missing_rights_are_named(
        &server,
        &rights_for("under Sentinel"),
        &MISSING_FOR_QUEUES,
        async || RedisEngine::connect(RedisConfig::parse(&url, &with_long_timeout()).unwrap()).await,
    )
    .await;
}

#[cfg(unix)]
#[tokio::test]
async fn an_attempt_after_a_right_was_revoked_under_sentinel_leaves_no_lock() {
    let Some((server, _sentinel, url)) = under_sentinel().await else {
        return;
    };
    no_lock_is_left_without_the_right_to_scripts(&server, &url).await;
}

#[tokio::test]
async fn one_node_that_evicts_locks_is_reported() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let (node, url) = (&nodes.nodes[2], nodes.url());
    eviction_is_reported(node, &node.address(), async |settings: &Settings| {
        RedisEngine::connect(RedisConfig::parse(&url, settings).unwrap()).await
    })
    .await;
}

#[tokio::test]
async fn a_master_under_sentinel_that_evicts_locks_is_reported() {
    let Some((server, _sentinel, url)) = under_sentinel().await else {
        return;
    };
    let address = format!("the master {MASTER:?} of the sentinels");
    eviction_is_reported(&server, &address, async |settings: &Settings| {
        RedisEngine::connect(RedisConfig::parse(&url, settings).unwrap()).await
    })
    .await;
}

#[tokio::test]
async fn sentinels_and_clusters_are_reached_over_tls_with_a_clients_certificate() {
    let Some(files) = Certificates::make() else { return };
    let options = files.options();
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let ports = ["--port", "0", "--tls-port", "PORT", "--tls-auth-clients", "yes"];
    let settings = Settings {
        tls: TlsFiles {
            ca_file: Some(files.path("ca.pem")),
            cert_file: Some(files.path("client.pem")),
            key_file: Some(files.path("client.key")),
            insecure: false,
            ..TlsFiles::default()
        },
        ..settings("lock:")
    };
    let works = async |url: &str| {
        let config = RedisConfig::parse(url, &settings).unwrap();
        let ours = RedisEngine::connect(config).await.unwrap();
        let (first, second) = (claim("n"), waiting("n"));
        acquire(&ours, &first).await;
        let mut subscription = enqueue(&ours, &second).await;
        release(&ours, &first).await;
        subscription.changed().await;
        acquire(&ours, &second).await;
        release(&ours, &second).await;
    };

    let Some(server) = Server::start(&[&ports[..], &options].concat()).await else {
        return;
    };
    let own = options
        .chunks(2)
        .map(|option| format!("{} {}\n", option[0].trim_start_matches('-'), option[1]))
        .collect::<String>();
    let watch = format!("sentinel monitor {MASTER} 127.0.0.1 {} 1\n", server.port);
    let secure = format!("port 0\ntls-port PORT\ntls-replication yes\n{own}{watch}");
    let Some(sentinel) = Server::sentinel(&secure).await else {
        return;
    };
    works(&format!("rediss+sentinel://127.0.0.1:{}/{MASTER}", sentinel.port)).await;
    let Some(plain) = Server::sentinel(&format!("tls-replication yes\n{own}{watch}")).await else {
        return;
    };
    works(&format!(
        "rediss+sentinel://127.0.0.1:{}/{MASTER}?sentinelTls=false",
        plain.port
    ))
    .await;

    // A cluster of one node needs no CLUSTER MEET.
    let clustered = ["--cluster-enabled", "yes", "--tls-cluster", "yes"];
    let Some(node) = Server::start(&[&ports[..], &options, &clustered].concat()).await else {
        return;
    };
    let config = RedisConfig::parse(&format!("rediss://127.0.0.1:{}", node.port), &settings).unwrap();
    let mut all = ::redis::cmd("CLUSTER");
    all.arg("ADDSLOTSRANGE").arg(0).arg(16383);
    Link::new(config).call(&all).await.unwrap();
    within(60, "a cluster that works", async || {
        let config = RedisConfig::parse(&format!("rediss+cluster://127.0.0.1:{}", node.port), &settings).unwrap();
        let ours = RedisEngine::connect(config).await.unwrap();
        ours.inspect(&key("n")).await.is_ok()
    })
    .await;
    works(&format!("rediss+cluster://127.0.0.1:{}", node.port)).await;
}
