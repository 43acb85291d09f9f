//! Logins that the caller provides for each new connection.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::task::AbortHandle;

/// How long a new connection waits for the caller's login if there is an earlier one.
const SHORT: Duration = Duration::from_millis(250);

/// A user name and a password.
#[derive(Clone)]
pub struct Login {
    /// `None`: the default user.
    pub username: Option<String>,
    /// The password.
    pub password: String,
}

/// Asks the caller for a login.
type Ask = Box<dyn Fn() -> BoxFuture<'static, Result<Login, String>> + Send + Sync>;

/// The source of the logins of new connections: a function of the caller.
///
/// # Behavior
/// `Debug` shows no password.
pub struct Credentials {
    ask: Ask,
    answers: Mutex<Answers>,
}

#[derive(Default)]
struct Answers {
    /// The number of requests.
    asked: u64,
    /// The answer to the newest request that has one, and the number of that request.
    last: (u64, Option<Login>),
    /// The newest request that had no answer in time. It is awaited until the next one.
    late: Option<AbortHandle>,
}

impl Credentials {
    /// Creates the source. `ask` is called before every new connection.
    pub fn new(ask: impl Fn() -> BoxFuture<'static, Result<Login, String>> + Send + Sync + 'static) -> Self {
        Credentials {
            ask: Box::new(ask),
            answers: Mutex::default(),
        }
    }

    /// Returns a login for a new connection.
    ///
    /// # Behavior
    /// The last login if the caller does not answer within [`SHORT`]: a connection for renewals must not wait for a blocked event
    /// loop, and most logins outlast their connection. Without a last login the limit is `limit`. An answer that arrives later is
    /// the last login of the next call. Needs a current runtime.
    ///
    /// # Errors
    /// The caller's error, as text; no answer within `limit`, and no earlier login.
    pub(super) async fn login(self: &Arc<Self>, limit: Duration) -> Result<Login, String> {
        let has_last = self.answers.lock().last.1.is_some();
        let limit = if has_last { limit.min(SHORT) } else { limit };
        let (asked, this) = ((self.ask)(), Arc::downgrade(self));
        let number = {
            let mut answers = self.answers.lock();
            answers.asked += 1;
            answers.asked
        };
        let asking = tokio::spawn(async move {
            let login = asked.await?;
            if let Some(this) = this.upgrade() {
                let mut answers = this.answers.lock();
                if number > answers.last.0 {
                    answers.last = (number, Some(login.clone()));
                }
            }
            Ok(login)
        });
        let request = asking.abort_handle();
        match tokio::time::timeout(limit, asking).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(ended)) => Err(ended.to_string()),
            Err(_) => {
                let mut answers = self.answers.lock();
                if let Some(earlier) = answers.late.replace(request) {
                    earlier.abort();
                }
                let last = answers.last.1.clone();
                last.ok_or_else(|| format!("the credentials were not there within {} ms", limit.as_millis()))
            }
        }
    }
}

impl Drop for Credentials {
    fn drop(&mut self) {
        if let Some(late) = &self.answers.get_mut().late {
            late.abort();
        }
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_silent_caller_gets_its_last_login() {
        let calls = Arc::new(AtomicU32::new(0));
        let counted = calls.clone();
        let credentials = Arc::new(Credentials::new(move || {
            let call = counted.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                if call != 1 {
                    std::future::pending::<()>().await;
                }
                Ok(Login {
                    username: None,
                    password: "secret".into(),
                })
            })
        }));
        let limit = Duration::from_millis(500);
        let error = credentials.login(limit).await.err().unwrap();
        assert!(error.contains("within 500 ms"), "{error}");
        for _ in 0..2 {
            let started = tokio::time::Instant::now();
            assert_eq!(credentials.login(limit).await.ok().unwrap().password, "secret");
            assert!(started.elapsed() <= SHORT, "renewals wait for this connection");
        }
        assert_eq!(calls.load(Ordering::Relaxed), 3);
        assert!(!format!("{credentials:?}").contains("secret"));
    }
}
