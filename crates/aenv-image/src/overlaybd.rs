//! How a manifest says that a layer is in overlaybd format: the annotations of accelerated-container-image.

use oci_spec::image::Descriptor;

use crate::error::LayerError;

/// Digest of the blob; on the descriptor of a layer in overlaybd format, and equal to the descriptor's own.
pub(crate) const BLOB_DIGEST: &str = "containerd.io/snapshot/overlaybd/blob-digest";
/// Bytes of the blob.
pub(crate) const BLOB_SIZE: &str = "containerd.io/snapshot/overlaybd/blob-size";
/// The filesystem on the disk; ext4 where it is left out.
pub(crate) const FILESYSTEM: &str = "containerd.io/snapshot/overlaybd/blob-fs-type";
/// Version of the format.
pub(crate) const VERSION: &str = "containerd.io/snapshot/overlaybd/version";
/// A last layer with this holds a recorded trace and no disk.
const TRACE: &str = "containerd.io/snapshot/overlaybd/acceleration-layer";
/// These mark layers whose data are those of another blob (a gzipped tar).
const INDEX_ONLY: [&str; 2] = [
    "containerd.io/snapshot/overlaybd/turbo-oci/target-digest",
    "containerd.io/snapshot/overlaybd/fastoci/target-digest",
];

/// What a layer's blob holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A tar of files.
    Files,
    /// A layer of a disk.
    Disk,
    /// Something that is no part of the disk.
    Aside,
}

/// What the annotations of a layer say that it holds.
pub(crate) fn kind(layer: &Descriptor) -> Result<Kind, LayerError> {
    let damaged = |message: String| Err(LayerError::Damaged(message));
    let Some(annotations) = layer.annotations() else { return Ok(Kind::Files) };
    let find = |key: &str| annotations.get(key).map(String::as_str);
    let own = layer.digest().to_string();
    if INDEX_ONLY.iter().any(|key| find(key).is_some()) {
        return damaged(format!(
            "the layer {own} is an index of another blob (turboOCI), which cannot be used; convert the image it was made from"
        ));
    }
    let (digest, size) = match (find(BLOB_DIGEST), find(BLOB_SIZE)) {
        (None, None) => return Ok(Kind::Files),
        (Some(digest), Some(size)) => (digest, size),
        _ => return damaged(format!("the layer {own} has one of {BLOB_DIGEST} and {BLOB_SIZE}, not both")),
    };
    if digest != own {
        return damaged(format!("the layer {own} has the overlaybd digest {:?}", shown(digest)));
    }
    if size.parse() != Ok(layer.size()) {
        let message =
            format!("the layer {own} has {} bytes, and in overlaybd {:?}", layer.size(), shown(size));
        return damaged(message);
    }
    if let Some(filesystem) = find(FILESYSTEM).filter(|name| !name.is_empty() && *name != "ext4") {
        return damaged(format!(
            "its disk has the filesystem {:?}, and guests here use ext4",
            shown(filesystem)
        ));
    }
    Ok(if find(TRACE) == Some("yes") { Kind::Aside } else { Kind::Disk })
}

/// What a stranger wrote, for a message.
fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use aenv_types::Digest;
    use serde_json::{Value, json};

    use super::*;

    fn descriptor(annotations: Value) -> Descriptor {
        let layer = json!({
            "mediaType": "application/vnd.oci.image.layer.v1.tar",
            "digest": Digest::of(b"x").to_string(), "size": 7, "annotations": annotations,
        });
        serde_json::from_value(layer).unwrap()
    }

    #[test]
    fn annotations_say_what_a_layer_is() {
        let digest = Digest::of(b"x").to_string();
        let disk = json!({ BLOB_DIGEST: digest, BLOB_SIZE: "7", "containerd.io/snapshot/overlaybd/version": "0.1.0" });
        assert_eq!(kind(&descriptor(disk.clone())).unwrap(), Kind::Disk);
        assert_eq!(kind(&descriptor(json!({ "other": "x" }))).unwrap(), Kind::Files);
        let mut aside = disk.clone();
        aside[TRACE] = json!("yes");
        assert_eq!(kind(&descriptor(aside)).unwrap(), Kind::Aside);
        for (key, value) in [
            (BLOB_DIGEST, Value::Null),
            (BLOB_SIZE, Value::Null),
            (BLOB_SIZE, json!("8")),
            (BLOB_SIZE, json!("seven")),
            (BLOB_DIGEST, json!(Digest::of(b"y").to_string())),
            (FILESYSTEM, json!("erofs")),
            (INDEX_ONLY[0], json!("sha256:00")),
        ] {
            let mut wrong = disk.clone();
            match value {
                Value::Null => drop(wrong.as_object_mut().unwrap().remove(key)),
                value => wrong[key] = value,
            }
            assert!(matches!(kind(&descriptor(wrong)), Err(LayerError::Damaged(_))), "{key}");
        }
    }
}
