//! The engine `firecracker` with real VMs. Needs what `qemu.rs` needs, hardware virtualization, and a Firecracker at
//! `$FIRECRACKER_BIN`; without one it says so and does nothing. `make test-lab` runs it in a VM that has both.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod suite;
mod support;

use std::path::Path;

use aenv_vmm::{Engine, Firecracker, FirecrackerConfig};
use support::Runtime;

fn engine(runtime: &Path) -> Option<Firecracker> {
    let Some(binary) = std::env::var_os("FIRECRACKER_BIN") else {
        eprintln!(
            "SKIPPED: FIRECRACKER_BIN names no Firecracker. Nothing of this engine was tested with a real one."
        );
        return None;
    };
    Some(Firecracker::new(FirecrackerConfig { binary: binary.into(), ..FirecrackerConfig::new(runtime) }))
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
