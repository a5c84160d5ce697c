//! Layers that lie, break or attack: each ends in a typed error, touches nothing outside, and leaves nothing behind.

use std::{fs, os::unix::fs::symlink};

use aenv_image::{ImageError, ImageLimits, ImageSettings};

use crate::support::{Layout, Node, Packing, Tar};

/// Every name that the attacks below would write, outside of the image.
const BAIT: &str = "/tmp/aenv-image-escaped";

#[tokio::test(flavor = "multi_thread")]
async fn attacks_are_refused_and_stay_inside() {
    let node = Node::start();
    let up = "../".repeat(20);
    let attacks: Vec<(&str, Tar)> = vec![
        ("upwards", Tar::default().file(&format!("{up}tmp/aenv-image-escaped"), b"x")),
        ("upwards in the middle", Tar::default().folder("a/").file("a/../../b", b"x")),
        (
            "through an absolute link",
            Tar::default().symlink("out", "/tmp").file("out/aenv-image-escaped", b"x"),
        ),
        (
            "through a relative link",
            Tar::default().symlink("out", &format!("{up}tmp")).file("out/aenv-image-escaped", b"x"),
        ),
        (
            "through links in a row",
            Tar::default().symlink("a", "b").symlink("b", "/tmp").file("a/aenv-image-escaped", b"x"),
        ),
        ("hard link upwards", Tar::default().hard_link("x", &format!("{up}etc/passwd"))),
        ("hard link to the host", Tar::default().hard_link("x", "/etc/passwd")),
        ("hard link through a link", Tar::default().symlink("e", "/etc").hard_link("x", "e/passwd")),
        ("hard link to a folder", Tar::default().folder("d/").hard_link("x", "d")),
        ("twice", Tar::default().file("x", b"1").file("x", b"2")),
        ("a link, then a file over it", Tar::default().symlink("x", BAIT).file("x", b"2")),
        ("a folder, then a link over it", Tar::default().folder("x/").file("x/y", b"1").symlink("x", "/tmp")),
        ("a link, then a folder over it", Tar::default().symlink("x", "/tmp").folder("x/")),
        ("beneath a file", Tar::default().file("x", b"1").file("x/y", b"2")),
        ("whiteout of the folder itself", Tar::default().file("a/.wh.", b"")),
        ("whiteout upwards", Tar::default().folder("a/").file("a/.wh...", b"")),
        ("the root as a file", Tar::default().file("./", b"").symlink(".", "/tmp")),
        (
            "a long name",
            Tar::default()
                .folder("a/")
                .entry(b'L', "././@LongLink", "", "n".repeat(300).as_bytes())
                .file("n", b""),
        ),
        ("a huge extension", Tar::default().entry(b'x', "pax", "", &[b'0'; 1 << 21])),
    ];
    for (name, tar) in attacks {
        let mut layout = Layout::new(node.scratch(&name.replace(' ', "-")));
        layout.layer(&tar.end(), Packing::Gzip);
        let result = node.pull(&layout.finish()).await;
        assert!(matches!(result, Err(ImageError::Hostile { .. })), "{name}: {result:?}");
        assert!(fs::symlink_metadata(BAIT).is_err(), "{name} got out");
        node.assert_clean(0).await;
    }
}

/// A lower layer's links are followed, within the image only.
#[tokio::test(flavor = "multi_thread")]
async fn links_of_lower_layers_end_at_the_images_root() {
    let node = Node::start();
    let outside = node.scratch("outside");
    let mut layout = Layout::new(node.scratch("layout"));
    let target = outside.to_str().unwrap();
    let base = Tar::default().symlink("out", target).folder("tmp/").symlink("up", "../../../../../tmp");
    layout.layer(&base.end(), Packing::Plain);
    let attack = Tar::default().file("up/inside", b"x").file("out/file", b"x");
    layout.layer(&attack.end(), Packing::Plain);
    // `up` leads to the image's own /tmp; `out` to something that the image does not have.
    let result = node.pull(&layout.finish()).await;
    assert!(
        matches!(&result, Err(ImageError::Hostile { message, .. }) if message.contains("out/file")),
        "{result:?}"
    );
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    node.assert_clean(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bombs_are_cut_off() {
    let limits =
        ImageLimits { layer_bytes: 8 << 20, layer_entries: 100, layers: 3, ..ImageLimits::default() };
    let node = Node::with(ImageSettings { limits, disk_size: 256 << 20, ..ImageSettings::default() });
    let zeros = vec![0; 32 << 20];
    let many = (0..101).fold(Tar::default(), |tar, n| tar.file(&format!("f{n}"), b""));
    let mut sparse = tar::Header::new_gnu();
    sparse.set_path("huge").unwrap();
    sparse.set_entry_type(tar::EntryType::GNUSparse);
    sparse.set_size(0);
    sparse.set_mode(0o644);
    sparse.as_gnu_mut().unwrap().set_real_size(1 << 33);
    sparse.set_cksum();
    let bombs: Vec<(&str, Vec<u8>, Packing)> = vec![
        ("gzip", Tar::default().file("zeros", &zeros).end(), Packing::Gzip),
        ("zstd", Tar::default().file("zeros", &zeros).end(), Packing::Zstd),
        ("plain", Tar::default().file("zeros", &zeros).end(), Packing::Plain),
        ("entries", many.end(), Packing::Gzip),
        ("sparse", Tar::default().raw(sparse.as_bytes()).end(), Packing::Plain),
        // Zeros behind the archive's end count as well.
        ("tail", [Tar::default().end(), zeros.clone()].concat(), Packing::Gzip),
    ];
    for (name, tar, packing) in bombs {
        let mut layout = Layout::new(node.scratch(name));
        layout.layer(&tar, packing);
        let result = node.pull(&layout.finish()).await;
        assert!(matches!(result, Err(ImageError::Hostile { .. })), "{name}: {result:?}");
        node.assert_clean(0).await;
    }
    let mut deep = Layout::new(node.scratch("deep"));
    for n in 0..4 {
        deep.layer(&Tar::default().file(&format!("f{n}"), b"").end(), Packing::Plain);
    }
    let result = node.pull(&deep.finish()).await;
    assert!(
        matches!(&result, Err(ImageError::Damaged { message, .. }) if message.contains("4 layers")),
        "{result:?}"
    );
    node.assert_clean(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_no_space() {
    let node = Node::with(ImageSettings { disk_size: 64 << 20, ..ImageSettings::default() });
    let mut layout = Layout::new(node.scratch("large"));
    let noise: Vec<u8> = (0..20_000_000_u32).flat_map(u32::to_le_bytes).collect();
    layout.layer(
        &(0..2).fold(Tar::default(), |tar, n| tar.file(&format!("f{n}"), &noise[..60_000_000])).end(),
        Packing::Plain,
    );
    let result = node.pull(&layout.finish()).await;
    // Larger than the disk is refused by its size alone; together they fill it.
    assert!(
        matches!(&result, Err(ImageError::NoSpace { message, .. }) if message.contains("64 MiB")),
        "{result:?}"
    );
    node.assert_clean(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_is_told_and_leaves_nothing() {
    let node = Node::start();
    let tar = Tar::default().folder("etc/").file("etc/text", &[7; 50_000]).end();
    type Damage = fn(&mut Layout, aenv_types::Digest);
    let damages: [(&str, &str, Damage); 9] = [
        ("truncated", "ends after", |layout, digest| {
            let path = layout.blob_path(&digest);
            let bytes = fs::read(&path).unwrap();
            fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
        }),
        ("flipped", "digest", |layout, digest| {
            let path = layout.blob_path(&digest);
            let mut bytes = fs::read(&path).unwrap();
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            fs::write(path, bytes).unwrap();
        }),
        ("longer", "longer", |layout, digest| {
            let path = layout.blob_path(&digest);
            let mut bytes = fs::read(&path).unwrap();
            bytes.push(0);
            fs::write(path, bytes).unwrap();
        }),
        ("wrong size", "digest", |layout, _| {
            let size = layout.layers[0]["size"].as_u64().unwrap();
            layout.layers[0]["size"] = (size - 1).into();
        }),
        ("missing", "has no blobs/sha256", |layout, digest| {
            fs::remove_file(layout.blob_path(&digest)).unwrap()
        }),
        ("wrong diff id", "the config says", |layout, _| {
            layout.diff_ids[0] = aenv_types::Digest::of(b"other")
        }),
        ("unknown media type", "unknown media type", |layout, _| {
            layout.layers[0]["mediaType"] = "application/vnd.oci.image.layer.v1.tar+lzma".into();
        }),
        ("weak digest", "sha256", |layout, _| {
            layout.layers[0]["digest"] = "md5:d41d8cd98f00b204e9800998ecf8427e".into()
        }),
        ("a layer too many", "layers and its config", |layout, _| {
            layout.layers.push(layout.layers[0].clone())
        }),
    ];
    for (name, says, damage) in damages {
        for packing in [Packing::Plain, Packing::Gzip, Packing::Zstd] {
            let folder = node.scratch("layouts").join(uuid::Uuid::new_v4().to_string());
            let mut layout = Layout::new(folder);
            let digest = layout.layer(&tar, packing);
            damage(&mut layout, digest);
            let result = node.pull(&layout.finish()).await;
            // A stream that breaks off may be seen by the decoder first.
            let told = |message: &str| message.contains(says) || message.contains("cannot be unpacked");
            assert!(
                matches!(&result, Err(ImageError::Damaged { message, .. }) if told(message)),
                "{name}: {result:?}"
            );
            node.assert_clean(0).await;
        }
    }
    let mut layout = Layout::new(node.scratch("no-tar"));
    layout.layer(&[b'x'; 5000], Packing::Gzip);
    let result = node.pull(&layout.finish()).await;
    assert!(
        matches!(&result, Err(ImageError::Damaged { message, .. }) if message.contains("no tar")),
        "{result:?}"
    );
    for (name, index) in
        [("html", "<html>404</html>"), ("empty", "{}"), ("none", r#"{"schemaVersion":2,"manifests":[]}"#)]
    {
        let folder = node.scratch(name);
        fs::write(folder.join("index.json"), index).unwrap();
        let result = node.pull(&format!("oci:{}", folder.display())).await;
        assert!(
            matches!(result, Err(ImageError::Damaged { .. } | ImageError::NotFound { .. })),
            "{name}: {result:?}"
        );
    }
    let result = node.pull("oci:/nonexistent/layout").await;
    assert!(matches!(result, Err(ImageError::NotFound { .. })), "{result:?}");
    node.assert_clean(0).await;
}

/// A blob that is a link out of the layout is read, and then has to have the right digest all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_blob_that_is_a_link_to_a_secret_is_damaged() {
    let node = Node::start();
    let mut layout = Layout::new(node.scratch("layout"));
    let digest = layout.layer(&Tar::default().file("x", b"x").end(), Packing::Plain);
    fs::remove_file(layout.blob_path(&digest)).unwrap();
    symlink("/etc/passwd", layout.blob_path(&digest)).unwrap();
    let result = node.pull(&layout.finish()).await;
    assert!(matches!(result, Err(ImageError::Damaged { .. })), "{result:?}");
    node.assert_clean(0).await;
}
