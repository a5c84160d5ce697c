//! Shared layers, interrupted pulls, several pulls at once, and what a crash leaves.

use std::fs;

use aenv_blockd::DiskExport;
use aenv_image::{ImageError, PullProgress};
use aenv_types::LayerName;

use crate::support::{Layout, Node, Packing, Tar, listing, names};

fn layer(n: usize) -> Vec<u8> {
    Tar::default()
        .folder("etc/")
        .file(&format!("etc/from-layer-{n}"), &[u8::try_from(n).unwrap(); 100_000])
        .end()
}

fn count(seen: &[PullProgress], wanted: impl Fn(&PullProgress) -> bool) -> usize {
    seen.iter().filter(|progress| wanted(progress)).count()
}

fn sealed(progress: &PullProgress) -> bool {
    matches!(progress, PullProgress::Sealed { .. })
}

fn reused(progress: &PullProgress) -> bool {
    matches!(progress, PullProgress::Reused { .. })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_that_failed_goes_on_at_the_first_missing_layer() {
    let node = Node::start();
    let mut layout = Layout::new(node.scratch("layout"));
    layout.layer(&layer(1), Packing::Gzip);
    layout.layer(&layer(2), Packing::Gzip);
    let last = layout.layer(&layer(3), Packing::Gzip);
    let reference = layout.finish();
    let whole = fs::read(layout.blob_path(&last)).unwrap();
    fs::write(layout.blob_path(&last), &whole[..whole.len() - 20]).unwrap();
    let result = node.pull(&reference).await;
    assert!(matches!(result, Err(ImageError::Damaged { .. })), "{result:?}");
    node.assert_clean(2).await;

    fs::write(layout.blob_path(&last), &whole).unwrap();
    let (image, seen) = node.pull(&reference).await.unwrap();
    assert_eq!((count(&seen, reused), count(&seen, sealed)), (2, 1), "{seen:?}");
    assert!(matches!(seen[0], PullProgress::Resolved { layers: 3, bytes } if bytes > 0));
    let mounted = node.mount(&image).await;
    assert_eq!(names(&mounted.point.join("etc")), ["from-layer-1", "from-layer-2", "from-layer-3"]);
    mounted.unmount().await;

    let (again, seen) = node.pull(&reference).await.unwrap();
    assert_eq!((count(&seen, reused), count(&seen, sealed)), (3, 0), "{seen:?}");
    assert_eq!(again.layers, image.layers);
    node.assert_clean(3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn images_that_share_layers_share_them_here() {
    let node = Node::start();
    let mut images = Vec::new();
    for top in [2, 3] {
        let mut layout = Layout::new(node.scratch(&format!("layout-{top}")));
        // The same layer, packed in another way, is the same layer.
        layout.layer(&layer(1), if top == 2 { Packing::Gzip } else { Packing::Zstd });
        layout.layer(&layer(top), Packing::Plain);
        images.push(node.pull(&layout.finish()).await.unwrap().0);
    }
    assert_eq!(images[0].layers[0], images[1].layers[0]);
    assert_ne!(images[0].layers[1], images[1].layers[1]);
    node.assert_clean(3).await;

    // A layer above one that was lost and made anew must not be used: it holds blocks that differ from the lost one.
    fs::remove_file(node.home.layer(&images[0].layers[0].name)).unwrap();
    let reference = format!("oci:{}:test", node.scratch("layout-2").display());
    let (again, seen) = node.pull(&reference).await.unwrap();
    assert_eq!(count(&seen, sealed), 2, "{seen:?}");
    let mounted = node.mount(&again).await;
    assert!(listing(&mounted.point).contains_key("etc/from-layer-2"));
    mounted.unmount().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_pulls_at_once_one_works() {
    let node = Node::start();
    let mut layout = Layout::new(node.scratch("layout"));
    layout.layer(&layer(1), Packing::Gzip);
    layout.layer(&layer(2), Packing::Zstd);
    let reference = layout.finish();
    let (a, b, c) = tokio::join!(node.pull(&reference), node.pull(&reference), node.pull(&reference));
    let all = [a.unwrap(), b.unwrap(), c.unwrap()];
    let total =
        |wanted: fn(&PullProgress) -> bool| all.iter().map(|(_, seen)| count(seen, wanted)).sum::<usize>();
    assert_eq!((total(sealed), total(reused)), (2, 4));
    assert_eq!(all[0].0.layers, all[1].0.layers);
    assert_eq!(all[0].0.layers, all[2].0.layers);
    node.assert_clean(2).await;
}

/// Who asked may go away: the layer is finished, and nothing half-made stays.
#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_pull_leaves_a_finished_layer() {
    let node = Node::start();
    let mut layout = Layout::new(node.scratch("layout"));
    layout.layer(&layer(1), Packing::Gzip);
    let reference = layout.finish();
    {
        let parsed = reference.parse().unwrap();
        let (begun, mut has_begun) = tokio::sync::mpsc::unbounded_channel();
        let progress = move |seen: PullProgress| {
            if matches!(seen, PullProgress::Applying { .. }) {
                let _ = begun.send(());
            }
        };
        let pull = node.images.pull(&parsed, None, &progress);
        tokio::select! {
            _ = pull => {}
            _ = has_begun.recv() => {}
        }
    }
    // The next pull waits for the one under way, or makes the layer itself.
    let (image, _) = node.pull(&reference).await.unwrap();
    assert_eq!(image.layers.len(), 1);
    node.assert_clean(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recover_removes_what_a_crash_left() {
    let node = Node::start();
    let mut layout = Layout::new(node.scratch("layout"));
    layout.layer(&layer(1), Packing::Gzip);
    let reference = layout.finish();
    let (image, _) = node.pull(&reference).await.unwrap();

    // As it looks when the process died between sealing and recording, and in the middle of applying.
    let (orphan, name) = (LayerName::new_local(), "image-0123456789abcdef");
    let staging = node.home.staging().join(name);
    fs::create_dir_all(&staging).unwrap();
    fs::write(node.home.layer(&orphan), b"sealed, and nobody knows").unwrap();
    fs::write(staging.join("target"), orphan.file_name()).unwrap();
    let export = DiskExport {
        name: name.into(),
        size: 1 << 30,
        layers: Vec::new(),
        upper: Some(staging.join("upper")),
    };
    node.exports.open_disk(export).await.unwrap();
    // And when it died right after recording.
    let recorded = node.home.staging().join("image-recorded");
    fs::create_dir_all(&recorded).unwrap();
    fs::write(recorded.join("target"), image.layers[0].name.file_name()).unwrap();
    let hostile = node.home.staging().join("image-hostile");
    fs::create_dir_all(&hostile).unwrap();
    fs::write(hostile.join("target"), "../journal.db").unwrap();
    fs::write(node.home.journal(), b"precious").unwrap();
    // Not ours.
    fs::create_dir_all(node.home.staging().join("capture-1")).unwrap();

    node.images.recover().await.unwrap();
    assert_eq!(names(&node.home.staging()), ["capture-1"]);
    fs::remove_dir(node.home.staging().join("capture-1")).unwrap();
    assert!(node.home.journal().exists());
    node.assert_clean(1).await;
    let (_, seen) = node.pull(&reference).await.unwrap();
    assert_eq!(count(&seen, reused), 1);
}
