//! The fencing token of a grant, computed from the proposals of the nodes.
//!
//! `docs/proofs/quorum.md` has the rule and its proof. `model/` calls this function in every order of events on three nodes.

/// The proposal of one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Proposal {
    pub(super) node: usize,
    pub(super) fence: u64,
    /// The node gave this vote to an earlier attempt of the same owner, which has kept it since.
    pub(super) already: bool,
}

/// The fencing token, and what is missing until it may be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Agreement {
    pub(super) fence: u64,
    /// The number of nodes whose last token is this one or a larger one.
    pub(super) known: usize,
    /// The nodes whose last token is smaller.
    pub(super) behind: Vec<usize>,
}

/// Returns the fencing token that follows from the proposals of a majority.
///
/// # Behavior
/// It is the largest proposal: each proposal is larger than the last token of its node, and the majority that knows the token
/// of the last grant shares a node with this one. It counts once a majority knows it, too. An owner that had the votes of a
/// majority already gets the token that these nodes know: its earlier grant, if there was one, has that token.
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
    fn the_largest_proposal_is_the_token_and_the_other_nodes_are_behind() {
        let agreement = agree(&proposals(&[(0, 7, false), (1, 9, false), (2, 8, true)]), 2);
        let (fence, known, behind) = (9, 1, vec![0, 2]);
        assert_eq!(agreement, Agreement { fence, known, behind });
    }

    #[test]
    fn a_majority_of_kept_votes_keeps_its_token() {
        let agreement = agree(&proposals(&[(0, 7, true), (1, 9, false), (2, 6, true)]), 2);
        let (fence, known, behind) = (7, 2, vec![2]);
        assert_eq!(agreement, Agreement { fence, known, behind });
    }
}
