//! The errors of stores as tables: what an error says, what follows from it, and what to do about it.

use std::fmt::Display;

/// A row of a table: the sign of an error, what follows from such an error, and the advice about it (what to do, or what it means).
///
/// A sign is `CODES`, `CODES: PARTS` or `: PARTS`. The error has one of the codes, which spaces separate (`?` stands for any character),
/// and its text has one of the parts, which `|` separates. The first row with a sign of the error counts.
pub(in crate::engine) type Row<K> = (&'static str, K, &'static str);

/// Returns the kind and the advice of an error, if the table has it. `code`: empty for an error without one.
pub(in crate::engine) fn find<K: Copy>(rows: &[Row<K>], code: &str, text: &str) -> Option<(K, &'static str)> {
    let is_code = |sign: &str| {
        sign.len() == code.len()
            && sign
                .bytes()
                .zip(code.bytes())
                .all(|(one, other)| one == b'?' || one == other)
    };
    let fits = |(sign, ..): &&Row<K>| {
        let (codes, parts) = sign.split_once(": ").unwrap_or((sign, ""));
        (codes.is_empty() || codes.split(' ').any(is_code)) && parts.split('|').any(|part| text.contains(part))
    };
    rows.iter().find(fits).map(|(_, kind, advice)| (*kind, *advice))
}

/// Renders an error and its advice, which is in parentheses. One that ends with a colon comes first: it is the meaning of the text. One that begins
/// with a colon continues the text.
pub(in crate::engine) fn render(text: impl Display, advice: &str) -> String {
    match advice {
        "" => text.to_string(),
        end if end.starts_with(':') => format!("{text}{end}"),
        meaning if meaning.ends_with(':') => format!("{meaning} {text}"),
        advice => format!("{text} ({advice})"),
    }
}

/// Writes a table: `SIGN => KIND, ADVICE;`, where the advice may be missing.
macro_rules! rows {
    (@) => { "" };
    (@ $advice:expr) => { $advice };
    ($($sign:expr => $kind:expr $(, $advice:expr)?;)*) => {
        &[$(($sign, $kind, $crate::engine::errors::rows!(@ $($advice)?))),*]
    };
}
pub(in crate::engine) use rows;

/// The errors of a store.
pub(in crate::engine) struct Table<K: 'static> {
    pub rows: &'static [Row<K>],
    /// Further advice about the certificate of an unknown authority, and about one for another name.
    pub additions: [&'static str; 2],
}

#[cfg(any(feature = "mysql", feature = "postgres", feature = "redis"))]
impl<K: Copy> Table<K> {
    /// Returns the kind of an error, if the table has it, and renders the error. `code`: `None` for an error of the connection. `shown`:
    /// the text with the code.
    pub(in crate::engine) fn explain(
        &self,
        code: Option<&str>,
        text: &str,
        shown: impl Display,
    ) -> (Option<K>, String) {
        match find(self.rows, code.unwrap_or_default(), text) {
            Some((kind, advice)) => (Some(kind), render(shown, advice)),
            None if code.is_none() => {
                let advice = crate::engine::tls::advice(text, self.additions);
                (None, render(shown, &advice.unwrap_or_default()))
            }
            None => (None, shown.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: &[Row<u8>] = rows! {
        "12: full|empty" => 1, "make room";
        "12 9???" => 2;
        ": a colon: inside" => 3, "it means:";
    };

    #[test]
    fn the_first_row_with_the_code_and_a_part_of_the_text_counts() {
        for (code, text, found) in [
            ("12", "it is full", Some((1, "make room"))),
            ("12", "empty", Some((1, "make room"))),
            ("12", "other", Some((2, ""))),
            ("9001", "full", Some((2, ""))),
            ("900", "full", None),
            ("1", "full", None),
            ("", "full", None),
            ("", "a colon: inside", Some((3, "it means:"))),
            ("7", "with a colon: inside", Some((3, "it means:"))),
        ] {
            assert_eq!(find(ROWS, code, text), found, "{code} {text}");
        }
    }

    #[test]
    fn advice_is_behind_an_error_and_its_meaning_before() {
        for (advice, expected) in [
            ("", "refused"),
            ("try later", "refused (try later)"),
            ("it is closed:", "it is closed: refused"),
            (": it is closed", "refused: it is closed"),
        ] {
            assert_eq!(render("refused", advice), expected);
        }
    }
}
