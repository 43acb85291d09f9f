//! Wakes waiters of stores without messages, by datagrams.
//!
//! Each engine with waiters listens on one UDP socket of the loopback interface. It stores its port, and a number for each waiter, with the waiter's position in the queue. A release reads the address of the first waiter in the same transaction,
//! and sends the number to it after the commit.
//!
//! Correctness does not depend on a datagram. When one is lost, or reaches another program that has the port now, the waiter
//! makes its next attempt later. (In another container it is always lost, because each one has its own loopback interface. So
//! SQLite's writer also checks for commits of others while calls wait.) A false datagram only causes one more attempt.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::net::UdpSocket;
use tokio::sync::{OnceCell, watch};
use tokio_util::task::AbortOnDropHandle;

use super::calls::Wakeup;
use crate::engine::Subscription;
use crate::model::{Claim, OwnerToken};

/// The first bytes of every datagram: the protocol and its version.
const MAGIC: [u8; 4] = *b"hfw1";
const DATAGRAM: usize = MAGIC.len() + size_of::<u64>();

/// The address of a waiter, as stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Address {
    /// The port of its engine. `None`: that engine could not bind a socket, and its waiters poll.
    pub port: Option<u16>,
    /// The waiter's number in its engine.
    pub id: u64,
}

/// The waiters of one engine, and its socket.
#[derive(Default)]
pub(in crate::engine) struct UdpWakeup {
    waiters: Arc<Waiters>,
    socket: OnceCell<Socket>,
}

struct Socket {
    socket: Arc<UdpSocket>,
    port: u16,
    _listener: AbortOnDropHandle<()>,
}

/// The waiters by their numbers.
#[derive(Default)]
struct Waiters(Mutex<HashMap<u64, Waiter>>);

struct Waiter {
    owner: OwnerToken,
    subscriptions: usize,
    notified: watch::Sender<()>,
}

impl Waiters {
    /// Wakes the waiter with this number. `false`: this engine does not have it.
    fn wake(&self, id: u64) -> bool {
        let waiters = self.0.lock();
        let waiter = waiters.get(&id);
        waiter.map(|waiter| waiter.notified.send_replace(())).is_some()
    }
}

/// Returns the number of a waiter, which is positive as a signed number, too, because the store has signed numbers.
fn number(owner: &OwnerToken) -> u64 {
    let mut hasher = DefaultHasher::new();
    owner.hash(&mut hasher);
    hasher.finish() >> 1
}

#[async_trait]
impl Wakeup for UdpWakeup {
    /// # Behavior
    /// The subscription belongs to the claim's owner. The owner's next waiting attempt stores the address.
    async fn subscribe(&self, claim: &Claim) -> Box<dyn Subscription> {
        self.register(&claim.owner).await
    }
}

impl UdpWakeup {
    /// Registers a waiter. Later wake-ups are not missed.
    async fn register(&self, owner: &OwnerToken) -> Box<dyn Subscription> {
        // Before the first attempt of the waiter, which stores the port.
        self.socket().await;
        let mut waiters = self.waiters.0.lock();
        let id = number(owner);
        let waiter = waiters.entry(id).or_insert_with(|| Waiter {
            owner: owner.clone(),
            subscriptions: 0,
            notified: watch::Sender::default(),
        });
        waiter.subscriptions += 1;
        let notified = waiter.notified.subscribe();
        drop(waiters);
        Box::new(UdpSubscription {
            id,
            notified,
            waiters: self.waiters.clone(),
        })
    }

    /// Returns the address of an owner. `None`: it did not subscribe.
    pub(super) fn address(&self, owner: &OwnerToken) -> Option<Address> {
        let id = number(owner);
        let is_known = self.waiters.0.lock().contains_key(&id);
        is_known.then(|| Address {
            port: self.socket.get().map(|socket| socket.port),
            id,
        })
    }

    /// Whether this engine has waiters.
    pub(super) fn has_waiters(&self) -> bool {
        !self.waiters.0.lock().is_empty()
    }

    /// Returns the owners of this engine's waiters, as a JSON array.
    pub(super) fn owners(&self) -> String {
        let waiters = self.waiters.0.lock();
        let owners: Vec<&str> = waiters.values().map(|waiter| waiter.owner.as_str()).collect();
        format!("[\"{}\"]", owners.join("\",\""))
    }

    /// Wakes waiters of this engine or of any other.
    pub(super) async fn wake(&self, addresses: &[Address]) {
        for address in addresses {
            if self.waiters.wake(address.id) {
                continue;
            }
            let Some(port) = address.port else { continue };
            let Some(Socket { socket, .. }) = self.socket().await else {
                return;
            };
            let target = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            if let Err(error) = socket.send_to(&datagram(address.id), target).await {
                tracing::debug!(%error, port, "a wake-up could not be sent");
            }
        }
    }

    /// Wakes every waiter of this engine, when wake-ups may have been lost.
    pub(super) fn wake_all(&self) {
        for waiter in self.waiters.0.lock().values() {
            waiter.notified.send_replace(());
        }
    }

    /// Returns the socket, which is bound by the first call. `None`: that failed; the next call tries again.
    async fn socket(&self) -> Option<&Socket> {
        let binding = self.socket.get_or_try_init(|| async {
            let socket = Arc::new(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?);
            let port = socket.local_addr()?.port();
            let listener = tokio::spawn(listen(socket.clone(), self.waiters.clone()).boxed());
            Ok::<_, std::io::Error>(Socket {
                socket,
                port,
                _listener: AbortOnDropHandle::new(listener),
            })
        });
        binding
            .await
            .inspect_err(|error| tracing::warn!(%error, "no socket for wake-ups: waiters poll"))
            .ok()
    }
}

fn datagram(id: u64) -> [u8; DATAGRAM] {
    let mut bytes = [0; DATAGRAM];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    bytes[MAGIC.len()..].copy_from_slice(&id.to_be_bytes());
    bytes
}

fn id_in(datagram: &[u8]) -> Option<u64> {
    let id = datagram.strip_prefix(&MAGIC)?;
    Some(u64::from_be_bytes(id.try_into().ok()?))
}

async fn listen(socket: Arc<UdpSocket>, waiters: Arc<Waiters>) {
    // One byte more than a datagram has, so that a longer one is detected.
    let mut buffer = [0; DATAGRAM + 1];
    loop {
        match socket.recv_from(&mut buffer).await {
            Ok((length, _)) => {
                if let Some(id) = id_in(&buffer[..length]) {
                    waiters.wake(id);
                }
            }
            // Windows reports here that an earlier datagram reached a closed port, or that a received one was too long.
            Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
}

struct UdpSubscription {
    id: u64,
    notified: watch::Receiver<()>,
    waiters: Arc<Waiters>,
}

#[async_trait]
impl Subscription for UdpSubscription {
    async fn changed(&mut self) {
        if self.notified.changed().await.is_err() {
            // The sender lives as long as this subscription.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for UdpSubscription {
    fn drop(&mut self) {
        let mut waiters = self.waiters.0.lock();
        if let Some(waiter) = waiters.get_mut(&self.id) {
            waiter.subscriptions -= 1;
            if waiter.subscriptions == 0 {
                waiters.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn is_notified(subscription: &mut Box<dyn Subscription>) -> bool {
        tokio::time::timeout(Duration::from_millis(300), subscription.changed())
            .await
            .is_ok()
    }

    #[tokio::test]
    async fn a_waiter_of_another_engine_is_woken_by_a_datagram() {
        let (here, there) = (UdpWakeup::default(), UdpWakeup::default());
        let (first, second) = (OwnerToken::fresh(), OwnerToken::fresh());
        let mut one = there.register(&first).await;
        let mut two = there.register(&second).await;
        let address = there.address(&first).unwrap();
        assert!(address.port.is_some());
        assert_eq!(here.address(&first), None);
        here.wake(&[address]).await;
        assert!(is_notified(&mut one).await);
        assert!(!is_notified(&mut two).await, "only one waiter is woken");
        assert!(!is_notified(&mut one).await, "once");
    }

    #[tokio::test]
    async fn a_waiter_of_this_engine_needs_no_socket() {
        let wakeup = UdpWakeup::default();
        let owner = OwnerToken::fresh();
        let mut subscription = wakeup.register(&owner).await;
        let address = Address {
            port: None,
            ..wakeup.address(&owner).unwrap()
        };
        wakeup.wake(&[address]).await;
        assert!(
            is_notified(&mut subscription).await,
            "a wake-up between subscription and wait is not missed"
        );
        wakeup.wake_all();
        assert!(is_notified(&mut subscription).await);
    }

    #[tokio::test]
    async fn every_subscription_of_an_owner_is_notified_and_the_last_one_removes_it() {
        let wakeup = UdpWakeup::default();
        let owner = OwnerToken::fresh();
        let mut one = wakeup.register(&owner).await;
        let mut two = wakeup.register(&owner).await;
        wakeup.wake(&[wakeup.address(&owner).unwrap()]).await;
        assert!(is_notified(&mut one).await && is_notified(&mut two).await);
        drop(one);
        assert!(wakeup.address(&owner).is_some());
        drop(two);
        assert_eq!(wakeup.address(&owner), None);
        assert!(wakeup.waiters.0.lock().is_empty());
    }

    #[tokio::test]
    async fn invalid_datagrams_are_ignored() {
        let wakeup = UdpWakeup::default();
        let owner = OwnerToken::fresh();
        let mut subscription = wakeup.register(&owner).await;
        let Address { port, id } = wakeup.address(&owner).unwrap();
        let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let target = (Ipv4Addr::LOCALHOST, port.unwrap());
        let mut long = datagram(id).to_vec();
        long.push(0);
        for rubbish in [
            &[] as &[u8],
            b"x",
            &MAGIC,
            &datagram(id ^ 1),
            &datagram(id)[..11],
            &long,
            &[0; 2000],
        ] {
            stranger.send_to(rubbish, target).await.unwrap();
        }
        assert!(!is_notified(&mut subscription).await);
        stranger.send_to(&datagram(id), target).await.unwrap();
        assert!(is_notified(&mut subscription).await, "the engine still listens");
    }
}
