//! The event loop of whoever calls, for an engine that wants its socket served there.
//!
//! A hop between two threads costs more than everything else in a call. Where calls come from a thread that has an event
//! loop of its own (Node's), a socket that is written and read on that thread saves two of them.

use std::fmt;
use std::sync::Arc;

/// An event loop.
pub trait EventLoop: Send + Sync + fmt::Debug {
    /// Whether the current thread is the loop's own.
    fn is_here(&self) -> bool;

    /// Has a socket served, from soon on and until it says that it has ended. May be called on any thread.
    #[cfg(unix)]
    fn serve(&self, socket: Arc<dyn Socket>);
}

/// Whether it is worthwhile to look out for answers for a moment before the loop sleeps.
///
/// # Behavior
/// To fall asleep and be woken takes a core about as long as a store nearby takes to answer, so that looking out costs
/// nothing when the answers come in time. Answers that do not are a sign of a store that is far away, or of a machine
/// without a core to spare: then there is no look-out for two turns, and for twice as many with each more in vain.
#[derive(Debug, Default)]
pub struct LookOut {
    /// How many in a row were in vain.
    in_vain: u32,
    /// For how many turns there is none.
    pause: u32,
}

/// The longest pause, as a power of two.
const LONGEST_PAUSE: u32 = 12;

impl LookOut {
    /// The loop has answers under way, and is about to sleep: whether to look out for them now.
    pub fn is_due(&mut self) -> bool {
        let due = self.pause == 0;
        self.pause = self.pause.saturating_sub(1);
        due
    }

    /// How the look-out ended.
    pub fn ended(&mut self, in_time: bool) {
        if in_time {
            self.in_vain = 0;
        } else {
            self.in_vain = (self.in_vain + 1).min(LONGEST_PAUSE);
            self.pause = 1 << self.in_vain;
        }
    }
}

/// A socket that an event loop serves. Its methods are called on the loop's thread, and must not block.
#[cfg(unix)]
pub trait Socket: Send + Sync {
    /// The descriptor. It stays open for as long as the socket lives.
    fn descriptor(&self) -> std::os::fd::RawFd;

    /// There is something to read. Answers whether the socket is still of use.
    fn readable(&self) -> bool;

    /// The loop is about to sleep: what is to be sent goes out now. Answers whether the socket is still of use.
    fn flush(&self) -> bool;

    /// Whether answers are under way: there will be something to read soon.
    fn awaits(&self) -> bool;

    /// The loop does not serve it (any more).
    fn end(&self);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of so many turns have a look-out, when all of them end alike.
    fn look_outs(look_out: &mut LookOut, turns: usize, in_time: bool) -> usize {
        let mut count = 0;
        for _ in 0..turns {
            if look_out.is_due() {
                count += 1;
                look_out.ended(in_time);
            }
        }
        count
    }

    #[test]
    fn a_store_that_answers_in_time_is_looked_out_for_in_every_turn_and_another_hardly_ever() {
        let mut look_out = LookOut::default();
        assert_eq!(look_outs(&mut look_out, 1000, true), 1000);
        assert_eq!(look_outs(&mut look_out, 10_000, false), 13);
        assert!(look_outs(&mut look_out, 10 << LONGEST_PAUSE, false) <= 10);
        // It has come nearer: the next look-out finds out, and all is as before.
        let turns = 1 << LONGEST_PAUSE;
        assert!(look_outs(&mut look_out, turns, true) <= turns);
        assert_eq!(look_outs(&mut look_out, 1000, true), 1000);
    }
}
