//! Where one reply ends and the next begins, the few shapes that the scripts answer, and plain commands.
//!
//! RESP2 as in the Redis serialization protocol specification. The driver's own parser wants a whole reply, and does not say how long it was.

use redis::{ErrorKind, RedisError, RedisResult, Value};

/// The length of the first reply in `bytes`; `None` while it is not complete.
///
/// # Errors
/// When it is no reply.
pub(super) fn length(bytes: &[u8]) -> RedisResult<Option<usize>> {
    let (mut at, mut left) = (0, 1_usize);
    while left > 0 {
        let Some((line, next)) = line(bytes, at) else {
            return Ok(None);
        };
        left -= 1;
        match line[0] {
            b'+' | b'-' | b':' => at = next,
            b'$' => {
                at = match size(&line[1..])? {
                    // A null.
                    None => next,
                    Some(size) if bytes.len() < next + size + 2 => return Ok(None),
                    Some(size) => next + size + 2,
                }
            }
            b'*' => {
                left += size(&line[1..])?.unwrap_or(0);
                at = next;
            }
            _ => return Err(nonsense()),
        }
    }
    Ok(Some(at))
}

/// A line without its end, and where the next one begins.
fn line(bytes: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let rest = bytes.get(at..)?;
    let end = rest.iter().position(|byte| *byte == b'\n')?;
    // The shortest line is one character and CR.
    (end >= 2).then(|| (&rest[..end - 1], at + end + 1))
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
        _ => redis::parse_redis_value(reply),
    }
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
}
