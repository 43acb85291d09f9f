//! A wake-up for stores that cannot push.
//!
//! Every engine that has waiters listens on one UDP socket of the loopback interface, and leaves its port and a random
//! number per waiter in the store, beside the waiter's place in the queue. Whoever frees a name reads the address of the
//! first waiter in the same transaction, and sends it the number once the transaction is committed.
//!
//! It is a hint and nothing else: a datagram that is lost, or that goes to a stranger who got the port since, costs a
//! waiter the time until its next own try. Nothing that arrives here can do more than cause a try too many.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::UdpSocket;
use tokio::sync::{OnceCell, watch};
use tokio_util::task::AbortOnDropHandle;

use crate::engine::Subscription;
use crate::model::OwnerToken;

/// What every datagram starts with: who talks, and in which version.
const MAGIC: [u8; 4] = *b"hfw1";
const DATAGRAM: usize = MAGIC.len() + size_of::<u64>();

/// Where a waiter is told, as it stands in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Address {
    /// The port of its engine. `None` when that engine could not bind one: its waiters only poll.
    pub port: Option<u16>,
    /// The waiter's own number there.
    pub id: u64,
}

/// The waiters of one engine, and its socket.
#[derive(Default)]
pub(super) struct Wakes {
    waiters: Arc<Waiters>,
    socket: OnceCell<Socket>,
}

struct Socket {
    socket: Arc<UdpSocket>,
    port: u16,
    _listener: AbortOnDropHandle<()>,
}

#[derive(Default)]
struct Waiters(Mutex<ByOwner>);

#[derive(Default)]
struct ByOwner {
    owners: HashMap<OwnerToken, Waiter>,
    ids: HashMap<u64, OwnerToken>,
}

struct Waiter {
    id: u64,
    subscriptions: usize,
    told: watch::Sender<()>,
}

impl Waiters {
    /// A panic elsewhere leaves the maps whole: nothing in here can panic between two changes.
    fn lock(&self) -> MutexGuard<'_, ByOwner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the waiter with this number. `false` when there is none here.
    fn wake(&self, id: u64) -> bool {
        let waiters = self.lock();
        let waiter = waiters.ids.get(&id).and_then(|owner| waiters.owners.get(owner));
        waiter.map(|waiter| waiter.told.send_replace(())).is_some()
    }
}

impl Wakes {
    /// Registers a waiter. From now on no wake-up of it is missed.
    pub(super) async fn subscribe(&self, owner: &OwnerToken) -> Box<dyn Subscription> {
        // Before the waiter is known to anybody, so that its first try can leave the port in the store.
        self.socket().await;
        let mut waiters = self.waiters.lock();
        let ByOwner { owners, ids } = &mut *waiters;
        let waiter = owners.entry(owner.clone()).or_insert_with(|| {
            // Positive as a signed number, too: that is how the store keeps it.
            let id = fastrand::u64(1..=i64::MAX.unsigned_abs());
            ids.insert(id, owner.clone());
            Waiter {
                id,
                subscriptions: 0,
                told: watch::Sender::default(),
            }
        });
        waiter.subscriptions += 1;
        let told = waiter.told.subscribe();
        drop(waiters);
        Box::new(WakeSubscription {
            owner: owner.clone(),
            told,
            waiters: self.waiters.clone(),
        })
    }

    /// Where this owner is told. `None` when it did not subscribe.
    pub(super) fn address(&self, owner: &OwnerToken) -> Option<Address> {
        let id = self.waiters.lock().owners.get(owner)?.id;
        Some(Address {
            port: self.socket.get().map(|socket| socket.port),
            id,
        })
    }

    /// Tells waiters of this engine or of any other.
    pub(super) async fn tell(&self, addresses: &[Address]) {
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

    /// Tells every waiter of this engine: something may have changed that nobody told of.
    pub(super) fn tell_all(&self) {
        for waiter in self.waiters.lock().owners.values() {
            waiter.told.send_replace(());
        }
    }

    /// The socket, bound when it is needed first. `None` when that fails; the next caller tries again.
    async fn socket(&self) -> Option<&Socket> {
        let binding = self.socket.get_or_try_init(|| async {
            let socket = Arc::new(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?);
            let port = socket.local_addr()?.port();
            let listener = tokio::spawn(listen(socket.clone(), self.waiters.clone()));
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
    // One byte more than is right, so that a longer datagram is seen to be longer.
    let mut buffer = [0; DATAGRAM + 1];
    loop {
        match socket.recv_from(&mut buffer).await {
            Ok((length, _)) => {
                if let Some(id) = id_in(&buffer[..length]) {
                    waiters.wake(id);
                }
            }
            // Windows reports here that nobody listened where an earlier datagram went, or that one was too long.
            Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
}

struct WakeSubscription {
    owner: OwnerToken,
    told: watch::Receiver<()>,
    waiters: Arc<Waiters>,
}

#[async_trait]
impl Subscription for WakeSubscription {
    async fn changed(&mut self) {
        if self.told.changed().await.is_err() {
            // The sender lives for as long as this subscription does.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for WakeSubscription {
    fn drop(&mut self) {
        let mut waiters = self.waiters.lock();
        let ByOwner { owners, ids } = &mut *waiters;
        if let Some(waiter) = owners.get_mut(&self.owner) {
            waiter.subscriptions -= 1;
            if waiter.subscriptions == 0 {
                ids.remove(&waiter.id);
                owners.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn hears(subscription: &mut Box<dyn Subscription>) -> bool {
        tokio::time::timeout(Duration::from_millis(300), subscription.changed())
            .await
            .is_ok()
    }

    #[tokio::test]
    async fn a_waiter_elsewhere_is_told_by_datagram() {
        let (here, there) = (Wakes::default(), Wakes::default());
        let (first, second) = (OwnerToken::fresh(), OwnerToken::fresh());
        let mut one = there.subscribe(&first).await;
        let mut two = there.subscribe(&second).await;
        let address = there.address(&first).unwrap();
        assert!(address.port.is_some());
        assert_eq!(here.address(&first), None);
        here.tell(&[address]).await;
        assert!(hears(&mut one).await);
        assert!(!hears(&mut two).await, "only the one that is meant");
        assert!(!hears(&mut one).await, "once");
    }

    #[tokio::test]
    async fn a_waiter_of_this_engine_needs_no_socket() {
        let wakes = Wakes::default();
        let owner = OwnerToken::fresh();
        let mut subscription = wakes.subscribe(&owner).await;
        let address = Address {
            port: None,
            ..wakes.address(&owner).unwrap()
        };
        wakes.tell(&[address]).await;
        assert!(hears(&mut subscription).await, "told between subscribing and waiting");
        wakes.tell_all();
        assert!(hears(&mut subscription).await);
    }

    #[tokio::test]
    async fn every_subscription_of_an_owner_hears_and_the_last_one_ends_it() {
        let wakes = Wakes::default();
        let owner = OwnerToken::fresh();
        let mut one = wakes.subscribe(&owner).await;
        let mut two = wakes.subscribe(&owner).await;
        wakes.tell(&[wakes.address(&owner).unwrap()]).await;
        assert!(hears(&mut one).await && hears(&mut two).await);
        drop(one);
        assert!(wakes.address(&owner).is_some());
        drop(two);
        assert_eq!(wakes.address(&owner), None);
        assert!(wakes.waiters.lock().ids.is_empty());
    }

    #[tokio::test]
    async fn rubbish_is_ignored() {
        let wakes = Wakes::default();
        let owner = OwnerToken::fresh();
        let mut subscription = wakes.subscribe(&owner).await;
        let Address { port, id } = wakes.address(&owner).unwrap();
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
        assert!(!hears(&mut subscription).await);
        stranger.send_to(&datagram(id), target).await.unwrap();
        assert!(hears(&mut subscription).await, "it still listens");
    }
}
