//! The events of the model, and the changes of each.

use stateright::{Model, Property};

use super::super::fence::agree;
use super::{Action, MAJORITY, NODES, Order, Phase, Raise, Rules, State, Vote};

impl Model for Rules {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::default()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (attempt, phase) in state.attempts.iter().enumerate() {
            if self.may_start(state, attempt) {
                // Two processes may have the same estimate of the clocks, or different ones.
                let floors = if self.plain_order(attempt).is_some() {
                    1..=self.floors
                } else {
                    0..=0
                };
                actions.extend(floors.map(|ahead| Action::Start(attempt, state.now + ahead)));
            }
            if matches!(phase, Phase::Voting | Phase::Raising { .. } | Phase::Holding { .. }) {
                actions.push(Action::End(attempt));
            }
            if *phase == Phase::Voting {
                for without in [None, Some(0), Some(1), Some(2)] {
                    if state.proposals(attempt, without).len() >= MAJORITY {
                        actions.push(Action::DecideWithout(attempt, without));
                    }
                }
            }
            if matches!(phase, Phase::Raising { known, .. } if known + state.raised(attempt) >= MAJORITY) {
                actions.push(Action::Grant(attempt));
            }
            for (node, column) in state.nodes.iter().enumerate() {
                let request = column.requests[attempt];
                match request.vote {
                    Vote::Requested | Vote::RequestedByScript => actions.push(Action::ExecuteVote(attempt, node)),
                    Vote::Acquired => actions.push(Action::ExecuteCount(attempt, node)),
                    Vote::No | Vote::Given { .. } => {}
                }
                if request.raise == Raise::Requested {
                    actions.push(Action::ExecuteRaise(attempt, node));
                }
                if request.heal {
                    actions.push(Action::ExecuteHeal(attempt, node));
                } else if self.heals
                    && matches!(phase, Phase::Holding { .. })
                    && column.holder.is_none()
                    && state.have(attempt) >= MAJORITY
                {
                    actions.push(Action::SendHeal(attempt, node));
                }
            }
        }
        for node in 0..NODES {
            if self.may_free(state, node) {
                actions.push(Action::Free(node));
            }
            if self.may_wipe(state, node) {
                actions.push(Action::Wipe(node));
            }
        }
    }

    fn next_state(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        match action {
            Action::Start(attempt, floor) => {
                state.attempts[attempt] = Phase::Voting;
                state.floors[attempt] = floor;
                for node in &mut state.nodes {
                    node.requests[attempt].vote = Vote::Requested;
                }
            }
            Action::ExecuteVote(attempt, node) => self.execute_vote(&mut state, attempt, node),
            Action::ExecuteCount(attempt, node) => self.execute_count(&mut state, attempt, node),
            Action::DecideWithout(attempt, without) => {
                let agreement = agree(&state.proposals(attempt, without), MAJORITY);
                let (fence, known) = (agreement.fence, agreement.known);
                if known >= MAJORITY || !self.writes_back {
                    state.grant(attempt, fence);
                } else {
                    state.attempts[attempt] = Phase::Raising { fence, known };
                    for node in agreement.behind {
                        state.nodes[node].requests[attempt].raise = Raise::Requested;
                    }
                }
            }
            Action::ExecuteRaise(attempt, node) => execute_raise(&mut state, attempt, node)?,
            Action::Grant(attempt) => {
                let Phase::Raising { fence, .. } = state.attempts[attempt] else {
                    return None;
                };
                state.grant(attempt, fence);
            }
            Action::End(attempt) => {
                let held = matches!(state.attempts[attempt], Phase::Holding { .. });
                state.attempts[attempt] = Phase::Ended { held };
                for node in &mut state.nodes {
                    let request = &mut node.requests[attempt];
                    if let Vote::Given { .. } = request.vote {
                        request.vote = Vote::No;
                    }
                    request.raise = Raise::No;
                }
            }
            Action::Free(node) => state.nodes[node].holder = None,
            Action::SendHeal(attempt, node) => state.nodes[node].requests[attempt].heal = true,
            Action::ExecuteHeal(attempt, node) => execute_heal(&mut state, attempt, node),
            Action::Wipe(node) => {
                let counters = state.nodes.iter().map(|node| node.fence).max();
                state.now = state.last.max(counters.unwrap_or_default()) + 1;
                state.nodes[node].holder = None;
                state.nodes[node].record = None;
                state.nodes[node].fence = 0;
                state.wipes += 1;
            }
        }
        state.nodes.sort_unstable();
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("one holder", |_, state: &State| state.holders() <= 1),
            Property::always("tokens grow", |_, state: &State| !state.shrunk),
        ]
    }
}

impl Rules {
    /// A node executes a vote: the plain commands or the script.
    fn execute_vote(&self, state: &mut State, attempt: usize, node: usize) {
        let has_ended = matches!(state.attempts[attempt], Phase::Ended { .. });
        let (floor, now) = (state.floors[attempt], state.now);
        let column = &mut state.nodes[node];
        let plain = self
            .plain_order(attempt)
            .filter(|_| column.requests[attempt].vote == Vote::Requested);
        let vote = match (plain, column.holder) {
            (Some(Order::AcquireAndCount), None) => {
                column.holder = Some(attempt);
                Vote::Acquired
            }
            // The wrong order: the counter first, and the name in the second step.
            (Some(Order::CountAndAcquire), _) => {
                let counts = column.fence < floor && floor >= now;
                column.fence = column.fence.max(floor);
                if counts {
                    Vote::Acquired
                } else {
                    Vote::RequestedByScript
                }
            }
            (Some(Order::AcquireAndCount), Some(_)) if !has_ended => Vote::RequestedByScript,
            (Some(_), Some(_)) => Vote::No,
            (None, holder) => {
                // A later attempt of an owner replaces an earlier one, and not the reverse.
                let ours = holder.filter(|holder| self.owners[*holder] == self.owners[attempt] && *holder <= attempt);
                if holder.is_some() && ours.is_none() {
                    Vote::No
                } else {
                    // The record counts if it belongs to the attempt that has the vote.
                    let kept = column
                        .record
                        .filter(|(recorded, _)| ours == Some(*recorded) && *recorded < attempt);
                    if kept.is_none() {
                        column.fence = (column.fence + 1).max(now);
                    }
                    let fence = kept.map_or(column.fence, |(_, fence)| fence);
                    let already = kept.is_some();
                    column.holder = Some(attempt);
                    column.record = Some((attempt, fence));
                    if has_ended {
                        Vote::No
                    } else {
                        Vote::Given { fence, already }
                    }
                }
            }
        };
        column.requests[attempt].vote = vote;
    }

    /// A node executes the second step of the plain commands.
    fn execute_count(&self, state: &mut State, attempt: usize, node: usize) {
        let has_ended = matches!(state.attempts[attempt], Phase::Ended { .. });
        let (floor, now) = (state.floors[attempt], state.now);
        let column = &mut state.nodes[node];
        let stands = match self.plain {
            Some(Order::CountAndAcquire) => {
                let takes = column.holder.is_none();
                if takes {
                    column.holder = Some(attempt);
                }
                takes
            }
            _ => {
                // A floor from before a node's restart differs too much from its clock.
                let counts = column.fence < floor && floor >= now;
                column.fence = column.fence.max(floor);
                counts && column.holder == Some(attempt)
            }
        };
        column.requests[attempt].vote = match (has_ended, stands) {
            (true, _) => Vote::No,
            (false, true) => Vote::Given {
                fence: floor,
                already: false,
            },
            (false, false) => Vote::RequestedByScript,
        };
    }
}

/// A node raises its counter, and its record, to the token of a vote that it has.
fn execute_raise(state: &mut State, attempt: usize, node: usize) -> Option<()> {
    let Phase::Raising { fence, .. } = state.attempts[attempt] else {
        return None;
    };
    let column = &mut state.nodes[node];
    let has_vote = column.holder == Some(attempt);
    column.requests[attempt].raise = if has_vote { Raise::Done } else { Raise::No };
    if has_vote {
        column.fence = column.fence.max(fence);
        if let Some((of, recorded)) = &mut column.record
            && *of == attempt
        {
            *recorded = fence.max(*recorded);
        }
    }
    Some(())
}

/// A free node stores the lock that a renewal writes back.
fn execute_heal(state: &mut State, attempt: usize, node: usize) {
    let fence = match state.attempts[attempt] {
        Phase::Holding { fence } => fence,
        // A late command with an old token.
        _ => 0,
    };
    let column = &mut state.nodes[node];
    column.requests[attempt].heal = false;
    if column.holder.is_none() {
        column.holder = Some(attempt);
        column.record = Some((attempt, fence));
        column.fence = column.fence.max(fence);
    }
}
