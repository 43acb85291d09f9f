//! The requests of ZooKeeper's protocol that this engine uses. The numbers are those of `ZooDefs.java` and `KeeperException.java`.

use bytes::BytesMut;

use super::jute::Writer;

/// The codes of a server's errors.
pub(in super::super) mod code {
    pub(in super::super::super) const OK: i32 = 0;
    /// Another part of the multi failed.
    pub(in super::super::super) const ROLLED_BACK: i32 = -2;
    pub(in super::super::super) const NO_NODE: i32 = -101;
    pub(in super::super::super) const BAD_VERSION: i32 = -103;
    pub(in super::super::super) const NODE_EXISTS: i32 = -110;
    pub(in super::super::super) const SESSION_EXPIRED: i32 = -112;
    pub(in super::super::super) const SESSION_MOVED: i32 = -118;
}

/// The numbers of the requests.
pub(super) mod op {
    pub(in super::super) const CREATE: i32 = 1;
    pub(in super::super) const DELETE: i32 = 2;
    pub(in super::super) const EXISTS: i32 = 3;
    pub(in super::super) const GET_DATA: i32 = 4;
    pub(in super::super) const SET_DATA: i32 = 5;
    pub(in super::super) const GET_CHILDREN: i32 = 8;
    pub(in super::super) const SYNC: i32 = 9;
    pub(in super::super) const CHECK: i32 = 13;
    pub(in super::super) const MULTI: i32 = 14;
    pub(in super::super) const CREATE_2: i32 = 15;
    pub(in super::super) const REMOVE_WATCHES: i32 = 18;
    pub(in super::super) const CREATE_CONTAINER: i32 = 19;
    pub(in super::super) const MULTI_READ: i32 = 22;
    pub(in super::super) const AUTH: i32 = 100;
    pub(in super::super) const ADD_WATCH: i32 = 106;
    pub(in super::super) const CLOSE: i32 = -11;
    pub(in super::super) const ERROR: i32 = -1;
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

/// The clients that may use a new node.
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
            op::CREATE
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

    pub(in super::super) fn children(path: &str) -> Self {
        Self::new(op::GET_CHILDREN, Writer::default().text(path).flag(false))
    }

    /// Waits until the server has applied everything that the leader had committed.
    pub(in super::super) fn sync(path: &str) -> Self {
        Self::new(op::SYNC, Writer::default().text(path))
    }

    /// Changes nothing, by a step that a majority of the servers commits. Needs the permission to read the node.
    pub(in super::super) fn commit(path: &str) -> Self {
        let check = Self::new(op::CHECK, Writer::default().text(path).int(-1));
        Self::multi(&[check])
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

    /// Executes several reads at one point in time. The parts are [`Request::data`] and [`Request::children`].
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

    pub(super) fn login(user: &str, password: &str) -> Self {
        let login = Writer::default().int(0).text("digest");
        Self::new(op::AUTH, login.text(&format!("{user}:{password}")))
    }

    pub(super) fn close() -> Self {
        Self::new(op::CLOSE, Writer::default())
    }

    /// Whether only a majority of the servers can execute it.
    pub(super) fn is_commit(&self) -> bool {
        self.op == op::MULTI
    }

    /// Returns the number of bytes of the frame.
    pub(super) fn length(&self) -> usize {
        self.body.len() + 2 * size_of::<i32>()
    }

    /// Appends the request with its number and its length.
    pub(super) fn write(&self, number: i32, out: &mut BytesMut) {
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
