use super::*;
use crate::engine::overload_queue::OVERLOAD;
use crate::model::Process;

type Answer = oneshot::Receiver<Result<Vec<Acquired>>>;

fn attempt(name: usize) -> (Job, Answer) {
    let key = Key::new(&format!("n{name}")).unwrap();
    let ttl = Ttl::clamped(Duration::from_secs(30));
    let claim = Claim::new(&[key], OwnerToken::fresh(), ttl, Arc::new(Process::current()));
    let (reply, answer) = Reply::new();
    (Job::Acquire(vec![Arc::new(claim)], Arc::default(), reply), answer)
}

/// The names of the next transaction.
async fn names(receiver: &mut Receiver) -> Vec<String> {
    let mut batch = Vec::new();
    assert!(receiver.next(&mut batch).await);
    let name = |job: &Job| match job {
        Job::Acquire(claims, ..) => claims[0].keys()[0].as_str().to_owned(),
        _ => unreachable!("only attempts were sent"),
    };
    batch.iter().map(name).collect()
}

#[tokio::test]
async fn renewals_and_releases_go_before_earlier_attempts_and_leave_them_a_share() {
    let (sender, mut receiver) = queue(Limit::claims(BATCH));
    let mut answers: Vec<Answer> = Vec::new();
    let (mut renewals, mut releases) = (Vec::new(), Vec::new());
    for name in 0..2 * BATCH {
        let (job, answer) = attempt(name);
        sender.send(job);
        answers.push(answer);
    }
    for name in 0..BATCH {
        let (Job::Acquire(claims, ..), _) = attempt(name) else {
            unreachable!("an attempt")
        };
        let claim = (*claims[0]).clone();
        let ttl = claim.ttl;
        let ((renewal, renewed), (release, released)) = (Reply::new(), Reply::new());
        sender.send(Job::Renew(claim.clone(), ttl, renewal));
        sender.send(Job::Release(vec![claim], Duration::ZERO, release));
        renewals.push(renewed);
        releases.push(released);
    }
    // Twice as many changes as a transaction takes, and after them the attempts.
    for (changes, attempts) in [(BATCH, SHARE), (BATCH, SHARE), (0, BATCH)] {
        let mut batch = Vec::new();
        assert!(receiver.next(&mut batch).await);
        let is_attempt: Vec<bool> = batch.iter().map(|job| matches!(job, Job::Acquire(..))).collect();
        assert_eq!(is_attempt, [vec![false; changes], vec![true; attempts]].concat());
    }
}

#[tokio::test(start_paused = true)]
async fn the_newest_attempts_go_first_once_the_oldest_has_waited_too_long() {
    let (sender, mut receiver) = queue(Limit::claims(BATCH));
    let mut answers: Vec<Answer> = Vec::new();
    let mut send = |range: std::ops::Range<usize>| {
        for name in range {
            let (job, answer) = attempt(name);
            sender.send(job);
            answers.push(answer);
        }
    };
    send(0..2 * BATCH);
    assert_eq!(names(&mut receiver).await[..2], ["n0", "n1"]);
    tokio::time::advance(OVERLOAD + Duration::from_millis(1)).await;
    send(1000..1010);
    let next = names(&mut receiver).await;
    assert_eq!(next.len(), BATCH);
    assert_eq!(next[..3], ["n1009", "n1008", "n1007"]);
    // Attempts for one name keep their order.
    let mut same: Vec<Answer> = Vec::new();
    for _ in 0..2 {
        let (job, answer) = attempt(3000);
        sender.send(job);
        same.push(answer);
    }
    let (mut batch, second) = (Vec::new(), same.pop());
    assert!(receiver.next(&mut batch).await);
    let is_first = |job: &Job| matches!(job, Job::Acquire(_, _, reply) if !reply.sender.is_closed());
    drop(same);
    assert!(!is_first(&batch[0]) && is_first(&batch[1]));
    drop(second);
    // Their callers left: the attempts that remain are dropped.
    drop(answers);
    let (job, _answer) = attempt(2000);
    sender.send(job);
    assert_eq!(names(&mut receiver).await, ["n2000"]);
    assert!(receiver.attempts.is_empty());
}
