//! The fence of a grant: what the nodes propose becomes one number.
//!
//! `docs/quorum.md` has the rule and why it holds; `model/` runs this very function through every order of events
//! on three nodes.

/// What a node proposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Proposal {
    pub(super) node: usize,
    pub(super) fence: u64,
    /// From an earlier attempt of the same owner, and kept ever since.
    pub(super) already: bool,
}

/// The fence, and what is missing until it may be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Agreement {
    pub(super) fence: u64,
    /// How many of the nodes have it, or a larger one, as their last.
    pub(super) known: usize,
    /// The nodes that have a smaller one.
    pub(super) behind: Vec<usize>,
}

/// The fence that follows from the proposals of a majority.
///
/// # Behavior
/// The largest proposal: each is larger than what its node had before, and the majority that knows the last grant's fence
/// shares a node with this one. It counts once a majority knows it, too. An owner that had the votes of a majority already
/// gets the fence that those know: its earlier grant, if there was one, was made with it.
pub(super) fn agree(proposals: &[Proposal], majority: usize) -> Agreement {
    let kept = proposals.iter().filter(|proposal| proposal.already).count() >= majority;
    let fence = proposals
        .iter()
        .filter(|proposal| proposal.already || !kept)
        .map(|proposal| proposal.fence)
        .max()
        .unwrap_or_default();
    let behind: Vec<usize> = proposals
        .iter()
        .filter(|proposal| proposal.fence < fence)
        .map(|proposal| proposal.node)
        .collect();
    Agreement {
        fence,
        known: proposals.len() - behind.len(),
        behind,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposals(list: &[(usize, u64, bool)]) -> Vec<Proposal> {
        let proposal = |&(node, fence, already)| Proposal { node, fence, already };
        list.iter().map(proposal).collect()
    }

    #[test]
    fn nodes_that_agree_need_nothing_more() {
        let agreement = agree(&proposals(&[(0, 7, false), (2, 7, false)]), 2);
        let (fence, known, behind) = (7, 2, vec![]);
        assert_eq!(agreement, Agreement { fence, known, behind });
    }

    #[test]
    fn the_largest_wins_and_the_others_are_behind() {
        let agreement = agree(&proposals(&[(0, 7, false), (1, 9, false), (2, 8, true)]), 2);
        let (fence, known, behind) = (9, 1, vec![0, 2]);
        assert_eq!(agreement, Agreement { fence, known, behind });
    }

    #[test]
    fn a_majority_that_was_kept_stands_by_its_fence() {
        let agreement = agree(&proposals(&[(0, 7, true), (1, 9, false), (2, 6, true)]), 2);
        let (fence, known, behind) = (7, 2, vec![2]);
        assert_eq!(agreement, Agreement { fence, known, behind });
    }
}
