//! The names of tables.

use crate::error::LockError;

/// Maximum length of a table name, without suffixes (`_waiters`), and of the name of its schema.
const MAX_TABLE: usize = 51;

/// The number of connections for calls without a setting: the parts of the queue, and the transactions.
pub(in crate::engine::sql) const FOR_CALLS: u32 = 4;

/// The options of a URL that are about a pool of connections, as Prisma has it. They are ignored.
pub(in crate::engine::sql) const POOL_OPTIONS: [&str; 4] = [
    "connection_limit",
    "pool_timeout",
    "socket_timeout",
    "statement_cache_size",
];

/// Returns a table name that is safe inside quotes: `name` or `schema.name`.
pub(in crate::engine::sql) fn checked_table(table: &str) -> Result<String, LockError> {
    let is_name = |name: &str| {
        let mut bytes = name.bytes();
        bytes
            .next()
            .is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
            && name.len() <= MAX_TABLE
    };
    if table.split('.').count() <= 2 && table.split('.').all(is_name) {
        return Ok(table.to_owned());
    }
    Err(LockError::invalid(
        "table",
        "must be 1 to 51 letters, digits and underscores, not starting with a digit, or two such names: schema.table",
        format_args!("{table:?}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_names_are_checked() {
        assert_eq!(checked_table("app.locks").unwrap(), "app.locks");
        for bad in ["", "a\"b", "a`b", "a.b.c", ".b", "1a", &"x".repeat(52)] {
            assert!(checked_table(bad).unwrap_err().message.starts_with("table "), "{bad}");
        }
    }
}
