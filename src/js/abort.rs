//! The caller's `AbortSignal`, which ends a wait.
//!
//! However many calls wait with one signal (a service's own shutdown signal, say), it carries one listener: Node warns of
//! a leak when an event target gets more than ten.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use napi::Env;
use tokio_util::sync::CancellationToken;

use super::promise::{Deferred, Shared};
use super::value::{
    Answer, Kept, Kind, Thrown, Value, construct, describe, function, get, global, invoke, kind, number, read_bool,
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

#[derive(Default)]
struct Groups {
    /// A `WeakMap` from signals to the numbers of their groups.
    numbers: Option<Kept>,
    groups: BTreeMap<u64, Group>,
    last: u64,
}

thread_local! {
    /// The groups of this thread's environment.
    static GROUPS: RefCell<Groups> = RefCell::default();
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
        let mut this = Abortable { deferred, place: None };
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
        let numbers = numbers(env, shared)?;
        let known = invoke(env, numbers, "get", &[signal])?;
        let group = if kind(env, known) == Kind::Number {
            read_number(env, known)? as u64
        } else {
            let group = fresh();
            let listener = function(env, "onAbort", move |env, _, _event| {
                aborted(env, group);
                Ok(undefined(env))
            })?;
            let kept = (Kept::new(env, shared, signal)?, Kept::new(env, shared, listener)?);
            invoke(env, numbers, "set", &[signal, number(env, group as f64)?])?;
            GROUPS.with_borrow_mut(|groups| {
                let (signal, listener) = kept;
                let members = BTreeMap::new();
                groups.groups.insert(
                    group,
                    Group {
                        signal,
                        listener,
                        members,
                    },
                );
            });
            if let Err(thrown) = invoke(env, signal, "addEventListener", &[string(env, "abort")?, listener]) {
                forget(env, group);
                return Err(thrown);
            }
            group
        };
        let member = fresh();
        let (deferred, abort) = (self.deferred.clone(), abort.clone());
        GROUPS.with_borrow_mut(|groups| {
            if let Some(group) = groups.groups.get_mut(&group) {
                group.members.insert(member, Member { deferred, abort });
            }
        });
        self.place = Some((group, member));
        Ok(())
    }

    /// Leaves the signal, and hands out the promise, unless the signal has settled it.
    pub(super) fn disarm(self, env: &Env) -> Option<Deferred> {
        if let Some((number, member)) = self.place {
            let last = GROUPS.with_borrow_mut(|groups| {
                let Some(group) = groups.groups.get_mut(&number) else {
                    return false;
                };
                group.members.remove(&member);
                group.members.is_empty()
            });
            if last {
                forget(env, number);
            }
        }
        take(&self.deferred)
    }
}

fn take(deferred: &Mutex<Option<Deferred>>) -> Option<Deferred> {
    deferred.lock().unwrap_or_else(PoisonError::into_inner).take()
}

fn fresh() -> u64 {
    GROUPS.with_borrow_mut(|groups| {
        groups.last += 1;
        groups.last
    })
}

fn numbers(env: &Env, shared: &Arc<Shared>) -> Answer<Value> {
    if let Some(map) = GROUPS.with_borrow(|groups| groups.numbers.as_ref().map(|kept| kept.value(env))) {
        return map;
    }
    let map = construct(env, global(env, "WeakMap")?)?;
    let kept = Kept::new(env, shared, map)?;
    GROUPS.with_borrow_mut(|groups| groups.numbers = Some(kept));
    Ok(map)
}

/// Takes the listener off a signal that no call waits with any more. No borrow is held while JavaScript runs.
fn forget(env: &Env, number: u64) -> Option<Group> {
    let (group, map) = GROUPS.with_borrow_mut(|groups| {
        let map = groups.numbers.as_ref().map(|kept| kept.value(env));
        (groups.groups.remove(&number), map)
    });
    let group = group?;
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
    let Some(group) = forget(env, number) else { return };
    for member in group.members.into_values() {
        if let Some(deferred) = take(&member.deferred) {
            member.abort.cancel();
            let reason = group.signal.value(env).and_then(|signal| get(env, signal, "reason"));
            deferred.settle(env, Err(reason.map_or_else(|thrown| thrown, Thrown::Js)));
        }
    }
}
