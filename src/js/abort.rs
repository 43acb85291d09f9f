//! The caller's `AbortSignal`, which ends a wait.
//!
//! However many calls wait with one signal (a service's own shutdown signal, say), it carries one listener: Node warns of
//! a leak when an event target gets more than ten.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use napi::Env;
use tokio_util::sync::CancellationToken;

use super::promise::{Bridge, Deferred};
use super::value::{
    Answer, Kept, Kind, Thrown, Value, construct, describe, function, get, global, invoke, kind, read_bool,
    read_number, string, undefined,
};
use crate::error::LockError;

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

/// A promise that either its answer or the caller's signal settles, whichever is first.
pub(super) struct Abortable {
    deferred: Arc<Mutex<Option<Deferred>>>,
    /// The signal's group, and this call's number in it.
    place: Option<(u64, u64)>,
}

/// The calls that wait with one signal.
struct Group {
    signal: Kept,
    listener: Kept,
    members: BTreeMap<u64, Member>,
}

struct Member {
    deferred: Arc<Mutex<Option<Deferred>>>,
    abort: CancellationToken,
}

/// All signals that calls wait with in one environment.
#[derive(Default)]
pub(super) struct Groups {
    /// A `WeakMap` from signals to the numbers of their groups.
    numbers: Option<Kept>,
    groups: BTreeMap<u64, Group>,
    last: u64,
}

impl Abortable {
    /// Arms the signal, if there is one: an abort rejects the promise with `signal.reason` itself, and cancels the token.
    ///
    /// # Errors
    /// The reason, when the signal is aborted already.
    pub(super) fn new(
        env: &Env,
        bridge: &Bridge,
        deferred: Deferred,
        signal: Option<(Value, &CancellationToken)>,
    ) -> Result<Self, (Deferred, Thrown)> {
        let deferred = Arc::new(Mutex::new(Some(deferred)));
        let mut this = Abortable { deferred, place: None };
        let Some((signal, abort)) = signal else { return Ok(this) };
        match this.listen(env, bridge, signal, abort) {
            Ok(()) => Ok(this),
            Err(thrown) => match take(&this.deferred) {
                Some(deferred) => Err((deferred, thrown)),
                // The signal was aborted by one of its own getters meanwhile; the promise is settled.
                None => Ok(this),
            },
        }
    }

    fn listen(&mut self, env: &Env, bridge: &Bridge, signal: Value, abort: &CancellationToken) -> Answer<()> {
        if read_bool(env, get(env, signal, "aborted")?)? {
            return Err(Thrown::Js(get(env, signal, "reason")?));
        }
        let numbers = numbers(env, bridge)?;
        let known = invoke(env, numbers, "get", &[signal])?;
        let joined = if kind(env, known) == Kind::Number {
            Some(read_number(env, known)? as u64)
        } else {
            None
        };
        let number = joined.unwrap_or_else(|| bridge.signals.borrow_mut().fresh());
        let listener = match joined {
            Some(_) => None,
            None => Some(function(env, "onAbort", move |env, _, _event| {
                aborted(env, number);
                Ok(undefined(env))
            })?),
        };
        if let Some(listener) = listener {
            let shared = bridge.shared();
            let (signal_kept, listener) = (Kept::new(env, shared, signal)?, Kept::new(env, shared, listener)?);
            invoke(
                env,
                numbers,
                "set",
                &[signal, super::value::number(env, number as f64)?],
            )?;
            let (signal, members) = (signal_kept, BTreeMap::new());
            let group = Group {
                signal,
                listener,
                members,
            };
            bridge.signals.borrow_mut().groups.insert(number, group);
        }
        // The member comes before the listener: a signal may call back at once.
        let member = bridge.signals.borrow_mut().fresh();
        if let Some(group) = bridge.signals.borrow_mut().groups.get_mut(&number) {
            let (deferred, abort) = (self.deferred.clone(), abort.clone());
            group.members.insert(member, Member { deferred, abort });
        }
        self.place = Some((number, member));
        if let Some(listener) = listener
            && let Err(thrown) = invoke(env, signal, "addEventListener", &[string(env, "abort")?, listener])
        {
            forget(env, bridge, number);
            return Err(thrown);
        }
        Ok(())
    }

    /// Leaves the signal, and hands out the promise, unless the signal has settled it.
    pub(super) fn disarm(self, env: &Env, bridge: &Bridge) -> Option<Deferred> {
        if let Some((number, member)) = self.place {
            let last = match bridge.signals.borrow_mut().groups.get_mut(&number) {
                Some(group) => {
                    group.members.remove(&member);
                    group.members.is_empty()
                }
                None => false,
            };
            if last {
                forget(env, bridge, number);
            }
        }
        take(&self.deferred)
    }
}

impl Groups {
    fn fresh(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

fn take(deferred: &Mutex<Option<Deferred>>) -> Option<Deferred> {
    deferred.lock().unwrap_or_else(PoisonError::into_inner).take()
}

fn numbers(env: &Env, bridge: &Bridge) -> Answer<Value> {
    if let Some(map) = bridge.signals.borrow().numbers.as_ref().map(|kept| kept.value(env)) {
        return map;
    }
    let map = construct(env, global(env, "WeakMap")?)?;
    bridge.signals.borrow_mut().numbers = Some(Kept::new(env, bridge.shared(), map)?);
    Ok(map)
}

/// Takes the listener off a signal that no call waits with any more. No borrow is held while JavaScript runs.
fn forget(env: &Env, bridge: &Bridge, number: u64) -> Option<Group> {
    let group = bridge.signals.borrow_mut().groups.remove(&number)?;
    let map = bridge.signals.borrow().numbers.as_ref().map(|kept| kept.value(env));
    let removed = group.signal.value(env).and_then(|signal| {
        if let Some(Ok(map)) = map {
            invoke(env, map, "delete", &[signal])?;
        }
        invoke(
            env,
            signal,
            "removeEventListener",
            &[string(env, "abort")?, group.listener.value(env)?],
        )
    });
    // A signal whose own method throws keeps a listener that does nothing any more.
    drop(removed);
    Some(group)
}

/// The signal was aborted: every call that waits with it rejects with its reason.
fn aborted(env: &Env, number: u64) {
    let Ok(bridge) = Bridge::get(env) else { return };
    let Some(group) = forget(env, &bridge, number) else {
        return;
    };
    for member in group.members.into_values() {
        if let Some(deferred) = take(&member.deferred) {
            member.abort.cancel();
            let reason = group.signal.value(env).and_then(|signal| get(env, signal, "reason"));
            deferred.settle(env, Err(reason.map_or_else(|thrown| thrown, Thrown::Js)));
        }
    }
}
