//! The engine `qemu` with real VMs. Needs root, `qemu-system-x86_64`, `ip`, `mke2fs`, busybox-static and apt.
#![allow(clippy::unwrap_used)]

mod suite;
mod support;

use std::{path::Path, time::Duration};

use aenv_vmm::{Engine, Qemu, QemuConfig, VmRecord};
use support::{Bench, Runtime, SHAPE};

const SOON: Duration = Duration::from_secs(60);

fn engine(runtime: &Path, warm: usize) -> Qemu {
    // Built beside the tests, because this crate's tests depend on the crate `aenv-track`.
    let tracker = std::env::current_exe().unwrap().with_file_name("libaenv_track.so");
    assert!(tracker.exists());
    Qemu::new(QemuConfig { warm, tracker: Some(tracker), ..QemuConfig::new(runtime) })
}

/// Whether what guests write can be kept account of.
fn is_tracked(record: &VmRecord) -> bool {
    let files = std::fs::read_dir(format!("/proc/{}/fd", record.pid)).unwrap().flatten();
    let mut links = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    links.any(|link| link == Path::new("anon_inode:[userfaultfd]"))
}

#[tokio::test(flavor = "multi_thread")]
async fn life_of_a_vm_with_cold_processes() {
    let runtime = Runtime::new();
    suite::life_of_a_vm(&engine(runtime.path(), 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn captures_under_traffic() {
    let runtime = Runtime::new();
    suite::captures_under_traffic(&engine(runtime.path(), 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forks_and_ends() {
    let runtime = Runtime::new();
    suite::forks_and_ends(&engine(runtime.path(), 0), &runtime).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn life_of_a_vm_with_warm_processes() {
    let runtime = Runtime::new();
    let qemu = engine(runtime.path(), 1);
    qemu.prewarm(SHAPE, 2).await.unwrap();
    wait_until(|| qemu.warm(SHAPE, 2) == 1).await;
    suite::life_of_a_vm(&qemu).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_run_of_the_server_sweeps_what_the_first_one_left() {
    let bench = Bench::new();
    let (runtime, other) = (Runtime::new(), Runtime::new());
    let first = engine(runtime.path(), 1);
    let stranger = engine(other.path(), 1);
    let ram = bench.empty_ram(&first);
    let (kept, lost) = (bench.place(&ram, &bench.root), bench.place(&ram, &bench.root));
    let kept_vm = bench.boot(&first, &kept).await;
    let lost_vm = bench.boot(&first, &lost).await;
    for qemu in [&first, &stranger] {
        qemu.prewarm(SHAPE, 1).await.unwrap();
    }
    wait_until(|| first.warm(SHAPE, 1) == 1 && stranger.warm(SHAPE, 1) == 1).await;

    // QEMU talks to one server at a time: the first one has to be gone.
    let record = kept_vm.record();
    assert!(is_tracked(&record));
    drop(kept_vm);
    let second = engine(runtime.path(), 0);
    let keep = std::slice::from_ref(&record);
    assert_eq!(second.sweep(keep).await.unwrap(), 2, "one VM and one process that waited");
    tokio::time::timeout(SOON, lost_vm.exited()).await.unwrap();
    assert_eq!(second.sweep(keep).await.unwrap(), 0);
    assert!(!runtime.path().join("warm").exists());
    let adopted = second.adopt(&record).await.unwrap();
    adopted.end().await.unwrap();
    assert_eq!(stranger.warm(SHAPE, 1), 1, "another server's processes are none of ours");
    assert_eq!(stranger.sweep(&[]).await.unwrap(), 0, "a process that waits is in use");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_without_a_filesystem_ends_the_boot_with_a_reason() {
    let bench = Bench::new();
    let runtime = Runtime::new();
    let qemu = engine(runtime.path(), 0);
    let ram = bench.empty_ram(&qemu);
    let blank = bench.base.path().join("blank.img");
    std::fs::File::create(&blank).unwrap().set_len(64 << 20).unwrap();
    let place = bench.place(&ram, &blank);
    let vm = bench.boot(&qemu, &place).await;
    tokio::time::timeout(Duration::from_secs(240), vm.exited()).await.unwrap();
    wait_until(|| place.console().contains("is there an ext4 filesystem on the root disk?")).await;
}

async fn wait_until(condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, wait).await.expect("it does not come true");
}
