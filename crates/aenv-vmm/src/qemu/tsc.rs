//! The host's TSC frequency, measured: emulated guests read the host's counter and cannot calibrate it themselves.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

const SPAN: Duration = Duration::from_millis(100);

/// Frequency in kHz. The first call takes a tenth of a second; it blocks.
pub(crate) fn host_khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(measure)
}

fn measure() -> u64 {
    let (start, first) = sample();
    std::thread::sleep(SPAN);
    let (end, last) = sample();
    let nanos = end.duration_since(start).as_nanos().max(1);
    u64::try_from(u128::from(last.wrapping_sub(first)) * 1_000_000 / nanos).unwrap_or(0)
}

/// Clock and counter at the same moment: the closest of several readings.
fn sample() -> (Instant, u64) {
    let reading = || {
        let before = counter();
        let now = Instant::now();
        let after = counter();
        (after.wrapping_sub(before), now, before + after.wrapping_sub(before) / 2)
    };
    let best = (0..16).map(|_| reading()).min_by_key(|(width, ..)| *width);
    let (_, now, middle) = best.unwrap_or_else(reading);
    (now, middle)
}

#[cfg(target_arch = "x86_64")]
fn counter() -> u64 {
    // SAFETY: rdtsc has no memory effects and exists on every x86-64 CPU.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_measurements_agree() {
        let (first, second) = (measure(), measure());
        assert!(first > 100_000, "{first} kHz");
        assert!(first.abs_diff(second) * 1000 < first, "{first} and {second} kHz");
    }
}
