//! The protocol as a model of three nodes, and every order of events in it (the stateright crate).
//!
//! Messages are never in order: each is carried out at any time after it was sent, or never, which is loss. Time is
//! abstract: an attempt's time is over at any moment (it failed, was released, or its validity ended), and from then on
//! the nodes may free what it holds (the release arrives, or the key expires) at any time, each for itself. That a node
//! does not do so before is what validity, counted from before the first request and less the drift, is for.
//!
//! A vote is asked for by the script, in one step, or by plain commands (`attempt.rs`), between which anything may happen: one
//! takes the name; the others, in a second step here, raise the counter to the floor, which the attempt has chosen when it
//! began, and look whether the name is still its own. (That look is the last command. If something comes between those two,
//! the vote does not count, which is the same as if the answer were lost.) What does not count falls to the script.
//!
//! The clocks are one number that stands still, so that the plain counters have to do the work. Only a wipe moves it past
//! every fence: that is what `docs/quorum.md` asks of clocks, that they differ by less than a node is away.

mod steps;

use stateright::{Checker, Model};

use super::fence::Proposal;

const NODES: usize = 3;
const MAJORITY: usize = 2;
const ATTEMPTS: usize = 3;

/// What a node has, and what is on its way to it and back, attempt by attempt. Nodes are all alike: a state has them sorted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Node {
    holder: Option<usize>,
    /// What the fence companion tells: an attempt, and its fence. It stays when the name is freed.
    told: Option<(usize, u64)>,
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
    /// By plain commands, if there may be such.
    Asked,
    /// Plain commands have taken the name, and more of them come.
    Taken,
    AskedByScript,
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
    floors: [u64; ATTEMPTS],
    now: u64,
    wipes: usize,
    /// The largest fence that was granted, and whether one was not larger than the last.
    last: u64,
    shrunk: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// With this floor.
    Start(usize, u64),
    CarryOutVote(usize, usize),
    /// What comes behind the taking, of plain commands.
    CarryOutCount(usize, usize),
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
    /// Whether votes are asked for by plain commands, and in which order those come.
    plain: Option<Order>,
    /// How many ideas of the clocks there are.
    floors: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    TakeAndCount,
    CountAndTake,
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
            plain: None,
            floors: 2,
        }
    }

    fn plainly(owners: [usize; ATTEMPTS]) -> Self {
        Rules {
            plain: Some(Order::TakeAndCount),
            ..Rules::of(owners)
        }
    }

    /// An owner's later attempts go by the script.
    fn asks_plainly(&self, attempt: usize) -> Option<Order> {
        self.plain
            .filter(|_| (0..attempt).all(|other| self.owners[other] != self.owners[attempt]))
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
        let voted = |attempt: usize| matches!(column.links[attempt].vote, Vote::Given { .. } | Vote::Taken);
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
fn plain_commands_are_as_good() {
    // With more of everything at once there are too many orders of events to try.
    let two_and_a_wipe = Rules {
        attempts: 2,
        ..Rules::plainly(RIVALS)
    };
    let with_a_retry = Rules {
        wipes: 0,
        floors: 1,
        ..Rules::plainly(RETRY)
    };
    for rules in [two_and_a_wipe, with_a_retry] {
        assert!(broken(rules).is_empty());
    }
}

#[test]
fn a_counter_that_is_raised_before_the_name_is_taken_gives_old_tokens() {
    let rules = Rules {
        plain: Some(Order::CountAndTake),
        attempts: 2,
        wipes: 0,
        ..Rules::of(RIVALS)
    };
    assert_eq!(broken(rules), ["tokens grow"]);
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
