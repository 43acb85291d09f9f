//! The file: opened, made when it is missing, and opened again when it was lost.

use std::fs::DirBuilder;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, Executor, Row};

use super::failure::{Failure, Kind};
use super::statements::{Statements, Transaction};
use crate::clock::Moment;
use crate::engine::sql::config::SqliteConfig;

/// After the file was found to be another one, the next look is not before so long: on a file system whose inode
/// numbers wander, every look would find another file.
const LOOK_PAUSE: Duration = Duration::from_millis(250);

/// The one connection of an engine.
pub(super) struct File {
    config: SqliteConfig,
    path: Arc<Path>,
    statements: Arc<Statements>,
    open: Option<Open>,
    /// No look at the file's identity before this moment.
    next_look: Moment,
}

struct Open {
    connection: SqliteConnection,
    identity: Option<Identity>,
}

impl File {
    pub(super) fn new(config: SqliteConfig, statements: Arc<Statements>) -> Self {
        File {
            path: config.path().into(),
            config,
            statements,
            open: None,
            next_look: Moment::now(),
        }
    }

    /// The connection, and whether it is a new one.
    ///
    /// # Behavior
    /// A connection goes on with the file that it opened even when that was deleted or replaced since, and would lock a
    /// ghost that no other process sees. So each call compares the inode at the path with the one that was opened. (It
    /// must not open the file for that: to close it again would give up the process's POSIX locks on it.)
    pub(super) async fn connection(&mut self) -> Result<(&mut SqliteConnection, bool), Failure> {
        let known = self.open.as_ref().and_then(|open| open.identity);
        if known.is_some() && self.next_look.is_past() && identity(&self.path) != known {
            tracing::warn!(path = %self.path.display(), "the file of the locks was deleted or replaced: opening it anew");
            self.next_look = Moment::now() + LOOK_PAUSE;
            self.close().await;
        }
        let (open, fresh) = match self.open.take() {
            Some(open) => (open, false),
            None => (self.opened().await?, true),
        };
        Ok((&mut self.open.insert(open).connection, fresh))
    }

    /// Makes the connection fit for use after an error, or gives it up.
    pub(super) async fn recover(&mut self, failure: &Failure) {
        match (failure.kind(), &mut self.open) {
            // It fails when no transaction was begun, which is just as well.
            (Kind::Busy, Some(open)) => drop(open.connection.execute("ROLLBACK").await),
            _ => self.close().await,
        }
    }

    pub(super) async fn close(&mut self) {
        if let Some(open) = self.open.take()
            && let Err(error) = open.connection.close().await
        {
            tracing::debug!(%error, "the connection was gone already");
        }
    }

    pub(super) fn failure(&self, cause: sqlx::Error) -> Failure {
        Failure::of_driver(&self.path, cause)
    }

    /// Opens the file, for as long as others are in the way.
    async fn opened(&self) -> Result<Open, Failure> {
        let deadline = Moment::now() + self.config.patience;
        loop {
            match self.try_open().await {
                // Switching to the write-ahead log needs the file alone, and SQLite does not wait for that.
                Err(failure) if failure.kind() != Kind::Stuck && !deadline.is_past() => {
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(2..25))).await;
                }
                outcome => return outcome,
            }
        }
    }

    async fn try_open(&self) -> Result<Open, Failure> {
        self.make_folder()
            .map_err(|error| Failure::of_folder(&self.path, &error))?;
        let before = identity(&self.path);
        let options = SqliteConnectOptions::new()
            .filename(&self.path)
            .create_if_missing(true)
            .busy_timeout(self.config.patience)
            // A commit writes whole pages, and the rows are small.
            .page_size(1024)
            .synchronous(SqliteSynchronous::Normal)
            // Every so many pages the log is copied into the file, which is the one time that the disk is waited for.
            .pragma("wal_autocheckpoint", "4000")
            .thread_name(|id| format!("holdfast-sqlite-{id}"))
            .disable_statement_logging();
        let mut connection = options.connect().await.map_err(|error| self.failure(error))?;
        // On an error the connection is dropped, and whatever it began is rolled back.
        self.prepare(&mut connection)
            .await
            .map_err(|error| self.failure(error))?;
        let identity = identity(&self.path);
        if before.is_some() && before != identity {
            // Which of the two was opened is not known.
            return Err(self.failure(sqlx::Error::WorkerCrashed));
        }
        Ok(Open { connection, identity })
    }

    async fn prepare(&self, connection: &mut SqliteConnection) -> sqlx::Result<()> {
        // Only a file that is not in this mode yet is switched: the switch needs the file alone, the question does not.
        if text(connection, "PRAGMA journal_mode").await? != "wal" {
            let mode = text(connection, "PRAGMA journal_mode = WAL").await?;
            if mode != "wal" {
                // Correct all the same, and slower.
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

    /// Whether the tables are there. An error when there are others of the same name.
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

    fn make_folder(&self) -> std::io::Result<()> {
        let Some(folder) = self.path.parent() else {
            return Ok(());
        };
        let mut builder = DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        if self.config.own_folder {
            // Names and metadata of locks are nobody else's business.
            std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        }
        builder.create(folder)
    }
}

async fn text(connection: &mut SqliteConnection, sql: &'static str) -> sqlx::Result<String> {
    connection.fetch_one(sql).await?.try_get(0)
}

/// What tells a file from another one that takes its path.
type Identity = (u64, u64);

#[cfg(unix)]
fn identity(path: &Path) -> Option<Identity> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Windows does not let anybody delete or replace a file that SQLite has open.
#[cfg(not(unix))]
fn identity(_path: &Path) -> Option<Identity> {
    None
}
