//! Bytes in and out.

use std::{
    fs,
    io::{Seek, SeekFrom},
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use aenv_blockd::{DiskExport, ExportKind, Exports};
use nix::fcntl::{FallocateFlags, fallocate};

use crate::node::{Aligned, MIB, Node, Numbers, eventually, is_block_device, open, open_cached, pattern};

pub(crate) async fn it_looks_like_the_disk_that_was_asked_for(kind: ExportKind) {
    let node = Node::start(kind).await;
    let layer = node.layer_of("base", 4 * MIB, &pattern(1, 4096));
    let export = DiskExport { layers: vec![layer], ..node.disk("disk", 16 * MIB) };
    let path = node.client.open_disk(export.clone()).await.unwrap();
    assert_eq!(path, node.home.exports().join("disk.disk"));
    assert_eq!(node.client.open_disk(export).await.unwrap(), path, "the same again");
    assert_eq!(is_block_device(&path), kind == ExportKind::Ublk);
    let mut file = open(&path);
    assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), 16 * MIB);
    let mut read = Aligned::new(8192);
    file.read_exact_at(read.as_mut(), 0).unwrap();
    assert!(read.as_ref()[..4096] == pattern(1, 4096) && read.as_ref()[4096..].iter().all(|byte| *byte == 0));
    // Beyond the layer's own size are zeros.
    file.read_exact_at(read.as_mut(), 15 * MIB).unwrap();
    assert!(read.as_ref().iter().all(|byte| *byte == 0));
    assert!(file.write_all_at(Aligned::new(4096).as_ref(), 16 * MIB).is_err());
    let listed = node.client.list().await.unwrap();
    assert_eq!(
        listed.iter().map(|export| (&*export.name, &export.path)).collect::<Vec<_>>(),
        [("disk", &path)]
    );
}

pub(crate) async fn random_io_is_what_a_model_says(kind: ExportKind) {
    const SIZE: u64 = 8 * MIB;
    let node = Node::start(kind).await;
    let base = pattern(7, MIB as usize);
    let layer = node.layer_of("base", SIZE, &base);
    let export = DiskExport { layers: vec![layer], ..node.disk("disk", SIZE) };
    let path = node.client.open_disk(export).await.unwrap();
    // Each thread has a part of the disk for itself.
    let parts: Vec<_> = (0..4)
        .map(|part| {
            let (path, base) = (path.clone(), base.clone());
            std::thread::spawn(move || {
                let file = open(&path);
                let (start, len) = (part * SIZE / 4, SIZE / 4);
                let mut model = vec![0; len as usize];
                if part == 0 {
                    model[..base.len()].copy_from_slice(&base);
                }
                let mut numbers = Numbers(part + 1);
                for round in 0..400 {
                    let bytes = 512 * (1 + numbers.below(if round % 8 == 0 { 512 } else { 32 }));
                    let offset = 512 * numbers.below((len - bytes) / 512 + 1);
                    let range = offset as usize..(offset + bytes) as usize;
                    match numbers.below(10) {
                        0..4 => {
                            let data = Aligned::of(&pattern(round << 8 | part, bytes as usize));
                            file.write_all_at(data.as_ref(), start + offset).unwrap();
                            model[range].copy_from_slice(data.as_ref());
                        }
                        4 => {
                            let mode =
                                FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                            fallocate(&file, mode, (start + offset) as i64, bytes as i64).unwrap();
                            model[range].fill(0);
                        }
                        5 if round % 4 == 0 => file.sync_all().unwrap(),
                        _ => {
                            let mut data = Aligned::new(bytes as usize);
                            file.read_exact_at(data.as_mut(), start + offset).unwrap();
                            assert!(
                                data.as_ref() == &model[range],
                                "round {round} of {part}: {offset}+{bytes}"
                            );
                        }
                    }
                }
                model
            })
        })
        .collect();
    let model: Vec<u8> = parts.into_iter().flat_map(|part| part.join().unwrap()).collect();
    let mut all = Aligned::new(SIZE as usize);
    open(&path).read_exact_at(all.as_mut(), 0).unwrap();
    assert!(all.as_ref() == model);
}

pub(crate) async fn a_disk_without_an_upper_cannot_be_written_to(kind: ExportKind) {
    let node = Node::start(kind).await;
    let layer = node.layer_of("base", MIB, &pattern(3, 4096));
    let export = DiskExport { name: "disk".into(), size: MIB, layers: vec![layer], upper: None };
    let path = node.client.open_disk(export).await.unwrap();
    let written = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .and_then(|file| file.write_all_at(&[1; 4096], 0).and_then(|()| file.sync_all()));
    assert!(written.is_err());
    assert!(fs::read(&path).unwrap()[..4096] == pattern(3, 4096));
}

pub(crate) async fn discards_give_space_back(kind: ExportKind) {
    const SIZE: u64 = 64 * MIB;
    let node = Node::start(kind).await;
    let path = node.client.open_disk(node.disk("disk", SIZE)).await.unwrap();
    let file = open(&path);
    let data = Aligned::of(&pattern(1, MIB as usize));
    for offset in (0..SIZE).step_by(MIB as usize) {
        file.write_all_at(data.as_ref(), offset).unwrap();
    }
    file.sync_all().unwrap();
    assert!(used(&node) >= SIZE / 2);
    // A guest's fstrim, which is a discard on either.
    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&file, mode, 0, SIZE as i64).unwrap();
    file.sync_all().unwrap();
    assert!(eventually(|| (used(&node) < SIZE / 4).then_some(())).is_some(), "{} are used", used(&node));
    let mut read = Aligned::new(MIB as usize);
    file.read_exact_at(read.as_mut(), 5 * MIB).unwrap();
    assert!(read.as_ref().iter().all(|byte| *byte == 0));
}

/// Bytes that the upper takes on the host's disk.
fn used(node: &Node) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let files = fs::read_dir(node.upper("disk")).unwrap();
    files.map(|file| file.unwrap().metadata().unwrap().blocks() * 512).sum()
}

pub(crate) async fn what_was_flushed_survives_the_process(kind: ExportKind) {
    let node = Node::start(kind).await;
    let path = node.client.open_disk(node.disk("disk", 8 * MIB)).await.unwrap();
    // Through the host's page cache, which must not keep it.
    let file = open_cached(&path);
    file.write_all_at(&pattern(9, 3 * 4096), 4096).unwrap();
    file.sync_all().unwrap();
    drop(file);
    node.kill_blockd().await;
    let mut read = Aligned::new(3 * 4096);
    open(&path).read_exact_at(read.as_mut(), 4096).unwrap();
    assert!(read.as_ref() == pattern(9, 3 * 4096));
}

pub(crate) async fn a_seal_under_load_has_all_that_was_written_before_it(kind: ExportKind) {
    const SIZE: u64 = 8 * MIB;
    const BLOCKS: u64 = SIZE / 4096;
    let node = Node::start(kind).await;
    let path = node.client.open_disk(node.disk("disk", SIZE)).await.unwrap();
    let cached = open_cached(&path);
    cached.write_all_at(&pattern(5, 4096), SIZE - 4096).unwrap();
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writer = {
        let (path, stop, done) = (path.clone(), Arc::clone(&stop), Arc::clone(&done));
        std::thread::spawn(move || {
            let file = open(&path);
            for number in 1_u64.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let block = Aligned::of(&number.to_le_bytes().repeat(512));
                file.write_all_at(block.as_ref(), number % (BLOCKS - 1) * 4096).unwrap();
                done.store(number, Ordering::Release);
            }
        })
    };
    let mut layers = Vec::new();
    for round in 0..4 {
        let before = done.load(Ordering::Acquire);
        assert!(eventually(|| (done.load(Ordering::Acquire) > before + 20).then_some(())).is_some());
        let acknowledged = done.load(Ordering::Acquire);
        let sealed = node.client.seal("disk", node.layer(&format!("sealed-{round}"))).await.unwrap();
        layers.push(sealed.layer.unwrap());
        let copy =
            DiskExport { name: format!("copy-{round}"), size: SIZE, layers: layers.clone(), upper: None };
        let copy = fs::read(node.client.open_disk(copy).await.unwrap()).unwrap();
        assert!(copy[(SIZE - 4096) as usize..] == pattern(5, 4096), "what lay in the page cache is missing");
        for number in acknowledged.saturating_sub(BLOCKS - 2)..=acknowledged {
            let at = (number % (BLOCKS - 1) * 4096) as usize;
            let found = u64::from_le_bytes(copy[at..at + 8].try_into().unwrap());
            assert!(found >= number, "round {round}: {found} where {number} was acknowledged");
        }
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
}

pub(crate) async fn many_disks_come_and_go_side_by_side(kind: ExportKind) {
    let node = Node::start(kind).await;
    let disks: Vec<_> = (0..8).map(|number| node.disk(&format!("disk-{number}"), MIB)).collect();
    for round in 0..3 {
        let used: Vec<_> = disks
            .iter()
            .map(|disk| {
                let (client, disk) = (node.client.clone(), disk.clone());
                tokio::spawn(async move {
                    let path = client.open_disk(disk.clone()).await.unwrap();
                    open(&path).write_all_at(Aligned::of(&pattern(round, 4096)).as_ref(), 0).unwrap();
                    client.close_disk(&disk.name).await.unwrap();
                })
            })
            .collect();
        for used in used {
            used.await.unwrap();
        }
    }
    assert_eq!(node.client.list().await.unwrap(), []);
    assert!(!node.log().contains("panicked"), "{}", node.log());
}
