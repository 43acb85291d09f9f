//! Takes the place of the fast path on systems without one: a type without values. Its callers are compiled, and never run.

#[path = "call.rs"]
mod call;
#[path = "record.rs"]
mod record;
#[path = "reply_sink.rs"]
mod reply_sink;
#[path = "resp.rs"]
pub(super) mod resp;

use std::io::{Error, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisResult, Value};
use rustls::ClientConnection;
use tokio::net::TcpStream;

pub(super) use self::call::{ALONE, BatchRelease, Outcome};
pub(super) use self::record::Record;
pub(super) use self::reply_sink::ReplySink;
use super::connection::liveness::Health;
use super::connection::pubsub::MessageHandler;
use super::keys::Layout;
use crate::event_loop::EventLoop;
use crate::model::{Claim, OwnerToken};

/// A fast path that cannot exist.
pub(super) enum FastPath {}

impl FastPath {
    pub(super) const IS_SUPPORTED: bool = false;

    pub(super) fn new(
        _: TcpStream,
        _: Option<ClientConnection>,
        _: Option<u32>,
        _: Layout,
        _: Duration,
    ) -> RedisResult<Arc<Self>> {
        Err(Error::from(ErrorKind::Unsupported).into())
    }

    pub(super) fn serve_on(self: Arc<Self>, _: &dyn EventLoop) {
        match *self {}
    }

    pub(super) fn watchdog(self: &Arc<Self>) -> std::future::Ready<()> {
        match **self {}
    }

    pub(super) fn number(&self) -> u64 {
        match *self {}
    }

    pub(super) fn is_open(&self) -> bool {
        match *self {}
    }

    pub(super) fn is_plain(&self) -> bool {
        match *self {}
    }

    pub(super) fn is_idle(&self) -> bool {
        match *self {}
    }

    pub(super) fn use_scripts_only(&self) {
        match *self {}
    }

    pub(super) fn subscribe(&self, _: impl FnOnce() -> (String, MessageHandler)) {
        match *self {}
    }

    pub(super) fn is_subscribed(&self) -> bool {
        match *self {}
    }

    pub(super) async fn call(&self, _: &Cmd) -> RedisResult<Value> {
        match *self {}
    }

    pub(super) async fn call_written(&self, _: impl FnOnce(&mut Vec<u8>)) -> RedisResult<Value> {
        match *self {}
    }

    pub(super) async fn attempt(&self, _: &Cmd, _: &(dyn Fn() + Sync)) -> RedisResult<Value> {
        match *self {}
    }

    pub(super) async fn settled(&self) {
        match *self {}
    }

    pub(super) async fn check(&self, _: &Claim) -> RedisResult<Outcome> {
        match *self {}
    }

    pub(super) async fn acquire(&self, _: &Claim) -> RedisResult<Outcome> {
        match *self {}
    }

    pub(super) async fn release(&self, _: &'static BatchRelease, _: &Claim, _: Option<&str>) -> RedisResult<Outcome> {
        match *self {}
    }

    pub(super) fn vote(&self, _: &Arc<dyn ReplySink>, _: usize, _: &Claim, _: &str, _: u64) {
        match *self {}
    }

    pub(super) fn release_to_sink(&self, _: &Arc<dyn ReplySink>, _: usize, _: &'static BatchRelease, _: &Claim) {
        match *self {}
    }

    pub(super) fn call_to_sink(&self, _: &Arc<dyn ReplySink>, _: usize, _: impl FnOnce(&mut Vec<u8>)) {
        match *self {}
    }

    pub(super) fn is_seeded(&self) -> bool {
        match *self {}
    }

    pub(super) fn begin_load(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        match *self {}
    }

    pub(super) fn record_later(&self, _: Record) {
        match *self {}
    }

    pub(super) fn forget(&self, _: &OwnerToken) {
        match *self {}
    }

    pub(super) fn write_records(&self) -> bool {
        match *self {}
    }

    pub(super) fn take_records(&self) -> Vec<Cmd> {
        match *self {}
    }

    pub(super) fn abandon(&self) {
        match *self {}
    }

    pub(super) fn end(&self) {
        match *self {}
    }

    pub(super) fn caller_left(&self) {
        match *self {}
    }

    pub(super) fn health(&self) -> &Health {
        match *self {}
    }
}
