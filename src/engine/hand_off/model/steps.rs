//! The events of the model, and the changes of each.

use stateright::{Model, Property};

use super::super::ClockReading;
use super::{
    AS_THE_AGE, AS_THE_DELAY, AS_THE_STEP, Action, Flight, GRANT, HOLDS, Holder, MOST_AGE, ONE_HOLDER, Phase, Rules,
    State, TOKENS, TTL, moment, server_us,
};

impl Model for Rules {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            now: 0,
            offset: 0,
            stepped: [0; 2],
            steps: 0,
            holder: Some((Holder::Releaser, i64::MAX)),
            fence: 1,
            release: None,
            handed_off: None,
            delay: 0,
            phase: Phase::Waiting,
            known_fence: 0,
            reading: None,
            heartbeat: Flight::No,
            message: Flight::No,
            attempt: Flight::No,
            renewal: Flight::No,
            is_releasing: false,
            rival_since: None,
            has_shrunk: false,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.phase == Phase::Ended && !state.is_releasing {
            // It never holds the lock again.
            return;
        }
        if state.now < self.end + TTL {
            actions.push(Action::Tick);
        }
        let is_early = state.now < self.end;
        if is_early && state.steps < self.most_steps {
            actions.extend(self.steps.iter().map(|ticks| Action::Step(*ticks)));
        }
        match state.heartbeat {
            Flight::No if is_early && state.phase == Phase::Waiting => actions.push(Action::SendHeartbeat),
            Flight::No => {}
            Flight::Sent(_) => actions.push(Action::ExecuteHeartbeat),
            Flight::Answered(..) => actions.push(Action::ReceiveHeartbeat),
        }
        if state.release.is_none() && is_early {
            actions.push(Action::StartHandOff);
        }
        if state.release.is_some() && state.handed_off.is_none() {
            actions.push(Action::HandOff);
        }
        if let Flight::Answered(..) = state.message {
            actions.push(Action::ReceiveMessage);
        }
        match state.attempt {
            Flight::Sent(_) => actions.push(Action::ExecuteAttempt),
            Flight::Answered(..) => actions.push(Action::ReceiveAttempt),
            Flight::No => {}
        }
        match state.renewal {
            Flight::Sent(_) => actions.push(Action::ExecuteRenewal),
            Flight::Answered(..) => actions.push(Action::ReceiveRenewal),
            Flight::No if state.is_waiter_holding() && is_early => actions.push(Action::SendRenewal),
            Flight::No => {}
        }
        if state.is_waiter_holding() && is_early {
            actions.push(Action::SendRelease);
        }
        if state.is_releasing {
            actions.push(Action::ExecuteRelease);
        }
        if state.live().is_none() && state.rival_since.is_none() {
            actions.push(Action::RivalAcquires);
        }
    }

    fn next_state(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        let (now, clock) = (state.now, state.clock());
        match action {
            Action::Tick => {
                state.now += 1;
                if matches!(state.phase, Phase::Holding(_)) && !state.is_waiter_holding() {
                    state.phase = Phase::Ended;
                }
            }
            Action::Step(ticks) => {
                state.offset += ticks;
                state.steps += 1;
                state.stepped[usize::from(state.release.is_some())] += ticks.max(0);
            }
            Action::SendHeartbeat => state.heartbeat = Flight::Sent(now),
            Action::ExecuteHeartbeat => {
                if let Flight::Sent(sent) = state.heartbeat {
                    state.heartbeat = Flight::Answered(sent, clock);
                }
            }
            Action::ReceiveHeartbeat => {
                if let Flight::Answered(sent, server) = state.heartbeat {
                    let sent = if self.counts_from_sending { sent } else { now };
                    state.reading = Some(ClockReading {
                        sent: moment(sent),
                        server_us: server_us(server),
                    });
                }
                state.heartbeat = Flight::No;
            }
            Action::StartHandOff => state.release = Some((now, clock)),
            Action::HandOff => self.hand_off(&mut state)?,
            Action::ReceiveMessage => self.receive_message(&mut state),
            Action::ExecuteAttempt => execute_attempt(&mut state),
            Action::ReceiveAttempt => receive_attempt(&mut state),
            Action::SendRenewal => state.renewal = Flight::Sent(now),
            Action::ExecuteRenewal => execute_renewal(&mut state),
            Action::ReceiveRenewal => receive_renewal(&mut state),
            Action::SendRelease => {
                state.phase = Phase::Ended;
                state.is_releasing = true;
                (state.heartbeat, state.message) = (Flight::No, Flight::No);
            }
            Action::ExecuteRelease => self.execute_release(&mut state),
            Action::RivalAcquires => {
                let fence = state.draw();
                state.has_shrunk |= fence <= state.known_fence;
                state.holder = Some((Holder::Rival, i64::MAX));
                state.rival_since = Some(now);
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ONE_HOLDER, |_, state: &State| state.overlap().is_none()),
            // As for every lease: the step ends it early in the store.
            Property::always(AS_THE_STEP, |_, state: &State| {
                state
                    .overlap()
                    .is_none_or(|overlap| overlap < state.stepped.iter().sum())
            }),
            Property::always(AS_THE_DELAY, |_, state: &State| {
                let is_after = state.stepped[1] > 0;
                state.overlap().is_none_or(|overlap| is_after || overlap < state.delay)
            }),
            Property::always(AS_THE_AGE, |_, state: &State| {
                let is_after = state.stepped[1] > 0;
                state.overlap().is_none_or(|overlap| is_after || overlap < MOST_AGE)
            }),
            Property::always(TOKENS, |_, state: &State| !state.has_shrunk),
            Property::sometimes(HOLDS, |_, state: &State| state.is_waiter_holding()),
        ]
    }
}

impl Rules {
    /// The server makes the waiter the holder, and sends the message.
    fn hand_off(&self, state: &mut State) -> Option<()> {
        let (started, granted) = state.release?;
        let fence = if self.draws_token { state.draw() } else { state.fence };
        state.has_shrunk |= fence <= 1;
        state.handed_off = Some(fence);
        state.holder = Some((Holder::Waiter, granted + GRANT));
        state.message = Flight::Answered(started, (granted, granted + GRANT));
        Some(())
    }

    /// The waiter accepts the hand-off, or confirms it by an attempt.
    fn receive_message(&self, state: &mut State) {
        if let (Phase::Waiting, Flight::Answered(sent, times), Some(fence)) =
            (state.phase, state.message, state.handed_off)
        {
            state.delay = state.now - sent;
            match self.accept(state, times) {
                Some(until) => {
                    state.phase = Phase::Holding(until);
                    state.known_fence = fence;
                }
                None => {
                    state.phase = Phase::Confirming;
                    state.attempt = Flight::Sent(state.now);
                }
            }
        }
        state.message = Flight::No;
    }

    /// The server executes the release, and a rival acquires the lock.
    fn execute_release(&self, state: &mut State) {
        state.is_releasing = false;
        if state.live() == Some(Holder::Waiter) {
            let last = if self.passes_own_token { state.known_fence } else { 1 };
            state.has_shrunk |= last < state.fence;
            state.fence = state.fence.max(last + 1);
            state.holder = Some((Holder::Rival, i64::MAX));
            state.rival_since = Some(state.now);
        }
    }
}

/// The server executes the attempt that confirms a hand-off.
fn execute_attempt(state: &mut State) {
    if let Flight::Sent(sent) = state.attempt {
        let fence = match (state.live(), state.handed_off) {
            (Some(Holder::Waiter), Some(fence)) => Some(fence),
            (None, _) => Some(state.draw()),
            _ => None,
        };
        if fence.is_some() {
            state.holder = Some((Holder::Waiter, state.clock() + TTL));
        }
        state.attempt = Flight::Answered(sent, fence);
    }
}

/// The waiter receives the answer of its attempt.
fn receive_attempt(state: &mut State) {
    if let (Flight::Answered(sent, Some(fence)), Phase::Confirming) = (state.attempt, state.phase) {
        state.phase = Phase::Holding(moment(sent + TTL));
        state.known_fence = fence;
        if !state.is_waiter_holding() {
            state.phase = Phase::Ended;
        }
    } else {
        state.phase = Phase::Ended;
    }
    state.attempt = Flight::No;
}

/// The server executes a renewal.
fn execute_renewal(state: &mut State) {
    if let Flight::Sent(sent) = state.renewal {
        let is_held = state.live() == Some(Holder::Waiter);
        if is_held {
            let until = state.holder.map_or(0, |(_, until)| until);
            state.holder = Some((Holder::Waiter, until.max(state.clock() + TTL)));
        }
        state.renewal = Flight::Answered(sent, is_held);
    }
}

/// The waiter receives the answer of its renewal.
fn receive_renewal(state: &mut State) {
    if let (Phase::Holding(until), Flight::Answered(sent, is_held)) = (state.phase, state.renewal) {
        state.phase = if is_held {
            Phase::Holding(until.max(moment(sent + TTL)))
        } else {
            Phase::Ended
        };
    }
    state.renewal = Flight::No;
}
