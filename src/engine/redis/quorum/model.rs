//! The protocol as a model of three nodes, and every order of events in it (the stateright crate).
//!
//! Messages are never in order: each is carried out at any time after it was sent, or never, which is loss. Time is
//! abstract: an attempt's time is over at any moment (it failed, was released, or its validity ended), and from then on
//! the nodes may free what it holds (the release arrives, or the key expires) at any time, each for itself. That a node
//! does not do so before is what validity, counted from before the first request and less the drift, is for.
//!
//! The clocks are one number that stands still, so that the plain counters have to do the work. Only a wipe moves it past
//! every fence: that is what `docs/quorum.md` asks of clocks, that they differ by less than a node is away.

use stateright::{Checker, Model, Property};

use super::fence::{Proposal, agree};

const NODES: usize = 3;
const MAJORITY: usize = 2;
const ATTEMPTS: usize = 3;

/// What a node has, and what is on its way to it and back, attempt by attempt. Nodes are all alike: a state has them sorted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Node {
    holder: Option<usize>,
    fence: u64,
    links: [Link; ATTEMPTS],
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Link {
    vote: Vote,
    raise: Raise,
    heal: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Vote {
    /// Not asked for, refused, or of no interest any more.
    #[default]
    No,
    Asked,
    /// The answer is on its way, or there. (Which of them changes nothing but when the attempt may decide: it does so at any
    /// moment, by any answers.)
    Given {
        fence: u64,
        already: bool,
    },
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Raise {
    #[default]
    No,
    Asked,
    Done,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
enum Phase {
    #[default]
    Future,
    Asking,
    /// So many nodes knew the fence from the start.
    Raising {
        fence: u64,
        known: usize,
    },
    Holding {
        fence: u64,
    },
    Over {
        held: bool,
    },
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct State {
    nodes: [Node; NODES],
    attempts: [Phase; ATTEMPTS],
    now: u64,
    wipes: usize,
    /// The largest fence that was granted, and whether one was not larger than the last.
    last: u64,
    shrunk: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Start(usize),
    CarryOutVote(usize, usize),
    /// By the answers of all nodes but this one.
    DecideWithout(usize, Option<usize>),
    CarryOutRaise(usize, usize),
    Grant(usize),
    End(usize),
    Free(usize),
    SendHeal(usize, usize),
    CarryOutHeal(usize, usize),
    Wipe(usize),
}

/// How soon a node may come back empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Restart {
    /// When every lease that it voted for is over.
    Delayed,
    /// When every attempt that it voted for is decided.
    AfterTheRound,
    AtOnce,
}

/// The rules, each of which can be broken.
#[derive(Debug, Clone)]
struct Rules {
    /// Who makes the attempts: the later ones of an owner are its retries.
    owners: [usize; ATTEMPTS],
    /// How many of them there are.
    attempts: usize,
    restart: Restart,
    wipes: usize,
    writes_back: bool,
    fresh_values: bool,
    heals: bool,
}

impl Rules {
    fn of(owners: [usize; ATTEMPTS]) -> Self {
        Rules {
            owners,
            attempts: ATTEMPTS,
            restart: Restart::Delayed,
            wipes: 1,
            writes_back: true,
            fresh_values: true,
            heals: false,
        }
    }

    fn may_start(&self, state: &State, attempt: usize) -> bool {
        let mine = |other: &usize| self.owners[*other] == self.owners[attempt];
        attempt < self.attempts
            && state.attempts[attempt] == Phase::Future
            // Attempts are numbered as they start.
            && (attempt == 0 || state.attempts[attempt - 1] != Phase::Future)
            // An owner tries again when it has failed, and never after it has held.
            && (0..attempt).filter(mine).all(|other| state.attempts[other] == Phase::Over { held: false })
    }

    fn may_free(&self, state: &State, node: usize) -> bool {
        let Some(holder) = state.nodes[node].holder else {
            return false;
        };
        let is_over = |attempt: usize| matches!(state.attempts[attempt], Phase::Over { .. });
        // A withdrawal of an earlier attempt may be on its way for ever; without a value of its own it hits the later one.
        let mistaken = || (0..holder).any(|other| self.owners[other] == self.owners[holder] && is_over(other));
        is_over(holder) || !self.fresh_values && mistaken()
    }

    fn may_wipe(&self, state: &State, node: usize) -> bool {
        let counts = |attempt: usize| {
            let phase = state.attempts[attempt];
            let open = !matches!(phase, Phase::Over { .. } | Phase::Future);
            let holding = matches!(phase, Phase::Holding { .. });
            match self.restart {
                Restart::Delayed => open,
                Restart::AfterTheRound => open && !holding,
                Restart::AtOnce => false,
            }
        };
        let column = &state.nodes[node];
        let voted = |attempt: usize| matches!(column.links[attempt].vote, Vote::Given { .. });
        state.wipes < self.wipes
            && !(0..ATTEMPTS).any(|attempt| counts(attempt) && (voted(attempt) || column.holder == Some(attempt)))
    }
}

impl State {
    fn grant(&mut self, attempt: usize, fence: u64) {
        self.shrunk |= fence <= self.last;
        self.last = self.last.max(fence);
        self.attempts[attempt] = Phase::Holding { fence };
        for node in &mut self.nodes {
            // A late one could only make a counter larger.
            node.links[attempt].raise = Raise::No;
        }
    }

    fn holders(&self) -> usize {
        let holds = |phase: &&Phase| matches!(phase, Phase::Holding { .. });
        self.attempts.iter().filter(holds).count()
    }

    fn proposals(&self, attempt: usize, without: Option<usize>) -> Vec<Proposal> {
        let given = |(node, column): (usize, &Node)| match column.links[attempt].vote {
            Vote::Given { fence, already } if Some(node) != without => Some(Proposal { node, fence, already }),
            _ => None,
        };
        self.nodes.iter().enumerate().filter_map(given).collect()
    }

    fn raised(&self, attempt: usize) -> usize {
        self.nodes
            .iter()
            .filter(|node| node.links[attempt].raise == Raise::Done)
            .count()
    }

    fn have(&self, attempt: usize) -> usize {
        self.nodes.iter().filter(|node| node.holder == Some(attempt)).count()
    }
}

impl Model for Rules {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::default()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (attempt, phase) in state.attempts.iter().enumerate() {
            if self.may_start(state, attempt) {
                actions.push(Action::Start(attempt));
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
                if link.vote == Vote::Asked {
                    actions.push(Action::CarryOutVote(attempt, node));
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
            Action::Start(attempt) => {
                state.attempts[attempt] = Phase::Asking;
                for node in &mut state.nodes {
                    node.links[attempt].vote = Vote::Asked;
                }
            }
            Action::CarryOutVote(attempt, node) => {
                let is_over = matches!(state.attempts[attempt], Phase::Over { .. });
                let column = &mut state.nodes[node];
                let given = match column.holder {
                    None => {
                        column.fence = (column.fence + 1).max(state.now);
                        Some(false)
                    }
                    Some(holder) => (self.owners[holder] == self.owners[attempt] && holder < attempt).then_some(true),
                };
                column.links[attempt].vote = match given {
                    Some(already) => {
                        column.holder = Some(attempt);
                        let fence = column.fence;
                        if is_over {
                            Vote::No
                        } else {
                            Vote::Given { fence, already }
                        }
                    }
                    None => Vote::No,
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
                    if link.vote != Vote::Asked {
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
                    column.fence = column.fence.max(fence);
                }
            }
            Action::Wipe(node) => {
                let counters = state.nodes.iter().map(|node| node.fence).max();
                state.now = state.last.max(counters.unwrap_or_default()) + 1;
                state.nodes[node].holder = None;
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

/// The two properties that do not hold, of those.
fn broken(rules: Rules) -> Vec<&'static str> {
    let started = std::time::Instant::now();
    let checker = rules.clone().checker().threads(2).spawn_bfs().join();
    let mut found: Vec<_> = checker.discoveries().into_keys().collect();
    found.sort_unstable();
    eprintln!(
        "{} states in {:?}: {rules:?}: {found:?}",
        checker.unique_state_count(),
        started.elapsed()
    );
    found
}

/// Three acquisitions at once.
const RIVALS: [usize; ATTEMPTS] = [0, 1, 2];
/// Two, one of which fails and is tried again.
const RETRY: [usize; ATTEMPTS] = [0, 1, 0];

#[test]
fn one_holder_and_growing_tokens_in_every_order_of_events() {
    for owners in [RIVALS, RETRY] {
        assert!(broken(Rules::of(owners)).is_empty());
    }
}

#[test]
fn healing_changes_nothing_of_that() {
    let with = |restart| Rules {
        heals: true,
        attempts: 2,
        wipes: 2,
        restart,
        ..Rules::of(RIVALS)
    };
    assert!(broken(with(Restart::Delayed)).is_empty());
    assert_eq!(broken(with(Restart::AfterTheRound)), ["one holder"]);
}

#[test]
fn without_the_write_back_a_token_comes_twice() {
    let rules = Rules {
        writes_back: false,
        wipes: 0,
        ..Rules::of(RIVALS)
    };
    assert_eq!(broken(rules), ["tokens grow"]);
}

#[test]
fn without_fresh_values_a_late_withdrawal_makes_a_second_holder() {
    let rules = Rules {
        fresh_values: false,
        wipes: 0,
        ..Rules::of([0, 0, 1])
    };
    assert!(broken(rules).contains(&"one holder"));
}

/// What `docs/quorum.md` says of restarts.
#[test]
fn a_node_that_forgets_its_vote_votes_twice() {
    let at = |restart| Rules {
        restart,
        ..Rules::of(RIVALS)
    };
    // There are two holders then, but the later one has the larger token.
    assert_eq!(broken(at(Restart::AfterTheRound)), ["one holder"]);
    // Unless the node is back before the attempt that it voted for is decided.
    assert_eq!(broken(at(Restart::AtOnce)), ["one holder", "tokens grow"]);
}
