//! The tables of a store.

use super::packet::{Bytes, Packet, list, rows};
use super::session::MysqlSession;
use crate::engine::sql::failure::{Failure, Kind};
use crate::engine::sql::server::Outcome;
use crate::engine::sql::tables::without_comments;

/// The columns of the tables.
const LOCKS: &str = "name, owner, fence, expires_at, queued, since, host, pid, metadata, permits, permit_limit";
const WAITERS: &str = "ticket, owner, name, alive_until, process, hold_ms, host, pid, permits, permit_limit";

/// The names of the tables, quoted.
pub(super) struct Tables {
    pub locks: String,
    pub waiters: String,
    /// What finds the tables in the catalogue.
    in_catalogue: String,
}

impl Tables {
    /// Creates the names for `table`: `name`, in `database`, or `schema.name`. They are safe inside quotes; `database` may not
    /// be. Each name includes its database, because behind a proxy the session may have that of another program. Without a
    /// database the server refuses the statements.
    pub(super) fn new(table: &str, database: &str) -> Self {
        let (schema, name) = table.split_once('.').unwrap_or((database, table));
        let quoted = |suffix: &str| match schema {
            "" => format!("`{name}{suffix}`"),
            schema => format!("`{}`.`{name}{suffix}`", schema.replace('`', "``")),
        };
        let schema = format!("CONVERT({} USING utf8mb4)", Bytes(schema));
        Tables {
            locks: quoted(""),
            waiters: quoted("_waiters"),
            in_catalogue: format!("table_schema = {schema} AND table_name IN ('{name}', '{name}_waiters')"),
        }
    }

    /// Creates the tables.
    fn schema(&self) -> Packet {
        let text = without_comments(include_str!("schema.sql"))
            .replace("{locks}", &self.locks)
            .replace("{waiters}", &self.waiters);
        let mut packet = Packet::default();
        let statements = text.split(';').map(str::trim).filter(|statement| !statement.is_empty());
        statements.for_each(|statement| _ = packet.add(statement));
        packet
    }
}

/// Makes a connection ready for statements. Creates the tables if they are missing.
pub(super) async fn set_up(session: &mut MysqlSession) -> Outcome<()> {
    match probe(session).await {
        Err(failure) if failure.kind() == Kind::NoTable => {
            let schema = session.server.tables.schema();
            session.run(schema, &mut Vec::new()).await?;
            probe(session).await
        }
        probed => probed,
    }
}

/// Checks the tables. Sets the isolation level.
async fn probe(session: &mut MysqlSession) -> Outcome<()> {
    let mut packet = Packet::default();
    // Each statement reads committed rows. Where the server refuses that, the first read of a transaction follows its locks.
    let level = if session.reads_committed {
        "READ COMMITTED"
    } else {
        "REPEATABLE READ"
    };
    packet.add(format_args!("SET SESSION TRANSACTION ISOLATION LEVEL {level}"));
    let Tables {
        locks,
        waiters,
        in_catalogue,
    } = &session.server.tables;
    for (table, columns) in [(locks, LOCKS), (waiters, WAITERS)] {
        // The error of a missing column or key names the table.
        let columns = list(columns.split(", ").map(|column| format!("{table}.{column}")));
        packet.add(format_args!(
            "SELECT {columns} FROM {table} FORCE INDEX (PRIMARY) LIMIT 0"
        ));
    }
    let engines = packet.add(format_args!(
        "SELECT engine, table_name FROM information_schema.tables WHERE {in_catalogue}"
    ));
    let mut answers = Vec::new();
    session.run(packet, &mut answers).await?;
    for row in rows(&answers, engines) {
        let (engine, table) = (row.text(0), row.text(1).unwrap_or_default());
        if let Some(engine) = engine.filter(|engine| !engine.eq_ignore_ascii_case("InnoDB")) {
            let message = format!(
                "the table {table} has the storage engine {engine} instead of InnoDB: ALTER TABLE {table} ENGINE = InnoDB, or choose \
                 another name with the option table"
            );
            return Err(Failure::new(
                &session.server.connections.place,
                Kind::Permanent,
                message,
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_names_are_quoted() {
        let text = Tables::new("app.locks", "other").schema().text;
        assert!(
            text.contains("`app`.`locks` (") && text.contains("`app`.`locks_waiters` (") && !text.contains('{'),
            "{text}"
        );
        assert_eq!(Tables::new("locks", "a`b.c").waiters, "`a``b.c`.`locks_waiters`");
        assert_eq!(Tables::new("locks", "").locks, "`locks`");
    }
}
