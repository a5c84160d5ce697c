//! A layer's files are exactly what `tar -x` makes of them, and whiteouts do what the specification says.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, PermissionsExt, chown, lchown, symlink},
    path::Path,
    process::Command,
};

use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use crate::support::{Layout, Node, Packing, Tar, listing, run};

/// Makes one of everything.
fn zoo(root: &Path) {
    let write = |name: &str, bytes: &[u8]| fs::write(root.join(name), bytes).unwrap();
    let mode =
        |name: &str, mode| fs::set_permissions(root.join(name), fs::Permissions::from_mode(mode)).unwrap();
    for folder in ["bin", "etc", "var/tmp", "dev", "empty", "data"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    mode("var/tmp", 0o1777);
    mode("empty", 0o2750);
    write("etc/nothing", b"");
    write("etc/text", b"hello\n");
    write("etc/grüße \n tab\t", b"odd name");
    write("data/large", &(0..3_000_000_u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>());
    write("bin/setuid", b"#!/bin/sh\n");
    chown(root.join("bin/setuid"), Some(0), Some(4)).unwrap();
    mode("bin/setuid", 0o6755);
    write("etc/locked", b"x");
    mode("etc/locked", 0);
    write("data/owned", b"x");
    chown(root.join("data/owned"), Some(3_000_000_000), Some(2_097_152)).unwrap();

    write("bin/able", b"x");
    // CAP_NET_RAW as VFS_CAP_REVISION_2, and a value with a newline and a zero in it.
    let capability = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    xattr::set(root.join("bin/able"), "security.capability", &capability).unwrap();
    xattr::set(root.join("bin/able"), "user.lines", b"a\nb\0c=d\n").unwrap();
    xattr::set(root.join("etc"), "user.folder", b"on a folder").unwrap();
    xattr::set(root.join("etc/text"), "trusted.note", b"for root").unwrap();

    symlink("text", root.join("etc/relative")).unwrap();
    symlink("/etc/text", root.join("etc/absolute")).unwrap();
    symlink("../../../../nowhere", root.join("etc/dangling")).unwrap();
    lchown(root.join("etc/relative"), Some(7), Some(8)).unwrap();
    fs::hard_link(root.join("etc/text"), root.join("data/twin")).unwrap();
    fs::hard_link(root.join("etc/dangling"), root.join("data/dangling-twin")).unwrap();

    let node = |name: &str, kind, bits, device| {
        mknod(&root.join(name), kind, Mode::from_bits_truncate(bits), device).unwrap();
        mode(name, bits);
    };
    node("dev/null", SFlag::S_IFCHR, 0o666, makedev(1, 3));
    node("dev/sda", SFlag::S_IFBLK, 0o660, makedev(8, 0));
    node("dev/large-minor", SFlag::S_IFBLK, 0o600, makedev(259, 70_000));
    node("dev/pipe", SFlag::S_IFIFO, 0o640, 0);

    let sparse = File::create(root.join("data/sparse")).unwrap();
    sparse.write_all_at(&[1; 4096], 0).unwrap();
    sparse.write_all_at(&[2; 4096], 40 << 20).unwrap();
    sparse.set_len(50 << 20).unwrap();
    sparse.sync_all().unwrap();

    let long = format!("{0}/{0}/{0}", "long-name-".repeat(12));
    fs::create_dir_all(root.join(&long)).unwrap();
    write(&format!("{long}/file"), b"deep");
    symlink("t".repeat(300), root.join("etc/long-link")).unwrap();

    let touch = |name: &str, when: &str| {
        run(Command::new("touch").args(["-h", "-m", "-d", when]).arg(root.join(name)));
    };
    touch("etc/text", "1969-12-31 23:59:58.25 UTC");
    touch("etc/nothing", "2100-01-01 00:00:00.123456789 UTC");
    touch("etc/relative", "2001-02-03 04:05:06 UTC");
    touch("dev/null", "2002-02-03 04:05:06 UTC");
    for folder in ["data", "empty", "etc", "dev", "bin", "var", "."] {
        touch(folder, "2003-04-05 06:07:08.5 UTC");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_is_what_tar_makes_of_it() {
    let node = Node::start();
    let root = node.scratch("zoo");
    zoo(&root);
    for format in ["posix", "gnu"] {
        let attributes: &[&str] = if format == "posix" { &["--xattrs", "--xattrs-include=*"] } else { &[] };
        let tar = run(Command::new("tar")
            .arg(format!("--format={format}"))
            .args(attributes)
            .args(["--numeric-owner", "-S", "-C"])
            .arg(&root)
            .args(["-cf", "-", "."]));
        let plain = node.scratch(&format!("plain-{format}"));
        let archive = node.scratch("archives").join(format);
        fs::write(&archive, &tar).unwrap();
        run(Command::new("tar")
            .args(["--xattrs", "--xattrs-include=*", "--same-owner", "-p", "-C"])
            .arg(&plain)
            .arg("-xf")
            .arg(&archive));

        let mut layout = Layout::new(node.scratch(&format!("layout-{format}")));
        layout.layer(&tar, Packing::Gzip);
        let (image, _) = node.pull(&layout.finish()).await.unwrap();
        let mounted = node.mount(&image).await;
        let (found, wanted) = (listing(&mounted.point), listing(&plain));
        mounted.unmount().await;
        assert!(wanted.len() > 30, "the zoo is too small: {}", wanted.len());
        for (name, line) in &wanted {
            assert_eq!(found.get(name), Some(line), "{format}: {name:?}");
        }
        assert_eq!(found.len(), wanted.len(), "{format}: {:?}", found.keys().collect::<Vec<_>>());
    }
    node.assert_clean(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whiteouts_hide_what_lower_layers_brought() {
    let node = Node::start();
    let mut layout = Layout::new(node.scratch("layout"));
    let base = Tar::default()
        .folder("a/")
        .file("a/gone", b"1")
        .file("a/kept", b"1")
        .folder("a/tree/")
        .file("a/tree/deep", b"1")
        .folder("opaque/")
        .file("opaque/old", b"1")
        .folder("opaque/sub/")
        .file("opaque/sub/old", b"1")
        .folder("swap/")
        .file("swap/inside", b"1")
        .file("file", b"1")
        .folder("usr/")
        .folder("usr/lib/")
        .symlink("lib", "usr/lib")
        .file("twice", b"1");
    layout.layer(&base.end(), Packing::Plain);
    let second = Tar::default()
        .file("a/.wh.gone", b"")
        .file("a/.wh.tree", b"")
        .file("a/.wh.never-there", b"")
        // New files before and behind the opaque mark stay.
        .file("opaque/new-before", b"2")
        .folder("opaque/sub/")
        .file("opaque/sub/new", b"2")
        .file("opaque/.wh..wh..opq", b"")
        .file("opaque/new-behind", b"2")
        .file(".wh..wh.plnk", b"")
        // A folder becomes a file, and a file a folder.
        .file("swap", b"now a file")
        .folder("file/")
        .file("file/inside", b"2")
        // Through a lower layer's link, as a process in the image would go.
        .file("lib/library", b"2")
        .folder("implied/")
        .file("implied/on/the/way", b"2")
        // Hidden and made anew in one layer.
        .file(".wh.twice", b"")
        .file("twice", b"2")
        .hard_link("a/link-to-lower", "/a/kept");
    layout.layer(&second.end(), Packing::Zstd);
    let third = Tar::default().file("a/link-to-lower", b"3").file(".wh.implied", b"");
    layout.layer(&third.end(), Packing::Gzip);

    let (image, _) = node.pull(&layout.finish()).await.unwrap();
    assert_eq!(image.layers.len(), 3);
    assert_eq!(image.guest.start_cmd.as_deref(), Some("/bin/true"));
    let mounted = node.mount(&image).await;
    let found = listing(&mounted.point);
    let read = |name: &str| fs::read_to_string(mounted.point.join(name)).unwrap();
    let expected = [
        "",
        "a",
        "a/kept",
        "a/link-to-lower",
        "file",
        "file/inside",
        "lib",
        "opaque",
        "opaque/new-before",
        "opaque/new-behind",
        "opaque/sub",
        "opaque/sub/new",
        "swap",
        "twice",
        "usr",
        "usr/lib",
        "usr/lib/library",
    ];
    assert_eq!(found.keys().map(String::as_str).collect::<Vec<_>>(), expected);
    assert_eq!((read("swap"), read("twice"), read("a/kept")), ("now a file".into(), "2".into(), "1".into()));
    assert_eq!(read("a/link-to-lower"), "3", "an entry replaces a name, not the file behind it");
    assert!(found["a"].contains("mtime=1600000000.0"), "a folder's time is the archive's: {}", found["a"]);
    mounted.unmount().await;
    node.assert_clean(3).await;
}
