//! Readings of the server's clock.

use std::time::Duration;

use mongodb::Database;
use mongodb::bson::{DateTime, doc};
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::clock::Moment;
use crate::engine::mongodb::Outcome;
use crate::engine::mongodb::connection::pool::Pool;
use crate::engine::mongodb::error::Failure;
use crate::engine::mongodb::ops::clock_offset::ClockReading;

/// How long a call waits for a shared reading. One connection that hangs must not delay the calls that other connections serve.
const SHARED_LIMIT: Duration = Duration::from_millis(200);

/// Reads the server's clock.
pub(super) async fn read_clock(database: &Database) -> Outcome<ClockReading> {
    let sent = Moment::now();
    let hello = database.run_command(doc! { "hello": 1 }).await;
    let hello = hello.map_err(Failure)?;
    // Without the field the estimated end is wrong, and is corrected.
    let time = hello.get_datetime("localTime").copied();
    Ok(ClockReading {
        time: time.unwrap_or(DateTime::from_millis(0)),
        sent,
        answered: Moment::now(),
    })
}

/// The last reading. Concurrent calls share one command.
#[derive(Default)]
pub(crate) struct SharedReading(Mutex<Option<ClockReading>>);

impl SharedReading {
    /// Returns a reading that was sent after this call began.
    ///
    /// # Errors
    /// Those of the command. The next caller repeats it.
    pub(crate) async fn next(&self, pool: &Pool) -> Outcome<ClockReading> {
        let read = || {
            let database = pool.connected().client.database("admin");
            async move { read_clock(&database).await }
        };
        self.next_with(read).await
    }

    async fn next_with<F>(&self, read: impl Fn() -> F) -> Outcome<ClockReading>
    where
        F: Future<Output = Outcome<ClockReading>>,
    {
        let called = Moment::now();
        let shared = async {
            // The calls that wait here while another one reads began before the next reading, and share it.
            let mut last = self.0.lock().await;
            if let Some(reading) = last.filter(|last| last.sent >= called) {
                return Ok(reading);
            }
            let reading = read().await?;
            *last = Some(reading);
            Ok(reading)
        };
        match timeout(SHARED_LIMIT, shared).await {
            Ok(reading) => reading,
            Err(_) => read().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_reading_that_hangs_delays_the_other_calls_for_a_moment_only() {
        let (shared, reads) = (SharedReading::default(), AtomicUsize::new(0));
        let read = || async {
            if reads.fetch_add(1, SeqCst) == 0 {
                std::future::pending::<()>().await;
            }
            let sent = Moment::now();
            Ok(ClockReading {
                time: DateTime::from_millis(1),
                sent,
                answered: sent,
            })
        };
        let began = tokio::time::Instant::now();
        let (hung, second, third) =
            tokio::join!(shared.next_with(read), shared.next_with(read), shared.next_with(read));
        for reading in [hung, second, third] {
            assert!(reading.is_ok());
        }
        assert_eq!(began.elapsed(), SHARED_LIMIT);
        reads.store(1, SeqCst);
        let (one, other) = tokio::join!(shared.next_with(read), shared.next_with(read));
        assert!(one.is_ok() && other.is_ok());
        assert_eq!(reads.load(SeqCst), 2, "concurrent calls share a command");
    }
}
