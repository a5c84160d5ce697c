//! Publishing: an ordinary image becomes one in overlaybd format, in a registry or an OCI layout, once for everybody who uses it.
//!
//! ```text
//! pull the image (its layers become layers of a disk, or are here already)
//! for each layer, base first
//!   the target has it            -> nothing is done
//!   otherwise                    -> drop what is dead in it, compress, put a tar's head around it, send
//! send the config and, last of all, the manifest
//! ```
//!
//! What is there is not sent again, so that one that broke off goes on where it was.

mod blob;
mod document;
mod layout;
mod pack;
mod records;
mod registry;

use std::sync::{Arc, atomic::Ordering};

use aenv_layer::Compression;
use aenv_types::{Digest, LayerRef};
use futures::{StreamExt, stream};
use uuid::Uuid;

use self::{blob::Blob, layout::LayoutTarget, records::Records, registry::RegistryTarget};
use crate::{
    ImageError, ImageReference, Images, PullProgress, RegistryAuth,
    blob::Meter,
    pull::{PREFIX, TICK},
    source::{Form, Layout},
};

/// Layers that are packed or sent at the same time.
const AT_ONCE: usize = 2;

/// Where an image is published.
#[derive(Clone, Debug)]
pub struct Destination {
    /// A registry's `host/name:tag`, or `oci:DIR[:tag]`.
    pub reference: ImageReference,
    /// As whom.
    pub identity: PublishAs,
}

/// As whom something is published to a registry.
#[derive(Clone, Debug)]
pub enum PublishAs {
    /// As nobody.
    Nobody,
    /// With these.
    Known(RegistryAuth),
    /// With what docker's `config.json` of this machine has for the registry.
    Docker,
}

/// What publishing is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublishProgress {
    /// The image is being pulled.
    Pull(PullProgress),
    /// A layer is being compressed.
    Packing {
        /// Its number, from 0.
        index: usize,
    },
    /// A layer is being sent.
    Sending {
        /// Its number, from 0.
        index: usize,
        /// Bytes so far.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// The target has a layer.
    Present {
        /// Its number, from 0.
        index: usize,
    },
}

/// An image that was published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Where it is.
    pub reference: String,
    /// Digest of its manifest.
    pub manifest: Digest,
    /// Layers.
    pub layers: usize,
    /// Bytes of all layers.
    pub bytes: u64,
    /// Bytes of layers that were sent now; the others were there.
    pub sent: u64,
}

/// Told what is done; must not block.
pub type Watcher<'a> = &'a (dyn Fn(PublishProgress) + Send + Sync);

/// A target.
enum Target {
    Registry(RegistryTarget),
    Layout(LayoutTarget),
}

impl Target {
    async fn open(images: &Images, to: &Destination) -> Result<Self, ImageError> {
        match &to.reference {
            ImageReference::Registry(name) => {
                RegistryTarget::open(name, &to.identity, images.settings()).await.map(Self::Registry)
            }
            ImageReference::OciDir { path, tag } => {
                LayoutTarget::open(path, tag.clone()).await.map(Self::Layout)
            }
            other => Err(ImageError::NotPublished {
                target: other.to_string(),
                message: "it is neither a registry's host/name:tag nor oci:DIR[:tag]".to_owned(),
            }),
        }
    }

    /// What mounting calls it, where there is such a thing.
    fn place(&self) -> Option<String> {
        match self {
            Self::Registry(registry) => Some(registry.place()),
            Self::Layout(_) => None,
        }
    }

    async fn has(&self, digest: &Digest, size: u64) -> Result<bool, ImageError> {
        match self {
            Self::Registry(registry) => registry.has(digest).await,
            Self::Layout(layout) => Ok(layout.has(digest, size)),
        }
    }

    /// Takes a blob over from where it was published before.
    async fn mount(&self, digest: &Digest, places: &[String]) -> bool {
        match self {
            Self::Registry(registry) => registry.mount(digest, places).await,
            Self::Layout(_) => false,
        }
    }

    async fn put(&self, blob: &Blob, meter: &Meter) -> Result<(), ImageError> {
        match self {
            Self::Registry(registry) => registry.put(blob, meter).await,
            Self::Layout(layout) => layout.put(blob, meter).await,
        }
    }

    async fn put_document(&self, bytes: &[u8]) -> Result<(), ImageError> {
        let blob = Blob::of_bytes(bytes.to_vec());
        if self.has(&blob.digest, blob.size).await? {
            return Ok(());
        }
        self.put(&blob, &Meter::default()).await
    }

    /// Makes the image visible.
    async fn finish(&self, manifest: &[u8], media_type: &str) -> Result<(), ImageError> {
        match self {
            Self::Registry(registry) => registry.finish(manifest, media_type).await,
            Self::Layout(layout) => layout.finish(manifest, media_type).await,
        }
    }
}

impl Images {
    /// Converts an ordinary image to overlaybd format and publishes the result.
    pub async fn convert(
        &self,
        from: &ImageReference,
        auth: Option<RegistryAuth>,
        compression: Compression,
        to: &Destination,
        watcher: Watcher<'_>,
    ) -> Result<Published, ImageError> {
        let target = Target::open(self, to).await?;
        // Whoever may not write there hears it before the work is done.
        target.put_document(document::EMPTY).await?;
        let (source, image) = self.resolve(from, auth).await?;
        if image.form == Form::Overlaybd {
            let message =
                "its layers are in overlaybd format already; it is used, or pushed, as it is".to_owned();
            return Err(ImageError::Damaged { reference: image.reference, message });
        }
        let config = image.config.raw.clone();
        let pulled = self.pull_resolved(source, image, &|step| watcher(PublishProgress::Pull(step))).await?;
        let packer = Packer {
            images: self,
            target: &target,
            records: Records::new(self.home()),
            compression,
            staging: self.home().staging().join(format!("{PREFIX}{}", Uuid::new_v4().simple())),
            reference: &pulled.reference,
        };
        let failed = |error: std::io::Error| ImageError::Io {
            context: "making a folder in staging".to_owned(),
            message: error.to_string(),
        };
        std::fs::create_dir_all(&packer.staging).map_err(failed)?;
        let steps =
            pulled.layers.iter().enumerate().map(|(index, layer)| packer.layer(index, *layer, watcher));
        // All of them are waited for, even after an error: nothing goes on in the folder when it is removed.
        let steps: Vec<_> = stream::iter(steps.collect::<Vec<_>>()).buffered(AT_ONCE).collect().await;
        if let Err(error) = std::fs::remove_dir_all(&packer.staging) {
            tracing::error!(staging = %packer.staging.display(), %error, "a staging folder stays");
        }
        let layers: Vec<Sent> = steps.into_iter().collect::<Result<_, _>>()?;

        let blobs: Vec<_> = layers.iter().map(|layer| (layer.digest, layer.size)).collect();
        let image = document::Image::new(&config, &blobs)
            .map_err(|message| ImageError::Damaged { reference: pulled.reference.clone(), message })?;
        target.put_document(&image.config).await?;
        target.finish(&image.manifest, document::MANIFEST).await?;
        Ok(published(to, Digest::of(&image.manifest), &layers))
    }

    /// Publishes an image of an OCI layout as it is.
    pub async fn push(
        &self,
        from: &ImageReference,
        to: &Destination,
        watcher: Watcher<'_>,
    ) -> Result<Published, ImageError> {
        let ImageReference::OciDir { path, tag } = from else {
            let message =
                "only an image of an OCI layout (oci:DIR[:tag]) is pushed; others are converted".to_owned();
            return Err(ImageError::NotPublished { target: to.reference.to_string(), message });
        };
        let source = Layout::folder(from.to_string(), path, tag.clone())?;
        let image = source.stored().await?;
        let target = Target::open(self, to).await?;
        let mut layers = Vec::new();
        for (index, (digest, size, file)) in image.layers.into_iter().enumerate() {
            let blob = Blob::of_file(digest, size, file);
            let sent = send(&target, index, &blob, watcher).await?;
            layers.push(Sent { digest, size, sent });
        }
        target.put_document(&image.config).await?;
        target.finish(&image.manifest, &image.media_type).await?;
        Ok(published(to, Digest::of(&image.manifest), &layers))
    }
}

fn published(to: &Destination, manifest: Digest, layers: &[Sent]) -> Published {
    Published {
        reference: to.reference.to_string(),
        manifest,
        layers: layers.len(),
        bytes: layers.iter().map(|layer| layer.size).sum(),
        sent: layers.iter().map(|layer| layer.sent).sum(),
    }
}

/// A layer that the target has now.
struct Sent {
    digest: Digest,
    size: u64,
    /// Bytes that were sent for it.
    sent: u64,
}

/// Packs and sends the layers of one image.
struct Packer<'a> {
    images: &'a Images,
    target: &'a Target,
    records: Records,
    compression: Compression,
    staging: std::path::PathBuf,
    reference: &'a str,
}

impl Packer<'_> {
    async fn layer(&self, index: usize, layer: LayerRef, watcher: Watcher<'_>) -> Result<Sent, ImageError> {
        if let Some(known) = self.records.find(&layer.name, self.compression) {
            let (digest, size) = (known.digest, known.size);
            if self.target.has(&digest, size).await? || self.target.mount(&digest, &known.places).await {
                watcher(PublishProgress::Present { index });
                self.records.keep(&layer.name, self.compression, digest, size, self.target.place());
                return Ok(Sent { digest, size, sent: 0 });
            }
        }
        watcher(PublishProgress::Packing { index });
        let about = |error: crate::error::LayerError| error.of(self.reference, &layer.name.to_string());
        self.images.check_room(layer.size.saturating_mul(2)).map_err(about)?;
        let (file, packed) = (self.images.home().layer(&layer.name), self.staging.join(index.to_string()));
        let compression = self.compression;
        let blob = tokio::task::spawn_blocking(move || pack::pack(&file, &packed, compression)).await;
        let blob = blob
            .map_err(|error| ImageError::Io {
                context: "packing a layer".to_owned(),
                message: error.to_string(),
            })?
            .map_err(about)?;
        let sent = send(self.target, index, &blob, watcher).await?;
        self.records.keep(&layer.name, self.compression, blob.digest, blob.size, self.target.place());
        blob.remove();
        Ok(Sent { digest: blob.digest, size: blob.size, sent })
    }
}

/// Sends a blob unless the target has it; returns the bytes that were sent.
async fn send(target: &Target, index: usize, blob: &Blob, watcher: Watcher<'_>) -> Result<u64, ImageError> {
    if target.has(&blob.digest, blob.size).await? {
        watcher(PublishProgress::Present { index });
        return Ok(0);
    }
    let meter = Meter::default();
    let (mut ticks, total, seen) = (tokio::time::interval(TICK), blob.size, Arc::clone(&meter));
    let mut sending = std::pin::pin!(target.put(blob, &meter));
    loop {
        tokio::select! {
            sent = &mut sending => {
                sent?;
                watcher(PublishProgress::Sending { index, done: total, total });
                return Ok(total);
            }
            _ = ticks.tick() => {
                watcher(PublishProgress::Sending { index, done: seen.load(Ordering::Relaxed), total });
            }
        }
    }
}
