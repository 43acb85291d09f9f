//! Asks JavaScript: for the login of a new connection, and for the DNS records of a name.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use napi::Env;
use napi_derive::napi;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::Bridge;
use super::notifier::Notifier;
use crate::engine::{Credentials, Login, Records, Resolver};

/// Sends a question. It is a notice: it does not keep the process alive. The answer is JSON text.
fn ask<T: DeserializeOwned>(
    notifier: &Arc<Notifier>,
    mut question: Value,
) -> impl Future<Output = Result<T, String>> + use<T> {
    let (answer, answered) = oneshot::channel();
    {
        let mut questions = notifier.shared.questions.lock();
        // Questions whose answers are not awaited any more.
        questions.waiting.retain(|_, answer| !answer.is_closed());
        questions.last += 1;
        question["question"] = questions.last.into();
        let number = questions.last;
        questions.waiting.insert(number, answer);
    }
    notifier.send(&question);
    async move {
        let ended = |_| Err("the event loop has ended".into());
        let text = answered.await.unwrap_or_else(ended)?;
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }
}

/// Creates the source of logins of one service.
pub(in crate::js) fn credentials(notifier: &Arc<Notifier>) -> Arc<Credentials> {
    let notifier = notifier.clone();
    Arc::new(Credentials::new(move || {
        let login = ask(&notifier, json!({}));
        Box::pin(async move {
            let (username, password) = login.await?;
            Ok(Login { username, password })
        })
    }))
}

/// Creates the resolver of one service. JavaScript answers within `limit`, unless its event loop is blocked.
pub(in crate::js) fn resolver(notifier: &Arc<Notifier>, limit: Duration) -> Arc<Resolver> {
    let notifier = notifier.clone();
    Arc::new(move |service, name| -> BoxFuture<'static, _> {
        let limit_ms = limit.as_secs_f64() * 1000.0;
        let records = ask(&notifier, json!({ "records": [service, name, limit_ms] }));
        Box::pin(async move {
            let (servers, texts) = records.await?;
            Ok(Records { servers, texts })
        })
    })
}

/// Answers a question: with JSON text, or with the text of an error.
#[napi]
pub fn answer(env: &Env, number: u32, value: Option<String>, error: String) {
    let answer = Bridge::existing(env).and_then(|bridge| bridge.shared.questions.lock().waiting.remove(&number));
    if let Some(answer) = answer {
        // The attempt to connect may have ended.
        let _ = answer.send(value.ok_or(error));
    }
}
