//! Deadlines: wall-clock times on a monotonic timer.
//!
//! Each actor sleeps on the runtime's timer wheel until its own deadline, so that any number of sandboxes expires side by
//! side. A sleep is cut into pieces, because the wall clock may be set while it lasts.

use std::time::Duration;

use chrono::{DateTime, Utc};

/// The longest uninterrupted sleep.
const PIECE: Duration = Duration::from_secs(20);

/// How often a failed expiry is tried again, at most.
const RETRY_CAP: Duration = Duration::from_secs(60);

/// Expiries that may pause sandboxes at once.
pub(crate) const PARALLEL_EXPIRIES: usize = 8;

/// When an actor has to end or pause its sandbox.
#[derive(Debug, Default)]
pub(crate) struct Deadline {
    failures: u32,
    not_before: Option<tokio::time::Instant>,
}

impl Deadline {
    /// Returns when `end_at` has passed (and, after failures, the time until the next try).
    pub(crate) async fn passed(&self, end_at: DateTime<Utc>) {
        if let Some(not_before) = self.not_before {
            tokio::time::sleep_until(not_before).await;
        }
        loop {
            let Ok(left) = (end_at - Utc::now()).to_std() else { return };
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(PIECE)).await;
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
    let timeout = timeout.min(Duration::from_secs(100 * 365 * 86_400));
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
