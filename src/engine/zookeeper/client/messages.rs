//! The requests, replies and events of ZooKeeper's protocol that this engine uses. The numbers are those of `ZooDefs.java` and
//! `KeeperException.java`.

use super::jute::{Malformed, Reader, Writer};

/// The codes of a server's errors.
pub(in super::super) mod code {
    pub(in super::super::super) const OK: i32 = 0;
    pub(in super::super::super) const UNIMPLEMENTED: i32 = -6;
    pub(in super::super::super) const NO_NODE: i32 = -101;
    pub(in super::super::super) const NO_AUTH: i32 = -102;
    pub(in super::super::super) const BAD_VERSION: i32 = -103;
    pub(in super::super::super) const NODE_EXISTS: i32 = -110;
    pub(in super::super::super) const SESSION_EXPIRED: i32 = -112;
    pub(in super::super::super) const INVALID_ACL: i32 = -114;
    pub(in super::super::super) const AUTH_FAILED: i32 = -115;
    pub(in super::super::super) const SESSION_MOVED: i32 = -118;
    pub(in super::super::super) const QUOTA_EXCEEDED: i32 = -125;
    pub(in super::super::super) const THROTTLED: i32 = -127;
}

mod op {
    pub(super) const CREATE: i32 = 1;
    pub(super) const DELETE: i32 = 2;
    pub(super) const EXISTS: i32 = 3;
    pub(super) const GET_DATA: i32 = 4;
    pub(super) const SET_DATA: i32 = 5;
    pub(super) const GET_CHILDREN: i32 = 8;
    pub(super) const SYNC: i32 = 9;
    pub(super) const GET_CHILDREN2: i32 = 12;
    pub(super) const MULTI: i32 = 14;
    pub(super) const CREATE2: i32 = 15;
    pub(super) const REMOVE_WATCHES: i32 = 18;
    pub(super) const CREATE_CONTAINER: i32 = 19;
    pub(super) const MULTI_READ: i32 = 22;
    pub(super) const AUTH: i32 = 100;
    pub(super) const ADD_WATCH: i32 = 106;
    pub(super) const CLOSE: i32 = -11;
    pub(super) const ERROR: i32 = -1;
}

/// The number of an event in place of the number of a request.
pub(super) const EVENT: i32 = -1;
/// The number of a login.
pub(super) const LOGIN: i32 = -4;

/// All permissions: create, read, write, delete, administer.
const ALL: i32 = 31;
/// A persistent watch of a node and everything below it.
const RECURSIVE: i32 = 1;
/// Any kind of watch, in a removal.
const ANY_WATCH: i32 = 3;

/// The kind of a new node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Kind {
    Persistent = 0,
    Ephemeral = 1,
    EphemeralSequential = 3,
    Container = 4,
}

/// Who may use a new node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Access {
    Everyone,
    /// The login of this connection.
    Creator,
}

/// A request without its number.
#[derive(Debug, Clone)]
pub(in super::super) struct Request {
    op: i32,
    body: Vec<u8>,
}

impl Request {
    fn new(op: i32, body: Writer) -> Self {
        Request { op, body: body.0 }
    }

    pub(in super::super) fn create(path: &str, data: &[u8], access: Access, kind: Kind) -> Self {
        let (scheme, id) = match access {
            Access::Everyone => ("world", "anyone"),
            Access::Creator => ("auth", ""),
        };
        let acl = Writer::default()
            .text(path)
            .buffer(data)
            .int(1)
            .int(ALL)
            .text(scheme)
            .text(id);
        let op = if kind == Kind::Container {
            op::CREATE_CONTAINER
        } else {
            op::CREATE2
        };
        Self::new(op, acl.int(kind as i32))
    }

    /// Deletes a node. `version` -1: any version.
    pub(in super::super) fn delete(path: &str, version: i32) -> Self {
        Self::new(op::DELETE, Writer::default().text(path).int(version))
    }

    pub(in super::super) fn exists(path: &str) -> Self {
        Self::new(op::EXISTS, Writer::default().text(path).flag(false))
    }

    pub(in super::super) fn data(path: &str) -> Self {
        Self::new(op::GET_DATA, Writer::default().text(path).flag(false))
    }

    pub(in super::super) fn set_data(path: &str, data: &[u8], version: i32) -> Self {
        Self::new(op::SET_DATA, Writer::default().text(path).buffer(data).int(version))
    }

    /// Reads the children of a node and its stat.
    pub(in super::super) fn children(path: &str) -> Self {
        Self::new(op::GET_CHILDREN2, Writer::default().text(path).flag(false))
    }

    /// Reads the children of a node, in [`Request::multi_read`].
    pub(in super::super) fn children_only(path: &str) -> Self {
        Self::new(op::GET_CHILDREN, Writer::default().text(path).flag(false))
    }

    /// Waits until the member has applied everything that the leader had committed.
    pub(in super::super) fn sync(path: &str) -> Self {
        Self::new(op::SYNC, Writer::default().text(path))
    }

    /// Watches a node and everything below it.
    pub(in super::super) fn add_watch(path: &str) -> Self {
        Self::new(op::ADD_WATCH, Writer::default().text(path).int(RECURSIVE))
    }

    pub(in super::super) fn remove_watches(path: &str) -> Self {
        Self::new(op::REMOVE_WATCHES, Writer::default().text(path).int(ANY_WATCH))
    }

    /// Executes all requests or none.
    pub(in super::super) fn multi(parts: &[Request]) -> Self {
        Self::joined(op::MULTI, parts)
    }

    /// Executes several reads at one point in time. The parts are [`Request::data`] and [`Request::children_only`].
    pub(in super::super) fn multi_read(parts: &[Request]) -> Self {
        Self::joined(op::MULTI_READ, parts)
    }

    fn joined(op: i32, parts: &[Request]) -> Self {
        let mut body = Writer::default();
        for part in parts {
            body = body.int(part.op).flag(false).int(-1);
            body.0.extend(&part.body);
        }
        Self::new(op, body.int(-1).flag(true).int(-1))
    }

    pub(super) fn login(user_and_password: &str) -> Self {
        let login = Writer::default().int(0).text("digest");
        Self::new(op::AUTH, login.text(user_and_password))
    }

    pub(super) fn close() -> Self {
        Self::new(op::CLOSE, Writer::default())
    }

    /// Returns the number of bytes of the frame.
    pub(super) fn length(&self) -> usize {
        self.body.len() + 2 * size_of::<i32>()
    }

    /// Appends the request with its number and its length.
    pub(super) fn write(&self, number: i32, out: &mut Vec<u8>) {
        let head = Writer::default().int(self.length() as i32).int(number).int(self.op);
        out.extend(head.0);
        out.extend(&self.body);
    }
}

/// The request that opens a session, or moves it to this connection. `id` 0: a new session.
pub(super) fn connect(last_zxid: i64, timeout_ms: i32, id: i64, password: &[u8]) -> Vec<u8> {
    let body = Writer::default().int(0).long(last_zxid).int(timeout_ms);
    let body = body.long(id).buffer(password).flag(false);
    let frame = Writer::default().buffer(&body.0);
    frame.0
}

/// The answer to [`connect`].
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Connected {
    /// The session timeout that the server has chosen. 0: the session has expired.
    pub timeout_ms: u32,
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
    /// When the node was created, by the leader's clock: milliseconds since 1970.
    pub created_ms: i64,
    pub version: i32,
    /// The session that an ephemeral node belongs to; 0: none.
    pub session: i64,
    /// The transaction of the last creation or deletion of a child.
    pub last_child_change: i64,
}

impl Stat {
    fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (_czxid, _mzxid, created_ms, _mtime) = (reader.long()?, reader.long()?, reader.long()?, reader.long()?);
        let (version, _cversion, _aversion) = (reader.int()?, reader.int()?, reader.int()?);
        let (session, _data_length, _children) = (reader.long()?, reader.int()?, reader.int()?);
        Ok(Stat {
            created_ms,
            version,
            session,
            last_child_change: reader.long()?,
        })
    }
}

/// The answer to one part of [`Request::multi`] and [`Request::multi_read`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Part {
    Created(String),
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
    /// Reads the path of a new node.
    #[cfg(test)]
    pub(in super::super) fn created(&self) -> Result<String, Malformed> {
        let mut reader = Reader(&self.body);
        reader.text().map(str::to_owned)
    }

    pub(in super::super) fn stat(&self) -> Result<Stat, Malformed> {
        Stat::read(&mut Reader(&self.body))
    }

    pub(in super::super) fn data(&self) -> Result<(&[u8], Stat), Malformed> {
        let mut reader = Reader(&self.body);
        Ok((reader.buffer()?, Stat::read(&mut reader)?))
    }

    pub(in super::super) fn children(&self) -> Result<(Vec<String>, Stat), Malformed> {
        let mut reader = Reader(&self.body);
        Ok((reader.texts()?, Stat::read(&mut reader)?))
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
                // The answer to a part that creates a node has the older form.
                op::CREATE => Part::Created(reader.text()?.to_owned()),
                op::CREATE2 => {
                    let path = reader.text()?.to_owned();
                    Stat::read(&mut reader)?;
                    Part::Created(path)
                }
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
        created_ms: 1_700_000_000_000,
        version: 4,
        session: 77,
        last_child_change: 10,
    };

    fn parts() -> Writer {
        let part = |writer: Writer, kind| writer.int(kind).flag(false).int(0);
        let writer = part(Writer::default(), op::CREATE).text("/a/b");
        let writer = stat(part(writer, op::CREATE2).text("/a/b"));
        let writer = stat(part(part(writer, op::DELETE), op::SET_DATA));
        let writer = stat(part(writer, op::GET_DATA).buffer(b"{}"));
        let writer = part(writer, op::GET_CHILDREN).int(1).text("x");
        part(writer, op::ERROR).int(code::NO_NODE).int(-1).flag(true).int(-1)
    }

    #[test]
    fn replies_are_read() {
        assert_eq!(reply(stat(Writer::default())).stat(), Ok(STAT));
        let children = stat(Writer::default().int(2).text("a").text("b"));
        assert_eq!(reply(children).children(), Ok((vec!["a".into(), "b".into()], STAT)));
        let expected = [
            Part::Created("/a/b".into()),
            Part::Created("/a/b".into()),
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
        let children = stat(Writer::default().int(2).text("a").text("b")).0;
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
            let _ = (
                reply.parts().is_ok(),
                reply.children().is_ok(),
                reply.stat().is_ok(),
                reply.created().is_ok(),
            );
        }
    }
}
