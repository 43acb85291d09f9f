//! Properties of `resp.rs` that hold for any bytes: for its tests, and for the fuzzer (`fuzz/`), which includes this file by
//! its path.

use redis::{ErrorKind, Value, parse_redis_value};

use super::resp::{Reader, bulk, is_push, length, length_of, value, write};

/// How many positions of a cut are tried.
const CUTS: usize = 256;

/// # Panics
/// When a property does not hold.
pub fn check(bytes: &[u8]) {
    match length(bytes) {
        Ok(Some(length)) => check_reply(bytes, length),
        // What the `redis` crate accepts as a reply is one here.
        _ => assert!(!is_plain(bytes) || parse_redis_value(bytes).is_err(), "{bytes:?}"),
    }
    let mut at = 0;
    let mut replies = std::iter::from_fn(|| {
        let reply = bytes.get(at..at + length(&bytes[at..]).ok()??)?;
        at += reply.len();
        value(reply).ok()
    });
    let one_by_one: Vec<_> = replies.by_ref().take(4).collect();
    match length_of(bytes, 4) {
        Ok(Some(end)) => {
            let mut reader = Reader::new(&bytes[..end]);
            let read: Vec<_> = (0..4).map_while(|_| value(reader.next().ok()?).ok()).collect();
            assert_eq!(read, one_by_one, "{bytes:?}");
            assert!(read.len() < 4 || end == at && reader.next().is_err(), "{bytes:?}");
        }
        _ => assert!(one_by_one.len() < 4, "{bytes:?}"),
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        let words: Vec<&str> = text.split(' ').collect();
        let mut out = Vec::new();
        write(&mut out, &words);
        let mut theirs = redis::Cmd::new();
        for word in &words {
            theirs.arg(word);
        }
        assert_eq!(out, theirs.get_packed_command());
        assert_eq!(length(&out).ok(), Some(Some(out.len())));
    }
}

fn check_reply(bytes: &[u8], end: usize) {
    assert!(0 < end && end <= bytes.len(), "{end} of {bytes:?}");
    let reply = &bytes[..end];
    // Neither the following bytes nor the position of a cut make a difference.
    assert_eq!(length(reply).ok(), Some(Some(end)), "{bytes:?}");
    for cut in (0..end).step_by(1 + end / CUTS).chain([end - 1]) {
        assert!(matches!(length(&bytes[..cut]), Ok(None)), "{cut} of {bytes:?}");
    }
    // Its parser, which does not return a length, finds the same.
    assert!(parse_redis_value(&bytes[..end - 1]).is_err(), "{bytes:?}");
    match value(reply) {
        Ok(Value::BulkString(text)) => assert_eq!(bulk(reply), Some(&text[..]), "{bytes:?}"),
        _ => assert_eq!(bulk(reply), None, "{bytes:?}"),
    }
    if let (Ok(Value::Array(elements)), Some(mut reader)) = (value(reply), Reader::elements(reply))
        && is_plain(reply)
    {
        let read: Vec<_> = elements.iter().map_while(|_| value(reader.next().ok()?).ok()).collect();
        assert_eq!(read, elements, "{bytes:?}");
        assert!(reader.next().is_err(), "{bytes:?}");
    }
    if let (Ok(Value::Push { data, .. }), Some(mut reader)) = (value(reply), Reader::elements(reply))
        && is_plain(reply)
    {
        assert!(is_push(reply) && reader.skip(1).is_ok(), "{bytes:?}");
        let read: Vec<_> = data.iter().map_while(|_| value(reader.next().ok()?).ok()).collect();
        assert_eq!(read, data, "{bytes:?}");
    }
    match (value(reply), parse_redis_value(reply)) {
        (ours, Ok(theirs)) if is_plain(reply) => assert_eq!(ours.ok(), Some(theirs), "{bytes:?}"),
        (Ok(ours), theirs) => assert_eq!(theirs.ok(), Some(ours), "{bytes:?}"),
        (Err(_), Err(theirs)) => assert_ne!(theirs.kind(), ErrorKind::Io, "nothing is missing in {bytes:?}"),
        (Err(_), Ok(_)) => {}
    }
}

/// Whether a server could have written it. The `redis` crate accepts more: blanks around a number, any negative size as a null, a push
/// without elements, and attributes.
fn is_plain(bytes: &[u8]) -> bool {
    String::from_utf8_lossy(bytes).split("\r\n").all(|line| {
        line.chars()
            .all(|c| c.is_ascii_alphanumeric() || "+-:$*_%~>".contains(c))
            && (line.ends_with("-1") || !line.starts_with("$-") && !line.starts_with("*-"))
            && !["%-", "~-", ">-", ">0"].iter().any(|sizes| line.starts_with(sizes))
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[test]
    fn whatever_comes_is_read_as_the_driver_reads_it() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..50_000 {
            let mut bytes = Vec::new();
            reply(&mut random, 3, &mut bytes);
            assert_eq!(length(&bytes).unwrap(), Some(bytes.len()), "{bytes:?}");
            for _ in 0..random.usize(..5) {
                reply(&mut random, 1, &mut bytes);
            }
            for _ in 0..random.usize(..4) {
                damage(&mut random, &mut bytes);
            }
            check(&bytes);
        }
    }

    /// Writes a reply with at most `depth` nested arrays.
    pub(in super::super) fn reply(random: &mut fastrand::Rng, depth: usize, out: &mut Vec<u8>) {
        let count = random.usize(..4);
        let text: String = (0..count)
            .map(|_| random.choice(['a', ' ', '\r', '\n', 'é']).unwrap())
            .collect();
        match random.u8(..if depth > 0 { 9 } else { 5 }) {
            0 => out.extend(format!(":{}\r\n", random.i64(..) >> random.u32(..64)).into_bytes()),
            1 => out.extend(format!("+{}\r\n", text.replace("\r\n", "")).into_bytes()),
            2 => out.extend(format!("-ERR {}\r\n", text.replace("\r\n", "")).into_bytes()),
            3 => out.extend(format!("${}\r\n{text}\r\n", text.len()).into_bytes()),
            4 => {
                let nulls = [&b"$-1\r\n"[..], b"*-1\r\n", b"_\r\n", b"#t\r\n"];
                out.extend_from_slice(random.choice(nulls).unwrap());
            }
            5 => {
                out.extend(format!("%{count}\r\n").into_bytes());
                (0..2 * count).for_each(|_| reply(random, depth - 1, out));
            }
            6 => push(random, depth, out),
            _ => {
                out.extend(format!("*{count}\r\n").into_bytes());
                (0..count).for_each(|_| reply(random, depth - 1, out));
            }
        }
    }

    /// Writes a push, of a shape that a subscription has, or of another.
    pub(in super::super) fn push(random: &mut fastrand::Rng, depth: usize, out: &mut Vec<u8>) {
        let count = random.usize(1..5);
        let kind = random.choice(["message", "subscribe", "invalidate"]).unwrap();
        out.extend(format!(">{count}\r\n${}\r\n{kind}\r\n", kind.len()).into_bytes());
        for _ in 1..count {
            match random.bool() {
                true => out.extend(b"$2\r\nto\r\n"),
                false => reply(random, depth.saturating_sub(1), out),
            }
        }
    }

    /// Makes one small change.
    pub(in super::super) fn damage(random: &mut fastrand::Rng, bytes: &mut Vec<u8>) {
        const PIECES: [&[u8]; 14] = [
            b"\r",
            b"\n",
            b"\r\n",
            b"$",
            b"*",
            b":",
            b"+",
            b"-",
            b">",
            b"%",
            b"1",
            b"*1\r\n",
            b"2147483647",
            b"9223372036854775807",
        ];
        let at = random.usize(..=bytes.len());
        let end = (at + random.usize(..3)).min(bytes.len());
        match random.u8(..4) {
            0 => bytes.truncate(at),
            1 => bytes[at..end].fill(random.u8(..)),
            2 => bytes.extend_from_within(at..),
            _ => drop(bytes.splice(at..end, random.choice(PIECES).unwrap().iter().copied())),
        }
    }
}
