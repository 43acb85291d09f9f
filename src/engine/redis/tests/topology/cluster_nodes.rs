//! A cluster of one test, and moves of its slots.

use super::*;
use crate::engine::redis::keys::slots::{SLOTS, slot_of};

/// The nodes of a cluster. The first three are masters at the start.
pub(super) struct Nodes {
    pub(super) nodes: Vec<Server>,
}

impl Nodes {
    pub(super) async fn start(replicas: usize) -> Option<Self> {
        let mut nodes = Vec::new();
        for _ in 0..3 + replicas {
            let bus = free_port().to_string();
            let options = [
                "--cluster-enabled",
                "yes",
                "--cluster-node-timeout",
                "1000",
                "--cluster-announce-ip",
                "127.0.0.1",
                "--cluster-port",
                &bus,
                "--cluster-announce-bus-port",
                &bus,
            ];
            let server = Server::start(&options).await?;
            nodes.push((server, bus));
        }
        let (first, bus) = (nodes[0].0.port, nodes[0].1.clone());
        let share = SLOTS / 3;
        for (index, (server, _)) in nodes.iter().enumerate() {
            let mut other = server.other().await;
            other
                .run::<()>(&format!("CLUSTER SET-CONFIG-EPOCH {}", index + 1))
                .await;
            other.run::<()>(&format!("CLUSTER MEET 127.0.0.1 {first} {bus}")).await;
            if index < 3 {
                let from = share * index as u16;
                let to = if index == 2 { SLOTS - 1 } else { from + share - 1 };
                other.run::<()>(&format!("CLUSTER ADDSLOTSRANGE {from} {to}")).await;
            }
        }
        let cluster = Nodes {
            nodes: nodes.into_iter().map(|(server, _)| server).collect(),
        };
        cluster.agreed().await;
        for (index, replica) in cluster.nodes[3..].iter().enumerate() {
            let master = cluster.id(index % 3).await;
            replica
                .other()
                .await
                .run::<()>(&format!("CLUSTER REPLICATE {master}"))
                .await;
        }
        within(60, "connected replicas", async || {
            let mut linked = 0;
            for master in &cluster.nodes[..3] {
                linked += master.linked_replicas().await;
            }
            linked == replicas
        })
        .await;
        Some(cluster)
    }

    /// Waits until all nodes know each other and report a working cluster.
    async fn agreed(&self) {
        within(60, "nodes that agree", async || {
            for node in &self.nodes {
                let info: String = node.other().await.run("CLUSTER INFO").await;
                let known = format!("cluster_known_nodes:{}\r\n", self.nodes.len());
                if !info.contains("cluster_state:ok") || !info.contains(&known) {
                    return false;
                }
            }
            true
        })
        .await;
    }

    pub(super) async fn id(&self, index: usize) -> String {
        self.nodes[index].other().await.run("CLUSTER MYID").await
    }

    pub(super) fn url(&self) -> String {
        let ports: Vec<String> = self.nodes[..3]
            .iter()
            .map(|node| format!("127.0.0.1:{}", node.port))
            .collect();
        format!("redis+cluster://{}", ports.join(","))
    }

    pub(super) async fn engine(&self) -> Arc<RedisEngine> {
        engine(&self.url(), "lock:").await
    }

    /// Opens an engine whose connections an event loop polls.
    #[cfg(unix)]
    pub(super) async fn engine_on_event_loop(&self) -> Arc<RedisEngine> {
        let settings = Settings {
            event_loop: Some(TestLoop::here()),
            ..settings("lock:")
        };
        RedisEngine::connect(RedisConfig::parse(&self.url(), &settings).unwrap())
            .await
            .unwrap()
    }

    /// Waits until the replica of the first master has the lock of a name.
    pub(super) async fn wait_for_replication(&self, name: &str) {
        within(60, "the replica has it", async || {
            let mut other = self.nodes[3].other().await;
            other.run::<()>("READONLY").await;
            other.run::<i64>(&format!("EXISTS lock:{name}")).await == 1
        })
        .await;
    }

    /// Begins to move a slot: both nodes are prepared, and no key has moved.
    pub(super) async fn open(&self, slot: u16, from: usize, to: usize) {
        let (source, target) = (self.id(from).await, self.id(to).await);
        let mut other = self.nodes[to].other().await;
        other
            .run::<()>(&format!("CLUSTER SETSLOT {slot} IMPORTING {source}"))
            .await;
        let mut other = self.nodes[from].other().await;
        other
            .run::<()>(&format!("CLUSTER SETSLOT {slot} MIGRATING {target}"))
            .await;
    }

    pub(super) async fn move_keys(&self, slot: u16, from: usize, to: usize) {
        let mut other = self.nodes[from].other().await;
        let keys: Vec<String> = other.run(&format!("CLUSTER GETKEYSINSLOT {slot} 1000")).await;
        for key in keys {
            let port = self.nodes[to].port.to_string();
            other
                .args::<()>(&["MIGRATE", "127.0.0.1", &port, &key, "0", "5000"])
                .await;
        }
    }

    /// Ends a move: the target has the slot. The third node learns it later from the cluster.
    pub(super) async fn close(&self, slot: u16, from: usize, to: usize) {
        let target = self.id(to).await;
        for node in [to, from] {
            let mut other = self.nodes[node].other().await;
            other.run::<()>(&format!("CLUSTER SETSLOT {slot} NODE {target}")).await;
        }
    }

    pub(super) async fn move_slot(&self, slot: u16, from: usize, to: usize) {
        self.open(slot, from, to).await;
        self.move_keys(slot, from, to).await;
        self.close(slot, from, to).await;
    }
}

pub(super) fn slot_of_name(name: &str) -> u16 {
    slot_of(&format!("lock:{name}"))
}

/// Returns the master that has a slot at the start.
pub(super) fn home(slot: u16) -> usize {
    usize::from(slot / (SLOTS / 3)).min(2)
}

/// Returns three names on three different masters.
pub(super) fn one_each() -> [String; 3] {
    [0, 1, 2].map(|index| {
        (0..)
            .map(|i| format!("n{i}"))
            .find(|name| home(slot_of_name(name)) == index)
            .unwrap()
    })
}
