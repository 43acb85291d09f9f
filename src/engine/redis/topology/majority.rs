//! Asks several servers the same question, and follows the majority.

use std::collections::HashMap;
use std::hash::Hash;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

/// Returns the answer that more than half of the servers give, as soon as they have given it; else the most frequent answer
/// after all have answered. So a server that hangs costs no time, and one that is cut off from the others does not decide.
///
/// # Errors
/// All errors, if no server has an answer.
pub(in super::super) async fn majority_of<T: Eq + Hash + Clone, E>(
    asked: impl IntoIterator<Item = impl Future<Output = Result<T, E>>>,
) -> Result<T, Vec<E>> {
    let mut asking: FuturesUnordered<_> = asked.into_iter().collect();
    let majority = asking.len() / 2 + 1;
    let mut votes: HashMap<T, usize> = HashMap::new();
    let mut refusals = Vec::new();
    while let Some(answer) = asking.next().await {
        match answer {
            Ok(answer) => {
                let count = votes.entry(answer.clone()).or_default();
                *count += 1;
                if *count >= majority {
                    return Ok(answer);
                }
            }
            Err(refusal) => refusals.push(refusal),
        }
    }
    let best = votes.into_iter().max_by_key(|(_, count)| *count);
    best.map(|(answer, _)| answer).ok_or(refusals)
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use futures_util::FutureExt;
    use futures_util::future::BoxFuture;

    use super::*;

    type Asked = BoxFuture<'static, Result<u8, &'static str>>;

    fn says(answer: Result<u8, &'static str>) -> Asked {
        ready(answer).boxed()
    }

    #[tokio::test]
    async fn most_of_them_decide_and_the_others_are_not_waited_for() {
        assert_eq!(majority_of([pending().boxed(), says(Ok(1)), says(Ok(1))]).await, Ok(1));
        assert_eq!(
            majority_of([says(Ok(2)), says(Ok(1)), says(Err("no")), says(Ok(1))]).await,
            Ok(1)
        );
        assert_eq!(majority_of([says(Err("no")), says(Ok(3))]).await, Ok(3));
        assert_eq!(
            majority_of([says(Err("no")), says(Err("neither"))]).await,
            Err(vec!["no", "neither"])
        );
        let undecided = [pending().boxed(), pending().boxed(), says(Ok(1))];
        assert_eq!(
            majority_of(undecided).now_or_never(),
            None,
            "the others may agree on another answer"
        );
    }
}
