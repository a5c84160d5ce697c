//! A capture before a pause, beside its floor, a write of as many bytes with `fsync`: `cargo bench -p aenv-memory --bench capture`.
//! `AENV_BENCH_DIR` says where (a real disk). The two take turns; the memory is this process's own.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for the terminal")]

use std::{
    fs::File,
    io::Write,
    path::Path,
    time::{Duration, Instant},
};

use aenv_memory::{CaptureReport, Ram, Since, capture_stopped};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};

const TURNS: usize = 15;
const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

fn main() {
    let base = std::env::var_os("AENV_BENCH_DIR").map_or_else(std::env::temp_dir, Into::into);
    let dir = tempfile::tempdir_in(&base).unwrap();
    println!(
        "| MiB changed | pages lie | scan ms | copy ms | write ms | capture ms p50 | p90 | write + fsync ms p50 | p90 | ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for mib in [32, 256] {
        for (name, scattered) in [("together", false), ("scattered", true)] {
            row(dir.path(), mib, name, scattered);
        }
    }
}

fn row(dir: &Path, mib: usize, name: &str, scattered: bool) {
    let ram = changed(dir, mib * MIB, scattered);
    let data: Vec<u8> = (0..mib * MIB).map(|i| (i / 7) as u8 | 1).collect();
    let (mut captures, mut floors, mut reports) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..TURNS {
        let path = dir.join("layer");
        let began = Instant::now();
        reports.push(capture_stopped(&ram, &path, Since::Mapping).unwrap());
        captures.push(began.elapsed());
        std::fs::remove_file(path).unwrap();

        let path = dir.join("plain");
        let began = Instant::now();
        let mut file = File::create(&path).unwrap();
        file.write_all(&data).unwrap();
        file.sync_all().unwrap();
        floors.push(began.elapsed());
        std::fs::remove_file(path).unwrap();
    }
    let part = |of: fn(&CaptureReport) -> Duration| at(reports.iter().map(of).collect(), 0.5);
    let (p50, floor) = (at(captures.clone(), 0.5), at(floors.clone(), 0.5));
    println!(
        "| {mib} | {name} | {:.1} | {:.1} | {:.1} | {p50:.1} | {:.1} | {floor:.1} | {:.1} | {:.2} |",
        part(|report| report.scan),
        part(|report| report.copy),
        part(|report| report.write),
        at(captures, 0.9),
        at(floors, 0.9),
        p50 / floor
    );
}

/// A private mapping of which so many bytes were changed: the first ones, or every second page.
fn changed(dir: &Path, bytes: usize, scattered: bool) -> Ram {
    let len = bytes * if scattered { 2 } else { 1 };
    let image = File::create_new(dir.join(format!("image-{bytes}-{scattered}"))).unwrap();
    image.set_len(len as u64).unwrap();
    let image = File::open(dir.join(format!("image-{bytes}-{scattered}"))).unwrap();
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping of a file that nobody changes, at an address that the kernel chooses; it is never unmapped.
    let memory = unsafe {
        let start = mmap(None, len.try_into().unwrap(), access, MapFlags::MAP_PRIVATE, &image, 0).unwrap();
        std::slice::from_raw_parts_mut(start.cast::<u8>().as_ptr(), len)
    };
    let step = if scattered { 2 * PAGE } else { PAGE };
    for (number, page) in memory.chunks_mut(step).enumerate() {
        for (i, byte) in page[..PAGE].iter_mut().enumerate() {
            *byte = (i + number) as u8 | 1;
        }
    }
    Ram::whole(std::process::id(), memory.as_ptr() as u64, len as u64)
}

/// Milliseconds at a percentile.
fn at(mut times: Vec<Duration>, part: f64) -> f64 {
    times.sort();
    times[((times.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e3
}
