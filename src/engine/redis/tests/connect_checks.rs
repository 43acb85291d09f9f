//! What `connect` checks: the commands that the server has, the rights of the user, and whether the server evicts locks.

use super::security::set_user;
use super::*;
use crate::engine::{Credentials, Login};
use crate::error::EngineError;

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

#[tokio::test]
async fn a_missing_right_is_named_and_no_lock_is_left() {
    let Some(server) = Server::start(&[]).await else { return };
    let mut other = server.other().await;
    let url = format!("redis://holdfast:pw@127.0.0.1:{}", server.port);
    for (missing, named) in [
        (&["-eval"][..], "'eval' command"),
        (&["-evalsha"], "'evalsha' command"),
        (&["-zadd"], "ZADD"),
        (&["-zcount"], "ZCOUNT"),
        (&["-subscribe"], "'subscribe' command"),
        (&["resetchannels"], "PUBLISH"),
        (&["resetkeys", "~lock:*"], "~holdfast:*"),
    ] {
        other.run::<()>("ACL SETUSER holdfast reset").await;
        set_user(&mut other, "pw", missing).await;
        let error = refusal(&url, &settings("lock:")).await.to_string();
        assert!(
            error.contains(named) && !error.contains("args beginning"),
            "{missing:?}: {error}"
        );
        assert_eq!(other.run::<i64>("DBSIZE").await, 0, "{missing:?}");
    }
    let Some(renamed) = Server::start(&["--rename-command", "EVAL", "EVAL-gone"]).await else {
        return;
    };
    let error = refusal(&renamed.url(), &settings("lock:")).await.to_string();
    assert!(error.contains("'EVAL'") && error.contains("rename-command"), "{error}");
}

#[cfg(unix)]
#[tokio::test]
async fn an_attempt_after_the_right_to_scripts_was_taken_away_leaves_no_lock() {
    let Some(server) = Server::start(&[]).await else { return };
    let mut other = server.other().await;
    set_user(&mut other, "pw", &[]).await;
    let url = format!("redis://holdfast:pw@127.0.0.1:{}", server.port);
    let settings = Settings {
        event_loop: Some(TestLoop::here()),
        ..settings("lock:")
    };
    let ours = RedisEngine::connect(RedisConfig::parse(&url, &settings).unwrap())
        .await
        .unwrap();
    // By plain commands, as soon as a script was executed.
    for _ in 0..3 {
        let first = claim("n");
        acquire(&ours, &first).await;
        release(&ours, &first).await;
    }
    let plainly: String = other.run("INFO commandstats").await;
    assert!(plainly.contains("cmdstat_incrby:"), "{plainly}");
    other.run::<()>("ACL SETUSER holdfast -eval -evalsha").await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    for claim in [claim("n"), claim("m")] {
        let error = ours.try_acquire(&claim).await.unwrap_err();
        assert!(error.to_string().contains("NOPERM"), "{error}");
    }
    assert_eq!(other.run::<Vec<String>>("KEYS lock:*").await, [""; 0]);
    // It works again without a new connection.
    other.run::<()>("ACL SETUSER holdfast +eval +evalsha").await;
    let first = claim("n");
    acquire(&ours, &first).await;
    release(&ours, &first).await;
}

#[tokio::test]
async fn a_server_that_evicts_locks_is_reported_once() {
    let options = ["--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"];
    let Some(server) = Server::start(&options).await else {
        return;
    };
    let (settings, texts) = with_warnings(settings("lock:"));
    let connect = async |url: &str| RedisEngine::connect(RedisConfig::parse(url, &settings).unwrap()).await;
    connect(&server.url()).await.unwrap();
    connect(&server.url()).await.unwrap();
    let seen = texts.lock().unwrap().clone();
    assert_eq!(seen.len(), 1, "{seen:?}");
    let address = format!("127.0.0.1:{}", server.port);
    for part in [&*address, "volatile-lru", "104857600", "noeviction"] {
        assert!(seen[0].contains(part), "{seen:?}");
    }
    // A user without the right to read it, and a server that evicts nothing.
    set_user(&mut server.other().await, "pw", &["-info"]).await;
    connect(&server.url().replace("://", "://holdfast:pw@")).await.unwrap();
    server
        .other()
        .await
        .run::<()>("CONFIG SET maxmemory-policy noeviction")
        .await;
    connect(&server.url()).await.unwrap();
    assert_eq!(texts.lock().unwrap().len(), 1);
}
