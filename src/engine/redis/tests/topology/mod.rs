//! Servers in company: a master with replicas, and sentinels that watch it.

use super::*;

mod cluster;
mod cluster_nodes;
mod replicas;
mod rights;
mod sentinel;

impl Server {
    /// A replica of this server, once it is linked.
    pub(super) async fn replica(&self, options: &[&str]) -> Option<Server> {
        let before = self.linked_replicas().await;
        let port = self.port.to_string();
        let replica = Server::start(&[&["--replicaof", "127.0.0.1", &port], options].concat()).await?;
        within(60, "a replica that is linked", async || {
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
            let asked = async {
                let mut connection = client.get_multiplexed_async_connection().await?;
                let role: Vec<::redis::Value> = ::redis::cmd("ROLE").query_async(&mut connection).await?;
                Ok::<_, ::redis::RedisError>(String::from_redis_value(role[0].clone())?)
            };
            match asked.await {
                Ok(role) => return role,
                // Sentinels end all connections of a server that they make a replica, this one included.
                Err(error) if error.is_io_error() => tokio::time::sleep(Duration::from_millis(50)).await,
                Err(error) => panic!("{error}"),
            }
        }
        panic!("the server does not tell its role");
    }

    /// Has the kernel keep the process from running, and lets it run again: it is there, and says nothing.
    pub(super) fn freeze(&self) {
        self.signal(libc::SIGSTOP);
    }

    pub(super) fn thaw(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a plain system call, on a child that has not been waited for.
        let done = unsafe { libc::kill(self.process.id() as i32, signal) };
        assert_eq!(done, 0);
    }

    /// A sentinel, with these lines in its configuration.
    pub(super) async fn sentinel(lines: &str) -> Option<Server> {
        let port = free_port();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sentinel.conf");
        // Host names as they are: nothing that the tests do depends on a resolver.
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
        let mut server = Server { process, port, dir };
        server.answers().await.then_some(server)
    }
}

/// A master, two replicas, and three sentinels that are quick to give up a master.
pub(super) struct Watched {
    /// The first one is the master at the start.
    pub(super) servers: Vec<Server>,
    pub(super) sentinels: Vec<Server>,
}

pub(super) const MASTER: &str = "main";

impl Watched {
    pub(super) async fn start() -> Option<Self> {
        let master = Server::start(&[]).await?;
        let replicas = [master.replica(&[]).await?, master.replica(&[]).await?];
        // Longer than the second between two of their questions: with less, one that has just been told of a new master
        // takes it for dead, and a second fail-over leaves two masters for ten seconds.
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
        let watched = Watched {
            servers: [master].into_iter().chain(replicas).collect(),
            sentinels,
        };
        watched.settled(2).await;
        Some(watched)
    }

    /// Waits until every sentinel knows every other one, and so many replicas.
    pub(super) async fn settled(&self, replicas: usize) {
        for sentinel in &self.sentinels {
            within(60, "sentinels that know the house", async || {
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

    /// The server that the sentinels name.
    pub(super) async fn master(&self) -> &Server {
        let mut other = self.sentinels[0].other().await;
        let (_, port): (String, u16) = other.run(&format!("SENTINEL GET-MASTER-ADDR-BY-NAME {MASTER}")).await;
        self.servers.iter().find(|server| server.port == port).unwrap()
    }
}

/// Waits for something that comes about in the background, and may take its time.
pub(super) async fn within(seconds: u64, what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(seconds);
    while !holds().await {
        assert!(tokio::time::Instant::now() < deadline, "not within {seconds} s: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
