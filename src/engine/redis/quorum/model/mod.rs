//! A model of the protocol (`docs/proofs/quorum.md`) with three nodes, in which every order of events is tried (the stateright crate).
//!
//! Messages are not in order: each is executed at any time after it was sent, or never (message loss). Time is abstract: an
//! attempt ends at any moment (it fails, is released, or its validity ends), and from then on each node may remove its key at any
//! time (the release arrives, or the key expires). A node does not do so earlier, because validity counts from before the first
//! request, minus the drift.
//!
//! A vote is requested by the script, in one step, or by plain commands (`acquire/round.rs`), between which other commands
//! may be executed: one command acquires the name; the others, in a second step of the model, raise the counter to the floor,
//! which the attempt chose at its begin, and check that the name is still its own. (That check is the last command. If another
//! command is executed between the two, the vote does not count, as if its answer were lost.) If the vote does not count, the
//! script is sent.
//!
//! All clocks are one number that does not change, so that the proof rests on the counters. Only a wipe sets it to more than every
//! token: this is the requirement of `docs/quorum.md` that clocks differ by less than the duration of an outage.

mod steps;

use stateright::{Checker, HasDiscoveries, Model};

use super::fence::Proposal;

const NODES: usize = 3;
const MAJORITY: usize = 2;
const ATTEMPTS: usize = 3;

/// The data of a node, and the requests in flight for each attempt. Nodes are interchangeable, so a state has them sorted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Node {
    holder: Option<usize>,
    /// The record in the fence companion: an attempt and its token. It stays after a release.
    record: Option<(usize, u64)>,
    fence: u64,
    requests: [Requests; ATTEMPTS],
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Requests {
    vote: Vote,
    raise: Raise,
    heal: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Vote {
    /// Not requested, refused, or not needed any more.
    #[default]
    No,
    /// By plain commands, if they are allowed.
    Requested,
    /// The first plain command has acquired the name, and the others follow.
    Acquired,
    RequestedByScript,
    /// The answer is in flight or has arrived. (This affects only the time of the decision, and an attempt may decide at any
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
    Requested,
    Done,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
enum Phase {
    #[default]
    Future,
    Voting,
    /// `known` nodes knew the token from the start.
    Raising {
        fence: u64,
        known: usize,
    },
    Holding {
        fence: u64,
    },
    Ended {
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
    /// The largest granted token, and whether a token was not larger than the one before it.
    last: u64,
    shrunk: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// An attempt begins, with this floor.
    Start(usize, u64),
    ExecuteVote(usize, usize),
    /// The plain commands after the first one.
    ExecuteCount(usize, usize),
    /// By the answers of all nodes except this one.
    DecideWithout(usize, Option<usize>),
    ExecuteRaise(usize, usize),
    Grant(usize),
    End(usize),
    Free(usize),
    SendHeal(usize, usize),
    ExecuteHeal(usize, usize),
    Wipe(usize),
}

/// When a node may restart without its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Restart {
    /// After the end of every lease that it voted for.
    Delayed,
    /// After the decision of every attempt that it voted for.
    AfterTheRounds,
    AtOnce,
}

/// The rules, each of which can be broken.
#[derive(Debug, Clone)]
struct Rules {
    /// The owners of the attempts. The later attempts of an owner are its retries.
    owners: [usize; ATTEMPTS],
    /// The number of attempts.
    attempts: usize,
    restart: Restart,
    wipes: usize,
    writes_back: bool,
    fresh_values: bool,
    heals: bool,
    /// Whether votes are requested by plain commands, and the order of those.
    plain: Option<Order>,
    /// The number of different estimates of the clocks.
    floors: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    AcquireAndCount,
    CountAndAcquire,
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

    fn with_plain_commands(owners: [usize; ATTEMPTS]) -> Self {
        Rules {
            plain: Some(Order::AcquireAndCount),
            ..Rules::of(owners)
        }
    }

    /// Returns the order of the plain commands of an attempt. Later attempts of an owner use the script.
    fn plain_order(&self, attempt: usize) -> Option<Order> {
        self.plain
            .filter(|_| (0..attempt).all(|other| self.owners[other] != self.owners[attempt]))
    }

    fn may_start(&self, state: &State, attempt: usize) -> bool {
        let mine = |other: &usize| self.owners[*other] == self.owners[attempt];
        attempt < self.attempts
            && state.attempts[attempt] == Phase::Future
            // Attempts are numbered in the order of their begin.
            && (attempt == 0 || state.attempts[attempt - 1] != Phase::Future)
            // An owner retries after a failure, and never after it has held the lock.
            && (0..attempt).filter(mine).all(|other| state.attempts[other] == Phase::Ended { held: false })
    }

    fn may_free(&self, state: &State, node: usize) -> bool {
        let Some(holder) = state.nodes[node].holder else {
            return false;
        };
        let has_ended = |attempt: usize| matches!(state.attempts[attempt], Phase::Ended { .. });
        // The rollback of an earlier attempt may arrive at any time. Without separate values it removes the later vote.
        let is_mistaken = || (0..holder).any(|other| self.owners[other] == self.owners[holder] && has_ended(other));
        has_ended(holder) || !self.fresh_values && is_mistaken()
    }

    fn may_wipe(&self, state: &State, node: usize) -> bool {
        let counts = |attempt: usize| {
            let phase = state.attempts[attempt];
            let open = !matches!(phase, Phase::Ended { .. } | Phase::Future);
            let holding = matches!(phase, Phase::Holding { .. });
            match self.restart {
                Restart::Delayed => open,
                Restart::AfterTheRounds => open && !holding,
                Restart::AtOnce => false,
            }
        };
        let column = &state.nodes[node];
        let voted = |attempt: usize| matches!(column.requests[attempt].vote, Vote::Given { .. } | Vote::Acquired);
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
            // A late command could only raise a counter.
            node.requests[attempt].raise = Raise::No;
        }
    }

    fn holders(&self) -> usize {
        let holds = |phase: &&Phase| matches!(phase, Phase::Holding { .. });
        self.attempts.iter().filter(holds).count()
    }

    fn proposals(&self, attempt: usize, without: Option<usize>) -> Vec<Proposal> {
        let given = |(node, column): (usize, &Node)| match column.requests[attempt].vote {
            Vote::Given { fence, already } if Some(node) != without => Some(Proposal { node, fence, already }),
            _ => None,
        };
        self.nodes.iter().enumerate().filter_map(given).collect()
    }

    fn raised(&self, attempt: usize) -> usize {
        self.nodes
            .iter()
            .filter(|node| node.requests[attempt].raise == Raise::Done)
            .count()
    }

    fn have(&self, attempt: usize) -> usize {
        self.nodes.iter().filter(|node| node.holder == Some(attempt)).count()
    }
}

/// Returns the properties that do not hold.
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

/// Asserts that a property does not hold. The search ends there.
fn assert_breaks(rules: Rules, property: &'static str) {
    let until = HasDiscoveries::AllOf([property].into());
    let checker = rules.clone().checker().threads(2).finish_when(until).spawn_bfs().join();
    assert!(checker.discovery(property).is_some(), "{property}: {rules:?}");
}

/// Three acquisitions at once.
const RIVALS: [usize; ATTEMPTS] = [0, 1, 2];
/// Two owners, one of which retries after a failure.
const RETRY: [usize; ATTEMPTS] = [0, 1, 0];

#[test]
fn one_holder_and_growing_tokens_in_every_order_of_events() {
    for owners in [RIVALS, RETRY] {
        assert!(broken(Rules::of(owners)).is_empty());
    }
}

#[test]
fn plain_commands_keep_the_properties() {
    // More attempts or wipes at once have too many orders of events.
    let two_and_a_wipe = Rules {
        attempts: 2,
        ..Rules::with_plain_commands(RIVALS)
    };
    let with_a_retry = Rules {
        wipes: 0,
        floors: 1,
        ..Rules::with_plain_commands(RETRY)
    };
    for rules in [two_and_a_wipe, with_a_retry] {
        assert!(broken(rules).is_empty());
    }
}

#[test]
fn a_counter_raised_before_the_name_is_acquired_gives_old_tokens() {
    let rules = Rules {
        plain: Some(Order::CountAndAcquire),
        attempts: 2,
        wipes: 0,
        ..Rules::of(RIVALS)
    };
    assert_breaks(rules, "tokens grow");
}

#[test]
fn healing_keeps_the_properties() {
    let with = |restart| Rules {
        heals: true,
        attempts: 2,
        wipes: 2,
        restart,
        ..Rules::of(RIVALS)
    };
    assert!(broken(with(Restart::Delayed)).is_empty());
    assert_breaks(with(Restart::AfterTheRounds), "one holder");
}

#[test]
fn without_the_write_back_a_token_comes_twice() {
    let rules = Rules {
        writes_back: false,
        wipes: 0,
        ..Rules::of(RIVALS)
    };
    assert_breaks(rules, "tokens grow");
}

#[test]
fn without_fresh_values_a_late_rollback_makes_a_second_holder() {
    let rules = Rules {
        fresh_values: false,
        wipes: 0,
        ..Rules::of([0, 0, 1])
    };
    assert_breaks(rules, "one holder");
}

/// The statements of `docs/quorum.md` about restarts.
#[test]
fn a_node_that_loses_its_vote_votes_twice() {
    let at = |restart| Rules {
        restart,
        ..Rules::of(RIVALS)
    };
    // There are two holders, but the later one has the larger token.
    assert_eq!(broken(at(Restart::AfterTheRounds)), ["one holder"]);
    // Except when the node restarts before the attempt that it voted for is decided.
    assert_eq!(broken(at(Restart::AtOnce)), ["one holder", "tokens grow"]);
}
