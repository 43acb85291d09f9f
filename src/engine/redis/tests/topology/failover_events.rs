//! The subscription to the events of the sentinels.

use super::super::security::Certificates;
use super::*;

#[cfg(target_os = "linux")]
#[tokio::test]
async fn sentinels_whose_certificates_have_another_name_are_subscribed() {
    let Some(files) = Certificates::make() else { return };
    let Some(server) = files.server("no").await else { return };
    let own = files.options();
    let own: String = own
        .chunks(2)
        .map(|option| format!("{} {}\n", option[0].trim_start_matches('-'), option[1]))
        .collect();
    let lines = format!(
        "bind 127.0.0.1 127.0.0.2\nport 0\ntls-port PORT\ntls-replication yes\ntls-auth-clients no\n{own}sentinel monitor {MASTER} 127.0.0.1 {} 1\n",
        server.port
    );
    let Some(sentinel) = Server::sentinel(&lines).await else {
        return;
    };
    let settings = Settings {
        tls: TlsFiles {
            ca_file: Some(files.path("ca.pem")),
            server_name: Some("localhost".into()),
            ..TlsFiles::default()
        },
        ..settings("lock:")
    };
    // An address of this machine that the certificate does not have.
    let url = format!("rediss+sentinel://127.0.0.2:{}/{MASTER}", sentinel.port);
    let ours = RedisEngine::connect(RedisConfig::parse(&url, &settings).unwrap())
        .await
        .unwrap();
    let mut other = OtherClient::connect(&format!("rediss://127.0.0.1:{}/#insecure", sentinel.port)).await;
    within(60, "a subscription", async || {
        let clients: String = other.run("CLIENT LIST TYPE pubsub").await;
        clients.lines().count() == 1
    })
    .await;
    ours.close().await;
}

#[tokio::test]
async fn a_missing_subscription_to_every_sentinel_is_reported() {
    let Some(server) = Server::start(&[]).await else { return };
    let lines = format!(
        "user asker on \">pw\" -@all +sentinel|get-master-addr-by-name\nsentinel monitor {MASTER} 127.0.0.1 {} 1\n",
        server.port
    );
    let Some(sentinel) = Server::sentinel(&lines).await else {
        return;
    };
    let (settings, texts) = with_warnings(settings("lock:"));
    let login = "sentinelUsername=asker&sentinelPassword=pw";
    let url = format!("redis+sentinel://127.0.0.1:{}/{MASTER}?{login}", sentinel.port);
    let _ours = RedisEngine::connect(RedisConfig::parse(&url, &settings).unwrap())
        .await
        .unwrap();
    within(60, "a warning", async || !texts.lock().unwrap().is_empty()).await;
    let text = texts.lock().unwrap()[0].clone();
    for part in [&*format!("127.0.0.1:{}", sentinel.port), "+switch-master", "NOPERM"] {
        assert!(text.contains(part), "{text}");
    }
}
