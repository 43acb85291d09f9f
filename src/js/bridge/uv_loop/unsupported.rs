//! Takes the place of `UvLoop` on systems where libuv polls no descriptors: a type without values.

use std::rc::Rc;
use std::sync::Arc;

use napi::Env;

use super::Bridge;
use crate::event_loop::Socket;

/// A handle on an event loop that cannot exist.
pub(super) enum UvLoop {}

impl UvLoop {
    pub(super) fn find(_: &Env) -> Option<Self> {
        None
    }

    pub(super) fn is_active(&self) -> bool {
        match *self {}
    }

    pub(super) fn activate(&self, _: &Rc<Bridge>) {
        match *self {}
    }

    pub(super) fn serve(&self, _: &Rc<Bridge>, _: Arc<dyn Socket>) {
        match *self {}
    }

    pub(super) fn end(&self) {
        match *self {}
    }
}
