//! The statements of the store, as texts with this store's table names, and transactions made of them.

use futures_util::TryStreamExt;
use sqlx::query::Query;
use sqlx::sqlite::{Sqlite, SqliteArguments, SqliteConnection, SqliteRow};
use sqlx::{AssertSqlSafe, Either, Executor, SqlSafeStr, SqlStr};

/// `BEGIN IMMEDIATE` takes the write lock at once: a transaction that read first could find, when it comes to write,
/// that what it read is out of date.
const BEGIN: &str = "BEGIN IMMEDIATE;\n";
const COMMIT: &str = "\nCOMMIT;";

/// What the statements of a script answered, in their order.
pub(super) type Answers = Vec<Answer>;

/// What one statement answered.
pub(super) struct Answer {
    pub rows: Vec<SqliteRow>,
    /// How many rows it changed.
    pub changed: u64,
}

pub(super) type Bound<'q> = Query<'q, Sqlite, SqliteArguments>;

/// A few statements that go to the database in one go.
///
/// Every exchange with the driver costs two switches between threads, which is more than most statements take. So a
/// script is one exchange, and where it starts or ends a transaction, it says so itself.
pub(super) struct Script {
    /// The text alone, with the begin, with the commit, with both.
    texts: [SqlStr; 4],
}

impl Script {
    fn new(file: &str, table: &str) -> Self {
        // The comments are for the reader of the file; as part of the text they would be hashed at every call.
        let lines: Vec<&str> = file
            .lines()
            .filter(|line| !line.trim_start().starts_with("--"))
            .collect();
        let text = lines.join("\n").trim().replace("{table}", table);
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
    pub look: Script,
    pub grant: Script,
    pub grant_again: Script,
    pub enqueue: Script,
    pub renew: Script,
    pub transfer: Script,
    pub release: Script,
    pub force_release: Script,
    pub list: Script,
    pub sweep: Script,
}

impl Statements {
    /// For tables whose names begin with `table`, which is safe inside quotes.
    pub(super) fn new(table: &str) -> Self {
        Statements {
            schema: Script::new(include_str!("schema.sql"), table),
            probe: Script::new(include_str!("probe.sql"), table),
            look: Script::new(include_str!("look.sql"), table),
            grant: Script::new(include_str!("grant.sql"), table),
            grant_again: Script::new(include_str!("grant_again.sql"), table),
            enqueue: Script::new(include_str!("enqueue.sql"), table),
            renew: Script::new(include_str!("renew.sql"), table),
            transfer: Script::new(include_str!("transfer.sql"), table),
            release: Script::new(include_str!("release.sql"), table),
            force_release: Script::new(include_str!("force_release.sql"), table),
            list: Script::new(include_str!("list.sql"), table),
            sweep: Script::new(include_str!("sweep.sql"), table),
        }
    }
}

/// A connection, and how far its transaction is. It begins with the first script that needs it.
///
/// Nothing is rolled back on drop: whoever owns the connection does that after an error, and this is never dropped in
/// the middle, because the one task that uses it is not.
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

    /// Carries a script out within the transaction. `last`: commit with it.
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
        // The begin is a statement that answered, too.
        answers.drain(..usize::from(begins).min(answers.len()));
        Ok(answers)
    }

    /// Carries a script that only reads out, within the transaction if there is one: without one it waits for nobody.
    pub(super) async fn read(
        &mut self,
        script: &Script,
        bind: impl FnOnce(Bound<'_>) -> Bound<'_>,
    ) -> sqlx::Result<Answers> {
        self.fetch(script, 0, bind).await
    }

    /// Commits what has not been committed by a script.
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
        // Several statements with arguments in one text is what the SQLite driver takes and the others do not.
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
