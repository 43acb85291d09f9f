//! Detects a member that does not answer.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use http::Request;

use super::connection::State;
use crate::clock::Moment;

/// The interval of the checks whether a server still answers.
const TICK: Duration = Duration::from_millis(300);
/// A request without an answer for this long makes the connection suspect.
const SILENCE: Duration = Duration::from_secs(1);
/// Each of two waits for the answer to a probe, three times as long without another member. After a stall of this process the first
/// one may end at once.
const PROBE: Duration = Duration::from_millis(500);
/// The request of a probe: a server without it answers with an error.
pub(super) const HEALTH: &str = "/grpc.health.v1.Health/Check";

/// Closes a connection whose server does not answer a probe, and one whose member answers no requests while there are others. (etcd
/// closes a connection with more than one HTTP/2 ping in 5 s, so that the probe is a request.)
pub(super) async fn close_when_silent(
    sender: SendRequest<Bytes>,
    head: Request<()>,
    state: Arc<State>,
    is_alone: bool,
) {
    let mut is_suspect = false;
    let wait = if is_alone { 3 * PROBE } else { PROBE };
    loop {
        let oldest = state.oldest();
        let pause = async {
            match oldest {
                Some(_) => tokio::time::sleep(TICK).await,
                None => state.begun().await,
            }
        };
        tokio::select! {
            () = state.closed.cancelled() => return,
            () = pause => {}
        }
        let Some(age) = oldest.map(Moment::elapsed).filter(|age| *age >= 2 * TICK) else {
            is_suspect = false;
            continue;
        };
        let probe = async {
            let (answer, mut stream) = sender.clone().ready().await?.send_request(head.clone(), false)?;
            stream.send_data(Bytes::from_static(&[0; 5]), true)?;
            answer.await.map(drop)
        };
        tokio::pin!(probe);
        let mut is_answered = false;
        for _ in 0..2 {
            tokio::select! {
                () = state.closed.cancelled() => return,
                answered = tokio::time::timeout(wait, &mut probe) => if answered.is_ok() {
                    is_answered = true;
                    break;
                },
            }
        }
        let is_stuck = age >= SILENCE && std::mem::replace(&mut is_suspect, age >= SILENCE) && !is_alone;
        if !is_answered || is_stuck {
            state.is_silent.store(true, Relaxed);
            tracing::debug!(is_answered, "a member of etcd does not answer");
            break;
        }
    }
    state.closed.cancel();
}
