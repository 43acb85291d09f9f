//! The statements of the store, with its table names, and the transactions that execute them.

use futures_util::TryStreamExt;
use sqlx::query::Query;
use sqlx::sqlite::{Sqlite, SqliteArguments, SqliteConnection, SqliteRow};
use sqlx::{AssertSqlSafe, Either, Executor, SqlSafeStr, SqlStr};

use crate::engine::sql::tables::without_comments;

/// `BEGIN IMMEDIATE` takes the write lock at once. Otherwise the data that a transaction read could be outdated when it writes.
const BEGIN: &str = "BEGIN IMMEDIATE;\n";
const COMMIT: &str = "\nCOMMIT;";

/// The answers of the statements of a script, in their order.
pub(super) type Answers = Vec<Answer>;

/// The answer of one statement.
pub(super) struct Answer {
    pub rows: Vec<SqliteRow>,
    /// Number of rows that it changed.
    pub changed: u64,
}

pub(super) type Bound<'q> = Query<'q, Sqlite, SqliteArguments>;

/// Statements that the database executes in one exchange.
///
/// An exchange with the driver costs two switches between threads, which take longer than most statements. So a script is one
/// exchange, and it can include the begin and the commit of its transaction.
pub(super) struct Script {
    /// The text alone, with the begin, with the commit, with both.
    texts: [SqlStr; 4],
}

impl Script {
    fn new(file: &str, table: &str) -> Self {
        // Remove the comments: the text is hashed at every call.
        let text = without_comments(file).replace("{table}", table);
        let sql = |text: String| AssertSqlSafe(std::sync::Arc::<str>::from(text)).into_sql_str();
        Script {
            texts: [
                sql(text.clone()),
                sql(format!("{BEGIN}{text}")),
                sql(format!("{text}{COMMIT}")),
                sql(format!("{BEGIN}{text}{COMMIT}")),
            ],
        }
    }
}

/// Every script of a store.
pub(super) struct Statements {
    pub schema: Script,
    pub probe: Script,
    pub snapshot: Script,
    pub snapshot_share: Script,
    pub grant: Script,
    pub grant_again: Script,
    pub enqueue: Script,
    pub next_waiters: Script,
    pub renew: Script,
    pub release: Script,
    pub force_release: Script,
    pub list: Script,
    pub sweep: Script,
}

impl Statements {
    /// Creates the statements for tables whose names start with `table`, which is safe inside quotes.
    pub(super) fn new(table: &str) -> Self {
        Statements {
            schema: Script::new(include_str!("statements/schema.sql"), table),
            probe: Script::new(include_str!("statements/probe.sql"), table),
            snapshot: Script::new(include_str!("statements/snapshot.sql"), table),
            snapshot_share: Script::new(include_str!("statements/snapshot_share.sql"), table),
            grant: Script::new(include_str!("statements/grant.sql"), table),
            grant_again: Script::new(include_str!("statements/grant_again.sql"), table),
            enqueue: Script::new(include_str!("statements/queue/enqueue.sql"), table),
            next_waiters: Script::new(include_str!("statements/queue/next_waiters.sql"), table),
            renew: Script::new(include_str!("statements/renew.sql"), table),
            release: Script::new(include_str!("statements/release.sql"), table),
            force_release: Script::new(include_str!("statements/force_release.sql"), table),
            list: Script::new(include_str!("statements/list.sql"), table),
            sweep: Script::new(include_str!("statements/sweep.sql"), table),
        }
    }
}

/// A connection and its transaction, which begins with the first script that needs it.
///
/// Dropping it does not roll back: after an error the owner of the connection does. The only task that uses it is never dropped
/// during a transaction.
pub(super) struct Transaction<'c> {
    connection: &'c mut SqliteConnection,
    open: bool,
}

impl<'c> Transaction<'c> {
    pub(super) fn new(connection: &'c mut SqliteConnection) -> Self {
        Transaction {
            connection,
            open: false,
        }
    }

    /// Executes a script within the transaction. `last`: commits with it.
    pub(super) async fn run(
        &mut self,
        script: &Script,
        last: bool,
        bind: impl FnOnce(Bound<'_>) -> Bound<'_>,
    ) -> sqlx::Result<Answers> {
        let begins = !std::mem::replace(&mut self.open, !last);
        let mut answers = self
            .fetch(script, usize::from(begins) | usize::from(last) << 1, bind)
            .await?;
        // The begin is a statement with an answer, too.
        answers.drain(..usize::from(begins).min(answers.len()));
        Ok(answers)
    }

    /// Executes a script that only reads, within the transaction if there is one. Without one it waits for no other process.
    pub(super) async fn read(
        &mut self,
        script: &Script,
        bind: impl FnOnce(Bound<'_>) -> Bound<'_>,
    ) -> sqlx::Result<Answers> {
        self.fetch(script, 0, bind).await
    }

    /// Commits, unless a script did.
    pub(super) async fn finish(self) -> sqlx::Result<()> {
        if self.open {
            self.connection.execute(sqlx::query("COMMIT")).await.map(drop)
        } else {
            Ok(())
        }
    }

    async fn fetch(
        &mut self,
        script: &Script,
        variant: usize,
        bind: impl FnOnce(Bound<'_>) -> Bound<'_>,
    ) -> sqlx::Result<Answers> {
        // Of the drivers, only that of SQLite accepts several statements with arguments in one text.
        let query = bind(sqlx::query(script.texts[variant].clone()));
        let mut results = self.connection.fetch_many(query);
        let mut answers = Vec::new();
        let mut rows = Vec::new();
        while let Some(result) = results.try_next().await? {
            match result {
                Either::Right(row) => rows.push(row),
                Either::Left(done) => {
                    answers.push(Answer {
                        rows: std::mem::take(&mut rows),
                        changed: done.rows_affected(),
                    });
                }
            }
        }
        Ok(answers)
    }
}
