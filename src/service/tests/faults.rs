//! A memory engine with faults.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

use async_trait::async_trait;

use super::*;
use crate::clock::Moment;
use crate::engine::memory::MemoryEngine;
use crate::engine::{
    Acquired, Answers, Description, Engine, EngineExt, HandOff, Read, Released, Renewal, Renewed,
    Result as EngineResult, SharedEngine, Subscription, answer_each,
};
use crate::error::EngineError;
use crate::model::{Claim, LockInfo};

/// The fault of the next calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// Refused at once, not executed.
    Refuse,
    /// The next call is refused at once and not executed. Later calls work.
    RefuseOne,
    /// The store answers that a row is locked. Not executed.
    Locked,
    /// Attempts for several names are refused at once. Everything else works.
    RefuseSets,
    /// Executed, but the reply is lost.
    LoseReply,
    /// The same of attempts. Everything else works.
    LoseAttempts,
    /// Never answered, not executed.
    Hang,
    /// The next call is never answered and not executed. Later calls work.
    HangOne,
    /// Attempts wait in a queue of the engine without an end. Nothing is sent.
    HangUnsent,
    /// Executed, but never answered.
    Swallow,
    /// Executed at once, answered after this many milliseconds.
    SlowReply(u64),
    /// Executed after this many milliseconds, and answered then.
    Stall(u64),
    /// Attempts fail at once, and are executed after this many milliseconds, as from a buffer of a broken connection.
    Late(u64),
    /// A permanent error.
    Fatal,
    /// Releases of names that begin with "hung" have no answer. Everything else works.
    HangSome,
    /// Attempts panic. Everything else works.
    Panic,
    /// `inspect` waits for a fencing token without an end. Everything else works.
    NoToken,
}

#[derive(Debug)]
pub(super) struct Faulty {
    store: SharedEngine,
    fault: Mutex<Fault>,
    /// Renewals of names without this prefix work.
    only: Mutex<&'static str>,
    /// Whether it keeps a queue.
    pub(super) ordered: bool,
    /// Whether a release grants, for 2 s.
    pub(super) hands_off: AtomicBool,
    /// Whether a hand-off is received after the end of its lease.
    pub(super) hands_off_late: AtomicBool,
    pub(super) attempts: AtomicU32,
    /// The owners of attempts.
    pub(super) owners: Mutex<Vec<OwnerToken>>,
    /// Number of attempts without an answer, and its maximum.
    concurrent: AtomicU32,
    pub(super) max_concurrent: AtomicU32,
    /// Number of claims in each call of `release_all`.
    pub(super) release_batches: Mutex<Vec<usize>>,
    /// Number of calls of `release_all` without an answer, and its maximum.
    concurrent_batches: AtomicU32,
    pub(super) max_concurrent_batches: AtomicU32,
    /// Calls of `release`, alone or in a batch.
    pub(super) releases: AtomicU32,
    /// When true, attempts of several waiters wait together before the first of them is sent, as for a connection.
    pub(super) gate: AtomicBool,
    /// Releases panic.
    pub(super) panics: AtomicBool,
    /// Whether a close ends the engine. (Services of a test share it.)
    pub(super) closes: AtomicBool,
    closed: AtomicBool,
    /// The owners whose attempts were sent together.
    pub(super) sent_owners: Mutex<Vec<OwnerToken>>,
    pub(super) renewals: AtomicU32,
    /// Number of calls of `renew_all`.
    pub(super) batches: AtomicU32,
    /// The longest lease. `None`: any ttl.
    pub(super) longest_lease: Option<Duration>,
}

impl Faulty {
    pub(super) fn new(name: &str) -> Self {
        Faulty {
            store: MemoryEngine::named(name),
            fault: Mutex::new(Fault::None),
            only: Mutex::new(""),
            ordered: true,
            hands_off: AtomicBool::new(false),
            hands_off_late: AtomicBool::new(false),
            attempts: AtomicU32::new(0),
            owners: Mutex::default(),
            concurrent: AtomicU32::new(0),
            max_concurrent: AtomicU32::new(0),
            release_batches: Mutex::default(),
            concurrent_batches: AtomicU32::new(0),
            max_concurrent_batches: AtomicU32::new(0),
            releases: AtomicU32::new(0),
            gate: AtomicBool::new(false),
            panics: AtomicBool::new(false),
            closes: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            sent_owners: Mutex::default(),
            renewals: AtomicU32::new(0),
            batches: AtomicU32::new(0),
            longest_lease: None,
        }
    }

    pub(super) fn store(&self) -> &SharedEngine {
        &self.store
    }

    pub(super) fn set(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
    }

    /// Like [`Faulty::set`], but renewals of names without this prefix work.
    pub(super) fn set_for(&self, prefix: &'static str, fault: Fault) {
        *self.only.lock().unwrap() = prefix;
        self.set(fault);
    }

    pub(super) fn hang(&self) {
        self.set(Fault::Hang);
    }

    async fn through<T: Send>(
        &self,
        op: &'static str,
        call: impl Future<Output = EngineResult<T>> + Send,
    ) -> EngineResult<T> {
        if self.closed.load(SeqCst) {
            return Err(EngineError::new("faulty", op, false, "this engine is closed"));
        }
        let fault = *self.fault.lock().unwrap();
        match fault {
            Fault::None | Fault::HangSome | Fault::Panic | Fault::RefuseSets | Fault::NoToken => call.await,
            Fault::HangOne => {
                self.set(Fault::None);
                std::future::pending().await
            }
            Fault::Refuse => Err(EngineError::new("faulty", op, true, "refused").not_sent()),
            Fault::Locked => Err(EngineError::new("faulty", op, true, "a row is locked").row_locked()),
            Fault::RefuseOne => {
                // The calls after it are in progress before the error arrives.
                self.set(Fault::None);
                tokio::time::sleep(ms(1)).await;
                Err(EngineError::new("faulty", op, true, "refused").not_sent())
            }
            Fault::Late(_) => Err(EngineError::new("faulty", op, true, "the connection broke")),
            Fault::Fatal => Err(EngineError::new("faulty", op, false, "wrong password")),
            Fault::LoseAttempts if op != "acquire" => call.await,
            Fault::LoseReply | Fault::LoseAttempts => {
                call.await?;
                Err(EngineError::new("faulty", op, true, "the reply was lost"))
            }
            Fault::Hang | Fault::HangUnsent => std::future::pending().await,
            Fault::Swallow => {
                call.await?;
                std::future::pending().await
            }
            Fault::Stall(delay) => {
                tokio::time::sleep(ms(delay)).await;
                call.await
            }
            Fault::SlowReply(delay) => {
                let answer = call.await;
                tokio::time::sleep(ms(delay)).await;
                answer
            }
        }
    }
}

impl Faulty {
    async fn attempt(&self, claim: &Claim) -> EngineResult<Acquired> {
        self.attempts.fetch_add(1, SeqCst);
        if *self.fault.lock().unwrap() == Fault::Panic {
            panic!("a bug in an engine");
        }
        if *self.fault.lock().unwrap() == Fault::HangUnsent {
            return std::future::pending().await;
        }
        if *self.fault.lock().unwrap() == Fault::RefuseSets && claim.keys().len() > 1 {
            return Err(EngineError::new("faulty", "acquire", true, "refused").not_sent());
        }
        claim.mark_sent();
        self.owners.lock().unwrap().push(claim.owner.clone());
        let _attempt = Attempt::begin(self);
        let mut claim = claim.clone();
        claim.waiting &= self.describe().ordered;
        if let Fault::Late(delay) = *self.fault.lock().unwrap() {
            let (store, claim) = (self.store.clone(), claim.clone());
            tokio::spawn(async move {
                tokio::time::sleep(ms(delay)).await;
                store.try_acquire(&claim).await
            });
        }
        self.through("acquire", self.store.try_acquire(&claim)).await
    }

    async fn renew_one(&self, claim: &Claim, ttl: Ttl) -> EngineResult<Renewed> {
        self.renewals.fetch_add(1, SeqCst);
        let prefix = *self.only.lock().unwrap();
        if !claim.keys()[0].as_str().starts_with(prefix) {
            return self.store.renew(claim, ttl).await;
        }
        self.through("renew", self.store.renew(claim, ttl)).await
    }

    async fn release_one(&self, claim: &Claim, keep: Duration) -> EngineResult<Released> {
        self.releases.fetch_add(1, SeqCst);
        assert!(!self.panics.load(SeqCst), "a bug in an engine");
        if *self.fault.lock().unwrap() == Fault::HangSome && claim.keys()[0].as_str().starts_with("hung") {
            return std::future::pending().await;
        }
        self.through("release", self.store.release(claim, keep)).await
    }
}

#[async_trait]
impl Engine for Faulty {
    fn describe(&self) -> Description {
        Description {
            longest_lease: self.longest_lease,
            address: "h:1".to_owned(),
            ..Description::new("faulty", self.ordered)
        }
    }

    async fn try_acquire_all(&self, claims: &[&Claim], answer: &mut Answers<'_, Acquired>) {
        if let [claim] = claims {
            return answer(0, self.attempt(claim).await);
        }
        while self.gate.load(SeqCst) {
            tokio::time::sleep(ms(1)).await;
        }
        // Like Redis and MongoDB: all of them in one packet or one command.
        for claim in claims {
            claim.mark_sent();
            self.sent_owners.lock().unwrap().push(claim.owner.clone());
        }
        for (index, claim) in claims.iter().enumerate() {
            answer(index, self.attempt(claim).await);
        }
    }

    async fn release_all(&self, claims: &[&Claim], keep: Duration, answer: &mut Answers<'_, Released>) {
        if let [claim] = claims {
            return answer(0, self.release_one(claim, keep).await);
        }
        self.release_batches.lock().unwrap().push(claims.len());
        let concurrent = self.concurrent_batches.fetch_add(1, SeqCst) + 1;
        self.max_concurrent_batches.fetch_max(concurrent, SeqCst);
        answer_each(claims.iter().map(|claim| self.release_one(claim, keep)), answer).await;
        self.concurrent_batches.fetch_sub(1, SeqCst);
    }

    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_, Renewed>) {
        self.batches.fetch_add(1, SeqCst);
        let calls = renewals
            .iter()
            .map(|renewal| self.renew_one(renewal.claim, renewal.ttl));
        answer_each(calls, answer).await;
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> EngineResult<Renewed> {
        self.through("transfer", self.store.transfer(claim, to)).await
    }

    async fn subscribe(&self, claim: &Claim, key: &Key) -> EngineResult<Box<dyn Subscription>> {
        if self.hands_off.load(SeqCst) {
            let (store, claim) = (self.store.clone(), claim.clone());
            let (granted, is_late) = (None, self.hands_off_late.load(SeqCst));
            return Ok(Box::new(HandOffs {
                store,
                claim,
                granted,
                is_late,
            }));
        }
        if self.describe().ordered {
            return self.store.subscribe(claim, key).await;
        }
        Ok(Box::new(NoNotifications))
    }

    async fn read(&self, what: Read<'_>) -> EngineResult<Vec<LockInfo>> {
        let fault = *self.fault.lock().unwrap();
        match what {
            Read::Prefix { page_timeout, .. } => {
                let page = self.through("list", self.store.read(what));
                let no_answer = |_| Err(EngineError::no_answer("faulty", "", "list", page_timeout));
                tokio::time::timeout(page_timeout, page).await.unwrap_or_else(no_answer)
            }
            Read::Name {
                waits_for_token: true, ..
            } if fault == Fault::NoToken => std::future::pending().await,
            // Only replies to commands that change the store are lost.
            Read::Name { .. } if fault == Fault::LoseReply => self.store.read(what).await,
            Read::Name { .. } => self.through("inspect", self.store.read(what)).await,
        }
    }

    async fn force_release(&self, key: &Key) -> EngineResult<bool> {
        self.through("force_release", self.store.force_release(key)).await
    }

    async fn close(&self) {
        self.closed.store(self.closes.load(SeqCst), SeqCst);
    }
}

/// Guard that counts an attempt without an answer.
struct Attempt<'a>(&'a Faulty);

impl<'a> Attempt<'a> {
    fn begin(engine: &'a Faulty) -> Self {
        let concurrent = engine.concurrent.fetch_add(1, SeqCst) + 1;
        engine.max_concurrent.fetch_max(concurrent, SeqCst);
        Attempt(engine)
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.0.concurrent.fetch_sub(1, SeqCst);
    }
}

/// A subscription without notifications: only the service's polls and local wake-ups remain.
struct NoNotifications;

#[async_trait]
impl Subscription for NoNotifications {
    async fn changed(&mut self) {
        std::future::pending().await
    }
}

/// A subscription of a store whose releases grant.
struct HandOffs {
    store: SharedEngine,
    claim: Claim,
    granted: Option<HandOff>,
    /// Whether the lease has ended when the message arrives.
    is_late: bool,
}

#[async_trait]
impl Subscription for HandOffs {
    async fn changed(&mut self) {
        self.claim.ttl = self.claim.ttl.min(Ttl::clamped(ms(2000)));
        loop {
            let sent = Moment::now();
            if let Ok(Acquired::Granted { fence }) = self.store.try_acquire(&self.claim).await {
                let until = match self.is_late {
                    true => sent,
                    false => sent + self.claim.ttl.validity(),
                };
                self.granted = Some(HandOff { fence, until });
                return;
            }
            tokio::time::sleep(ms(1)).await;
        }
    }

    fn take_hand_off(&mut self) -> Option<HandOff> {
        self.granted.take()
    }

    fn is_reliable(&self) -> bool {
        true
    }
}
