//! How fast memory is captured, beside the same bytes written plainly.
//!
//! `cargo run --release -p aenv-memory --example capture_bench -- [FOLDER]`: the folder's disk is the one that is measured.

use std::{
    fs::{self, File},
    io::Write,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use aenv_memory::{BufferPool, DEFAULT_BUFFER, Ram, Since, Snapshot, capture_stopped};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

const MIB: usize = 1 << 20;
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let mut out = std::io::stdout();
    let pool = BufferPool::new(DEFAULT_BUFFER, 1);
    drop(pool.get()?);
    writeln!(out, "medians of {ROUNDS}, in ms; buffer of {} MiB", DEFAULT_BUFFER / MIB)?;
    writeln!(
        out,
        "| changed MiB | scan | copy | stopped | write | at once | plain write+fsync | at once / plain |"
    )?;
    writeln!(out, "|-|-|-|-|-|-|-|-|")?;
    for mib in [16, 64, 256] {
        let image = folder.join(format!("capture-bench-{}.image", std::process::id()));
        let target = folder.join(format!("capture-bench-{}.layer", std::process::id()));
        let result = measure(mib, &image, &target, &pool);
        for file in [&image, &target] {
            let _ = fs::remove_file(file);
        }
        writeln!(out, "{}", result?)?;
    }
    Ok(())
}

fn measure(
    mib: usize,
    image: &Path,
    target: &Path,
    pool: &BufferPool,
) -> Result<String, Box<dyn std::error::Error>> {
    let file = File::options().read(true).write(true).create(true).truncate(true).open(image)?;
    let len = NonZeroUsize::new(1 << 30).ok_or("no size")?;
    file.set_len(len.get() as u64)?;
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let start = unsafe { mmap(None, len, access, MapFlags::MAP_PRIVATE, &file, 0) }?;
    // SAFETY: the mapping was just made, and nothing else uses it before it is unmapped.
    let memory = unsafe { std::slice::from_raw_parts_mut(start.cast::<u8>().as_ptr(), len.get()) };
    // Runs of 64 pages with gaps between them, as guests leave them.
    let mut state = 1u64;
    for page in (0..mib * 256).map(|page| page / 64 * 80 + page % 64) {
        for word in memory[page * 4096..(page + 1) * 4096].chunks_mut(64) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            word[..8].copy_from_slice(&state.to_le_bytes());
        }
    }
    let ram = Ram::whole(std::process::id(), start.as_ptr() as u64, len.get() as u64);
    let plain_bytes = vec![7u8; mib * MIB];
    let (mut scans, mut copies, mut writes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut at_once, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let report = Snapshot::take(&ram, pool.get()?, target, Since::Mapping)?.write()?;
        scans.push(report.scan);
        copies.push(report.copy);
        writes.push(report.write);
        fs::remove_file(target)?;
        let began = Instant::now();
        capture_stopped(&ram, target, Since::Mapping)?;
        at_once.push(began.elapsed());
        fs::remove_file(target)?;
        let began = Instant::now();
        let mut file = File::create(target)?;
        file.write_all(&plain_bytes)?;
        file.sync_all()?;
        plain.push(began.elapsed());
        fs::remove_file(target)?;
    }
    // SAFETY: `memory` is not used any more.
    unsafe { munmap(start, len.get()) }?;
    let [scan, copy, write, at_once, plain] = [scans, copies, writes, at_once, plain].map(median);
    Ok(format!(
        "| {mib} | {scan:.2} | {copy:.1} | {:.1} | {write:.1} | {at_once:.1} | {plain:.1} | {:.2} |",
        scan + copy,
        at_once / plain
    ))
}

/// In milliseconds.
fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e3
}
