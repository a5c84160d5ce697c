//! Look-ups in the merged index of ten layers with a million segments: `cargo bench -p aenv-layer --bench index`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for the terminal")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_layer::{Layer, LayerWriter, Stack};

const LAYERS: u64 = 10;
const SEGMENTS: u64 = 100_000;
const SIZE: u64 = 64 << 30;
const LOOK_UPS: u64 = 1_000_000;
const ROUNDS: usize = 21;

fn main() {
    let dir = tempfile::tempdir().unwrap();
    let mut layers = Vec::new();
    for number in 0..LAYERS {
        let path = dir.path().join(number.to_string());
        let mut writer = LayerWriter::create(&path, SIZE).unwrap();
        // Blocks that no other layer has, so that all of them stay in the merged index.
        for segment in 0..SEGMENTS {
            let block = (segment * LAYERS + number) * 16 + segment % 7;
            writer.append(block * 4096, &[number as u8 + 1; 512]).unwrap();
        }
        writer.finish().unwrap();
        layers.push(Arc::new(Layer::open_file(&path).unwrap()));
    }
    let (started, cpu) = (Instant::now(), cpu_time());
    let stack = Stack::new(layers, None, SIZE).unwrap();
    println!(
        "merge of {LAYERS} layers, {} segments: {:?} of CPU, {:?} on the wall",
        stack.segments().0,
        cpu_time() - cpu,
        started.elapsed()
    );
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut hits = 0;
    let mut rates: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let cpu = cpu_time();
            for _ in 0..LOOK_UPS {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let extent = stack.extent((random % SIZE) & !511).unwrap();
                hits += u64::from(extent.data);
            }
            LOOK_UPS as f64 / (cpu_time() - cpu).as_secs_f64() / 1e6
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    println!(
        "random look-ups, {ROUNDS} rounds of {LOOK_UPS}: median {:.2} M/s of one core, {:.2} to {:.2}; {hits} found data",
        rates[ROUNDS / 2],
        rates[0],
        rates[ROUNDS - 1]
    );
}

/// CPU time that this thread has had: on a busy machine the clock on the wall says little.
fn cpu_time() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}
