//! The file: opened, created if it is missing, and opened again after it was deleted or replaced.

use std::fs::DirBuilder;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use libsqlite3_sys::{SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, SQLITE_OK, sqlite3_db_config};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, Executor, Row};

use super::NAME;
use super::error::{kind_of, of_system};
use super::identity::{FileId, Files, file_id};
use super::peers::{Peer, Peers};
use super::statements::{Statements, Transaction};
use crate::clock::Moment;
use crate::engine::sql::config::SqliteConfig;
use crate::engine::sql::failure::{Failure, Kind, Place};
use crate::engine::sql::udp_wakeup::UdpWakeup;

/// Shortest time between two re-openings after the files were deleted or replaced. Limits the load on a file system whose inode
/// numbers change: there each comparison finds other files.
const REOPEN_PAUSE: Duration = Duration::from_millis(250);

/// The one connection of an engine.
pub(super) struct File {
    config: SqliteConfig,
    path: Arc<Path>,
    place: Place,
    statements: Arc<Statements>,
    wakeup: Arc<UdpWakeup>,
    open: Option<Open>,
    /// The earliest moment of the next re-opening.
    next_reopening: Moment,
}

struct Open {
    connection: SqliteConnection,
    files: Files,
    /// `None` where files have no ids.
    peer: Option<Peer>,
}

impl File {
    /// `wakeup`: wakes every waiter after the file was opened, because wake-ups may have been lost.
    pub(super) fn new(config: SqliteConfig, statements: Arc<Statements>, wakeup: Arc<UdpWakeup>) -> Self {
        File {
            path: config.path().into(),
            place: Place {
                engine: NAME,
                address: config.path().display().to_string().into(),
            },
            config,
            statements,
            wakeup,
            open: None,
            next_reopening: Moment::now(),
        }
    }

    /// Returns the connection.
    ///
    /// # Behavior
    /// Opens the files again when they were deleted or replaced.
    ///
    /// # Errors
    /// Fails with a retryable failure when they are deleted or replaced again within `REOPEN_PAUSE`.
    pub(super) async fn connection(&mut self) -> Result<&mut SqliteConnection, Failure> {
        if !self.are_in_place() {
            if !self.next_reopening.is_past() {
                return Err(self.replaced());
            }
            self.next_reopening = Moment::now() + REOPEN_PAUSE;
            self.reopen().await;
        } else if self
            .open
            .as_ref()
            .and_then(|open| open.peer.as_ref())
            .is_some_and(Peer::is_outdated)
        {
            self.reopen().await;
        }
        let open = match self.open.take() {
            Some(open) => open,
            None => {
                let open = self.opened().await?;
                self.wakeup.wake_all();
                open
            }
        };
        Ok(&mut self.open.insert(open).connection)
    }

    /// Fails when the files were deleted or replaced: the last commit may be in files that no other process sees.
    pub(super) fn confirm(&self) -> Result<(), Failure> {
        if self.are_in_place() {
            Ok(())
        } else {
            Err(self.replaced())
        }
    }

    fn are_in_place(&self) -> bool {
        self.open.as_ref().is_none_or(|open| open.files.are_in_place())
    }

    /// Waits until another connection of this process finds that the files were deleted or replaced.
    pub(super) async fn outdated(&self) {
        match self.open.as_ref().and_then(|open| open.peer.as_ref()) {
            Some(peer) => peer.outdated().await,
            None => std::future::pending().await,
        }
    }

    /// Closes the connection because the files were deleted or replaced. The next call opens them.
    pub(super) async fn reopen(&mut self) {
        tracing::warn!(path = %self.path.display(), "the files of the database were deleted or replaced: opening them again");
        if let Some(open) = &mut self.open {
            if let Some(peer) = &open.peer {
                peer.outdate();
            }
            if open.files.were_replaced() {
                keep_log_apart(&mut open.connection).await;
            }
        }
        self.close().await;
    }

    /// Makes the connection usable after an error, or closes it. Returns the failure.
    pub(super) async fn failed(&mut self, error: sqlx::Error) -> Failure {
        let failure = self.failure(error);
        match (failure.kind(), &mut self.open) {
            // It fails when there is no transaction, which is harmless.
            (Kind::Busy, Some(open)) => drop(open.connection.execute("ROLLBACK").await),
            _ => self.close().await,
        }
        failure
    }

    pub(super) async fn close(&mut self) {
        if let Some(open) = self.open.take() {
            let _closing = match &open.peer {
                Some(peer) => Some(peer.closing().await),
                None => None,
            };
            // The peer is dropped later: a new connection must not share anything with this one.
            if let Err(error) = open.connection.close().await {
                tracing::debug!(%error, "the connection was closed already");
            }
        }
    }

    fn failure(&self, cause: sqlx::Error) -> Failure {
        Failure::of_driver(&self.place, kind_of(&self.path, &cause), cause)
    }

    fn replaced(&self) -> Failure {
        let message = "the database, its -wal or its -shm file was deleted or replaced";
        Failure::new(&self.place, Kind::Broken, message)
    }

    /// Opens the file. Retries while other connections prevent it.
    async fn opened(&self) -> Result<Open, Failure> {
        let deadline = Moment::now() + self.config.busy_timeout;
        loop {
            match self.try_open().await {
                // The change to the write-ahead log needs exclusive access, and SQLite does not wait for that.
                Err(failure) if matches!(failure.kind(), Kind::Busy | Kind::Broken) && !deadline.is_past() => {
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(2..25))).await;
                }
                outcome => return outcome,
            }
        }
    }

    async fn try_open(&self) -> Result<Open, Failure> {
        self.create_folder().map_err(|error| {
            let message = format!("its folder cannot be created: {error} (create it, or choose another path)");
            Failure::new(&self.place, of_system(&error), message)
        })?;
        let before = file_id(&self.path);
        let peer = match before {
            Some(database) => Some(self.joined(database).await?),
            None => None,
        };
        let options = SqliteConnectOptions::new()
            .filename(&self.path)
            .create_if_missing(true)
            .busy_timeout(self.config.busy_timeout)
            // A commit writes whole pages, and the rows are small.
            .page_size(1024)
            .synchronous(SqliteSynchronous::Normal)
            // The number of pages after which the log is copied into the file. Only this waits for the disk.
            .pragma("wal_autocheckpoint", "4000")
            // In bytes, more than these pages. While a reader is active, the log may be larger. It is truncated when the reader
            // has ended.
            .pragma("journal_size_limit", "8388608")
            .thread_name(|id| format!("holdfast-sqlite-{id}"))
            .disable_statement_logging();
        let mut connection = options.connect().await.map_err(|error| self.failure(error))?;
        // On an error the connection is dropped, which rolls back its transaction.
        self.prepare(&mut connection)
            .await
            .map_err(|error| self.failure(error))?;
        let files = Files::at(&self.path);
        if self.config.own_folder {
            files.make_private();
        }
        if before.is_some() && before != files.database() {
            // It is not known which of the two was opened.
            return Err(self.failure(sqlx::Error::WorkerCrashed));
        }
        let peer = match (peer, files.database()) {
            (None, Some(created)) => Some(self.joined(created).await?),
            (peer, _) => peer,
        };
        Ok(Open {
            connection,
            files,
            peer,
        })
    }

    async fn joined(&self, database: FileId) -> Result<Peer, Failure> {
        let joined = tokio::time::timeout(self.config.busy_timeout, Peers::join(database)).await;
        joined.map_err(|_| self.replaced())
    }

    async fn prepare(&self, connection: &mut SqliteConnection) -> sqlx::Result<()> {
        // Read the mode first: setting it needs exclusive access to the file.
        if text(connection, "PRAGMA journal_mode").await? != "wal" {
            let mode = text(connection, "PRAGMA journal_mode = WAL").await?;
            if mode != "wal" {
                // Another mode is correct, too, but slower.
                tracing::warn!(path = %self.path.display(), mode, "this file system cannot keep a write-ahead log");
            }
        }
        if !self.probe(connection).await? {
            Transaction::new(connection)
                .run(&self.statements.schema, true, |query| query)
                .await?;
            self.probe(connection).await?;
        }
        Ok(())
    }

    /// Whether the tables exist. Fails when other tables have their names.
    async fn probe(&self, connection: &mut SqliteConnection) -> sqlx::Result<bool> {
        match Transaction::new(connection)
            .read(&self.statements.probe, |query| query)
            .await
        {
            Ok(answers) => answers
                .first()
                .and_then(|answer| answer.rows.first())
                .map_or(Ok(false), |row| row.try_get(0)),
            Err(sqlx::Error::Database(error)) if error.message().starts_with("no such table") => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn create_folder(&self) -> std::io::Result<()> {
        let Some(folder) = self.path.parent() else {
            return Ok(());
        };
        let mut builder = DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        if self.config.own_folder {
            // Names and metadata of locks are private.
            std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        }
        builder.create(folder)
    }
}

/// Returns a number that differs from the last one if another connection has committed since.
pub(super) async fn data_version(connection: &mut SqliteConnection) -> sqlx::Result<i64> {
    connection.fetch_one("PRAGMA data_version").await?.try_get(0)
}

async fn text(connection: &mut SqliteConnection, sql: &'static str) -> sqlx::Result<String> {
    connection.fetch_one(sql).await?.try_get(0)
}

/// Makes SQLite leave the files alone when it closes the connection. By default the last connection copies its log to the
/// database and deletes the file with the log's name. Here the log is deleted, and other processes may have written to the
/// database since.
async fn keep_log_apart(connection: &mut SqliteConnection) {
    let Ok(mut handle) = connection.lock_handle().await else {
        return;
    };
    let no_result = std::ptr::null_mut::<std::ffi::c_int>();
    // SAFETY: the handle is open and locked. The option takes an int, and a pointer for the result that may be null.
    let code = unsafe {
        sqlite3_db_config(
            handle.as_raw_handle().as_ptr(),
            SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE,
            1 as std::ffi::c_int,
            no_result,
        )
    };
    if code != SQLITE_OK {
        tracing::warn!(code, "SQLite refused to disable the checkpoint on close");
    }
}
