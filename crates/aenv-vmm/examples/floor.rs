//! The floor that the product's numbers are compared with: the bare engine, from the call of `launch` to the first answer
//! of the guest, with cold and with warm processes.
//!
//! ```text
//! cargo run --release -p aenv-vmm --example floor -- [rounds]
//! ```
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use aenv_vmm::{Engine, Qemu, QemuConfig};
use support::{Bench, Capture, Runtime, SHAPE};

#[tokio::main]
async fn main() {
    let rounds: usize = std::env::args().nth(1).map_or(20, |text| text.parse().unwrap());
    let bench = Bench::new();
    let runtime = Runtime::new();
    let qemu = Qemu::new(QemuConfig { warm: 0, ..QemuConfig::new(runtime.path()) });
    let report = qemu.probe().await;
    println!("{:?} {:?} with {:?}, {SHAPE:?}", report.kind, report.version, report.virtualization);

    let ram = bench.empty_ram(&qemu);
    let source = bench.place(&ram, &bench.root);
    let start = Instant::now();
    let vm = bench.boot(&qemu, &source).await;
    let mut agent = source.netns.connect();
    agent.ask("ping");
    println!("cold boot to first answer: {:.0} ms", millis(start.elapsed()));

    let mut pauses = Vec::new();
    let scratch = bench.base.path().join("scratch");
    for _ in 0..rounds {
        let start = Instant::now();
        vm.pause().await.unwrap();
        vm.save_state(&scratch).await.unwrap();
        pauses.push(start.elapsed());
        vm.resume().await.unwrap();
    }
    print("pause + save_state", &mut pauses);
    let capture = bench.capture(&qemu, &*vm, &source).await;
    vm.end().await.unwrap();

    launches("cold process", &bench, &capture, &qemu, rounds).await;
    let folder = Runtime::new();
    let warm = Qemu::new(QemuConfig { warm: 1, ..QemuConfig::new(folder.path()) });
    warm.prewarm(SHAPE, 2).await.unwrap();
    launches("warm process", &bench, &capture, &warm, rounds).await;
    warm.close();
}

async fn launches(name: &str, bench: &Bench, capture: &Capture, qemu: &Qemu, rounds: usize) {
    let (mut running, mut answered) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let place = bench.place(&capture.ram, &capture.root);
        let spec = capture.spec(&place);
        if name.starts_with("warm") {
            while qemu.warm(SHAPE, 2) == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        let start = Instant::now();
        let vm = qemu.launch(spec).await.unwrap();
        vm.resume().await.unwrap();
        running.push(start.elapsed());
        let mut agent = place.netns.connect();
        assert!(agent.ask("ping").starts_with("pong "));
        answered.push(start.elapsed());
        vm.end().await.unwrap();
    }
    print(&format!("{name}: launch .. vCPUs run"), &mut running);
    print(&format!("{name}: launch .. first answer"), &mut answered);
}

fn print(name: &str, samples: &mut [Duration]) {
    samples.sort();
    let at = |part: f64| millis(samples[((samples.len() - 1) as f64 * part).round() as usize]);
    println!(
        "{name}: median {:.1} ms, p90 {:.1} ms, min {:.1} ms (n={})",
        at(0.5),
        at(0.9),
        at(0.0),
        samples.len()
    );
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
