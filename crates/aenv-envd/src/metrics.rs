//! `GET /metrics`: what the guest uses right now.

use std::{fs, sync::Arc};

use aenv_envd_api::Metrics;
use axum::{Json, extract::State};
use nix::sys::statvfs::statvfs;
use parking_lot::Mutex;

use crate::guest::Guest;

/// The CPU counters of the measurement before, so that a share can be told.
#[derive(Debug, Default)]
pub struct CpuMeter(Mutex<CpuTimes>);

/// Ticks of all vCPUs since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct CpuTimes {
    busy: u64,
    total: u64,
}

/// Answers `GET /metrics`.
pub async fn serve(State(guest): State<Arc<Guest>>) -> Json<Metrics> {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let memory = Memory::parse(&fs::read_to_string("/proc/meminfo").unwrap_or_default());
    let (disk_used, disk_total) = disk().unwrap_or_default();
    Json(Metrics {
        ts: chrono::Utc::now().timestamp(),
        cpu_count: cpu_count(&stat),
        cpu_used_pct: guest.cpu.used_since_last(&stat),
        mem_total: memory.total,
        mem_used: memory.total.saturating_sub(memory.free + memory.cache),
        mem_cache: memory.cache,
        disk_used,
        disk_total,
    })
}

impl CpuMeter {
    fn used_since_last(&self, stat: &str) -> f64 {
        let now = CpuTimes::parse(stat);
        let before = std::mem::replace(&mut *self.0.lock(), now);
        let total = now.total.saturating_sub(before.total);
        if total == 0 {
            return 0.0;
        }
        let share = now.busy.saturating_sub(before.busy) as f64 / total as f64;
        (share * 10_000.0).round().clamp(0.0, 10_000.0) / 100.0
    }
}

impl CpuTimes {
    /// From the first line of `/proc/stat`: user nice system idle iowait irq softirq steal guest guest_nice (the last two are
    /// contained in user and nice).
    fn parse(stat: &str) -> Self {
        let line = stat.lines().next().unwrap_or_default();
        let ticks: Vec<u64> =
            line.split_whitespace().skip(1).take(8).filter_map(|field| field.parse().ok()).collect();
        let total = ticks.iter().sum();
        let idle: u64 = ticks.iter().skip(3).take(2).sum();
        Self { busy: total - idle, total }
    }
}

fn cpu_count(stat: &str) -> u32 {
    let lines = stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu "));
    u32::try_from(lines.count()).unwrap_or(u32::MAX)
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Memory {
    total: u64,
    free: u64,
    cache: u64,
}

impl Memory {
    fn parse(meminfo: &str) -> Self {
        let bytes = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
        };
        let cache = bytes("Buffers") + bytes("Cached") + bytes("SReclaimable");
        Self { total: bytes("MemTotal"), free: bytes("MemFree"), cache: cache.saturating_sub(bytes("Shmem")) }
    }
}

fn disk() -> nix::Result<(u64, u64)> {
    let root = statvfs("/")?;
    let unit = root.fragment_size();
    Ok(((root.blocks() - root.blocks_free()) * unit, root.blocks() * unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_share_is_of_the_time_between() {
        let meter = CpuMeter::default();
        let first = "cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1 2\ncpu1 1 2\nintr 5\n";
        assert_eq!(meter.used_since_last(first), 20.0);
        assert_eq!(cpu_count(first), 2);
        assert_eq!(meter.used_since_last("cpu  200 0 200 700 100 0 0 0 0 0\n"), 100.0);
        assert_eq!(meter.used_since_last("cpu  200 0 200 700 100 0 0 0 0 0\n"), 0.0);
    }

    #[test]
    fn memory_is_in_bytes() {
        let text = "MemTotal:  1000 kB\nMemFree:  400 kB\nBuffers: 10 kB\nCached: 100 kB\nShmem: 20 kB\nSReclaimable: 5 kB\n";
        assert_eq!(Memory::parse(text), Memory { total: 1_024_000, free: 409_600, cache: 97_280 });
    }
}
