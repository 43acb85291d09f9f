//! What `connect` checks: the commands that the server has, the rights of the user, and whether the server evicts locks.

use super::security::set_user;
use super::*;
use crate::engine::{Credentials, EngineExt, Login};
use crate::error::EngineError;

/// Returns settings with a long store timeout, because a busy machine may pause. `connect` ignores a server that does not answer
/// within a part of that timeout.
pub(super) fn with_long_timeout() -> Settings {
    Settings {
        store_timeout: Duration::from_secs(20),
        ..settings("lock:")
    }
}

async fn refusal(url: &str, settings: &Settings) -> EngineError {
    let error = RedisEngine::connect(RedisConfig::parse(url, settings).unwrap())
        .await
        .unwrap_err();
    assert!(!error.retryable, "{error}");
    error
}

/// Returns the texts of an error and of its causes.
fn texts(error: &EngineError) -> String {
    let mut texts = format!("{error} {error:?}");
    let mut cause: Option<&dyn std::error::Error> = Some(&*error.source);
    while let Some(error) = cause {
        texts += &format!("\n{error} {error:?}");
        cause = error.source();
    }
    texts
}

#[tokio::test]
async fn an_error_about_an_unknown_command_repeats_no_login() {
    let Some(server) = Server::start(&["--rename-command", "HELLO", "HELLO-gone"]).await else {
        return;
    };
    let login = Login {
        username: Some("holdfast".into()),
        password: "S3CRET-pass".into(),
    };
    let credentials = Credentials::new(move || {
        let login = login.clone();
        Box::pin(async move { Ok(login) })
    });
    let with_credentials = Settings {
        credentials: Some(Arc::new(credentials)),
        ..settings("lock:")
    };
    let address = format!("127.0.0.1:{}", server.port);
    for (url, settings) in [
        (format!("redis://:S3CRET-pass@{address}"), settings("lock:")),
        (format!("redis://{address}"), with_credentials),
    ] {
        let error = refusal(&url, &settings).await;
        let shown = texts(&error);
        assert!(!shown.contains("S3CRET") && !shown.contains("'AUTH'"), "{shown}");
        assert!(
            shown.contains(&address) && shown.contains("with the command HELLO is needed"),
            "{shown}"
        );
    }
}

/// A right that a user lacks: the rule that removes it, and what the error names.
pub(super) type Missing = (&'static [&'static str], &'static str);

/// The rights that each kind of deployment needs.
const MISSING: [Missing; 5] = [
    (&["-eval"], "'eval' command"),
    (&["-evalsha"], "'evalsha' command"),
    (&["-zadd"], "ZADD"),
    (&["resetchannels"], "PUBLISH"),
    (&["resetkeys", "~lock:*"], "~holdfast:*"),
];

/// Asserts that `connect` fails and names the right, for each right that the user lacks on this server, and that the server has
/// no key then. `rights`: the additional rights of the deployment. `also`: more rights that it needs.
pub(super) async fn missing_rights_are_named<E: std::fmt::Debug>(
    server: &Server,
    rights: &[&str],
    also: &[Missing],
    connect: impl AsyncFn() -> Result<Arc<E>, EngineError>,
) {
    let mut other = server.other().await;
    for (missing, named) in MISSING.iter().chain(also) {
        other.run::<()>("ACL SETUSER holdfast reset").await;
        set_user(&mut other, "pw", &[rights, missing].concat()).await;
        let error = connect().await.unwrap_err();
        let text = error.to_string();
        assert!(!error.retryable && text.contains(named), "{missing:?}: {text}");
        assert!(!text.contains("args beginning"), "{missing:?}: {text}");
        assert_eq!(other.run::<i64>("DBSIZE").await, 0, "{missing:?}");
    }
    set_user(&mut other, "pw", rights).await;
    connect().await.unwrap();
}

/// The rights that waiters need where a server has their queue.
pub(super) const MISSING_FOR_QUEUES: [Missing; 2] =
    [(&["-zcount"], "ZCOUNT"), (&["-subscribe"], "'subscribe' command")];

/// Asserts that `connect` warns once of this server, by its `address`, once it evicts keys.
pub(super) async fn eviction_is_reported<E>(
    server: &Server,
    address: &str,
    connect: impl AsyncFn(&Settings) -> Result<Arc<E>, EngineError>,
) {
    let (settings, texts) = with_warnings(with_long_timeout());
    drop(connect(&settings).await.unwrap());
    assert_eq!(*texts.lock().unwrap(), [""; 0]);
    let mut other = server.other().await;
    other.run::<()>("CONFIG SET maxmemory 100mb").await;
    other.run::<()>("CONFIG SET maxmemory-policy volatile-lru").await;
    for _ in 0..2 {
        drop(connect(&settings).await.unwrap());
    }
    let seen = texts.lock().unwrap().clone();
    assert_eq!(seen.len(), 1, "{seen:?}");
    for part in [address, "volatile-lru", "104857600", "noeviction"] {
        assert!(seen[0].contains(part), "{seen:?}");
    }
}

#[tokio::test]
async fn a_missing_right_is_named_and_no_lock_is_left() {
    let Some(server) = Server::start(&[]).await else { return };
    let url = format!("redis://holdfast:pw@127.0.0.1:{}", server.port);
    missing_rights_are_named(&server, &[], &MISSING_FOR_QUEUES, async || {
        RedisEngine::connect(RedisConfig::parse(&url, &with_long_timeout()).unwrap()).await
    })
    .await;
    let Some(renamed) = Server::start(&["--rename-command", "EVAL", "EVAL-gone"]).await else {
        return;
    };
    let error = refusal(&renamed.url(), &with_long_timeout()).await.to_string();
    assert!(error.contains("'EVAL'") && error.contains("rename-command"), "{error}");
}

/// Revokes the right to run scripts while an engine acquires by plain commands. Asserts that attempts fail and leave no lock.
#[cfg(unix)]
pub(super) async fn no_lock_is_left_without_the_right_to_scripts(server: &Server, url: &str) {
    let settings = Settings {
        event_loop: Some(TestLoop::here()),
        ..with_long_timeout()
    };
    let ours = RedisEngine::connect(RedisConfig::parse(url, &settings).unwrap())
        .await
        .unwrap();
    let mut other = server.other().await;
    let pair = async || {
        let first = claim("n");
        acquire(&ours, &first).await;
        release(&ours, &first).await;
    };
    for is_at_once in [true, false] {
        // By plain commands, as soon as a script was executed.
        for _ in 0..3 {
            pair().await;
        }
        let plainly: String = other.run("INFO commandstats").await;
        assert!(plainly.contains("cmdstat_incrby:"), "{plainly}");
        other.run::<()>("ACL SETUSER holdfast -eval -evalsha").await;
        if is_at_once {
            // No script was refused yet. The refused release shows it.
            let first = claim("first");
            if ours.try_acquire(&first).await.is_ok() {
                ours.release(&first, Duration::ZERO).await.unwrap_err();
            }
        } else {
            tokio::time::sleep(Duration::from_millis(1100)).await;
        }
        for claim in [claim("n"), claim("m")] {
            let error = ours.try_acquire(&claim).await.unwrap_err();
            assert!(error.to_string().contains("NOPERM"), "{error}");
        }
        other.run::<()>("DEL lock:first").await;
        assert_eq!(other.run::<Vec<String>>("KEYS lock:*").await, [""; 0]);
        // It works again without a new connection.
        other.run::<()>("ACL SETUSER holdfast +eval +evalsha").await;
        pair().await;
    }
}

#[cfg(unix)]
#[tokio::test]
async fn an_attempt_after_the_right_to_scripts_was_taken_away_leaves_no_lock() {
    let Some(server) = Server::start(&[]).await else { return };
    set_user(&mut server.other().await, "pw", &[]).await;
    let url = format!("redis://holdfast:pw@127.0.0.1:{}", server.port);
    no_lock_is_left_without_the_right_to_scripts(&server, &url).await;
}

#[tokio::test]
async fn a_server_that_evicts_locks_is_reported_once() {
    let Some(server) = Server::start(&[]).await else { return };
    let connect = async |url: &str, settings: &Settings| {
        let config = RedisConfig::parse(url, settings).unwrap();
        RedisEngine::connect(config).await
    };
    let address = server.address();
    eviction_is_reported(&server, &address, async |settings: &Settings| {
        connect(&server.url(), settings).await
    })
    .await;
    // A user without the right to read it, and a server that evicts nothing.
    let (settings, texts) = with_warnings(with_long_timeout());
    let mut other = server.other().await;
    set_user(&mut other, "pw", &["-info"]).await;
    let limited = server.url().replace("://", "://holdfast:pw@");
    connect(&limited, &settings).await.unwrap();
    other.run::<()>("CONFIG SET maxmemory-policy noeviction").await;
    connect(&server.url(), &settings).await.unwrap();
    assert_eq!(*texts.lock().unwrap(), [""; 0]);
}
