//! The messages of etcd's protocol: the fields that are used, with the numbers of `rpc.proto` and `kv.proto` of etcd 3.4.
//! Unknown fields are ignored.

use prost::{Message, Oneof};

/// Declares messages: for each field its type in Rust, its kind for prost, and its number.
macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty [$($kind:tt)*] $tag:tt)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, PartialEq, Message)]
            pub struct $name {
                $(#[prost($($kind)*, tag = $tag)] pub $field: $type,)*
            }
        )*
    };
}

/// Declares choices of messages, and the messages that contain one.
macro_rules! choices {
    ($($outer:ident $oneof:tt $tags:tt $name:ident { $($variant:ident($type:ty) $tag:tt)* })*) => {
        $(
            #[derive(Clone, PartialEq, Oneof)]
            pub enum $name {
                $(#[prost(message, tag = $tag)] $variant($type),)*
            }
            #[derive(Clone, PartialEq, Message)]
            pub struct $outer {
                #[prost(oneof = $oneof, tags = $tags)]
                pub op: Option<$name>,
            }
        )*
    };
}

choices! {
    RequestOp "Op" "1, 2, 3, 4" Op { Range(RangeRequest) "1" Put(PutRequest) "2" Delete(DeleteRequest) "3"
        Txn(TxnRequest) "4" }
    ResponseOp "OpAnswer" "1, 2, 3, 4" OpAnswer { Range(RangeResponse) "1" Put(Nothing) "2" Delete(Nothing) "3"
        Txn(TxnResponse) "4" }
    WatchRequest "WatchOp" "1, 2" WatchOp { Create(WatchCreateRequest) "1" Cancel(WatchCancelRequest) "2" }
}

impl From<Op> for RequestOp {
    fn from(op: Op) -> Self {
        RequestOp { op: Some(op) }
    }
}

messages! {
    /// `raft_term`: the term of the leader of the last entry that the member has executed.
    Header { revision: i64 [int64] "3" raft_term: u64 [uint64] "4" }
    KeyValue {
        key: Vec<u8> [bytes = "vec"] "1" create_revision: i64 [int64] "2" mod_revision: i64 [int64] "3"
        value: Vec<u8> [bytes = "vec"] "5" lease: i64 [int64] "6"
    }
    /// `sort_order`: 1: ascending.
    /// `sort_target`: 0: by the key, 2: by `create_revision`.
    RangeRequest {
        key: Vec<u8> [bytes = "vec"] "1" range_end: Vec<u8> [bytes = "vec"] "2" limit: i64 [int64] "3"
        revision: i64 [int64] "4" sort_order: i32 [int32] "5" sort_target: i32 [int32] "6" keys_only: bool [bool] "8"
        min_create_revision: i64 [int64] "12" max_create_revision: i64 [int64] "13"
    }
    /// `count`: the number of keys in the range, whatever the limit is.
    RangeResponse {
        header: Option<Header> [message, optional] "1" kvs: Vec<KeyValue> [message, repeated] "2"
        more: bool [bool] "3" count: i64 [int64] "4"
    }
    PutRequest { key: Vec<u8> [bytes = "vec"] "1" value: Vec<u8> [bytes = "vec"] "2" lease: i64 [int64] "3" }
    DeleteRequest { key: Vec<u8> [bytes = "vec"] "1" }
    /// An answer of which only its arrival counts.
    Nothing {}
    /// `result`: 0: equal, 1: greater. `target`: 1: `create_revision`, 2: `mod_revision`.
    Compare {
        result: i32 [int32] "1" target: i32 [int32] "2" key: Vec<u8> [bytes = "vec"] "3"
        create_revision: Option<i64> [int64, optional] "5" mod_revision: Option<i64> [int64, optional] "6"
        range_end: Vec<u8> [bytes = "vec"] "64"
    }
    TxnRequest {
        compare: Vec<Compare> [message, repeated] "1" success: Vec<RequestOp> [message, repeated] "2"
        failure: Vec<RequestOp> [message, repeated] "3"
    }
    TxnResponse {
        header: Option<Header> [message, optional] "1" succeeded: bool [bool] "2"
        responses: Vec<ResponseOp> [message, repeated] "3"
    }
    WatchCreateRequest { key: Vec<u8> [bytes = "vec"] "1" range_end: Vec<u8> [bytes = "vec"] "2" }
    WatchCancelRequest { id: i64 [int64] "1" }
    /// `kind`: 0: put, 1: deleted.
    Event { kind: i32 [int32] "1" kv: Option<KeyValue> [message, optional] "2" }
    WatchResponse {
        id: i64 [int64] "2" created: bool [bool] "3" canceled: bool [bool] "4" cancel_reason: String [string] "6"
        events: Vec<Event> [message, repeated] "11"
    }
    /// Grants a lease. `ttl` in seconds.
    LeaseGrantRequest { ttl: i64 [int64] "1" }
    /// The request to keep a lease alive, to revoke it, and for its time to live.
    LeaseRequest { id: i64 [int64] "1" }
    /// The answer to all requests about leases. `ttl` in seconds; zero or less: there is no such lease.
    LeaseResponse { header: Option<Header> [message, optional] "1" id: i64 [int64] "2" ttl: i64 [int64] "3" }
    AuthenticateRequest { name: String [string] "1" password: String [string] "2" }
    AuthenticateResponse { token: String [string] "2" }
}
