//! Users with limited rights, passwords, databases, and TLS.

use std::path::PathBuf;

use super::*;
use crate::engine::{EngineExt, Renewed};
use crate::error::EngineError;

/// Returns the words of the documented user in `engine/redis/mod.rs`.
fn documented_user() -> Vec<String> {
    let words: String = include_str!("../mod.rs")
        .lines()
        .skip_while(|line| !line.contains("ACL SETUSER"))
        .take_while(|line| !line.contains("```"))
        .map(|line| line.trim_start_matches("//!"))
        .collect::<Vec<_>>()
        .join(" ");
    words.split_whitespace().map(str::to_owned).collect()
}

pub(super) async fn set_user(other: &mut OtherClient, password: &str, also: &[&str]) {
    let words: Vec<String> = documented_user()
        .iter()
        .map(|word| word.replace("PASSWORD", password))
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).chain(also.iter().copied()).collect();
    assert_eq!(words[..3], ["ACL", "SETUSER", "holdfast"]);
    other.args::<()>(&words).await;
}

async fn refused(url: &str, settings: &Settings) -> EngineError {
    let error = RedisEngine::connect(RedisConfig::parse(url, settings).unwrap())
        .await
        .unwrap_err();
    assert!(!error.retryable, "{error}");
    error
}

#[tokio::test]
async fn the_documented_user_can_do_everything_and_no_more_than_that() {
    let Some(server) = Server::start(&[]).await else { return };
    let mut other = server.other().await;
    let password = "p@ss/w:rd#%";
    set_user(&mut other, password, &[]).await;
    let url = |db| format!("redis://holdfast:p%40ss%2Fw%3Ard%23%25@127.0.0.1:{}/{db}", server.port);
    let ours = engine(&url(9), "lock:").await;
    for name in ["n", "a}b", "{tag}x", "{}"] {
        let mut first = claim(name);
        first.metadata = Some("1".into());
        acquire(&ours, &first).await;
        let (next, after) = (waiting(name), waiting(name));
        let mut subscription = enqueue(&ours, &next).await;
        enqueue(&ours, &after).await;
        assert_eq!(
            ours.renew(&first, Ttl::clamped(2 * LONG)).await.unwrap(),
            Renewed::Extended
        );
        let to = OwnerToken::fresh();
        assert_eq!(ours.transfer(&first, &to).await.unwrap(), Renewed::Extended);
        first.owner = to;
        assert!(ours.inspect(&key(name)).await.unwrap().unwrap().metadata.is_some());
        assert_eq!(ours.list("", PAGE).await.unwrap().len(), 1);
        release(&ours, &first).await;
        tokio::time::timeout(Duration::from_secs(5), subscription.changed())
            .await
            .unwrap();
        acquire(&ours, &next).await;
        assert_eq!(ours.release(&after, Duration::ZERO).await.unwrap(), Released::NotHeld);
        release(&ours, &next).await;
        acquire(&ours, &first).await;
        assert_eq!(ours.release(&first, LONG).await.unwrap(), Released::Freed);
        assert!(ours.force_release(&key(name)).await.unwrap());
    }
    assert_eq!(other.run::<i64>("DBSIZE").await, 0, "all of it was in database 9");
    assert_eq!(
        other.run::<Vec<::redis::Value>>("ACL LOG").await.len(),
        0,
        "no command was refused"
    );
    assert!(documented_user().iter().any(|word| word == "-@all"));

    let elsewhere = engine(&url(0), "elsewhere:").await;
    let error = elsewhere.try_acquire(&claim("n")).await.unwrap_err();
    assert!(
        error.to_string().contains("the server's ACL forbids it: NOPERM"),
        "{error}"
    );
}

#[tokio::test]
async fn without_the_right_to_publish_a_release_changes_nothing() {
    let Some(server) = Server::start(&[]).await else { return };
    let mut other = server.other().await;
    set_user(&mut other, "pw", &[]).await;
    let ours = engine(&format!("redis://holdfast:pw@127.0.0.1:{}", server.port), "lock:").await;
    let first = claim("n");
    acquire(&ours, &first).await;
    other.run::<()>("ACL SETUSER holdfast resetchannels").await;
    // No call can wait or be notified: the name stays with its holder.
    for error in [
        ours.try_acquire(&waiting("n")).await.unwrap_err(),
        ours.try_acquire(&waiting("n")).await.unwrap_err(),
    ] {
        assert!(
            !error.retryable && error.to_string().contains("the server's ACL forbids it: "),
            "{error}"
        );
    }
    assert!(ours.inspect(&key("n")).await.unwrap().is_some());
    // The connection still works.
    assert_eq!(ours.renew(&first, first.ttl).await.unwrap(), Renewed::Extended);
}

#[tokio::test]
async fn a_failed_login_is_not_retryable() {
    let Some(server) = Server::start(&["--requirepass", "right"]).await else {
        return;
    };
    let at = |login: &str| format!("redis://{login}127.0.0.1:{}", server.port);
    let plain = Settings::default();
    let error = refused(&at(":secret@"), &plain).await.to_string();
    assert!(error.contains("WRONGPASS") && !error.contains("secret"), "{error}");
    let error = refused(&at("nobody:secret@"), &plain).await.to_string();
    assert!(error.contains("WRONGPASS") && !error.contains("secret"), "{error}");
    assert!(refused(&at(""), &plain).await.to_string().contains("NOAUTH"));
    assert!(
        refused(&(at(":right@") + "/999"), &plain)
            .await
            .to_string()
            .contains("out of range")
    );

    let ours = engine(&at(":right@"), "lock:").await;
    acquire(&ours, &claim("n")).await;
    let mut other = OtherClient::connect(&at(":right@")).await;
    other.run::<()>("ACL SETUSER guest on nopass ~* &* +@all").await;
    let guest = engine(&at("guest@"), "lock:").await;
    acquire(&guest, &claim("m")).await;
}

/// An authority, and the certificates that it has signed.
pub(in super::super) struct Certificates(tempfile::TempDir);

impl Certificates {
    /// Returns `None`, after a message, if there is no `openssl`.
    pub(in super::super) fn make() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("san"), "subjectAltName=IP:127.0.0.1,DNS:localhost").unwrap();
        const NEW: &str = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2";
        const REQUEST: &str = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        for line in [
            &format!("{NEW} -keyout ca.key -out ca.pem -subj /CN=authority"),
            &format!("{NEW} -keyout other.key -out other.pem -subj /CN=another"),
            &format!("{REQUEST} -keyout server.key -out server.csr -subj /CN=localhost"),
            "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile san -out server.pem",
            &format!("{REQUEST} -keyout client.key -out client.csr -subj /CN=client"),
            "x509 -req -in client.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile san -out client.pem",
        ] {
            let done = Command::new("openssl")
                .args(line.split(' '))
                .current_dir(dir.path())
                .output();
            match done {
                Ok(done) => assert!(
                    done.status.success(),
                    "{line}: {}",
                    String::from_utf8_lossy(&done.stderr)
                ),
                Err(error) => {
                    skip(&format!("no openssl: {error}"));
                    return None;
                }
            }
        }
        Some(Certificates(dir))
    }

    pub(in super::super) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns the server's options for its certificate files.
    pub(super) fn options(&self) -> [String; 6] {
        let file = |name: &str| self.path(name).to_str().unwrap().to_owned();
        [
            "--tls-cert-file".into(),
            file("server.pem"),
            "--tls-key-file".into(),
            file("server.key"),
            "--tls-ca-cert-file".into(),
            file("ca.pem"),
        ]
    }

    pub(super) async fn server(&self, ask_clients: &str) -> Option<Server> {
        let files = self.options();
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let ports = ["--port", "0", "--tls-port", "PORT", "--tls-auth-clients", ask_clients];
        Server::start(&[&ports[..], &files].concat()).await
    }
}

#[tokio::test]
async fn tls_trusts_only_the_configured_authority() {
    let Some(files) = Certificates::make() else { return };
    let Some(server) = files.server("no").await else { return };
    let with = |tls: TlsFiles| Settings {
        tls,
        ..settings("lock:")
    };
    let trusting = |ca: &str| {
        with(TlsFiles {
            ca_file: Some(files.path(ca)),
            ..TlsFiles::default()
        })
    };
    for host in ["127.0.0.1", "localhost"] {
        let url = format!("rediss://{host}:{}", server.port);
        let config = RedisConfig::parse(&url, &trusting("ca.pem")).unwrap();
        let ours = RedisEngine::connect(config).await.unwrap();
        let first = claim("n");
        acquire(&ours, &first).await;
        let next = waiting("n");
        let mut subscription = enqueue(&ours, &next).await;
        release(&ours, &first).await;
        subscription.changed().await;
        acquire(&ours, &next).await;
        release(&ours, &next).await;
    }
    let url = format!("rediss://127.0.0.1:{}", server.port);
    for stranger in [Settings::default(), trusting("other.pem")] {
        let error = refused(&url, &stranger).await.to_string();
        assert!(error.contains("certificate"), "{error}");
    }
    let insecure = with(TlsFiles {
        insecure: true,
        ..TlsFiles::default()
    });
    RedisEngine::connect(RedisConfig::parse(&url, &insecure).unwrap())
        .await
        .unwrap();
}

#[tokio::test]
async fn tls_sends_the_clients_certificate() {
    let Some(files) = Certificates::make() else { return };
    let Some(server) = files.server("yes").await else {
        return;
    };
    let url = format!("rediss://127.0.0.1:{}", server.port);
    let anonymous = TlsFiles {
        ca_file: Some(files.path("ca.pem")),
        ..TlsFiles::default()
    };
    let error = refused(
        &url,
        &Settings {
            tls: anonymous.clone(),
            ..Settings::default()
        },
    )
    .await
    .to_string();
    assert!(error.to_lowercase().contains("certificate"), "{error}");

    let both = std::fs::read_to_string(files.path("client.pem")).unwrap()
        + &std::fs::read_to_string(files.path("client.key")).unwrap();
    std::fs::write(files.path("both.pem"), both).unwrap();
    let two = TlsFiles {
        cert_file: Some(files.path("client.pem")),
        key_file: Some(files.path("client.key")),
        ..anonymous
    };
    let one = TlsFiles {
        cert_file: Some(files.path("both.pem")),
        key_file: None,
        ..two.clone()
    };
    for tls in [two, one] {
        let config = RedisConfig::parse(
            &url,
            &Settings {
                tls,
                ..Settings::default()
            },
        )
        .unwrap();
        let ours = RedisEngine::connect(config).await.unwrap();
        let first = claim("n");
        acquire(&ours, &first).await;
        release(&ours, &first).await;
    }
}
