//! The sizes of prepared statements, and their values.
//!
//! The server needs longer to parse attempts and releases than to execute them. A connection has 12 sizes of each (on MySQL one size of
//! attempts), for 1 to 64 calls. The last call is repeated up to the next size, which has no further effect. The first use of a size needs
//! one more request, with its own time limit. Where statements cannot be prepared (the server's limit is reached, or a proxy supports
//! none), they are sent as text.

use sqlx::Arguments as _;
use sqlx::mysql::MySqlArguments;

/// Returns the size of the prepared statement that executes `count` calls: 1, 2, 3, 4, 6, 8, 12, 16 and so on, so that a connection has few
/// statements. The last call is repeated up to this size.
pub(super) fn prepared_size(count: usize) -> usize {
    let power = count.next_power_of_two();
    if power >= 4 && count <= power / 4 * 3 {
        power / 4 * 3
    } else {
        power
    }
}

/// Returns the calls, padded with the last one up to the size of the prepared statement.
pub(super) fn padded<T>(calls: &[T]) -> impl Iterator<Item = &T> {
    let rest = prepared_size(calls.len()) - calls.len();
    calls.iter().chain(std::iter::repeat_n(calls.last(), rest).flatten())
}

/// Adds a value to those of a prepared statement.
pub(super) fn add<'a, T>(arguments: &mut MySqlArguments, value: T)
where
    T: sqlx::Encode<'a, sqlx::MySql> + sqlx::Type<sqlx::MySql> + 'a,
{
    // The encoding of bytes and of integers does not fail.
    let _ = arguments.add(value);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::engine::sql::mysql::STATEMENT_BATCH;
    use crate::engine::sql::mysql::config::PREPARED;

    #[test]
    fn a_connection_has_few_prepared_statements() {
        let sizes: BTreeSet<usize> = (1..=STATEMENT_BATCH).map(prepared_size).collect();
        let all = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];
        assert_eq!(sizes, BTreeSet::from(all));
        assert!(2 * sizes.len() <= PREPARED);
        assert!((1..=STATEMENT_BATCH).all(|count| prepared_size(count) >= count));
    }

    #[test]
    fn the_last_call_is_repeated() {
        assert_eq!(padded(&[1, 2, 3, 4, 5]).collect::<Vec<_>>(), [&1, &2, &3, &4, &5, &5]);
        assert_eq!(padded(&[1, 2, 3]).count(), 3);
    }
}
