//! Config and manifest of an image in overlaybd format.

use aenv_types::Digest;
use serde_json::{Value, json};

use crate::overlaybd::{BLOB_DIGEST, BLOB_SIZE, FILESYSTEM, VERSION};

/// A document with nothing in it.
pub(super) const EMPTY: &[u8] = b"{}";
/// Media type of a manifest.
pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// The version of the format that the other tools write too.
const FORMAT_VERSION: &str = "0.1.0";

/// Both documents.
pub(super) struct Image {
    pub config: Vec<u8>,
    pub manifest: Vec<u8>,
}

impl Image {
    /// From the config of the image that was converted, and the digests and sizes of the layers, base first. The same input
    /// gives the same bytes.
    pub fn new(source: &[u8], layers: &[(Digest, u64)]) -> Result<Self, String> {
        let mut config: Value =
            serde_json::from_slice(source).map_err(|error| format!("its config cannot be read: {error}"))?;
        let diff_ids: Vec<String> = layers.iter().map(|(digest, _)| digest.to_string()).collect();
        config["rootfs"] = json!({ "type": "layers", "diff_ids": diff_ids });
        drop_history_that_does_not_fit(&mut config, layers.len());
        let config = bytes(&config)?;
        let layers: Vec<Value> = layers
            .iter()
            .map(|(digest, size)| {
                json!({
                    "mediaType": LAYER,
                    "digest": digest.to_string(),
                    "size": size,
                    "annotations": {
                        BLOB_DIGEST: digest.to_string(),
                        BLOB_SIZE: size.to_string(),
                        FILESYSTEM: "ext4",
                        VERSION: FORMAT_VERSION,
                    },
                })
            })
            .collect();
        let manifest = bytes(&json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {
                "mediaType": CONFIG,
                "digest": Digest::of(&config).to_string(),
                "size": config.len(),
            },
            "layers": layers,
        }))?;
        Ok(Self { config, manifest })
    }
}

/// A layer that changes nothing becomes none, and then the history tells of more layers than there are.
fn drop_history_that_does_not_fit(config: &mut Value, layers: usize) {
    let Some(history) = config.get("history").and_then(Value::as_array) else { return };
    let told = history.iter().filter(|step| step.get("empty_layer") != Some(&Value::Bool(true))).count();
    if told != layers
        && let Some(config) = config.as_object_mut()
    {
        config.remove("history");
    }
}

fn bytes(document: &Value) -> Result<Vec<u8>, String> {
    serde_json::to_vec(document).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_fit_each_other() {
        let source = json!({
            "architecture": "amd64", "os": "linux", "config": { "Env": ["A=b"] },
            "rootfs": { "type": "layers", "diff_ids": ["sha256:00", "sha256:01"] },
            "history": [{ "created_by": "a" }, { "empty_layer": true }, { "created_by": "b" }],
        });
        let source = source.to_string().into_bytes();
        let (one, two) = ((Digest::of(b"1"), 1), (Digest::of(b"2"), 2));
        let image = Image::new(&source, &[one, two]).unwrap();
        let config: Value = serde_json::from_slice(&image.config).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"], json!([one.0.to_string(), two.0.to_string()]));
        assert_eq!(
            (config["history"].as_array().unwrap().len(), &config["config"]["Env"][0]),
            (3, &json!("A=b"))
        );
        let manifest: Value = serde_json::from_slice(&image.manifest).unwrap();
        assert_eq!(manifest["config"]["digest"], Digest::of(&image.config).to_string());
        assert_eq!(manifest["layers"][1]["annotations"][BLOB_SIZE], "2");
        let fewer = Image::new(&source, &[one]).unwrap();
        assert!(!String::from_utf8(fewer.config).unwrap().contains("history"));
        assert!(Image::new(b"<html>", &[one]).is_err());
    }
}
