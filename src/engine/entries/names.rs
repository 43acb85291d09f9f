//! Names as parts of keys and paths.

use std::fmt::Write;

/// Encodes a name: every byte except `A–Z a–z 0–9 _ . : -` is `%XX`.
pub(in crate::engine) fn encoded(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b':' | b'-') {
            text.push(byte.into());
        } else {
            // Writing to a text does not fail.
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

/// Decodes a name. `None`: no name is encoded like this.
pub(in crate::engine) fn decoded(text: &str) -> Option<String> {
    let mut name = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        name.push(match byte {
            b'/' => return None,
            b'%' => {
                let (digits, after) = rest.split_at_checked(2)?;
                rest = after;
                u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(name).ok()
}
