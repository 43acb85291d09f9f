//! A lock's own `AbortSignal`, which tells of its loss.

use std::sync::{Arc, Mutex, PoisonError};

use napi::Env;

use super::error::to_js;
use super::promise::Shared;
use super::value::{
    Answer, Kept, Kind, Value, boolean, construct, delete, describe, function, get, global, invoke, kind, string,
    undefined,
};
use crate::error::LockError;
use crate::service::Lease;

/// The `AbortController` behind `lock.signal`, for as long as the lease may be lost.
pub(super) struct LossSignal {
    lease: Arc<Lease>,
    controller: Mutex<Option<Kept>>,
}

/// What of the signal looks at the clock when it is asked.
const LIVE: [&str; 3] = ["aborted", "reason", "throwIfAborted"];

impl LossSignal {
    /// Makes the signal of a lease.
    ///
    /// # Behavior
    /// After the process was suspended the event that tells of the loss waits its turn in the event loop, and the user's
    /// code may run before it. So, until the loss, the signal's own `aborted`, `reason` and `throwIfAborted` look at the
    /// clock when they are asked: whoever asks is told the truth at once, and asking fires the event. With the loss they
    /// go away, and the signal is an ordinary one.
    pub(super) fn signal_of(env: &Env, shared: &Arc<Shared>, lease: &Arc<Lease>) -> Answer<Value> {
        let controller = construct(env, global(env, "AbortController")?)?;
        let signal = get(env, controller, "signal")?;
        let this = Arc::new(LossSignal {
            lease: lease.clone(),
            controller: Mutex::new(Some(Kept::new(env, shared, controller)?)),
        });
        for name in LIVE {
            this.watch(env, signal, name)?;
        }
        let ended = Ended(this.clone());
        let bridge = shared.clone();
        lease.on_loss(Box::new(move |loss| {
            bridge.notice(move |env| {
                ended.0.abort(env, &loss);
                drop(ended);
            });
        }));
        this.look(env);
        Ok(signal)
    }

    /// Puts a live stand-in for one of the signal's own members on it.
    fn watch(self: &Arc<Self>, env: &Env, signal: Value, name: &'static str) -> Answer<()> {
        let live = self.clone();
        let stand_in = function(env, name, move |env, this, _| {
            if live.look(env) {
                // The stand-ins are gone: this is the signal's own answer.
                return match name {
                    "throwIfAborted" => invoke(env, this, name, &[]),
                    _ => get(env, this, name),
                };
            }
            Ok(if name == "aborted" {
                boolean(env, false)
            } else {
                undefined(env)
            })
        })?;
        let descriptor = super::value::object(env)?;
        let kind = if name == "throwIfAborted" { "value" } else { "get" };
        super::value::set(env, descriptor, kind, stand_in)?;
        super::value::set(env, descriptor, "configurable", boolean(env, true))?;
        let object = global(env, "Object")?;
        invoke(env, object, "defineProperty", &[signal, string(env, name)?, descriptor])?;
        Ok(())
    }

    /// Whether the signal was aborted by this: the lease is lost by the clock, and nobody had told yet.
    fn look(&self, env: &Env) -> bool {
        match self.lease.loss() {
            Some(loss) => self.abort(env, &loss),
            None => false,
        }
    }

    fn abort(&self, env: &Env, loss: &LockError) -> bool {
        let controller = self.controller.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(controller) = controller else {
            return false;
        };
        let fired = controller.value(env).and_then(|controller| {
            let signal = get(env, controller, "signal")?;
            for name in LIVE {
                delete(env, signal, name)?;
            }
            invoke(env, controller, "abort", &[to_js(env, loss)])
        });
        // Node reports what a listener throws by itself. Where something else failed, the stand-ins may be there still.
        fired.is_ok()
    }
}

/// Lets go of the controller when the lease cannot be lost any more: the signal and its getter hold each other.
struct Ended(Arc<LossSignal>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.controller.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// Has a warning printed the way Node prints its own, once per call.
pub(super) fn warn(env: &Env, text: &str, thrown: Value) {
    let shown = super::value::get(env, thrown, "stack")
        .ok()
        .filter(|stack| kind(env, *stack) == Kind::String)
        .and_then(|stack| super::value::read_lossy(env, stack).ok())
        .unwrap_or_else(|| describe(env, thrown));
    emit_warning(env, &format!("{text}: {shown}"));
}

/// Emits a `HoldfastWarning` of the process.
pub(super) fn emit_warning(env: &Env, text: &str) {
    let emitted = global(env, "process").and_then(|process| {
        let arguments = [string(env, text)?, string(env, "HoldfastWarning")?];
        invoke(env, process, "emitWarning", &arguments)
    });
    drop(emitted);
}
