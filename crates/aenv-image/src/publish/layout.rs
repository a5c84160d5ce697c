//! Publishing to an OCI image layout: a folder.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aenv_types::Digest;
use futures::TryStreamExt;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncWriteExt;
use uuid::Uuid;

use super::blob::Blob;
use crate::{ImageError, blob::Meter};

/// What names an image in an index.
const NAME: &str = "org.opencontainers.image.ref.name";

/// A folder.
pub(super) struct LayoutTarget {
    folder: PathBuf,
    tag: Option<String>,
}

impl LayoutTarget {
    /// Makes the folder, unless it is a layout already.
    pub async fn open(folder: &Path, tag: Option<String>) -> Result<Self, ImageError> {
        let target = Self { folder: folder.to_owned(), tag };
        let prepared = (|| {
            fs::create_dir_all(folder.join("blobs/sha256"))?;
            aenv_durable::write(&folder.join("oci-layout"), br#"{"imageLayoutVersion":"1.0.0"}"#)
        })();
        prepared.map_err(|error| target.io("making it", error)).map(|()| target)
    }

    fn io(&self, what: &str, error: io::Error) -> ImageError {
        let target = format!("oci:{}", self.folder.display());
        match error.kind() {
            io::ErrorKind::StorageFull => {
                ImageError::NoSpace { reference: target, message: format!("{what}: {error}") }
            }
            _ => ImageError::NotPublished { target, message: format!("{what}: {error}") },
        }
    }

    fn blob(&self, digest: &Digest) -> PathBuf {
        self.folder.join("blobs/sha256").join(digest.hex())
    }

    pub fn has(&self, digest: &Digest, size: u64) -> bool {
        fs::metadata(self.blob(digest)).is_ok_and(|file| file.len() == size)
    }

    /// Writes a blob beside its name and renames it when its digest was found right.
    pub async fn put(&self, blob: &Blob, meter: &Meter) -> Result<(), ImageError> {
        let target = self.blob(&blob.digest);
        let beside = target.with_extension(format!("tmp-{}", Uuid::new_v4().simple()));
        let written = self.write(blob, meter, &beside).await;
        let placed = written.and_then(|found| {
            if found == blob.digest {
                return fs::rename(&beside, &target);
            }
            Err(io::Error::other(format!("its bytes have the digest {found} and not {}", blob.digest)))
        });
        if placed.is_err() {
            // The first error says more than a second one.
            fs::remove_file(&beside).ok();
        }
        placed.map_err(|error| self.io("writing a blob", error))
    }

    async fn write(&self, blob: &Blob, meter: &Meter, path: &Path) -> io::Result<Digest> {
        let mut file = tokio::fs::File::create(path).await?;
        let mut pieces = std::pin::pin!(blob.stream(meter).await?);
        let mut hasher = Sha256::new();
        while let Some(piece) = pieces.try_next().await? {
            hasher.update(&piece);
            file.write_all(&piece).await?;
        }
        file.flush().await?;
        file.sync_all().await?;
        Ok(Digest::from_bytes(hasher.finalize().into()))
    }

    /// Names the image in the index, in place of one of the same name.
    pub async fn finish(&self, manifest: &[u8], media_type: &str) -> Result<(), ImageError> {
        let blob = Blob::of_bytes(manifest.to_vec());
        self.put(&blob, &Meter::default()).await?;
        let path = self.folder.join("index.json");
        let mut index: Value = match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|error| self.io("reading its index.json", io::Error::other(error)))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                json!({ "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [] })
            }
            Err(error) => return Err(self.io("reading its index.json", error)),
        };
        let Some(manifests) = index.get_mut("manifests").and_then(Value::as_array_mut) else {
            return Err(self.io("reading its index.json", io::Error::other("it has no list of manifests")));
        };
        let name = self.tag.clone().map_or(Value::Null, Value::String);
        let named = |item: &Value| item["annotations"][NAME].clone();
        manifests.retain(|item| named(item) != name);
        let mut item =
            json!({ "mediaType": media_type, "digest": blob.digest.to_string(), "size": blob.size });
        if let Some(tag) = &self.tag {
            item["annotations"] = json!({ NAME: tag });
        }
        manifests.push(item);
        aenv_durable::write(&path, index.to_string().as_bytes())
            .map_err(|error| self.io("writing its index.json", error))
    }
}
