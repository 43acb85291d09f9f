//! Splits a stream into replies, reads the few shapes of replies that the scripts and plain commands have, and writes
//! commands.
//!
//! RESP2 and RESP3 as in the Redis serialization protocol specification, without attributes and replies of unknown length. The
//! parser of the `redis` crate needs a whole reply, and does not return its length.

use redis::{ErrorKind, RedisError, RedisResult, Value};

/// A null in RESP2.
pub const NIL: &[u8] = b"$-1\r\n";
/// A null in RESP3.
const NULL: &[u8] = b"_\r\n";
/// The end of a line. A CR or LF alone is a part of the line.
const END: &[u8] = b"\r\n";

/// Returns the length of the first reply in `bytes`. `None`: it is incomplete.
///
/// # Behavior
/// Each call begins from the start, reads each line once, and skips bulk strings: the longest reply on the connection has
/// some thousand short lines (`list`).
///
/// # Errors
/// As soon as the bytes cannot become a reply.
pub fn length(bytes: &[u8]) -> RedisResult<Option<usize>> {
    let (mut at, mut left) = (0, 1_usize);
    while left > 0 {
        let Some((kind, rest)) = bytes.get(at..).and_then(<[u8]>::split_first) else {
            return Ok(None);
        };
        if !b"+-:$*_,#(=!%~>".contains(kind) {
            return Err(nonsense());
        }
        let Some(end) = rest.windows(END.len()).position(|two| two == END) else {
            return Ok(None);
        };
        at += 1 + end + END.len();
        left -= 1;
        match kind {
            b'$' | b'=' | b'!' => {
                if let Some(size) = size(*kind, &rest[..end])? {
                    at = at.saturating_add(size).saturating_add(END.len());
                }
            }
            b'*' | b'~' | b'>' | b'%' => {
                let more = size(*kind, &rest[..end])?.unwrap_or(0);
                let more = more.checked_mul(if *kind == b'%' { 2 } else { 1 });
                left = more.and_then(|more| left.checked_add(more)).ok_or_else(nonsense)?;
            }
            _ => {}
        }
    }
    Ok((at <= bytes.len()).then_some(at))
}

/// Reads a size. `None` for -1, a null, which only two kinds have.
fn size(kind: u8, digits: &[u8]) -> RedisResult<Option<usize>> {
    match number(digits) {
        Some(-1) if b"$*".contains(&kind) => Ok(None),
        Some(size) => usize::try_from(size).map(Some).map_err(|_| nonsense()),
        None => Err(nonsense()),
    }
}

fn number(digits: &[u8]) -> Option<i64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Reads one whole reply.
///
/// # Errors
/// When it is no reply. An error of the server is a value, as in the `redis` crate.
pub fn value(reply: &[u8]) -> RedisResult<Value> {
    // The most frequent replies, without the parser of the `redis` crate.
    match reply {
        [b':', digits @ .., b'\r', b'\n'] => number(digits).map(Value::Int).ok_or_else(nonsense),
        reply if is_nil(reply) => Ok(Value::Nil),
        [b'$', ..] => {
            let text = bulk(reply).ok_or_else(nonsense)?;
            Ok(Value::BulkString(text.to_vec()))
        }
        _ => redis::parse_redis_value(reply),
    }
}

/// Whether a reply is a null, in either protocol.
pub fn is_nil(reply: &[u8]) -> bool {
    matches!(reply, NIL | NULL)
}

/// Whether a reply is a message of the server that no request has caused, or the answer to SUBSCRIBE.
pub fn is_push(reply: &[u8]) -> bool {
    reply.starts_with(b">")
}

/// Returns the content of a bulk string that is not null.
pub fn bulk(reply: &[u8]) -> Option<&[u8]> {
    let rest = reply.strip_prefix(b"$")?;
    let line = rest.windows(END.len()).position(|two| two == END)?;
    let size = usize::try_from(number(&rest[..line])?).ok()?;
    let text = rest[line + END.len()..].strip_suffix(END)?;
    (text.len() == size).then_some(text)
}

/// Returns the length of the first `count` replies. `None`: they are incomplete.
///
/// # Errors
/// As [`length`].
pub fn length_of(bytes: &[u8], count: usize) -> RedisResult<Option<usize>> {
    let mut at = 0;
    for _ in 0..count {
        let Some(length) = length(&bytes[at..])? else {
            return Ok(None);
        };
        at += length;
    }
    Ok(Some(at))
}

/// Reads whole replies one by one.
#[derive(Clone)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(replies: &'a [u8]) -> Self {
        Reader(replies)
    }

    /// Reads the elements of an array or of a push. `None` for another reply.
    pub fn elements(reply: &'a [u8]) -> Option<Self> {
        let rest = reply.strip_prefix(b"*").or_else(|| reply.strip_prefix(b">"))?;
        let line = rest.windows(END.len()).position(|two| two == END)?;
        number(&rest[..line]).filter(|count| *count >= 0)?;
        Some(Reader(&rest[line + END.len()..]))
    }

    /// Skips replies.
    ///
    /// # Errors
    /// As [`Reader::next`].
    pub fn skip(&mut self, count: usize) -> RedisResult<()> {
        for _ in 0..count {
            self.next()?;
        }
        Ok(())
    }

    /// Returns the next reply.
    ///
    /// # Errors
    /// As [`length`], and when there is none.
    pub fn next(&mut self) -> RedisResult<&'a [u8]> {
        let length = length(self.0)?.ok_or_else(nonsense)?;
        let (reply, rest) = self.0.split_at(length);
        self.0 = rest;
        Ok(reply)
    }
}

/// Writes one command.
pub fn write(out: &mut Vec<u8>, words: &[&str]) {
    head(out, words.len());
    for text in words {
        word(out, &[text]);
    }
}

/// Writes the beginning of a command of `words` words.
pub fn head(out: &mut Vec<u8>, words: usize) {
    let mut digits = itoa::Buffer::new();
    out.push(b'*');
    out.extend_from_slice(digits.format(words).as_bytes());
    out.extend_from_slice(END);
}

/// Writes one word of a command, from its parts.
pub fn word(out: &mut Vec<u8>, parts: &[&str]) {
    let mut digits = itoa::Buffer::new();
    let size: usize = parts.iter().map(|part| part.len()).sum();
    out.push(b'$');
    out.extend_from_slice(digits.format(size).as_bytes());
    out.extend_from_slice(END);
    for part in parts {
        out.extend_from_slice(part.as_bytes());
    }
    out.extend_from_slice(END);
}

pub fn nonsense() -> RedisError {
    (ErrorKind::Parse, "not a reply of Redis").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_split_wherever_the_stream_is_cut() {
        let replies: [&[u8]; 15] = [
            b":1\r\n",
            b":-1763706623123456\r\n",
            b"+OK\r\n",
            b"-NOSCRIPT No matching script.\r\n",
            b"$-1\r\n",
            b"$0\r\n\r\n",
            b"$4\r\n\r\n\r\n\r\n",
            b"*3\r\n:1\r\n*2\r\n$1\r\nx\r\n$-1\r\n:5\r\n",
            b"*0\r\n",
            b"_\r\n",
            b"#t\r\n",
            b",1.5\r\n",
            b"=5\r\ntxt:x\r\n",
            b"%1\r\n$5\r\nproto\r\n:3\r\n",
            b">3\r\n$7\r\nmessage\r\n$2\r\nto\r\n$2\r\n\r\n\r\n",
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
        for bad in [
            &b"hello\r\n"[..],
            b"$x\r\n",
            b"*-2\r\n",
            b">?\r\n",
            b"%-1\r\n",
            b"|1\r\n",
            b"$99999999999999999999\r\n",
            b"%9223372036854775807\r\n%9223372036854775807\r\n",
        ] {
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
