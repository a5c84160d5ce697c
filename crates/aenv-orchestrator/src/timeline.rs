//! Where the time of a verb goes, for the log.

use std::{fmt::Write, time::Instant};

/// The steps of one verb, each with the milliseconds that it took.
pub(crate) struct Timeline {
    began: Instant,
    last: Instant,
    steps: String,
}

impl Timeline {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self { began: now, last: now, steps: String::new() }
    }

    /// The step that ends now.
    pub(crate) fn step(&mut self, name: &str) {
        let now = Instant::now();
        let comma = if self.steps.is_empty() { "" } else { ", " };
        // Writing to a string does not fail.
        let _ = write!(self.steps, "{comma}{name} {:.1}", (now - self.last).as_secs_f64() * 1e3);
        self.last = now;
    }

    /// `name 1.2, other 3.4; 4.6 ms in all`.
    pub(crate) fn told(self) -> String {
        format!("{}; {:.1} ms in all", self.steps, (self.last - self.began).as_secs_f64() * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_told_in_order() {
        let mut timeline = Timeline::new();
        timeline.step("noted");
        std::thread::sleep(std::time::Duration::from_millis(2));
        timeline.step("taken");
        let told = timeline.told();
        let (noted, rest) = told.split_once(", taken ").unwrap();
        assert!(noted.starts_with("noted "), "{told}");
        assert!(rest.split(';').next().unwrap().parse::<f64>().unwrap() >= 2.0, "{told}");
    }
}
