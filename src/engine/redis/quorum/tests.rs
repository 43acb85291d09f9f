//! What the tests of the engine see of a quorum.

use super::QuorumEngine;

impl QuorumEngine {
    /// Returns the number of entries on the clean-up list of a node.
    pub(in super::super) fn cleanup_len(&self, node: usize) -> usize {
        self.quorum.nodes[node].cleanup.len()
    }

    /// Closes the connection to a node, so that its next call needs a new one.
    pub(in super::super) async fn disconnect(&self, node: usize) {
        let link = &self.quorum.nodes[node].link;
        if let Some(connection) = link.existing().await {
            link.lose(connection.generation);
        }
    }
}
