//! Asks JavaScript for the logins of new connections.

use std::collections::HashMap;
use std::sync::Arc;

use napi::Env;
use napi_derive::napi;
use serde_json::json;
use tokio::sync::oneshot;

use super::Bridge;
use super::notifier::Notifier;
use crate::engine::{Credentials, Login};

type Answer = oneshot::Sender<Result<Login, String>>;

/// The requests without an answer, by number.
#[derive(Default)]
pub(in crate::js) struct Logins {
    last: u32,
    waiting: HashMap<u32, Answer>,
}

/// Creates the source of logins of one service. A request is a notice: it does not keep the process alive.
pub(in crate::js) fn credentials(notifier: &Arc<Notifier>) -> Arc<Credentials> {
    let notifier = notifier.clone();
    Arc::new(Credentials::new(move || {
        let (answer, answered) = oneshot::channel();
        notifier.request(move |bridge| {
            let mut logins = bridge.logins.borrow_mut();
            // Requests that are not awaited any more.
            logins.waiting.retain(|_, answer| !answer.is_closed());
            logins.last += 1;
            let number = logins.last;
            logins.waiting.insert(number, answer);
            json!({ "login": number })
        });
        Box::pin(async move {
            answered
                .await
                .unwrap_or_else(|_| Err("the event loop has ended".into()))
        })
    }))
}

/// Answers a request for a login: with a password, or with the text of an error.
#[napi]
pub fn answer_login(env: &Env, number: u32, username: Option<String>, password: Option<String>, error: String) {
    let answer = Bridge::existing(env).and_then(|bridge| bridge.logins.borrow_mut().waiting.remove(&number));
    if let Some(answer) = answer {
        // The attempt to connect may have ended.
        let _ = answer.send(match password {
            Some(password) => Ok(Login { username, password }),
            None => Err(error),
        });
    }
}
