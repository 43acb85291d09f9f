//! Several servers: a master with replicas, sentinels, and clusters.

use super::*;

mod cluster;
mod cluster_nodes;
#[cfg(unix)]
mod cluster_order;
mod failover_events;
mod moving_slots;
mod replicas;
mod rights;
mod sentinel;
mod sharded;
mod shares;

impl Server {
    /// Starts a replica of this server, and waits until it is connected.
    pub(super) async fn replica(&self, options: &[&str]) -> Option<Server> {
        let before = self.linked_replicas().await;
        let port = self.port.to_string();
        let replica = Server::start(&[&["--replicaof", "127.0.0.1", &port], options].concat()).await?;
        within(60, "a connected replica", async || {
            self.linked_replicas().await > before
        })
        .await;
        Some(replica)
    }

    pub(super) async fn linked_replicas(&self) -> usize {
        let (_, _, replicas): (String, i64, Vec<(String, String, String)>) = self.other().await.run("ROLE").await;
        replicas.len()
    }

    pub(super) async fn role(&self) -> String {
        let client = ::redis::Client::open(self.url()).unwrap();
        for _ in 0..100 {
            let role = async {
                let mut connection = client.get_multiplexed_async_connection().await?;
                let role: Vec<::redis::Value> = ::redis::cmd("ROLE").query_async(&mut connection).await?;
                Ok::<_, ::redis::RedisError>(String::from_redis_value(role[0].clone())?)
            };
            match role.await {
                Ok(role) => return role,
                // Sentinels end all connections of a server that they make a replica, this one included.
                Err(error) if error.is_io_error() => tokio::time::sleep(Duration::from_millis(50)).await,
                Err(error) => panic!("{error}"),
            }
        }
        panic!("the server does not return its role");
    }

    /// Suspends the process: its connections stay open, and it does not answer.
    pub(super) fn suspend(&self) {
        self.signal(libc::SIGSTOP);
    }

    pub(super) fn resume(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a plain system call, on a child that has not been waited for.
        let done = unsafe { libc::kill(self.process.id() as i32, signal) };
        assert_eq!(done, 0);
    }

    /// Starts a sentinel with these lines in its configuration.
    pub(super) async fn sentinel(lines: &str) -> Option<Server> {
        let port = free_port();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sentinel.conf");
        // Addresses instead of host names, so that the tests do not depend on a resolver.
        let common = format!("port {port}\nbind 127.0.0.1\nprotected-mode no\n");
        std::fs::write(&file, common + &lines.replace("PORT", &port.to_string())).unwrap();
        let process = Command::new("redis-server")
            .arg(&file)
            .arg("--sentinel")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let process = match process {
            Ok(process) => process,
            Err(error) => {
                skip(&format!("no redis-server: {error}"));
                return None;
            }
        };
        let mut server = Server {
            process,
            port,
            dir,
            files: None,
        };
        server.wait_until_ready().await.then_some(server)
    }
}

/// A master, two replicas, and three sentinels with a short time limit for a master.
pub(super) struct SentinelSetup {
    /// The first one is the master at the start.
    pub(super) servers: Vec<Server>,
    pub(super) sentinels: Vec<Server>,
}

pub(super) const MASTER: &str = "main";

impl SentinelSetup {
    pub(super) async fn start() -> Option<Self> {
        let master = Server::start(&[]).await?;
        let replicas = [master.replica(&[]).await?, master.replica(&[]).await?];
        // Longer than the second between two of their requests. With less, a sentinel that has just learned of a new master
        // considers it down, and a second failover leaves two masters for ten seconds.
        let lines = format!(
            "sentinel monitor {MASTER} 127.0.0.1 {} 2\n\
             sentinel down-after-milliseconds {MASTER} 2000\n\
             sentinel failover-timeout {MASTER} 3000\n",
            master.port
        );
        let mut sentinels = Vec::new();
        for _ in 0..3 {
            sentinels.push(Server::sentinel(&lines).await?);
        }
        let setup = SentinelSetup {
            servers: [master].into_iter().chain(replicas).collect(),
            sentinels,
        };
        setup.settled(2).await;
        Some(setup)
    }

    /// Waits until every sentinel knows every other one, and this number of replicas.
    pub(super) async fn settled(&self, replicas: usize) {
        for sentinel in &self.sentinels {
            within(60, "sentinels that know the setup", async || {
                let known: HashMap<String, String> =
                    sentinel.other().await.run(&format!("SENTINEL MASTER {MASTER}")).await;
                known["num-other-sentinels"] == "2"
                    && known["num-slaves"].parse::<usize>().unwrap() >= replicas
                    && known["flags"] == "master"
            })
            .await;
        }
    }

    pub(super) fn url(&self) -> String {
        let ports = self
            .sentinels
            .iter()
            .map(|sentinel| format!("127.0.0.1:{}", sentinel.port));
        format!("redis+sentinel://{}/{MASTER}", ports.collect::<Vec<_>>().join(","))
    }

    /// Returns the server that the sentinels report as the master.
    pub(super) async fn master(&self) -> &Server {
        let mut other = self.sentinels[0].other().await;
        let (_, port): (String, u16) = other.run(&format!("SENTINEL GET-MASTER-ADDR-BY-NAME {MASTER}")).await;
        self.servers.iter().find(|server| server.port == port).unwrap()
    }
}

/// Waits until a condition holds, up to this number of seconds.
pub(super) async fn within(seconds: u64, what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(seconds);
    while !holds().await {
        assert!(tokio::time::Instant::now() < deadline, "not within {seconds} s: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
