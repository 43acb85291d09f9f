//! The local clock: monotonic, and it includes the time that the machine is suspended.
//!
//! `std::time::Instant` stops while a laptop or a virtual machine is suspended (`CLOCK_MONOTONIC` on Linux). A lease measured
//! with it would seem held after it has expired in the store. On Linux `CLOCK_BOOTTIME` continues (`clock_gettime(2)`), on macOS
//! `CLOCK_MONOTONIC` does (`clock_gettime(3)`), on Windows the performance counter behind `Instant` does.
//!
//! The crate's unit tests use tokio's clock, so that they can pause it.

use std::num::NonZeroU64;
use std::time::Duration;

/// The clock's origin is this long before the start of the machine (136 years), so that a moment can be moved to before the start:
/// `holdfast/testing` does that on a machine that has just started.
#[cfg_attr(test, allow(dead_code))]
const ORIGIN: Duration = Duration::from_secs(1 << 32);

/// A point in time on the local clock, in nanoseconds since the clock's origin (they suffice for 584 years). Valid only in this
/// process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(NonZeroU64);

impl Moment {
    /// Returns the present.
    pub fn now() -> Self {
        #[cfg(test)]
        return Moment::from_nanos(nanos(tests::paused_now()));
        #[cfg(not(test))]
        return Moment::from_nanos(nanos(boot_time() + ORIGIN));
    }

    /// Returns the time until this moment; zero when it has passed.
    pub fn remaining(self) -> Duration {
        Duration::from_nanos(self.to_nanos().saturating_sub(Self::now().to_nanos()))
    }

    /// Returns the time since this moment; zero when it is in the future.
    pub fn elapsed(self) -> Duration {
        Duration::from_nanos(Self::now().to_nanos().saturating_sub(self.to_nanos()))
    }

    /// Whether this moment has been reached.
    pub fn is_past(self) -> bool {
        Self::now() >= self
    }

    /// Returns the nanoseconds since the clock's origin, for an atomic. Never zero.
    pub fn to_nanos(self) -> u64 {
        self.0.get()
    }

    /// Creates a moment from [`Moment::to_nanos`]. Zero becomes one, so that an `Option<Moment>` needs no extra space.
    pub fn from_nanos(nanos: u64) -> Self {
        Moment(NonZeroU64::new(nanos).unwrap_or(NonZeroU64::MIN))
    }
}

impl std::ops::Add<Duration> for Moment {
    type Output = Moment;
    fn add(self, rhs: Duration) -> Moment {
        Moment::from_nanos(self.to_nanos().saturating_add(nanos(rhs)))
    }
}

impl std::ops::Sub<Duration> for Moment {
    type Output = Moment;
    fn sub(self, rhs: Duration) -> Moment {
        Moment::from_nanos(self.to_nanos().saturating_sub(nanos(rhs)))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(unix)]
#[cfg_attr(test, allow(dead_code))]
fn boot_time() -> Duration {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: libc::clockid_t = libc::CLOCK_BOOTTIME;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: libc::clockid_t = libc::CLOCK_MONOTONIC;
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is a valid, writable timespec, and both clock ids exist on every kernel that Node 20 runs on.
    unsafe { libc::clock_gettime(CLOCK, &mut ts) };
    Duration::new(ts.tv_sec as u64, ts.tv_nsec as u32)
}

#[cfg(not(unix))]
#[cfg_attr(test, allow(dead_code))]
fn boot_time() -> Duration {
    use std::sync::OnceLock;
    use std::time::Instant;
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::OnceLock;
    use tokio::time::Instant;

    pub(super) fn paused_now() -> Duration {
        static ORIGIN: OnceLock<std::time::Instant> = OnceLock::new();
        let origin = *ORIGIN.get_or_init(std::time::Instant::now);
        // One hour ahead: a paused clock starts before the origin, and the difference must not saturate at zero.
        (Instant::now().into_std() + Duration::from_secs(3600)).saturating_duration_since(origin)
    }

    #[test]
    fn boot_time_advances_with_real_time() {
        let before = boot_time();
        std::thread::sleep(Duration::from_millis(20));
        let passed = boot_time() - before;
        assert!(passed >= Duration::from_millis(19), "only {passed:?} passed");
    }

    #[tokio::test(start_paused = true)]
    async fn remaining_and_elapsed_are_opposites() {
        let later = Moment::now() + Duration::from_secs(5);
        assert_eq!(later.remaining(), Duration::from_secs(5));
        assert!(!later.is_past());
        tokio::time::advance(Duration::from_secs(6)).await;
        assert_eq!(later.remaining(), Duration::ZERO);
        assert_eq!(later.elapsed(), Duration::from_secs(1));
        assert!(later.is_past());
        assert_eq!(Moment::from_nanos(later.to_nanos()), later);
    }
}
