//! The statements of the store, with its table names.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio_postgres::types::Type;

use crate::engine::sql::tables::without_comments;

/// Declares the statements, each with its file.
macro_rules! statements {
    ($($name:ident $file:literal)*) => {
        /// A statement: its index in [`Statements`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Sql {
            $($name,)*
        }

        const FILES: &[&str] = &[$(include_str!(concat!("statements/", $file, ".sql"))),*];
    };
}

statements! {
    Acquire "single/acquire"
    AcquireOne "single/acquire_one"
    Renew "single/renew"
    Release "single/release"
    ReleaseOne "single/release_one"
    HandOff "single/hand_off"
    Lock "transaction/lock"
    Rows "transaction/rows"
    Expired "transaction/expired"
    Shares "transaction/shares"
    Queue "transaction/queue"
    Leave "transaction/leave"
    Enter "transaction/enter"
    Notify "transaction/notify"
    Write "transaction/write"
    WriteShares "transaction/write_shares"
    Heartbeat "heartbeat"
    Check "check"
    CheckShares "check_shares"
    List "single/list"
    ClaimSweep "claim_sweep"
    OldSnapshot "old_snapshot"
    Sweep "sweep"
    ExpiredPositions "expired_positions"
    Privileges "privileges"
}

/// A statement with its table names.
pub(super) struct Statement {
    /// The text for a session with the settings of [`dial`](super::dial).
    text: String,
    /// The text for a session without these settings, as behind a pooler: the statement limits its wait for a locked row.
    limited: String,
    /// The types of its parameters.
    pub types: Vec<Type>,
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
        let all = FILES.iter().map(|file| Statement {
            text: of_file(file).replace("{lock_timeout}", ""),
            limited: of_file(file).replace("{lock_timeout}", &limit),
            types: types(&of_file(file)),
        });
        Statements {
            schema: schema.to_owned(),
            create: of_file(include_str!("statements/schema.sql")),
            begins: [lock_wait_ms, BRIEF_LOCK_WAIT_MS].map(|lock_wait_ms| {
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

/// Returns the types of the parameters of a statement, each of which has a cast: `$1::text[]`.
fn types(text: &str) -> Vec<Type> {
    let parameter = |part: &str| {
        let (number, rest) = part.split_once("::")?;
        let end = rest.find(|letter: char| !letter.is_ascii_lowercase());
        let (name, rest) = rest.split_at(end.unwrap_or(rest.len()));
        let of_type = match (name, rest.starts_with("[]")) {
            ("bigint", false) => Type::INT8,
            ("bigint", true) => Type::INT8_ARRAY,
            ("boolean", true) => Type::BOOL_ARRAY,
            ("bytea", false) => Type::BYTEA,
            ("bytea", true) => Type::BYTEA_ARRAY,
            ("integer", true) => Type::INT4_ARRAY,
            ("text", false) => Type::TEXT,
            ("text", true) => Type::TEXT_ARRAY,
            _ => return None,
        };
        Some((number.parse().ok()?, of_type))
    };
    let by_number: BTreeMap<usize, Type> = text.split('$').filter_map(parameter).collect();
    by_number.into_values().collect()
}

/// The schema of a table whose name has none.
pub(super) const SCHEMA: &str = "holdfast";

/// How long a brief transaction waits for a lock.
const BRIEF_LOCK_WAIT_MS: u128 = 10;

/// The key of the advisory lock under which tables are created: "holdfast" in ASCII.
const CREATION_LOCK: i64 = 0x686f_6c64_6661_7374;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_parameter_has_a_type() {
        let statements = Statements::new("locks", Duration::from_secs(1));
        for one in statements.all() {
            let numbers = (1..).take_while(|number| one.text.contains(&format!("${number}")));
            assert_eq!(one.types.len(), numbers.count(), "{}", one.text);
        }
        let types = &statements.get(Sql::HandOff).types;
        assert_eq!(*types, [Type::BYTEA_ARRAY, Type::TEXT_ARRAY, Type::TEXT, Type::INT8]);
        assert_eq!(statements.get(Sql::Privileges).types, []);
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
