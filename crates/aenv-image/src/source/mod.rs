//! Where images come from: one trait, and one module for each kind of place.

mod docker;
mod layout;
pub(crate) mod registry;

use std::{io::Read, sync::Arc};

use aenv_remote::Place;
use aenv_store::BlockSource;
use aenv_types::Digest;
use async_trait::async_trait;
use oci_spec::image::{Descriptor, ImageManifest};

pub(crate) use self::{docker::DockerArchive, layout::Layout, registry::Registry};
use crate::{
    ImageError,
    blob::Expected,
    config::{self, Document, MAX_DOCUMENT, ParsedConfig},
    error::LayerError,
    overlaybd::{self, Kind},
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
    /// Its layers, base first.
    pub layers: Vec<LayerBlob>,
    /// What they are: tars, one for each diff id of the config, or layers of a disk in overlaybd format.
    pub form: Form,
}

/// What the layers of an image are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Tars of files.
    Tars,
    /// Layers of a disk in overlaybd format.
    Overlaybd,
}

/// A place where one image is.
#[async_trait]
pub(crate) trait ImageSource: Send + Sync {
    /// Reads the manifest and the config.
    async fn resolve(&self) -> Result<ResolvedImage, ImageError>;

    /// Opens a layer's stored bytes. They are not checked yet. Reading blocks, and may be done off the runtime's
    /// threads only.
    async fn open(&self, layer: &LayerBlob) -> Result<Box<dyn Read + Send>, LayerError>;

    /// Where a layer can be read by ranges for as long as the image is used.
    fn place(&self, _layer: &LayerBlob) -> Result<Place, LayerError> {
        Err(not_in_place())
    }

    /// A layer's bytes, read by ranges. Called on a thread of the runtime.
    fn bytes(&self, _layer: &LayerBlob) -> Result<Arc<dyn BlockSource>, LayerError> {
        Err(not_in_place())
    }
}

fn not_in_place() -> LayerError {
    LayerError::Damaged(
        "layers in overlaybd format are used where they are, which an archive does not allow: unpack it to a folder (oci:DIR) or push it to a registry"
            .to_owned(),
    )
}

/// A place that knows manifests and blobs by digest.
#[async_trait]
trait Blobs: Send + Sync {
    /// The bytes of a manifest, index or config. The caller checks them.
    async fn document(&self, descriptor: &Descriptor) -> Result<Vec<u8>, LayerError>;
}

/// An index within an index within ...: deeper than this is a trick.
const MAX_INDEX_DEPTH: usize = 4;

/// Follows a manifest or index down to one manifest.
async fn find_manifest(
    blobs: &dyn Blobs,
    mut digest: Digest,
    mut bytes: Vec<u8>,
) -> Result<(Digest, Vec<u8>, ImageManifest), LayerError> {
    for _ in 0..MAX_INDEX_DEPTH {
        match config::parse_document(&bytes)? {
            Document::Index(index) => {
                let chosen = config::select_platform(index.manifests())?;
                digest = config::digest_of(&chosen)?;
                bytes = checked_document(blobs, &chosen).await?;
            }
            Document::Manifest(manifest) => return Ok((digest, bytes, *manifest)),
        }
    }
    Err(LayerError::Damaged("an index within an index within an index, too deep".to_owned()))
}

/// Follows a manifest or index down to one image.
async fn resolve_document(
    blobs: &dyn Blobs,
    reference: String,
    digest: Digest,
    bytes: Vec<u8>,
) -> Result<ResolvedImage, LayerError> {
    let (digest, _, manifest) = find_manifest(blobs, digest, bytes).await?;
    let config = config::parse_config(&checked_document(blobs, manifest.config()).await?)?;
    let (layers, form) = layers_of(manifest.layers())?;
    let (said, expected) = (manifest.layers().len(), config.diff_ids.len());
    if said != expected {
        let message = format!("its manifest has {said} layers and its config {expected}");
        return Err(LayerError::Damaged(message));
    }
    Ok(ResolvedImage { reference, manifest: digest, config, layers, form })
}

/// The layers that make the disk, all of one form.
fn layers_of(descriptors: &[Descriptor]) -> Result<(Vec<LayerBlob>, Form), LayerError> {
    let mut layers = Vec::with_capacity(descriptors.len());
    let mut form = None;
    for descriptor in descriptors {
        config::check_layer_type(descriptor.media_type())?;
        let own = match overlaybd::kind(descriptor)? {
            Kind::Aside => continue,
            Kind::Files => Form::Tars,
            Kind::Disk => Form::Overlaybd,
        };
        if *form.get_or_insert(own) != own {
            let message = "some of its layers are in overlaybd format and some are tars of files";
            return Err(LayerError::Damaged(message.to_owned()));
        }
        let digest = config::digest_of(descriptor)?;
        let expected = Expected { digest: Some(digest), size: descriptor.size() };
        layers.push(LayerBlob { expected, key: digest.to_string() });
    }
    Ok((layers, form.unwrap_or(Form::Tars)))
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
