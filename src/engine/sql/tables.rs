//! The names of tables, and the files of statements.

use crate::error::LockError;

/// Maximum length of a table name, without suffixes (`_waiters`), and of the name of its schema.
const MAX_TABLE: usize = 51;

/// Returns the text of a file of statements without its comments.
pub(super) fn without_comments(file: &str) -> String {
    let lines = file.lines().filter(|line| !line.trim_start().starts_with("--"));
    lines.collect::<Vec<_>>().join("\n").trim().to_owned()
}

/// Returns a table name that is safe inside quotes: `name`, or on a server `schema.name`.
pub(super) fn checked_table(table: &str, is_on_server: bool) -> Result<String, LockError> {
    let is_name = |name: &str| {
        let starts = name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
        let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        starts && name.bytes().all(is_of_name) && name.len() <= MAX_TABLE
    };
    let is_reserved = !is_on_server && table.to_ascii_lowercase().starts_with("sqlite_");
    let names = if is_on_server { 2 } else { 1 };
    if !is_reserved && table.split('.').count() <= names && table.split('.').all(is_name) {
        return Ok(table.to_owned());
    }
    let others = match is_on_server {
        true => ", or two such names: schema.table",
        false => " or with sqlite_",
    };
    let rule = format!("must be 1 to 51 letters, digits and underscores, not starting with a digit{others}");
    Err(LockError::invalid("table", &rule, format_args!("{table:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_names_are_checked() {
        assert_eq!(checked_table("app.locks", true).unwrap(), "app.locks");
        for bad in ["", "a\"b", "a`b", "a.b.c", ".b", "1a", &"x".repeat(52)] {
            let error = checked_table(bad, true).unwrap_err();
            assert!(error.message.starts_with("table "), "{bad}");
        }
    }
}
