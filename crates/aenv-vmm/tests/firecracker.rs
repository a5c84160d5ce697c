//! The engine `firecracker` with real VMs. Needs what `qemu.rs` needs, hardware virtualization, and a Firecracker at
//! `$FIRECRACKER_BIN`; without one it says so and does nothing. `make test-lab` runs it in a VM that has both.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod suite;
mod support;

use std::path::Path;

use aenv_types::MachineShape;
use aenv_vmm::{Engine, Firecracker, FirecrackerConfig, JailConfig};
use support::{Bench, Ram, Runtime};

fn engine(runtime: &Path) -> Option<Firecracker> {
    let Some(binary) = std::env::var_os("FIRECRACKER_BIN") else {
        eprintln!(
            "SKIPPED: FIRECRACKER_BIN names no Firecracker. Nothing of this engine was tested with a real one."
        );
        return None;
    };
    let jail = JailConfig { root: runtime.join("jail"), first_uid: 1_900_400_000, uids: 1000 };
    let settings = FirecrackerConfig::new(runtime);
    Some(Firecracker::new(FirecrackerConfig { binary: binary.into(), jail: Some(jail), ..settings }))
}

/// Made before the tests below run where neither a network nor cargo is.
#[test]
fn the_guest_is_there() {
    aenv_testkit::guest_artifacts(aenv_testkit::GuestDaemon::Agent).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn life_of_a_vm() {
    let runtime = Runtime::new();
    let Some(engine) = engine(runtime.path()) else { return };
    let report = engine.probe().await;
    assert!(report.missing.is_empty(), "{:?}", report.missing);
    suite::life_of_a_vm(&engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn captures_under_traffic() {
    let runtime = Runtime::new();
    let Some(engine) = engine(runtime.path()) else { return };
    suite::captures_under_traffic(&engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forks_and_ends() {
    let runtime = Runtime::new();
    let Some(engine) = engine(runtime.path()) else { return };
    suite::forks_and_ends(&engine, &runtime).await;
}

/// Memory above 3 GiB of the host's lies above 4 GiB of the guest's, where its kernel takes from first.
#[tokio::test(flavor = "multi_thread")]
async fn memory_in_two_pieces_is_captured() {
    let runtime = Runtime::new();
    let Some(engine) = engine(runtime.path()) else { return };
    let bench = Bench::new();
    let shape = MachineShape { memory_mib: 3584, ..support::SHAPE };
    let mut ram = Ram::new(engine.kind(), bench.base.path(), shape.memory_bytes(), |_| {});
    let mut place = bench.place(&ram, &bench.root);
    place.spec.shape = shape;
    let mut vm = bench.boot(&engine, &place).await;
    assert_eq!(place.netns.connect().ask("fill 48 9"), "ok");
    // Once of anonymous memory, once of an image.
    for _ in 0..2 {
        let mapping = vm.ram().unwrap();
        let upper = aenv_memory::Ram::whole(mapping.pid as u32, mapping.upper.unwrap().start, 512 << 20);
        assert!(!aenv_memory::scan(&upper, aenv_memory::Since::Mapping).unwrap().ranges.is_empty());
        let capture = bench.capture(&engine, &*vm, &place).await;
        vm.end().await.unwrap();
        let mut next = bench.place(&capture.ram, &capture.root);
        next.spec.shape = shape;
        vm = engine.launch(capture.spec(&next)).await.unwrap();
        vm.resume().await.unwrap();
        assert_eq!(next.netns.connect().ask("check 9"), "same");
        assert_eq!(next.netns.connect().ask("fill 8 9"), "ok");
        (place, ram) = (next, capture.ram);
    }
    vm.end().await.unwrap();
    drop((place, ram));
}
