//! `docker save` archives: `manifest.json`, a config and the layers' tar files.

use std::{io::Read, path::Path};

use aenv_types::Digest;
use async_trait::async_trait;
use serde::Deserialize;

use super::{Form, ImageSource, LayerBlob, ResolvedImage, about_image, layout::TarIndex};
use crate::{ImageError, blob::Expected, config, error::LayerError};

/// An archive of `docker save`.
///
/// Its layers have no digests of their own; each is checked by its diff id after it was unpacked. It has no manifest in
/// the sense of the OCI either: the config's digest (Docker's image id) stands for it.
pub(crate) struct DockerArchive {
    reference: String,
    tag: Option<String>,
    files: TarIndex,
    index: Vec<SavedImage>,
}

/// An element of `manifest.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SavedImage {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

impl DockerArchive {
    /// Opens an archive.
    pub(crate) fn open(reference: String, path: &Path, tag: Option<String>) -> Result<Self, ImageError> {
        let files = TarIndex::load(path, &reference)?;
        let bytes = files.read("manifest.json").map_err(|error| about_image(error, &reference))?;
        let index = serde_json::from_slice(&bytes).map_err(|error| ImageError::Damaged {
            reference: reference.clone(),
            message: format!("its manifest.json cannot be read: {error}"),
        })?;
        Ok(Self { reference, tag, files, index })
    }

    fn choose(&self) -> Result<&SavedImage, ImageError> {
        let not_found = |message| ImageError::NotFound { reference: self.reference.clone(), message };
        let known = || {
            self.index.iter().flat_map(|image| image.repo_tags.iter().flatten()).cloned().collect::<Vec<_>>()
        };
        match (&self.tag, self.index.as_slice()) {
            (Some(tag), images) => images
                .iter()
                .find(|image| {
                    image
                        .repo_tags
                        .iter()
                        .flatten()
                        .any(|name| name == tag || name.ends_with(&format!("/{tag}")))
                })
                .ok_or_else(|| {
                    not_found(format!("the archive has no {tag:?}, only [{}]", known().join(", ")))
                }),
            (None, [only]) => Ok(only),
            (None, []) => Err(not_found("the archive holds no image".to_owned())),
            (None, _) => Err(not_found(format!(
                "the archive holds several images, name one of [{}]",
                known().join(", ")
            ))),
        }
    }

    fn read(&self, image: &SavedImage) -> Result<ResolvedImage, LayerError> {
        let bytes = self.files.read(&image.config)?;
        let digest = Digest::of(&bytes);
        let config = config::parse_config(&bytes)?;
        // Docker names the config after its digest.
        let stem = image.config.rsplit('/').next().unwrap_or_default().trim_end_matches(".json");
        if stem.len() == 64 && stem != digest.hex() {
            return Err(LayerError::Damaged(format!("its config {} has the digest {digest}", image.config)));
        }
        let layers = image
            .layers
            .iter()
            .map(|name| {
                let size =
                    self.files.size(name).ok_or_else(|| LayerError::Damaged(format!("it has no {name}")))?;
                Ok(LayerBlob { expected: Expected { digest: None, size }, key: name.clone() })
            })
            .collect::<Result<Vec<_>, LayerError>>()?;
        if layers.len() != config.diff_ids.len() {
            return Err(LayerError::Damaged(format!(
                "its manifest.json has {} layers and its config {}",
                layers.len(),
                config.diff_ids.len()
            )));
        }
        Ok(ResolvedImage {
            reference: self.reference.clone(),
            manifest: digest,
            config,
            layers,
            form: Form::Tars,
        })
    }
}

#[async_trait]
impl ImageSource for DockerArchive {
    async fn resolve(&self) -> Result<ResolvedImage, ImageError> {
        let image = self.choose()?;
        self.read(image).map_err(|error| about_image(error, &self.reference))
    }

    async fn open(&self, layer: &LayerBlob) -> Result<Box<dyn Read + Send>, LayerError> {
        self.files.open(&layer.key)
    }
}
