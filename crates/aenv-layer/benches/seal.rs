//! Sealing an upper that has taken 1 GiB: `cargo bench -p aenv-layer --bench seal`. `AENV_BENCH_DIR` says where (a real disk).

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for the terminal")]

use std::{
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use aenv_layer::{Stack, Upper};
use aenv_store::BlockDevice;

const BYTES: u64 = 1 << 30;
const SIZE: u64 = 4 << 30;

fn main() {
    let base = std::env::var_os("AENV_BENCH_DIR").map_or_else(std::env::temp_dir, Into::into);
    for (name, block, random) in [("1 MiB in order", 1 << 20, false), ("4 KiB at random", 4096, true)] {
        for flushed in [true, false] {
            let dir = tempfile::tempdir_in(&base).unwrap();
            let stack = fill(dir.path(), block, random);
            let segments = stack.segments().1;
            let mut flush = Duration::ZERO;
            if flushed {
                let started = Instant::now();
                stack.flush().unwrap();
                flush = started.elapsed();
            }
            let (seal, cpu, stall) = seal(&stack, &dir.path().join("sealed"));
            let when = if flushed {
                format!("after a flush of {flush:?}")
            } else {
                "with all data dirty".to_owned()
            };
            println!(
                "1 GiB, {name}, {segments} segments: seal {when}: {seal:?}, {cpu:?} of CPU; longest write meanwhile {stall:?}"
            );
        }
    }
}

fn fill(dir: &Path, block: u64, random: bool) -> Stack {
    let upper = Upper::create(&dir.join("upper"), SIZE).unwrap();
    let stack = Stack::new(Vec::new(), Some(upper), SIZE).unwrap();
    let data = vec![0x5a; block as usize];
    let started = Instant::now();
    for i in 0..BYTES / block {
        // An odd factor visits every block once.
        let at = if random { i.wrapping_mul(0x9e37_79b1) % (SIZE / block) } else { i };
        stack.write_at(&data, at * block).unwrap();
    }
    println!("  written in {:?}", started.elapsed());
    stack
}

/// The time of a seal, its CPU time, and of the longest write that ran beside it.
fn seal(stack: &Stack, target: &Path) -> (Duration, Duration, Duration) {
    let done = AtomicBool::new(false);
    let longest = AtomicU64::new(0);
    let elapsed = thread::scope(|scope| {
        scope.spawn(|| {
            let data = [1; 4096];
            let mut at = 0;
            while !done.load(Ordering::Relaxed) {
                let started = Instant::now();
                stack.write_at(&data, at % SIZE).unwrap();
                longest.fetch_max(started.elapsed().as_micros() as u64, Ordering::Relaxed);
                at += 4096;
                thread::sleep(Duration::from_micros(200));
            }
        });
        let (started, cpu) = (Instant::now(), cpu_time());
        stack.seal(target).unwrap().unwrap();
        let elapsed = (started.elapsed(), cpu_time() - cpu);
        done.store(true, Ordering::Relaxed);
        elapsed
    });
    (elapsed.0, elapsed.1, Duration::from_micros(longest.into_inner()))
}

/// CPU time that this thread has had: on a busy machine the clock on the wall says little.
fn cpu_time() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}
