//! What goes wrong, and how it is said.

use std::{
    fs,
    os::unix::{fs::FileExt, process::CommandExt},
    path::Path,
    process::Command,
};

use aenv_blockd::{DiskExport, ExportError, ExportKind, Exports};

use crate::node::{Aligned, MIB, Node, open, pattern};

pub(crate) async fn bytes_that_cannot_be_had_are_an_error_and_not_a_hang(kind: ExportKind) {
    let node = Node::start(kind).await;
    let layer = node.layer_of("base", 4 * MIB, &pattern(1, 2 * MIB as usize));
    let export = DiskExport { layers: vec![layer.clone()], ..node.disk("disk", 4 * MIB) };
    let path = node.client.open_disk(export).await.unwrap();
    let file = open(&path);
    let mut read = Aligned::new(4096);
    file.read_exact_at(read.as_mut(), 0).unwrap();
    // The layer's file loses its data, with the index read already.
    fs::File::options().write(true).open(&layer).unwrap().set_len(4096).unwrap();
    let error = file.read_exact_at(read.as_mut(), MIB).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    // What needs none of it goes on.
    file.write_all_at(Aligned::of(&pattern(2, 4096)).as_ref(), MIB).unwrap();
    file.read_exact_at(read.as_mut(), MIB).unwrap();
    assert!(read.as_ref() == pattern(2, 4096));
}

pub(crate) async fn what_is_closed_is_gone_for_who_has_it_open(kind: ExportKind) {
    let node = Node::start(kind).await;
    let path = node.client.open_disk(node.disk("disk", MIB)).await.unwrap();
    let file = open(&path);
    file.write_all_at(Aligned::new(4096).as_ref(), 0).unwrap();
    node.client.close_disk("disk").await.unwrap();
    node.client.close_disk("disk").await.unwrap();
    assert!(!path.exists());
    assert!(file.write_all_at(Aligned::new(4096).as_ref(), 0).is_err());
    assert!(file.read_exact_at(Aligned::new(4096).as_mut(), 0).is_err());
    let found = node.client.seal("disk", node.layer("sealed")).await;
    assert!(matches!(found, Err(ExportError::NotFound { .. })));
}

pub(crate) async fn a_disk_belongs_to_whom_it_is_given(kind: ExportKind) {
    const ONE: u32 = 1_912_345_678;
    let node = Node::start(kind).await;
    let path = node.client.open_disk(node.disk("disk", MIB)).await.unwrap();
    // The folders of a node let others pass; the temporary one above does not.
    let temporary = std::env::temp_dir();
    let of_node = |folder: &&Path| folder.starts_with(&temporary) && **folder != temporary;
    for folder in path.ancestors().take_while(of_node).skip(2) {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    }
    std::os::unix::fs::chown(&path, Some(ONE), Some(ONE)).unwrap();
    let read_by = |uid: u32| {
        let mut command = Command::new("/usr/bin/head");
        let output = command.arg("-c512").arg(&path).uid(uid).gid(uid).output().unwrap();
        output.status.success()
    };
    assert!(read_by(ONE));
    assert!(!read_by(ONE + 1));
    // Another disk of the same name is another disk.
    node.client.close_disk("disk").await.unwrap();
    node.client.open_disk(node.disk("disk", MIB)).await.unwrap();
    assert!(!read_by(ONE));
}

pub(crate) async fn partitions_that_a_guest_writes_are_not_looked_at() {
    let node = Node::start(ExportKind::Ublk).await;
    let mut table = vec![0; MIB as usize];
    // One Linux partition from sector 64 on, 128 sectors long.
    table[446..462].copy_from_slice(&[0, 0, 0, 0, 0x83, 0, 0, 0, 64, 0, 0, 0, 128, 0, 0, 0]);
    table[510..512].copy_from_slice(&[0x55, 0xaa]);
    let layer = node.layer_of("base", MIB, &table);
    let path =
        node.client.open_disk(DiskExport { layers: vec![layer], ..node.disk("disk", MIB) }).await.unwrap();
    let number = {
        use std::os::unix::fs::MetadataExt;
        let number = fs::metadata(&path).unwrap().rdev();
        format!("{}:{}", libc::major(number), libc::minor(number))
    };
    let folder = fs::canonicalize(format!("/sys/dev/block/{number}")).unwrap();
    assert!(fs::read(&path).unwrap() == table);
    let partitions = fs::read_dir(&folder).unwrap().filter(|entry| {
        let name = entry.as_ref().unwrap().file_name();
        name.to_string_lossy().starts_with("ublkb")
    });
    assert_eq!(partitions.count(), 0);
}
