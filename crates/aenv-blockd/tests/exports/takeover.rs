//! A blockd dies, and another one follows.

use std::{
    fs,
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use aenv_blockd::{ExportKind, Exports};
use nix::sys::signal::{Signal, kill};

use crate::node::{Aligned, MIB, Node, eventually, open, pattern, started};

pub(crate) async fn a_blockd_that_was_killed_shows_its_disks_again(kind: ExportKind) {
    let node = Node::start(kind).await;
    let path = node.client.open_disk(node.disk("disk", 8 * MIB)).await.unwrap();
    open(&path).write_all_at(Aligned::of(&pattern(4, 4096)).as_ref(), 4096).unwrap();
    for round in 0..2 {
        node.kill_blockd().await;
        let file = open(&path);
        let mut read = Aligned::new(4096);
        file.read_exact_at(read.as_mut(), 4096).unwrap();
        assert!(read.as_ref() == pattern(4, 4096), "round {round}");
        file.write_all_at(Aligned::of(&pattern(round, 4096)).as_ref(), 8192).unwrap();
        file.sync_all().unwrap();
        let layer = node.client.seal("disk", node.layer(&format!("sealed-{round}"))).await.unwrap().layer;
        assert!(layer.is_some(), "round {round}");
    }
    assert_eq!(node.client.list().await.unwrap().len(), 1);
}

/// Who has a device open notices a delay and nothing else, however often its blockd is killed.
pub(crate) async fn requests_wait_for_the_next_blockd() {
    const SIZE: u64 = 8 * MIB;
    const BLOCKS: u64 = SIZE / 4096;
    let node = Node::start(ExportKind::Ublk).await;
    let path = node.client.open_disk(node.disk("disk", SIZE)).await.unwrap();
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writer = {
        let (stop, done) = (Arc::clone(&stop), Arc::clone(&done));
        let file = open(&path);
        std::thread::spawn(move || {
            let mut read = Aligned::new(4096);
            for number in 1_u64.. {
                if stop.load(Ordering::Relaxed) {
                    return number - 1;
                }
                let (block, place) = (Aligned::of(&number.to_le_bytes().repeat(512)), number % BLOCKS * 4096);
                file.write_all_at(block.as_ref(), place).unwrap();
                file.read_exact_at(read.as_mut(), place).unwrap();
                assert!(read.as_ref() == block.as_ref());
                if number % 64 == 0 {
                    file.sync_all().unwrap();
                }
                done.store(number, Ordering::Release);
            }
            0
        })
    };
    let goes_on = |from: u64| eventually(|| (done.load(Ordering::Acquire) > from + 20).then_some(()));
    assert!(goes_on(0).is_some());
    for round in 0..3 {
        node.kill_blockd().await;
        let from = done.load(Ordering::Acquire);
        assert!(goes_on(from).is_some(), "nothing goes on after round {round}");
    }
    // One that is asked to end leaves them to the next as well.
    let before = node.pid().await;
    kill(before, Signal::SIGTERM).unwrap();
    assert!(eventually(|| (fs::metadata(format!("/proc/{before}")).is_err()).then_some(())).is_some());
    let from = done.load(Ordering::Acquire);
    assert!(goes_on(from).is_some(), "nothing goes on after the end that was asked for");
    stop.store(true, Ordering::Relaxed);
    let last = writer.join().unwrap();
    let mut all = Aligned::new(SIZE as usize);
    open(&path).read_exact_at(all.as_mut(), 0).unwrap();
    for number in last.saturating_sub(BLOCKS - 1).max(1)..=last {
        let at = (number % BLOCKS * 4096) as usize;
        assert_eq!(u64::from_le_bytes(all.as_ref()[at..at + 8].try_into().unwrap()), number);
    }
}

/// A list that lost an entry leaves a device of ours that nobody knows; another node's device is its own.
pub(crate) async fn devices_of_nobody_go_and_those_of_others_stay() {
    let other = Node::start(ExportKind::Ublk).await;
    let kept = other.client.open_disk(other.disk("kept", MIB)).await.unwrap();
    let kept_file = open(&kept);
    let mut node = Node::start(ExportKind::Ublk).await;
    let before = devices();
    node.client.open_disk(node.disk("lost", MIB)).await.unwrap();
    let lost: Vec<_> = devices().into_iter().filter(|device| !before.contains(device)).collect();
    assert_eq!(lost.len(), 1);

    let pid = node.pid().await;
    node.client = aenv_blockd::Client::new(node.home.blockd_socket());
    kill(pid, Signal::SIGKILL).unwrap();
    let list = node.home.runtime().join("blockd.state");
    let mut state: serde_json::Value = serde_json::from_slice(&fs::read(&list).unwrap()).unwrap();
    state["disks"] = serde_json::json!([]);
    fs::write(&list, state.to_string()).unwrap();
    node.client = started(&node.home, ExportKind::Ublk).await;
    assert!(eventually(|| (!devices().contains(&lost[0])).then_some(())).is_some());

    kept_file.write_all_at(Aligned::of(&pattern(1, 4096)).as_ref(), 0).unwrap();
    let mut read = Aligned::new(4096);
    kept_file.read_exact_at(read.as_mut(), 0).unwrap();
    assert!(read.as_ref() == pattern(1, 4096));
}

fn devices() -> Vec<PathBuf> {
    let entries = fs::read_dir("/sys/class/ublk-char").into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}
