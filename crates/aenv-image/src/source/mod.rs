//! Where images come from: one trait, and one module for each kind of place.

mod credentials;
mod docker;
mod layout;
mod registry;

use std::io::Read;

use aenv_types::Digest;
use async_trait::async_trait;
use oci_spec::image::Descriptor;

pub(crate) use self::{credentials::DockerConfig, docker::DockerArchive, layout::Layout, registry::Registry};
use crate::{
    ImageError,
    blob::Expected,
    config::{self, Document, MAX_DOCUMENT, ParsedConfig},
    error::LayerError,
};

/// A layer of an image, as its place stores it.
#[derive(Clone, Debug)]
pub(crate) struct LayerBlob {
    /// What its bytes must be.
    pub expected: Expected,
    /// What the place calls it: a digest, or a file in an archive.
    pub key: String,
}

/// An image that was found.
pub(crate) struct ResolvedImage {
    /// The reference, normalized.
    pub reference: String,
    /// Digest of its manifest.
    pub manifest: Digest,
    /// Its config.
    pub config: ParsedConfig,
    /// Its layers, base first; as many as the config has diff ids.
    pub layers: Vec<LayerBlob>,
}

/// A place where one image is.
#[async_trait]
pub(crate) trait ImageSource: Send + Sync {
    /// Reads the manifest and the config.
    async fn resolve(&self) -> Result<ResolvedImage, ImageError>;

    /// Opens a layer's stored bytes. They are not checked yet. Reading blocks, and may be done off the runtime's
    /// threads only.
    async fn open(&self, layer: &LayerBlob) -> Result<Box<dyn Read + Send>, LayerError>;
}

/// A place that knows manifests and blobs by digest.
#[async_trait]
trait Blobs: Send + Sync {
    /// The bytes of a manifest, index or config. The caller checks them.
    async fn document(&self, descriptor: &Descriptor) -> Result<Vec<u8>, LayerError>;
}

/// An index within an index within ...: deeper than this is a trick.
const MAX_INDEX_DEPTH: usize = 4;

/// Follows a manifest or index down to one image.
async fn resolve_document(
    blobs: &dyn Blobs,
    reference: String,
    mut digest: Digest,
    mut bytes: Vec<u8>,
) -> Result<ResolvedImage, LayerError> {
    for _ in 0..MAX_INDEX_DEPTH {
        match config::parse_document(&bytes)? {
            Document::Index(index) => {
                let chosen = config::select_platform(index.manifests())?;
                digest = config::digest_of(&chosen)?;
                bytes = checked_document(blobs, &chosen).await?;
            }
            Document::Manifest(manifest) => {
                let config = config::parse_config(&checked_document(blobs, manifest.config()).await?)?;
                let mut layers = Vec::with_capacity(manifest.layers().len());
                for descriptor in manifest.layers() {
                    config::check_layer_type(descriptor.media_type())?;
                    let digest = config::digest_of(descriptor)?;
                    let expected = Expected { digest: Some(digest), size: descriptor.size() };
                    layers.push(LayerBlob { expected, key: digest.to_string() });
                }
                if layers.len() != config.diff_ids.len() {
                    return Err(LayerError::Damaged(format!(
                        "its manifest has {} layers and its config {}",
                        layers.len(),
                        config.diff_ids.len()
                    )));
                }
                return Ok(ResolvedImage { reference, manifest: digest, config, layers });
            }
        }
    }
    Err(LayerError::Damaged("an index within an index within an index, too deep".to_owned()))
}

/// A manifest, index or config whose size and digest are right.
async fn checked_document(blobs: &dyn Blobs, descriptor: &Descriptor) -> Result<Vec<u8>, LayerError> {
    let digest = config::digest_of(descriptor)?;
    if descriptor.size() > MAX_DOCUMENT {
        return Err(LayerError::Hostile(format!("a manifest or config of {} bytes", descriptor.size())));
    }
    let bytes = blobs.document(descriptor).await?;
    if bytes.len() as u64 != descriptor.size() {
        let (found, said) = (bytes.len(), descriptor.size());
        return Err(LayerError::Damaged(format!("{digest} has {found} bytes and not {said}")));
    }
    let found = Digest::of(&bytes);
    if found != digest {
        return Err(LayerError::Damaged(format!("the blob {digest} has the digest {found}")));
    }
    Ok(bytes)
}

/// An error about an image as a whole.
fn about_image(error: LayerError, reference: &str) -> ImageError {
    match error {
        LayerError::Damaged(message) => ImageError::Damaged { reference: reference.to_owned(), message },
        other => other.of(reference, reference),
    }
}
