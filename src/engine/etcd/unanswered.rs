//! Attempts whose callers were dropped, and which the server may still execute.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::model::OwnerToken;

/// The owners with requests of attempts that have no answer.
#[derive(Default)]
pub(super) struct Attempts {
    requests: Mutex<HashMap<OwnerToken, usize>>,
    answered: Notify,
}

/// A request of an attempt without an answer. Dropping it records the answer.
pub(super) struct Unanswered {
    attempts: Arc<Attempts>,
    owners: Vec<OwnerToken>,
}

impl Attempts {
    pub(super) fn begin(self: &Arc<Self>, owners: impl Iterator<Item = OwnerToken>) -> Unanswered {
        let owners: Vec<OwnerToken> = owners.collect();
        let mut requests = self.requests.lock();
        for owner in &owners {
            *requests.entry(owner.clone()).or_default() += 1;
        }
        drop(requests);
        let attempts = self.clone();
        Unanswered { attempts, owners }
    }

    /// Waits until no attempt of an owner is without an answer: etcd executes the requests of a connection in any order.
    pub(super) async fn answered(&self, owner: &OwnerToken) {
        loop {
            let answered = self.answered.notified();
            tokio::pin!(answered);
            answered.as_mut().enable();
            if !self.requests.lock().contains_key(owner) {
                return;
            }
            answered.await;
        }
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        let mut requests = self.attempts.requests.lock();
        let mut is_last = false;
        for owner in &self.owners {
            if let Some(count) = requests.get_mut(owner) {
                *count -= 1;
                if *count == 0 {
                    requests.remove(owner);
                    is_last = true;
                }
            }
        }
        drop(requests);
        if is_last {
            self.attempts.answered.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_release_waits_for_every_request_of_its_owner() {
        let attempts = Arc::new(Attempts::default());
        let [one, two] = [OwnerToken::fresh(), OwnerToken::fresh()];
        let first = attempts.begin([one.clone(), two.clone()].into_iter());
        let second = attempts.begin(std::iter::once(one.clone()));
        let is_answered = async |owner| {
            let waiting = attempts.answered(owner);
            tokio::time::timeout(Duration::from_millis(1), waiting).await.is_ok()
        };
        assert!(!is_answered(&one).await && !is_answered(&two).await);
        drop(first);
        assert!(!is_answered(&one).await && is_answered(&two).await);
        let answered = async {
            tokio::time::sleep(Duration::from_millis(5)).await;
            drop(second);
        };
        tokio::join!(attempts.answered(&one), answered);
        assert!(is_answered(&one).await && attempts.requests.lock().is_empty());
    }
}
