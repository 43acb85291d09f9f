//! Counts how often the driver sent a command.
//!
//! The driver repeats a write after some errors, and does not report it to the caller. It checks out one connection for each time that
//! it sends the command, in the caller's task (mongodb 3.9.1, `client/executor.rs`: `get_connection`), and reports each checkout
//! to a handler. (After a new login it repeats a command on the same connection. The server refused that command before.)
//!
//! This is not a documented promise of the driver. `Cargo.lock` pins its version, and `tests/repeated.rs` fails with a version that
//! reports fewer checkouts or more.

use std::cell::Cell;

use mongodb::event::cmap::CmapEvent;

tokio::task_local! {
    static CHECKOUTS: Cell<u32>;
}

/// Counts an event of the driver that is a checkout.
pub(super) fn count(event: &CmapEvent) {
    if matches!(event, CmapEvent::ConnectionCheckoutStarted(_)) {
        let _ = CHECKOUTS.try_with(|count| count.set(count.get() + 1));
    }
}

/// Runs a call of the driver. Returns its outcome, and how often the driver checked out a connection for it.
pub(crate) async fn counted<T>(call: impl Future<Output = T>) -> (T, u32) {
    let counted = async {
        let outcome = call.await;
        (outcome, CHECKOUTS.with(Cell::get))
    };
    CHECKOUTS.scope(Cell::new(0), counted).await
}
