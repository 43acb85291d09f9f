//! The connection that receives notifications.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;

use super::session::{PostgresServer, PostgresSession, Values};
use super::statements::Sql;
use crate::engine::core::ledger::{Content, Notification};
use crate::engine::hand_off::GrantTimes;
use crate::engine::sql::server::connection::{TEST_TIMEOUT, connected};
use crate::engine::sql::server::waiters::Waiters;
use crate::engine::sql::server::{Outcome, Server};
use crate::model::Fence;

/// How long the connection stays open without waiters.
const LISTENER_KEPT: Duration = Duration::from_secs(10);

/// How long the notification of [`notify_self`] may take.
const NOTIFICATION_TIMEOUT: Duration = Duration::from_secs(1);
const NOT_RECEIVED: &str = "the connection of listenUrl receives no notifications of released locks, so that waiters poll: listenUrl leads \
                            to another database, or through a pooler. Set it to the server and the database of the store, without a pooler";

/// Returns a notification as the text of a message: `<owner>`, `<owner> <ms until the name may be free>`, or
/// `<owner> <fencing token> <µs of the hand-off> <µs of its end>`.
pub(super) fn text_of(notification: &Notification) -> String {
    let owner = &notification.owner;
    match notification.content {
        Content::MayBeFree => owner.clone(),
        Content::FreeAfter(after) => format!("{owner} {}", after.as_millis()),
        Content::Granted(fence, times) => format!("{owner} {} {} {}", fence.0, times.granted_us, times.until_us),
    }
}

/// Reads a message. `None`: it is of another version.
fn notification_of(text: &str) -> Option<Notification> {
    let mut parts = text.split(' ');
    let owner = parts.next()?.to_owned();
    let numbers: Result<Vec<u64>, _> = parts.map(str::parse).collect();
    let content = match numbers.ok()?[..] {
        [] => Content::MayBeFree,
        [ms] => Content::FreeAfter(Duration::from_millis(ms)),
        [fence, granted_us, until_us] => Content::Granted(Fence(fence), GrantTimes { granted_us, until_us }),
        _ => return None,
    };
    let engine = None;
    Some(Notification { engine, owner, content })
}

/// Listens until the connection breaks. `true`: there have been no waiters for some time.
pub(super) async fn receive(server: &Arc<PostgresServer>, waiters: &Waiters) -> Outcome<bool> {
    let (sender, mut notifications) = mpsc::unbounded_channel();
    let session: PostgresSession = connected(server.connections(), server.connect_with(Some(sender))).await?;
    // It may lead to another server.
    waiters.forget_clock();
    let listen = format!("LISTEN \"holdfast_{}\"", waiters.process);
    session.connection.within_limit(session.execute(&listen)).await?;
    // Notifications of earlier transactions were not received.
    let names = waiters.known.names();
    if !names.is_empty() {
        waiters.check(names);
    }
    // `listenUrl` may lead to another database, or through a pooler, which delivers nothing. Then waiters poll until a notification arrives.
    let testing = async {
        match notify_self(server, &waiters.process).await {
            Ok(()) => tokio::time::sleep(NOTIFICATION_TIMEOUT).await,
            Err(failure) => {
                tracing::debug!(%failure, "listenUrl was not tested");
                std::future::pending().await
            }
        }
    };
    let mut testing = pin!(testing);
    let mut is_tested = server.config.listen.is_none();
    loop {
        let received = tokio::select! {
            received = timeout(LISTENER_KEPT, notifications.recv()) => received,
            () = session.connection.outdated() => {
                let test = session.connection.is_usable(session.execute(""));
                if timeout(TEST_TIMEOUT, test).await == Ok(true) {
                    continue;
                }
                Ok(None)
            }
            () = &mut testing, if !is_tested => {
                is_tested = true;
                server.receives_nothing.store(true, Ordering::Relaxed);
                waiters.warn(NOT_RECEIVED.to_owned());
                waiters.check(waiters.known.names());
                continue;
            }
        };
        match received {
            Ok(Some(text)) => {
                is_tested = true;
                server.receives_nothing.store(false, Ordering::Relaxed);
                if let Some(notification) = notification_of(&text) {
                    waiters.notify(&notification);
                }
            }
            Ok(None) => return Ok(false),
            Err(_) if waiters.forget_listener_if_unused() => {
                // The next waiter tests `listenUrl` again.
                server.receives_nothing.store(false, Ordering::Relaxed);
                return Ok(true);
            }
            Err(_) => {}
        }
    }
}

/// Sends a notification to this process over another connection.
async fn notify_self(server: &Arc<PostgresServer>, process: &str) -> Outcome<()> {
    let other: PostgresSession = connected(server.connections(), server.connect_with(None)).await?;
    let (channels, texts): ([&str; 1], [&str; 1]) = ([process], ["test"]);
    let values: &Values<'_> = &[&channels.as_slice(), &texts.as_slice()];
    let sent = other.connection.within_limit(other.query(Sql::Notify, values)).await;
    sent.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::OwnerToken;

    #[test]
    fn a_notification_is_parsed_as_it_was_formatted() {
        let times = GrantTimes {
            granted_us: 1_700_000_000_000_000,
            until_us: 1_700_000_002_000_000,
        };
        let after = Duration::from_millis(400);
        for content in [
            Content::MayBeFree,
            Content::FreeAfter(after),
            Content::Granted(Fence(7), times),
        ] {
            let engine = None;
            let owner = OwnerToken::fresh().as_str().to_owned();
            let notification = Notification { engine, owner, content };
            assert_eq!(notification_of(&text_of(&notification)), Some(notification));
        }
        for of_another_version in ["a b", "a 1 2", "a 1 2 3 4", "a 1 2 x"] {
            assert_eq!(notification_of(of_another_version), None);
        }
    }
}
