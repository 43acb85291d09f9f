//! Sends the messages of a service to JavaScript: events and losses, in batches, to one function.

use std::ptr;
use std::sync::{Arc, Weak};

use napi::bindgen_prelude::{Function, ToNapiValue};
use napi::{Env, JsValue, sys};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::deferred::{share_to_json, to_json};
use super::shared::{Reference, Shared};
use crate::engine::Warnings;
use crate::error::{Code, LockError};
use crate::service::{Event, EventKind};
use crate::stall_detector::StallDetector;

/// Calls the `notify` function of one service with JSON text: an array of messages.
pub(in crate::js) struct Notifier {
    pub(super) shared: Arc<Shared>,
    notify: Reference,
    /// The JSON text of the next call, without the closing bracket. Empty: there are no messages.
    batch: Mutex<String>,
}

impl Notifier {
    /// Creates the notifier of a service with a reference to its JavaScript function.
    pub(in crate::js) fn new(
        env: &Env,
        shared: &Arc<Shared>,
        notify: &Function<'_, String, ()>,
    ) -> napi::Result<Arc<Self>> {
        let mut reference = ptr::null_mut();
        // SAFETY: `env` is the live environment of this thread, and the function belongs to the open handle scope.
        napi::check_status!(unsafe { sys::napi_create_reference(env.raw(), notify.raw(), 1, &mut reference) })?;
        Ok(Arc::new(Notifier {
            shared: shared.clone(),
            notify: Reference(reference),
            batch: Mutex::default(),
        }))
    }

    /// Reports the loss of a lease.
    pub(in crate::js) fn lost(self: &Arc<Self>, id: u64, error: &LockError) {
        self.send(&json!({ "lost": id, "error": to_json(error) }));
    }

    /// Reports an event.
    pub(in crate::js) fn event(self: &Arc<Self>, event: &Event) {
        let duration = event.duration.map(|duration| duration.as_secs_f64() * 1000.0);
        let (waited, held) = match event.kind {
            EventKind::Released | EventKind::Lost => (None, duration),
            _ => (duration, None),
        };
        self.send(&json!({
            "type": event.kind,
            "names": event.names.as_ref().map(|names| names.iter().map(|name| name.as_str()).collect::<Vec<_>>()),
            "share": event.share.map(share_to_json),
            "fencingToken": event.fence.map(|fence| fence.0.to_string()),
            "waitedMs": waited,
            "heldMs": held,
            "reason": event.reason.as_deref(),
            "code": event.code.map(Code::as_str),
        }));
    }

    /// Emits a process warning.
    pub(in crate::js) fn warn(self: &Arc<Self>, text: &str) {
        self.send(&json!({ "warning": text }));
    }

    /// Adds a message to the batch. The first message of a batch schedules its delivery.
    pub(super) fn send(self: &Arc<Self>, message: &Value) {
        let mut batch = self.batch.lock();
        let is_first = batch.is_empty();
        batch.push(if is_first { '[' } else { ',' });
        batch.push_str(&message.to_string());
        if is_first {
            let this = self.clone();
            self.shared.notice(move |env, _| this.deliver(env));
        }
    }

    /// Calls the JavaScript function with the batch.
    fn deliver(&self, env: &Env) {
        let mut batch = std::mem::take(&mut *self.batch.lock());
        batch.push(']');
        let (mut function, mut result) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: `env` is the live environment of this thread, and the caller opened a handle scope. `notify` catches the
        // errors of the user's code.
        unsafe {
            sys::napi_get_reference_value(env.raw(), self.notify.0, &mut function);
            let (Ok(this), Ok(text)) = (
                <()>::to_napi_value(env.raw(), ()),
                String::to_napi_value(env.raw(), batch),
            ) else {
                return;
            };
            sys::napi_call_function(env.raw(), this, function, 1, &text, &mut result);
            // An exception that is pending would fail every later call of Node-API, and leave promises unsettled.
            sys::napi_get_and_clear_last_exception(env.raw(), &mut result);
        }
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.shared.discard(self.notify);
    }
}

/// Creates the warnings of a service.
pub(in crate::js) fn warnings(notifier: &Arc<Notifier>) -> Arc<Warnings> {
    let notifier = notifier.clone();
    Arc::new(Warnings::new(move |text| notifier.warn(text)))
}

/// Creates the stall detector of a service. Its pings are notices: they do not keep the process alive.
pub(in crate::js) fn stall_detector(shared: &Arc<Shared>) -> Arc<StallDetector> {
    let shared = shared.clone();
    Arc::new_cyclic(|detector: &Weak<StallDetector>| {
        let detector = detector.clone();
        StallDetector::new(move || {
            let detector = detector.clone();
            shared.notice(move |_, _| {
                if let Some(detector) = detector.upgrade() {
                    detector.responded();
                }
            });
        })
    })
}
