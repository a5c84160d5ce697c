//! Deadlines: times to live, on a monotonic timer.
//!
//! Each actor sleeps on the runtime's timer wheel until its own deadline, so that any number of sandboxes expires side by
//! side. A deadline is shown, and journaled, as a time of the wall clock. When that clock is set while a server runs, a sandbox lives as long
//! as it was to live all the same; only a server that starts has nothing but the wall clock to go by.

use std::time::Duration;

use chrono::{DateTime, Utc};

/// The longest time to live: what a timestamp can hold, and more than anybody waits.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

/// The longest uninterrupted sleep: timers know of no more than two years.
const PIECE: Duration = Duration::from_secs(86_400);

/// How often a failed expiry is tried again, at most.
const RETRY_CAP: Duration = Duration::from_secs(60);

/// Expiries that may pause sandboxes at once.
pub(crate) const PARALLEL_EXPIRIES: usize = 8;

/// When an actor has to end or pause its sandbox.
#[derive(Debug, Default)]
pub(crate) struct Deadline {
    failures: u32,
    not_before: Option<tokio::time::Instant>,
    /// A deadline, and when that is on the monotonic clock.
    known: Option<(DateTime<Utc>, tokio::time::Instant)>,
}

impl Deadline {
    /// Returns when `end_at` has passed (and, after failures, the time until the next try).
    pub(crate) async fn passed(&mut self, end_at: DateTime<Utc>) {
        let at = self.at(end_at, Utc::now());
        if let Some(not_before) = self.not_before {
            tokio::time::sleep_until(not_before).await;
        }
        while tokio::time::Instant::now() < at {
            tokio::time::sleep_until(at.min(tokio::time::Instant::now() + PIECE)).await;
        }
    }

    /// When that is, whatever the wall clock said since it was asked for the first time.
    fn at(&mut self, end_at: DateTime<Utc>, now: DateTime<Utc>) -> tokio::time::Instant {
        match self.known {
            Some((known, at)) if known == end_at => at,
            _ => {
                let left = (end_at - now).to_std().unwrap_or_default();
                let at = tokio::time::Instant::now() + left.min(LONGEST);
                self.known = Some((end_at, at));
                at
            }
        }
    }

    /// What had to be done at the deadline did not work: the next try comes later and later.
    pub(crate) fn failed(&mut self) {
        self.not_before = Some(tokio::time::Instant::now() + retry_after(self.failures));
        self.failures += 1;
    }

    /// Forgets failures.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// When what failed so many times before is tried again.
pub(crate) fn retry_after(failures: u32) -> Duration {
    Duration::from_secs(2).saturating_mul(1 << failures.min(6)).min(RETRY_CAP)
}

/// now + `timeout`, within what a timestamp can hold. Cut to microseconds, as clients are shown it.
pub(crate) fn after(timeout: Duration) -> DateTime<Utc> {
    let timeout = timeout.min(LONGEST);
    let end_at = Utc::now() + timeout;
    DateTime::from_timestamp_micros(end_at.timestamp_micros()).unwrap_or(end_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_deadline_passes_once_it_is_there() {
        let start = std::time::Instant::now();
        Deadline::default().passed(Utc::now() + Duration::from_millis(80)).await;
        assert!(start.elapsed() >= Duration::from_millis(75));
        Deadline::default().passed(Utc::now() - Duration::from_secs(5)).await;
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[tokio::test]
    async fn a_clock_that_is_set_moves_no_deadline() {
        let (mut deadline, now) = (Deadline::default(), Utc::now());
        let hour = chrono::TimeDelta::hours(1);
        let end_at = now + hour;
        let at = deadline.at(end_at, now);
        let left = at - tokio::time::Instant::now();
        assert!((3590..=3600).contains(&left.as_secs()), "{left:?}");
        for clock in [now + hour * 2, now - hour * 24 * 365] {
            assert_eq!(deadline.at(end_at, clock), at);
        }
        // Another deadline is told by the clock as it is then.
        let later = deadline.at(end_at + hour * 2, now + hour * 2);
        assert!((3590..=3610).contains(&(later - tokio::time::Instant::now()).as_secs()));
    }

    #[test]
    fn failures_are_retried_later_and_later() {
        let waits: Vec<_> = (0..100).map(retry_after).collect();
        assert_eq!(waits[0], Duration::from_secs(2));
        assert!(waits.is_sorted());
        assert_eq!(waits[99], RETRY_CAP);
    }

    #[tokio::test]
    async fn a_failure_puts_the_next_try_off() {
        let mut deadline = Deadline::default();
        deadline.failed();
        let past = Utc::now() - Duration::from_secs(1);
        let early = tokio::time::timeout(Duration::from_millis(50), deadline.passed(past)).await;
        assert!(early.is_err(), "it was tried again at once");
        deadline.clear();
        deadline.passed(past).await;
    }

    #[test]
    fn huge_timeouts_do_not_overflow() {
        assert!(after(Duration::MAX) > Utc::now());
    }
}
