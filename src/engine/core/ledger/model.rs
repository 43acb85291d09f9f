//! A search of every order of events of a shared name, with the ledger itself (the stateright crate).
//!
//! Each claim makes one attempt, as a waiter or not, and releases, stops waiting or dies. An event is one transaction, as an SQL engine
//! makes it: rows and positions are read, the ledger is called, and its changes are written. A check of the name, as a heartbeat makes it,
//! follows each death.

use std::sync::Arc;
use std::time::Duration;

use stateright::{Checker, Model, Property};

use super::*;
use crate::model::{Key, Process, Share, Sums};

const NOW: i64 = 1_700_000_000_000_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    Waiting,
    Holding,
    Ended,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    phases: Vec<Phase>,
    /// The rows of shares, by claim: whether each is alive.
    held: BTreeMap<usize, bool>,
    /// The positions in their order: the claim, and whether it is alive.
    queue: Vec<(usize, bool)>,
    fence: i64,
    /// The faults of the steps so far.
    has_shrunk: bool,
    has_overtaken: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Attempt { claim: usize, waits: bool },
    Release(usize),
    Death(usize),
}

/// The shares of the claims.
#[derive(Debug, Clone)]
struct Claims(Vec<Share>);

fn key() -> Key {
    Key::new("n").unwrap().shared()
}

fn owner(claim: usize) -> OwnerToken {
    OwnerToken::parse(&format!("{claim:032x}")).unwrap()
}

fn claim_of(owner: &str) -> usize {
    usize::from_str_radix(owner, 16).unwrap()
}

impl Claims {
    fn claim(&self, claim: usize, waits: bool) -> Claim {
        let ttl = Ttl::clamped(Duration::from_secs(30));
        let mut made = Claim::new(&[key()], owner(claim), ttl, Arc::new(Process::current()));
        (made.share, made.waiting) = (Some(self.0[claim]), waits);
        made
    }

    /// Reads the tables.
    fn read(&self, state: &State) -> Ledger {
        let name = stored_name("", &key());
        let process = Arc::new(Process::current());
        let end = |is_live: bool| NOW + if is_live { 4_500_000 } else { 0 };
        let share = |(claim, is_live): (&usize, &bool)| {
            let owner = owner(*claim).as_str().to_owned();
            let row = Row::read(Some(owner.clone()), end(*is_live), state.fence, Some(self.0[*claim]));
            (share_name(&name, &owner), row)
        };
        let position = |(index, (claim, is_live)): (usize, &(usize, bool))| {
            let waiter = Waiter {
                engine: None,
                holder: Some(process.clone()),
                hold_ms: 4500,
                share: Some(self.0[*claim]),
            };
            let owner = owner(*claim).as_str().to_owned();
            Position::read(index as i64 + 1, name.clone(), owner, end(*is_live), waiter)
        };
        let mut rows: BTreeMap<StoredName, Row> = state.held.iter().map(share).collect();
        rows.insert(name.clone(), Row::read(None, 0, state.fence, None));
        Ledger::new(NOW, rows, state.queue.iter().enumerate().map(position).collect())
    }

    /// Makes a transaction.
    fn transact(&self, state: &mut State, call: impl FnOnce(&mut Ledger)) {
        let before = state.clone();
        let mut ledger = self.read(state);
        call(&mut ledger);
        let changes = ledger.finish();
        let name = stored_name("", &key());
        for (stored, row) in changes.rows {
            if stored == name {
                state.has_shrunk |= row.fence < state.fence;
                state.fence = row.fence;
                continue;
            }
            let claim = claim_of(std::str::from_utf8(&stored[name.len() + 1..]).unwrap());
            if row.owner.is_some() {
                // The fence of the transaction may be that of a later grant in it.
                state.has_shrunk |= !before.held.contains_key(&claim) && row.fence <= before.fence;
                state.held.insert(claim, true);
            } else {
                state.held.remove(&claim);
            }
        }
        state
            .queue
            .retain(|(claim, _)| !changes.left.iter().any(|left| claim_of(left) == *claim));
        for entered in changes.entered {
            let claim = claim_of(&entered.owner);
            if !state.queue.iter().any(|(queued, _)| *queued == claim) {
                state.queue.push((claim, true));
            }
        }
        for notification in changes.notifications {
            if let Content::Granted(..) = notification.content {
                state.phases[claim_of(&notification.owner)] = Phase::Holding;
            }
        }
        // The claims that were granted in this step came before all that still wait.
        let is_live = |state: &State, claim| state.queue.iter().position(|queued| *queued == (claim, true));
        let waits_on: Vec<usize> = (0..self.0.len())
            .filter(|claim| is_live(&before, *claim).is_some())
            .collect();
        for granted in state.held.keys().filter(|claim| !before.held.contains_key(claim)) {
            let position = is_live(&before, *granted).unwrap_or(usize::MAX);
            let is_passed =
                |claim: &usize| is_live(state, *claim).is_some() && is_live(&before, *claim) < Some(position);
            state.has_overtaken |= waits_on.iter().any(|claim| claim != granted && is_passed(claim));
        }
    }

    fn sums(&self, state: &State) -> Sums {
        let live = state.held.iter().filter(|(_, is_live)| **is_live);
        live.map(|(claim, _)| self.0[*claim]).collect()
    }
}

impl Model for Claims {
    type State = State;
    type Action = Event;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            phases: vec![Phase::Idle; self.0.len()],
            held: BTreeMap::new(),
            queue: Vec::new(),
            fence: 1,
            has_shrunk: false,
            has_overtaken: false,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Event>) {
        for (claim, phase) in state.phases.iter().enumerate() {
            match phase {
                Phase::Idle => actions.extend([false, true].map(|waits| Event::Attempt { claim, waits })),
                Phase::Waiting | Phase::Holding => actions.extend([Event::Release(claim), Event::Death(claim)]),
                Phase::Ended => {}
            }
        }
    }

    fn next_state(&self, last: &State, event: Event) -> Option<State> {
        let mut state = last.clone();
        let names = [stored_name("", &key())];
        match event {
            Event::Attempt { claim, waits } => {
                // A grant replaces this.
                state.phases[claim] = if waits { Phase::Waiting } else { Phase::Ended };
                let mut is_granted = false;
                self.transact(&mut state, |ledger| {
                    let acquired = ledger.attempt(&self.claim(claim, waits), &names);
                    is_granted = matches!(acquired, Acquired::Granted { .. });
                });
                if is_granted {
                    state.phases[claim] = Phase::Holding;
                }
            }
            Event::Release(claim) => {
                state.phases[claim] = Phase::Ended;
                self.transact(&mut state, |ledger| {
                    ledger.release(&self.claim(claim, false), &names, Duration::ZERO);
                });
            }
            Event::Death(claim) => {
                state.phases[claim] = Phase::Ended;
                state.held.entry(claim).and_modify(|is_live| *is_live = false);
                let position = state.queue.iter_mut().find(|(queued, _)| *queued == claim);
                position.into_iter().for_each(|(_, is_live)| *is_live = false);
                self.transact(&mut state, |_| ());
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(
                "the permits in use are within the limit of each holder",
                |claims: &Claims, state: &State| {
                    let live = || state.held.iter().filter(|(_, is_live)| **is_live);
                    let used: u32 = live().map(|(claim, _)| claims.0[*claim].permits()).sum();
                    live().all(|(claim, _)| used <= claims.0[*claim].limit())
                },
            ),
            Property::always("the owner of a live row holds", |_, state: &State| {
                let live = |claim: &usize| state.held.get(claim) == Some(&true);
                let holds = |claim: &usize| state.phases[*claim] == Phase::Holding;
                (0..state.phases.len()).all(|claim| live(&claim) == holds(&claim))
            }),
            Property::always("no waiter is overtaken", |_, state: &State| !state.has_overtaken),
            Property::always("tokens grow", |_, state: &State| !state.has_shrunk),
            // So every waiter is granted once the holders before it have ended.
            Property::always("the first waiter does not fit", |claims: &Claims, state: &State| {
                let first = state.queue.iter().find(|(_, is_live)| *is_live);
                first.is_none_or(|(claim, _)| !claims.sums(state).with(claims.0[*claim]).is_within_limits())
            }),
            Property::sometimes("all hold, or one waits", |_, state: &State| {
                state
                    .phases
                    .iter()
                    .all(|phase| matches!(phase, Phase::Holding | Phase::Waiting))
            }),
        ]
    }
}

/// Checks three claims with every combination of permits and limits up to three.
#[test]
fn the_rule_holds_in_every_order_of_events() {
    let shares: Vec<Share> = (1..=3)
        .flat_map(|limit| (1..=limit).map(move |permits| Share::new(permits, limit).unwrap()))
        .collect();
    let mut states = 0;
    for one in 0..shares.len() {
        for other in one..shares.len() {
            for third in other..shares.len() {
                let claims = Claims([one, other, third].map(|index| shares[index]).to_vec());
                let checker = claims.checker().spawn_bfs().join();
                checker.assert_properties();
                states += checker.unique_state_count();
            }
        }
    }
    assert!(states > 10_000, "{states} states");
}
