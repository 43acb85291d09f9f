//! The replies and events of ZooKeeper's protocol that this engine uses.

use super::jute::{Malformed, Reader};
use super::messages::op;

/// The answer to [`connect`](super::messages::connect): a session.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Connected {
    /// The session timeout that the server has chosen. 0: the session has expired.
    pub timeout_ms: u32,
    /// 0: no session.
    pub id: i64,
    pub password: Vec<u8>,
}

impl Connected {
    pub(super) fn parse(frame: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(frame);
        let _protocol = reader.int()?;
        let timeout_ms = reader.int()?.max(0) as u32;
        let (id, password) = (reader.long()?, reader.buffer()?.to_vec());
        Ok(Connected {
            timeout_ms,
            id,
            password,
        })
    }
}

/// The head of a reply or an event.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub number: i32,
    pub zxid: i64,
    pub code: i32,
}

/// Splits a frame into its head and its body.
pub(super) fn head(frame: &[u8]) -> Result<(Head, &[u8]), Malformed> {
    let mut reader = Reader(frame);
    let (number, zxid, code) = (reader.int()?, reader.long()?, reader.int()?);
    Ok((Head { number, zxid, code }, reader.0))
}

/// What has happened to a watched node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Change {
    Created,
    Deleted,
    /// Its data, or something else that does not change the order.
    Other,
}

/// Reads an event: the change and the path.
pub(super) fn event(body: &[u8]) -> Result<(Change, &str), Malformed> {
    let mut reader = Reader(body);
    let (kind, _state, path) = (reader.int()?, reader.int()?, reader.text()?);
    let change = match kind {
        1 => Change::Created,
        2 => Change::Deleted,
        _ => Change::Other,
    };
    Ok((change, path))
}

/// The facts about a node that the engine uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Stat {
    /// The transaction that created the node.
    pub created: i64,
    /// When the node was created, by the leader's clock: milliseconds since 1970.
    pub created_ms: i64,
    /// When its data was last written, by the clock of the leader of that time.
    pub changed_ms: i64,
    pub version: i32,
    /// The session that an ephemeral node belongs to; 0: none.
    pub session: i64,
    /// The transaction of the last creation or deletion of a child.
    pub last_child_change: i64,
}

impl Stat {
    fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (created, _mzxid, created_ms, changed_ms) =
            (reader.long()?, reader.long()?, reader.long()?, reader.long()?);
        let (version, _cversion, _aversion) = (reader.int()?, reader.int()?, reader.int()?);
        let (session, _data_length, _children) = (reader.long()?, reader.int()?, reader.int()?);
        Ok(Stat {
            created,
            created_ms,
            changed_ms,
            version,
            session,
            last_child_change: reader.long()?,
        })
    }
}

/// Whether the body of an answer to [`Request::multi`](super::messages::Request::multi) is that of executed requests.
pub(super) fn is_executed(body: &[u8]) -> bool {
    Reader(body).int().is_ok_and(|kind| kind != op::ERROR)
}

/// The answer to one part of `Request::multi` and `Request::multi_read`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Part {
    Created(String),
    Checked,
    Deleted,
    Changed(Stat),
    Data(Vec<u8>, Stat),
    Children(Vec<String>),
    Failed(i32),
}

/// The body of a successful reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct Reply {
    pub(super) body: Vec<u8>,
    /// The session of the connection.
    pub session: i64,
}

impl Reply {
    pub(in super::super) fn children(&self) -> Result<Vec<String>, Malformed> {
        Reader(&self.body).texts()
    }

    /// Reads the answers to the parts.
    pub(in super::super) fn parts(&self) -> Result<Vec<Part>, Malformed> {
        let mut reader = Reader(&self.body);
        let mut parts = Vec::new();
        loop {
            let (kind, is_last, _code) = (reader.int()?, reader.flag()?, reader.int()?);
            if is_last {
                return Ok(parts);
            }
            parts.push(match kind {
                op::CREATE => Part::Created(reader.text()?.to_owned()),
                op::CREATE_2 => {
                    let path = reader.text()?.to_owned();
                    Stat::read(&mut reader)?;
                    Part::Created(path)
                }
                op::CHECK => Part::Checked,
                op::DELETE => Part::Deleted,
                op::SET_DATA => Part::Changed(Stat::read(&mut reader)?),
                op::GET_DATA => {
                    let data = reader.buffer()?.to_vec();
                    Part::Data(data, Stat::read(&mut reader)?)
                }
                op::GET_CHILDREN => Part::Children(reader.texts()?),
                op::ERROR => Part::Failed(reader.int()?),
                _ => return Err(Malformed),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::jute::Writer;
    use super::super::messages::code;
    use super::*;

    fn reply(body: Writer) -> Reply {
        Reply {
            body: body.0,
            session: 1,
        }
    }

    fn stat(writer: Writer) -> Writer {
        let writer = writer
            .long(1)
            .long(2)
            .long(1_700_000_000_000)
            .long(3)
            .int(4)
            .int(5)
            .int(6);
        writer.long(77).int(8).int(9).long(10)
    }

    const STAT: Stat = Stat {
        created: 1,
        created_ms: 1_700_000_000_000,
        changed_ms: 3,
        version: 4,
        session: 77,
        last_child_change: 10,
    };

    fn parts() -> Writer {
        let part = |writer: Writer, kind| writer.int(kind).flag(false).int(0);
        let writer = part(Writer::default(), op::CREATE).text("/a/b");
        let writer = stat(part(part(writer, op::CHECK), op::CREATE_2).text("/a"));
        let writer = stat(part(part(writer, op::DELETE), op::SET_DATA));
        let writer = stat(part(writer, op::GET_DATA).buffer(b"{}"));
        let writer = part(writer, op::GET_CHILDREN).int(1).text("x");
        part(writer, op::ERROR).int(code::NO_NODE).int(-1).flag(true).int(-1)
    }

    #[test]
    fn replies_are_read() {
        let children = Writer::default().int(2).text("a").text("b");
        assert_eq!(reply(children).children(), Ok(vec!["a".into(), "b".into()]));
        let expected = [
            Part::Created("/a/b".into()),
            Part::Checked,
            Part::Created("/a".into()),
            Part::Deleted,
            Part::Changed(STAT),
            Part::Data(b"{}".to_vec(), STAT),
            Part::Children(vec!["x".into()]),
            Part::Failed(code::NO_NODE),
        ];
        assert_eq!(reply(parts()).parts(), Ok(expected.to_vec()));
        let event_body = Writer::default().int(2).int(3).text("/a/b").0;
        assert_eq!(event(&event_body), Ok((Change::Deleted, "/a/b")));
        let head_body = Writer::default().int(7).long(8).int(-101).int(9).0;
        assert_eq!(
            head(&head_body),
            Ok((
                Head {
                    number: 7,
                    zxid: 8,
                    code: -101
                },
                &[0, 0, 0, 9][..]
            ))
        );
        let connected = Writer::default()
            .int(0)
            .int(10_000)
            .long(5)
            .buffer(b"secret")
            .flag(false)
            .0;
        let expected = Connected {
            timeout_ms: 10_000,
            id: 5,
            password: b"secret".to_vec(),
        };
        assert_eq!(Connected::parse(&connected), Ok(expected));
    }

    /// Every reader answers a message that was cut or changed, without a panic.
    #[test]
    fn cut_and_damaged_messages_are_errors_or_other_values() {
        let whole = parts().0;
        for length in 0..whole.len() {
            assert_eq!(
                reply(Writer(whole[..length].to_vec())).parts(),
                Err(Malformed),
                "{length}"
            );
        }
        let children = Writer::default().int(2).text("a").text("b").0;
        for length in 0..children.len() {
            assert!(
                reply(Writer(children[..length].to_vec())).children().is_err(),
                "{length}"
            );
        }
        for _ in 0..20_000 {
            let mut damaged = if fastrand::bool() {
                whole.clone()
            } else {
                children.clone()
            };
            for _ in 0..fastrand::usize(1..4) {
                let at = fastrand::usize(..damaged.len());
                damaged[at] = fastrand::u8(..);
            }
            damaged.truncate(fastrand::usize(..=damaged.len()));
            let _ = (
                head(&damaged).is_ok(),
                event(&damaged).is_ok(),
                Connected::parse(&damaged).is_ok(),
            );
            let reply = reply(Writer(damaged));
            let _ = (reply.parts().is_ok(), reply.children().is_ok(), reply.created().is_ok());
        }
    }
}
