//! The statements of the store, with its table names.

use std::time::Duration;

use tokio_postgres::types::Type;

use crate::engine::sql::server::BRIEF_LOCK_WAIT;

/// A statement: its index in [`Statements`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sql {
    Acquire,
    AcquireOne,
    Renew,
    Release,
    ReleaseOne,
    HandOff,
    Lock,
    Locked,
    Rows,
    Queue,
    Leave,
    Enter,
    Notify,
    Write,
    Heartbeat,
    Check,
    List,
    PageBound,
    ClaimSweep,
    OldSnapshot,
    Sweep,
    ExpiredPositions,
    Privileges,
}

/// The file of each statement, and the types of its parameters.
const FILES: [(Sql, &str, &[Type]); 23] = [
    (
        Sql::Acquire,
        include_str!("statements/single/acquire.sql"),
        &[
            Type::BYTEA_ARRAY,
            Type::TEXT_ARRAY,
            Type::INT8_ARRAY,
            Type::TEXT_ARRAY,
            Type::INT8_ARRAY,
            Type::TEXT_ARRAY,
        ],
    ),
    (
        Sql::AcquireOne,
        include_str!("statements/single/acquire_one.sql"),
        &[Type::BYTEA, Type::TEXT, Type::INT8, Type::TEXT, Type::INT8, Type::TEXT],
    ),
    (
        Sql::Renew,
        include_str!("statements/single/renew.sql"),
        &[Type::BYTEA_ARRAY, Type::TEXT_ARRAY, Type::INT8_ARRAY],
    ),
    (
        Sql::Release,
        include_str!("statements/single/release.sql"),
        &[Type::BYTEA_ARRAY, Type::TEXT_ARRAY],
    ),
    (
        Sql::ReleaseOne,
        include_str!("statements/single/release_one.sql"),
        &[Type::BYTEA, Type::TEXT],
    ),
    (
        Sql::HandOff,
        include_str!("statements/single/hand_off.sql"),
        &[Type::BYTEA_ARRAY, Type::TEXT_ARRAY, Type::TEXT, Type::INT8],
    ),
    (
        Sql::Lock,
        include_str!("statements/transaction/lock.sql"),
        &[Type::BYTEA_ARRAY, Type::BOOL_ARRAY],
    ),
    (
        Sql::Locked,
        include_str!("statements/transaction/locked.sql"),
        &[Type::BYTEA_ARRAY],
    ),
    (
        Sql::Rows,
        include_str!("statements/transaction/rows.sql"),
        &[Type::BYTEA_ARRAY],
    ),
    (
        Sql::Queue,
        include_str!("statements/transaction/queue.sql"),
        &[Type::BYTEA_ARRAY, Type::TEXT_ARRAY, Type::INT8],
    ),
    (
        Sql::Leave,
        include_str!("statements/transaction/leave.sql"),
        &[Type::TEXT_ARRAY, Type::BYTEA_ARRAY, Type::INT8],
    ),
    (
        Sql::Enter,
        include_str!("statements/transaction/enter.sql"),
        &[
            Type::TEXT_ARRAY,
            Type::BYTEA_ARRAY,
            Type::INT8_ARRAY,
            Type::INT4_ARRAY,
            Type::TEXT_ARRAY,
            Type::INT8_ARRAY,
            Type::INT8_ARRAY,
            Type::TEXT,
        ],
    ),
    (
        Sql::Notify,
        include_str!("statements/transaction/notify.sql"),
        &[Type::TEXT_ARRAY, Type::TEXT_ARRAY],
    ),
    (
        Sql::Write,
        include_str!("statements/transaction/write.sql"),
        &[
            Type::BYTEA_ARRAY,
            Type::TEXT_ARRAY,
            Type::INT8_ARRAY,
            Type::INT8_ARRAY,
            Type::BOOL_ARRAY,
            Type::TEXT_ARRAY,
            Type::INT8_ARRAY,
            Type::TEXT_ARRAY,
        ],
    ),
    (
        Sql::Heartbeat,
        include_str!("statements/heartbeat.sql"),
        &[Type::TEXT, Type::INT8, Type::TEXT_ARRAY],
    ),
    (
        Sql::Check,
        include_str!("statements/check.sql"),
        &[Type::BYTEA_ARRAY, Type::TEXT, Type::INT8],
    ),
    (
        Sql::List,
        include_str!("statements/single/list.sql"),
        &[Type::BYTEA, Type::BYTEA, Type::INT8],
    ),
    (
        Sql::PageBound,
        include_str!("statements/single/page_bound.sql"),
        &[Type::BYTEA, Type::BYTEA, Type::INT8],
    ),
    (
        Sql::ClaimSweep,
        include_str!("statements/claim_sweep.sql"),
        &[Type::BYTEA, Type::INT8],
    ),
    (Sql::OldSnapshot, include_str!("statements/old_snapshot.sql"), &[]),
    (
        Sql::Sweep,
        include_str!("statements/sweep.sql"),
        &[Type::INT8, Type::INT8, Type::BYTEA],
    ),
    (
        Sql::ExpiredPositions,
        include_str!("statements/expired_positions.sql"),
        &[Type::INT8, Type::INT8],
    ),
    (Sql::Privileges, include_str!("statements/privileges.sql"), &[]),
];

/// A statement with its table names.
pub(super) struct Statement {
    /// The text for a session with the settings of [`dial`](super::dial).
    text: String,
    /// The text for a session without these settings, as behind a pooler: the statement limits its wait for a locked row.
    limited: String,
    pub types: &'static [Type],
}

impl Statement {
    /// Returns the text. `has_options`: whether the options of the session were sent.
    pub(super) fn text(&self, has_options: bool) -> &str {
        if has_options { &self.text } else { &self.limited }
    }
}

/// Every statement of a store.
pub(super) struct Statements {
    /// The schema of the tables.
    pub schema: String,
    /// Creates the tables, as one transaction.
    create: String,
    /// The statements that begin a transaction: with the usual lock timeout, and with a brief one.
    begins: [String; 2],
    all: Vec<Statement>,
}

impl Statements {
    /// Creates the statements for `table`: `name`, in [`SCHEMA`], or `schema.name`, both safe inside quotes. They wait for a
    /// locked row for `lock_wait`. Each name includes its schema, because the `search_path` of a session may be that of another
    /// program (behind a pooler) or of the role.
    pub(super) fn new(table: &str, lock_wait: Duration) -> Self {
        let (schema, name) = table.split_once('.').unwrap_or((SCHEMA, table));
        let quoted = |suffix: &str| format!("\"{schema}\".\"{name}{suffix}\"");
        let grant = without_comments(include_str!("statements/single/grant.sql"));
        let of_file = |file: &str| {
            without_comments(file)
                .replace("{grant}", &grant)
                .replace("{locks}", &quoted(""))
                .replace("{waiters}", &quoted("_waiters"))
                .replace("{queue_index}", &format!("\"{name}_waiters_queue\""))
                .replace("{process_index}", &format!("\"{name}_waiters_process\""))
        };
        let lock_wait_ms = lock_wait.as_millis();
        let limit = format!(", set_config('lock_timeout', '{lock_wait_ms}', true)");
        let all = FILES.iter().map(|(_, file, types)| Statement {
            text: of_file(file).replace("{lock_timeout}", ""),
            limited: of_file(file).replace("{lock_timeout}", &limit),
            types,
        });
        Statements {
            schema: schema.to_owned(),
            create: of_file(include_str!("statements/schema.sql")),
            begins: [lock_wait_ms, BRIEF_LOCK_WAIT.as_millis()].map(|lock_wait_ms| {
                format!(
                    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = 2000; \
                     SET LOCAL lock_timeout = {lock_wait_ms}; SET LOCAL client_min_messages = warning"
                )
            }),
            all: all.collect(),
        }
    }

    /// Returns the statements that begin a transaction. A process that is stopped during one holds the locks of its rows: the server ends its
    /// session then. Behind a pooler a session does not have these settings.
    pub(super) fn begin(&self, is_brief: bool) -> &str {
        &self.begins[usize::from(is_brief)]
    }

    /// Returns the statements that create the tables, and before them their schema if it is missing: `IF NOT EXISTS` alone would
    /// need the privilege to create schemas. Two concurrent creations fail, also with `IF NOT EXISTS`.
    pub(super) fn create(&self, has_schema: bool) -> String {
        let Statements { schema, create, .. } = self;
        let create_schema = match has_schema {
            true => String::new(),
            false => format!("CREATE SCHEMA IF NOT EXISTS \"{schema}\";"),
        };
        format!(
            "BEGIN; SET LOCAL lock_timeout = 0; SELECT pg_advisory_xact_lock({CREATION_LOCK}); {create_schema} {create} COMMIT;"
        )
    }

    /// Returns a statement.
    pub(super) fn get(&self, sql: Sql) -> &Statement {
        &self.all[sql as usize]
    }

    /// Returns every statement in the order of [`Sql`].
    pub(super) fn all(&self) -> &[Statement] {
        &self.all
    }
}

fn without_comments(file: &str) -> String {
    let lines = file.lines().filter(|line| !line.trim_start().starts_with("--"));
    lines.collect::<Vec<_>>().join("\n").trim().to_owned()
}

/// The schema of a table whose name has none.
pub(super) const SCHEMA: &str = "holdfast";

/// The key of the advisory lock under which tables are created: "holdfast" in ASCII.
const CREATION_LOCK: i64 = 0x686f_6c64_6661_7374;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_statement_is_at_its_place() {
        for (place, (sql, _, _)) in FILES.iter().enumerate() {
            assert_eq!(*sql as usize, place, "{sql:?}");
        }
    }

    #[test]
    fn table_names_are_quoted_and_have_a_schema() {
        let own = Statements::new("locks", Duration::from_secs(1));
        assert!(
            own.create.contains("\"holdfast\".\"locks_waiters\" ("),
            "{}",
            own.create
        );
        let statements = Statements::new("app.locks", Duration::from_secs(1));
        let text = &statements.get(Sql::Write).text;
        assert!(
            text.contains("\"app\".\"locks\" AS l") && text.contains("\"app\".\"locks_waiters\""),
            "{text}"
        );
        for one in statements.all() {
            let (named, with_schema) = (one.limited.matches("\"locks"), one.limited.matches("\"app\".\"locks"));
            assert_eq!(named.count(), with_schema.count(), "{}", one.limited);
        }
        assert!(
            !statements
                .all()
                .iter()
                .any(|one| one.text.contains('{') || one.limited.contains('{'))
        );
        let limited = statements.all().iter().filter(|one| one.text != one.limited);
        assert_eq!(limited.count(), 2, "the attempts");
    }
}
