//! What the host says of its memory, in `/proc`.

use crate::seams::Host;

/// The host's memory at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct HostMemory {
    /// MiB that can be had without swapping.
    pub available_mib: u64,
    /// Percent of the last ten seconds in which something waited for memory; 0 where the kernel does not count that.
    pub stalled_pct: f64,
}

/// The host that this runs on.
pub(crate) struct ThisHost;

impl Host for ThisHost {
    fn memory(&self) -> Option<HostMemory> {
        let available_mib = meminfo().into_iter().find(|(name, _)| name == "MemAvailable")?.1 >> 10;
        let pressure = std::fs::read_to_string("/proc/pressure/memory").unwrap_or_default();
        Some(HostMemory { available_mib, stalled_pct: stalled(&pressure) })
    }

    fn anonymous_mib(&self, pid: i32) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        Some(lines(&status).find(|(name, _)| name == "RssAnon")?.1 >> 10)
    }
}

/// Names and values (KiB, or pages for the huge ones) of `/proc/meminfo`.
pub fn meminfo() -> Vec<(String, u64)> {
    lines(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default()).collect()
}

/// Lines such as `MemTotal:  1024 kB`.
fn lines(text: &str) -> impl Iterator<Item = (String, u64)> {
    text.lines().filter_map(|line| {
        let (name, rest) = line.split_once(':')?;
        Some((name.to_owned(), rest.split_whitespace().next()?.parse().ok()?))
    })
}

/// `some avg10` of a file of pressure (the kernel's Documentation/accounting/psi.rst).
fn stalled(pressure: &str) -> f64 {
    let some = pressure.lines().find_map(|line| line.strip_prefix("some "));
    let avg10 = some.and_then(|line| line.split(' ').find_map(|field| field.strip_prefix("avg10=")));
    avg10.and_then(|number| number.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_is_read_where_it_is_counted() {
        let text = "some avg10=12.50 avg60=1.00 avg300=0.10 total=99\nfull avg10=3.00 avg60=0.50 avg300=0.00 total=9\n";
        assert!((stalled(text) - 12.5).abs() < f64::EPSILON);
        assert!(stalled("").abs() < f64::EPSILON);
    }

    #[test]
    fn this_host_has_memory() {
        assert!(ThisHost.memory().unwrap().available_mib > 0);
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(ThisHost.anonymous_mib(own).is_some());
        assert_eq!(ThisHost.anonymous_mib(0), None);
    }
}
