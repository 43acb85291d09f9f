//! The two directions of `AbortSignal`: the caller's, which ends a wait, and a lock's own, which tells of its loss.

use std::sync::{Arc, Mutex, PoisonError};

use napi::Env;
use tokio_util::sync::CancellationToken;

use super::error::to_js;
use super::promise::{Deferred, Shared};
use super::value::{
    Answer, Kept, Kind, Thrown, Value, boolean, construct, delete, describe, function, get, global, invoke, kind,
    read_bool, string, undefined,
};
use crate::error::LockError;
use crate::service::Lease;

/// A promise that either its answer or the caller's signal settles, whichever is first.
pub(super) struct Abortable {
    deferred: Arc<Mutex<Option<Deferred>>>,
    listener: Option<(Kept, Kept)>,
}

/// Checks that a value is an `AbortSignal`, by what it can do: signals of other realms and polyfills count.
pub(super) fn check(env: &Env, value: Value) -> Answer<()> {
    let fits = kind(env, value) == Kind::Object
        && kind(env, get(env, value, "aborted")?) == Kind::Boolean
        && kind(env, get(env, value, "addEventListener")?) == Kind::Function
        && kind(env, get(env, value, "removeEventListener")?) == Kind::Function;
    if fits {
        Ok(())
    } else {
        Err(LockError::invalid("signal", "must be an AbortSignal", describe(env, value)).into())
    }
}

impl Abortable {
    /// Arms the signal, if there is one: an abort rejects the promise with `signal.reason` itself, and cancels `abort`.
    ///
    /// # Errors
    /// The reason, when the signal is aborted already.
    pub(super) fn new(
        env: &Env,
        shared: &Arc<Shared>,
        deferred: Deferred,
        signal: Option<Value>,
        abort: &CancellationToken,
    ) -> Result<Self, (Deferred, Thrown)> {
        let deferred = Arc::new(Mutex::new(Some(deferred)));
        let mut this = Abortable {
            deferred,
            listener: None,
        };
        let Some(signal) = signal else { return Ok(this) };
        match this.listen(env, shared, signal, abort) {
            Ok(()) => Ok(this),
            Err(thrown) => match take(&this.deferred) {
                Some(deferred) => Err((deferred, thrown)),
                // The signal was aborted by one of its own getters meanwhile; the promise is settled.
                None => Ok(this),
            },
        }
    }

    fn listen(&mut self, env: &Env, shared: &Arc<Shared>, signal: Value, abort: &CancellationToken) -> Answer<()> {
        if read_bool(env, get(env, signal, "aborted")?)? {
            return Err(Thrown::Js(get(env, signal, "reason")?));
        }
        let kept_signal = Kept::new(env, shared, signal)?;
        let (deferred, abort) = (self.deferred.clone(), abort.clone());
        let own_signal = Kept::new(env, shared, signal)?;
        let listener = function(env, "onAbort", move |env, _, _event| {
            if let Some(deferred) = take(&deferred) {
                abort.cancel();
                let reason = own_signal.value(env).and_then(|signal| get(env, signal, "reason"));
                deferred.settle(env, Err(reason.map_or_else(|thrown| thrown, Thrown::Js)));
            }
            Ok(undefined(env))
        })?;
        invoke(env, signal, "addEventListener", &[string(env, "abort")?, listener])?;
        self.listener = Some((kept_signal, Kept::new(env, shared, listener)?));
        Ok(())
    }

    /// Takes the listener off the signal, and hands out the promise, unless the signal has settled it.
    pub(super) fn disarm(self, env: &Env) -> Option<Deferred> {
        if let Some((signal, listener)) = &self.listener {
            let removed = signal.value(env).and_then(|signal| {
                let args = [string(env, "abort")?, listener.value(env)?];
                invoke(env, signal, "removeEventListener", &args)
            });
            // A signal whose own method throws keeps a listener that does nothing any more.
            drop(removed);
        }
        take(&self.deferred)
    }
}

fn take(deferred: &Mutex<Option<Deferred>>) -> Option<Deferred> {
    deferred.lock().unwrap_or_else(PoisonError::into_inner).take()
}

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

    /// Whether the lease is lost by the clock; if so, the signal is aborted when this returns.
    fn look(&self, env: &Env) -> bool {
        match self.lease.loss() {
            Some(loss) => {
                self.abort(env, &loss);
                true
            }
            None => false,
        }
    }

    fn abort(&self, env: &Env, loss: &LockError) {
        let controller = self.controller.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(controller) = controller else { return };
        let fired = controller.value(env).and_then(|controller| {
            let signal = get(env, controller, "signal")?;
            for name in LIVE {
                delete(env, signal, name)?;
            }
            invoke(env, controller, "abort", &[to_js(env, loss)])
        });
        // Node reports what a listener throws by itself; nothing else can fail here.
        drop(fired);
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
    let emitted = global(env, "process").and_then(|process| {
        let message = string(env, &format!("{text}: {shown}"))?;
        invoke(env, process, "emitWarning", &[message, string(env, "HoldfastWarning")?])
    });
    drop(emitted);
}
