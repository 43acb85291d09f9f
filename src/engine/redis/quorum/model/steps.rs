//! The events, and what each of them changes.

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
                // Two processes may have the same idea of the clocks, or not.
                let floors = if self.asks_plainly(attempt).is_some() {
                    1..=self.floors
                } else {
                    0..=0
                };
                actions.extend(floors.map(|ahead| Action::Start(attempt, state.now + ahead)));
            }
            if matches!(phase, Phase::Asking | Phase::Raising { .. } | Phase::Holding { .. }) {
                actions.push(Action::End(attempt));
            }
            if *phase == Phase::Asking {
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
                let link = column.links[attempt];
                match link.vote {
                    Vote::Asked | Vote::AskedByScript => actions.push(Action::CarryOutVote(attempt, node)),
                    Vote::Taken => actions.push(Action::CarryOutCount(attempt, node)),
                    Vote::No | Vote::Given { .. } => {}
                }
                if link.raise == Raise::Asked {
                    actions.push(Action::CarryOutRaise(attempt, node));
                }
                if link.heal {
                    actions.push(Action::CarryOutHeal(attempt, node));
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
                state.attempts[attempt] = Phase::Asking;
                state.floors[attempt] = floor;
                for node in &mut state.nodes {
                    node.links[attempt].vote = Vote::Asked;
                }
            }
            Action::CarryOutVote(attempt, node) => {
                let is_over = matches!(state.attempts[attempt], Phase::Over { .. });
                let (floor, now) = (state.floors[attempt], state.now);
                let column = &mut state.nodes[node];
                let plain = self
                    .asks_plainly(attempt)
                    .filter(|_| column.links[attempt].vote == Vote::Asked);
                let vote = match (plain, column.holder) {
                    (Some(Order::TakeAndCount), None) => {
                        column.holder = Some(attempt);
                        Vote::Taken
                    }
                    // For the model that breaks the rule: the counter first, and the name in the second step.
                    (Some(Order::CountAndTake), _) => {
                        let counts = column.fence < floor && floor >= now;
                        column.fence = column.fence.max(floor);
                        if counts { Vote::Taken } else { Vote::AskedByScript }
                    }
                    (Some(Order::TakeAndCount), Some(_)) if !is_over => Vote::AskedByScript,
                    (Some(_), Some(_)) => Vote::No,
                    (None, holder) => {
                        // The latest attempt of an owner keeps its vote; an earlier one of the same owner hands it over.
                        let ours =
                            holder.filter(|holder| self.owners[*holder] == self.owners[attempt] && *holder <= attempt);
                        if holder.is_some() && ours.is_none() {
                            Vote::No
                        } else {
                            // What is told of the attempt that has the vote, and not of another.
                            let kept = column.told.filter(|(told, _)| ours == Some(*told) && *told < attempt);
                            if kept.is_none() {
                                column.fence = (column.fence + 1).max(now);
                            }
                            let fence = kept.map_or(column.fence, |(_, fence)| fence);
                            let already = kept.is_some();
                            column.holder = Some(attempt);
                            column.told = Some((attempt, fence));
                            if is_over {
                                Vote::No
                            } else {
                                Vote::Given { fence, already }
                            }
                        }
                    }
                };
                column.links[attempt].vote = vote;
            }
            Action::CarryOutCount(attempt, node) => {
                let is_over = matches!(state.attempts[attempt], Phase::Over { .. });
                let (floor, now) = (state.floors[attempt], state.now);
                let column = &mut state.nodes[node];
                let stands = match self.plain {
                    Some(Order::CountAndTake) => {
                        let takes = column.holder.is_none();
                        if takes {
                            column.holder = Some(attempt);
                        }
                        takes
                    }
                    _ => {
                        // A floor from before a node's restart is not what its clock shows.
                        let counts = column.fence < floor && floor >= now;
                        column.fence = column.fence.max(floor);
                        counts && column.holder == Some(attempt)
                    }
                };
                column.links[attempt].vote = match (is_over, stands) {
                    (true, _) => Vote::No,
                    (false, true) => Vote::Given {
                        fence: floor,
                        already: false,
                    },
                    (false, false) => Vote::AskedByScript,
                };
            }
            Action::DecideWithout(attempt, without) => {
                let agreement = agree(&state.proposals(attempt, without), MAJORITY);
                let (fence, known) = (agreement.fence, agreement.known);
                if known >= MAJORITY || !self.writes_back {
                    state.grant(attempt, fence);
                } else {
                    state.attempts[attempt] = Phase::Raising { fence, known };
                    for node in agreement.behind {
                        state.nodes[node].links[attempt].raise = Raise::Asked;
                    }
                }
            }
            Action::CarryOutRaise(attempt, node) => {
                let Phase::Raising { fence, .. } = state.attempts[attempt] else {
                    return None;
                };
                let column = &mut state.nodes[node];
                let has_vote = column.holder == Some(attempt);
                column.links[attempt].raise = if has_vote { Raise::Done } else { Raise::No };
                if has_vote {
                    column.fence = column.fence.max(fence);
                    if let Some((of, told)) = &mut column.told
                        && *of == attempt
                    {
                        *told = fence.max(*told);
                    }
                }
            }
            Action::Grant(attempt) => {
                let Phase::Raising { fence, .. } = state.attempts[attempt] else {
                    return None;
                };
                state.grant(attempt, fence);
            }
            Action::End(attempt) => {
                let held = matches!(state.attempts[attempt], Phase::Holding { .. });
                state.attempts[attempt] = Phase::Over { held };
                for node in &mut state.nodes {
                    let link = &mut node.links[attempt];
                    if let Vote::Given { .. } = link.vote {
                        link.vote = Vote::No;
                    }
                    link.raise = Raise::No;
                }
            }
            Action::Free(node) => state.nodes[node].holder = None,
            Action::SendHeal(attempt, node) => state.nodes[node].links[attempt].heal = true,
            Action::CarryOutHeal(attempt, node) => {
                let fence = match state.attempts[attempt] {
                    Phase::Holding { fence } => fence,
                    // A late one: the fence that it brings is an old one.
                    _ => 0,
                };
                let column = &mut state.nodes[node];
                column.links[attempt].heal = false;
                if column.holder.is_none() {
                    column.holder = Some(attempt);
                    column.told = Some((attempt, fence));
                    column.fence = column.fence.max(fence);
                }
            }
            Action::Wipe(node) => {
                let counters = state.nodes.iter().map(|node| node.fence).max();
                state.now = state.last.max(counters.unwrap_or_default()) + 1;
                state.nodes[node].holder = None;
                state.nodes[node].told = None;
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
