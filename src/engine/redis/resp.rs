//! Where one reply ends and the next begins, the few shapes that the scripts answer, and plain commands.
//!
//! RESP2 as in the Redis serialization protocol specification. The driver's own parser wants a whole reply, and does not say how long it was.

use redis::{ErrorKind, RedisError, RedisResult, Value};

/// The end of a line. A CR or a LF alone is part of it.
const END: &[u8] = b"\r\n";

/// The length of the first reply in `bytes`; `None` while it is not complete.
///
/// # Behavior
/// Each call begins anew, looks at every line once, and jumps over bulk strings: the longest reply that is asked for on
/// the lane has some thousand short lines (`listing.rs`).
///
/// # Errors
/// When it is no reply, as soon as that can be told.
pub(super) fn length(bytes: &[u8]) -> RedisResult<Option<usize>> {
    let (mut at, mut left) = (0, 1_usize);
    while left > 0 {
        let Some((kind, rest)) = bytes.get(at..).and_then(<[u8]>::split_first) else {
            return Ok(None);
        };
        if !b"+-:$*".contains(kind) {
            return Err(nonsense());
        }
        let Some(end) = rest.windows(END.len()).position(|two| two == END) else {
            return Ok(None);
        };
        at += 1 + end + END.len();
        left -= 1;
        match kind {
            b'$' => {
                if let Some(size) = size(&rest[..end])? {
                    at = at.saturating_add(size).saturating_add(END.len());
                }
            }
            b'*' => {
                let more = size(&rest[..end])?.unwrap_or(0);
                left = left.checked_add(more).ok_or_else(nonsense)?;
            }
            _ => {}
        }
    }
    Ok((at <= bytes.len()).then_some(at))
}

/// A size; `None` for -1, a null.
fn size(digits: &[u8]) -> RedisResult<Option<usize>> {
    match number(digits) {
        Some(-1) => Ok(None),
        Some(size) => usize::try_from(size).map(Some).map_err(|_| nonsense()),
        None => Err(nonsense()),
    }
}

fn number(digits: &[u8]) -> Option<i64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// One whole reply.
///
/// # Errors
/// When it is no reply. A server's error is a value here, as the driver has it.
pub(super) fn value(reply: &[u8]) -> RedisResult<Value> {
    // What nearly all replies are, without the driver's parser.
    match reply {
        [b':', digits @ .., b'\r', b'\n'] => number(digits).map(Value::Int).ok_or_else(nonsense),
        b"$-1\r\n" => Ok(Value::Nil),
        [b'$', rest @ ..] => {
            let text = bulk(rest).ok_or_else(nonsense)?;
            Ok(Value::BulkString(text.to_vec()))
        }
        _ => redis::parse_redis_value(reply),
    }
}

/// What a bulk string holds, from behind its `$` to its end.
fn bulk(reply: &[u8]) -> Option<&[u8]> {
    let line = reply.windows(END.len()).position(|two| two == END)?;
    let size = usize::try_from(number(&reply[..line])?).ok()?;
    let text = reply[line + END.len()..].strip_suffix(END)?;
    (text.len() == size).then_some(text)
}

/// The first four replies, and how long they are together; `None` while they are not complete.
///
/// # Errors
/// As [`length`] and [`value`].
pub(super) fn four(bytes: &[u8]) -> RedisResult<Option<([Value; 4], usize)>> {
    let mut replies = [const { Value::Nil }; 4];
    let mut at = 0;
    for reply in &mut replies {
        let Some(length) = length(&bytes[at..])? else {
            return Ok(None);
        };
        *reply = value(&bytes[at..at + length])?;
        at += length;
    }
    Ok(Some((replies, at)))
}

/// Writes one command.
pub(super) fn write(out: &mut Vec<u8>, words: &[&str]) {
    let mut digits = itoa::Buffer::new();
    out.push(b'*');
    out.extend_from_slice(digits.format(words.len()).as_bytes());
    for word in words {
        out.extend_from_slice(b"\r\n$");
        out.extend_from_slice(digits.format(word.len()).as_bytes());
        out.extend_from_slice(b"\r\n");
        out.extend_from_slice(word.as_bytes());
    }
    out.extend_from_slice(b"\r\n");
}

fn nonsense() -> RedisError {
    (ErrorKind::Parse, "not a reply in RESP2").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_told_apart_wherever_the_stream_is_cut() {
        let replies: [&[u8]; 9] = [
            b":1\r\n",
            b":-1763706623123456\r\n",
            b"+OK\r\n",
            b"-NOSCRIPT No matching script.\r\n",
            b"$-1\r\n",
            b"$0\r\n\r\n",
            b"$4\r\n\r\n\r\n\r\n",
            b"*3\r\n:1\r\n*2\r\n$1\r\nx\r\n$-1\r\n:5\r\n",
            b"*0\r\n",
        ];
        let stream = replies.concat();
        let mut at = 0;
        for reply in replies {
            let end = at + reply.len();
            for cut in at..end {
                assert_eq!(length(&stream[at..cut]).unwrap(), None, "{:?}", &stream[at..cut]);
            }
            assert_eq!(length(&stream[at..]).unwrap(), Some(reply.len()));
            assert_eq!(value(reply).unwrap(), redis::parse_redis_value(reply).unwrap());
            at = end;
        }
        let mut out = Vec::new();
        write(&mut out, &["SET", "", "é\r\n"]);
        let expected = redis::cmd("SET").arg("").arg("é\r\n").get_packed_command();
        assert_eq!(out, expected);
        for bad in [&b"hello\r\n"[..], b"$x\r\n", b"*-2\r\n", b"$99999999999999999999\r\n"] {
            assert!(length(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_line_ends_with_both_cr_and_lf() {
        assert_eq!(length(b"+a\nb\r\n").unwrap(), Some(6));
        assert_eq!(length(b":12\n").unwrap(), None);
    }

    #[test]
    fn what_can_become_no_reply_is_not_waited_for() {
        for bad in [&b"\n"[..], b"\r\n", b"H", b"*2\r\n:1\r\n\r"] {
            assert!(length(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn sizes_beyond_all_measure_do_no_harm() {
        assert_eq!(length(b"$9223372036854775807\r\n").unwrap(), None);
        assert_eq!(length(b"*9223372036854775807\r\n").unwrap(), None);
        assert!(length(&b"*9223372036854775807\r\n".repeat(3)).is_err());
        let deep = [b"*1\r\n".repeat(100_000), b":1\r\n".to_vec()].concat();
        assert_eq!(length(&deep).unwrap(), Some(deep.len()));
        assert!(value(&deep).is_err());
    }
}
