//! Names as parts of keys and paths.

use crate::model::Key;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'_').remove(b'.').remove(b':').remove(b'-');
/// Stands before a shared name.
pub(in crate::engine) const SHARED: &str = "%FF";

/// Encodes a name: every byte except `A–Z a–z 0–9 _ . : -` is `%XX`.
pub(in crate::engine) fn encoded(name: &str) -> String {
    utf8_percent_encode(name, ESCAPED).to_string()
}

/// Returns what stands before a shared name. No other name has it, because UTF-8 does not have this byte.
pub(in crate::engine) fn marker(key: &Key) -> &'static str {
    if key.is_shared() { SHARED } else { "" }
}

/// Decodes a name. `None`: no name is encoded like this.
pub(in crate::engine) fn decoded(text: &str) -> Option<String> {
    let is_digit = |byte: &u8| byte.is_ascii_hexdigit();
    let is_escape = |rest: &str| {
        rest.as_bytes()
            .get(..2)
            .is_some_and(|digits| digits.iter().all(is_digit))
    };
    if text.contains('/') || !text.split('%').skip(1).all(is_escape) {
        return None;
    }
    let name = percent_decode_str(text).decode_utf8().ok()?;
    Some(name.into_owned())
}
