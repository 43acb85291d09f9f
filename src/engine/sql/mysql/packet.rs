//! Several statements in one packet, and their answers. All values are digits, `NULL`, `x'…'`, or `_binary'…'` with only ASCII letters,
//! digits and `-_.:/@`. Every SQL mode reads them in the same way.

use std::fmt::{self, Display, Write};

use sqlx::Row as _;
use sqlx::mysql::MySqlRow;

/// The server's clock at the beginning of a statement, in microseconds since 1970.
pub(super) const NOW: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";
/// Sets `@u` to the server's clock, in microseconds since 1970.
pub(super) const CLOCK: &str = "SET @u = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/// Statements, each of which has one answer.
#[derive(Default)]
pub(super) struct Packet {
    pub text: String,
    statements: usize,
}

impl Packet {
    /// Adds a statement, and returns the index of its answer.
    pub(super) fn add(&mut self, statement: impl Display) -> usize {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{statement};");
        self.statements += 1;
        self.statements - 1
    }
}

/// The answer of one statement.
pub(super) struct Answer {
    pub rows: Vec<Row>,
    /// The number of rows that an `UPDATE` matched.
    pub affected: u64,
    /// The last value of `LAST_INSERT_ID(…)` in the statement.
    pub insert_id: u64,
}

/// A row. The values of a packet are texts.
pub(super) struct Row(pub MySqlRow);

impl Row {
    /// Returns a value. `None`: NULL.
    pub(super) fn bytes(&self, column: usize) -> Option<&[u8]> {
        self.0.try_get_unchecked(column).ok()?
    }

    /// Returns a value as text.
    pub(super) fn text(&self, column: usize) -> Option<String> {
        self.bytes(column)
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    /// Returns a number. `None`: NULL, or not a number.
    pub(super) fn number(&self, column: usize) -> Option<i64> {
        self.0.try_get_unchecked(column).ok()?
    }

    /// Whether a value is true.
    pub(super) fn is_true(&self, column: usize) -> bool {
        self.number(column).is_some_and(|number| number != 0)
    }
}

/// Returns the rows of an answer.
pub(super) fn rows(answers: &[Answer], index: usize) -> &[Row] {
    answers.get(index).map_or(&[], |answer| &answer.rows)
}

/// Bytes or text as a value.
pub(super) struct Bytes<T>(pub T);

impl<T: AsRef<[u8]>> Display for Bytes<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.as_ref();
        let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/@".contains(byte);
        match std::str::from_utf8(bytes) {
            Ok(text) if bytes.iter().all(is_plain) => write!(f, "_binary'{text}'"),
            _ => {
                f.write_str("x'")?;
                bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
                f.write_str("'")
            }
        }
    }
}

/// A value that may be NULL.
pub(super) struct Nullable<T>(pub Option<T>);

impl<T: Display> Display for Nullable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str("NULL"),
        }
    }
}

/// Returns values with commas between them.
pub(super) fn list<T: Display>(values: impl IntoIterator<Item = T>) -> String {
    joined(", ", values)
}

/// Returns values with a separator between them.
pub(super) fn joined<T: Display>(separator: &str, values: impl IntoIterator<Item = T>) -> String {
    let mut text = String::new();
    for (index, value) in values.into_iter().enumerate() {
        if index > 0 {
            text.push_str(separator);
        }
        // Writing to a string does not fail.
        let _ = write!(text, "{value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_need_no_escape() {
        assert_eq!(Bytes("a'\\\"").to_string(), "x'61275c22'");
        assert_eq!(Nullable(None::<i64>).to_string(), "NULL");
        assert_eq!(
            list([Bytes("a-_.:/@Z0"), Bytes("a b"), Bytes("ß")]),
            "_binary'a-_.:/@Z0', x'612062', x'c39f'"
        );
        for byte in 0..=u8::MAX {
            let text = Bytes([byte]).to_string();
            let value = text.split_once('\'').unwrap().1.strip_suffix('\'').unwrap();
            assert!(!value.contains(['\'', '\\', '"', '%', '`']), "{text}");
        }
        let mut packet = Packet::default();
        assert_eq!((packet.add("SELECT 1"), packet.add(CLOCK)), (0, 1));
    }
}
