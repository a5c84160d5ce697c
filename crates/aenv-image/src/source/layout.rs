//! OCI image layouts: a folder, or the same in a tar file (`oci-archive`).

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::Arc,
};

use aenv_remote::Place;
use aenv_store::{BlockSource, FileSource};
use aenv_types::Digest;
use async_trait::async_trait;
use oci_spec::image::{Descriptor, ImageIndex, MediaType};

use super::{Blobs, ImageSource, LayerBlob, ResolvedImage, about_image, resolve_document};
use crate::{
    ImageError,
    config::{self, MAX_DOCUMENT},
    error::LayerError,
};

/// Names of images in an index: the specification's annotation, and containerd's.
const NAME_ANNOTATIONS: [&str; 2] = ["org.opencontainers.image.ref.name", "io.containerd.image.name"];

/// An OCI image layout.
pub(crate) struct Layout {
    reference: String,
    tag: Option<String>,
    files: Files,
}

/// The files of a layout, by name.
enum Files {
    /// In a folder.
    Folder(PathBuf),
    /// In a tar file.
    Archive(TarIndex),
}

impl Layout {
    /// In a folder.
    pub(crate) fn folder(reference: String, path: &Path, tag: Option<String>) -> Result<Self, ImageError> {
        if !path.join("index.json").is_file() {
            let message = format!("{} is no OCI layout: it has no index.json", path.display());
            return Err(ImageError::NotFound { reference, message });
        }
        Ok(Self { reference, tag, files: Files::Folder(path.to_owned()) })
    }

    /// In a tar file.
    pub(crate) fn archive(reference: String, path: &Path, tag: Option<String>) -> Result<Self, ImageError> {
        let files = Files::Archive(TarIndex::load(path, &reference)?);
        Ok(Self { reference, tag, files })
    }

    /// The descriptor in `index.json` that is meant.
    fn choose(&self, index: &ImageIndex) -> Result<Descriptor, ImageError> {
        let names = |descriptor: &Descriptor| -> Vec<String> {
            let annotations = descriptor.annotations().clone().unwrap_or_default();
            NAME_ANNOTATIONS.iter().filter_map(|key| annotations.get(*key).cloned()).collect()
        };
        let manifests = index.manifests();
        if let Some(tag) = &self.tag {
            let named = |name: &String| name == tag || name.ends_with(&format!(":{tag}"));
            return manifests.iter().find(|item| names(item).iter().any(named)).cloned().ok_or_else(|| {
                let known: Vec<String> = manifests.iter().flat_map(names).collect();
                ImageError::NotFound {
                    reference: self.reference.clone(),
                    message: format!("the layout has no {tag:?}, only [{}]", known.join(", ")),
                }
            });
        }
        match manifests.as_slice() {
            [] => Err(ImageError::NotFound {
                reference: self.reference.clone(),
                message: "the layout holds no image".to_owned(),
            }),
            [only] => Ok(only.clone()),
            many => config::select_platform(many).map_err(|_| {
                let known: Vec<String> = many.iter().flat_map(names).collect();
                ImageError::NotFound {
                    reference: self.reference.clone(),
                    message: format!("the layout holds several images, name one of [{}]", known.join(", ")),
                }
            }),
        }
    }
}

/// The parts of an image as a layout stores them.
pub(crate) struct StoredImage {
    /// The manifest.
    pub manifest: Vec<u8>,
    /// Its media type.
    pub media_type: String,
    /// The config.
    pub config: Vec<u8>,
    /// Digest, size and file of each layer; only the sizes were compared.
    pub layers: Vec<(Digest, u64, PathBuf)>,
}

impl Layout {
    async fn chosen(&self) -> Result<(Digest, Vec<u8>), ImageError> {
        let about = |error| about_image(error, &self.reference);
        let bytes = self.files.read("index.json").map_err(about)?;
        let index: ImageIndex = serde_json::from_slice(&bytes)
            .map_err(|error| about(LayerError::Damaged(format!("its index.json cannot be read: {error}"))))?;
        let chosen = self.choose(&index)?;
        let digest = config::digest_of(&chosen).map_err(about)?;
        let manifest = super::checked_document(self, &chosen).await.map_err(about)?;
        Ok((digest, manifest))
    }

    /// The image's parts.
    pub(crate) async fn stored(&self) -> Result<StoredImage, ImageError> {
        let (digest, bytes) = self.chosen().await?;
        self.parts(digest, bytes).await.map_err(|error| about_image(error, &self.reference))
    }

    async fn parts(&self, digest: Digest, bytes: Vec<u8>) -> Result<StoredImage, LayerError> {
        let Files::Folder(folder) = &self.files else { return Err(super::not_in_place()) };
        let (_, manifest, parsed) = super::find_manifest(self, digest, bytes).await?;
        let config = super::checked_document(self, parsed.config()).await?;
        let media_type = parsed.media_type().as_ref().unwrap_or(&MediaType::ImageManifest).to_string();
        let mut layers = Vec::new();
        for descriptor in parsed.layers() {
            let digest = config::digest_of(descriptor)?;
            let (file, size) = (folder.join(blob_name(&digest)), descriptor.size());
            if !std::fs::metadata(&file).is_ok_and(|found| found.len() == size) {
                return Err(LayerError::Damaged(format!("it has no {digest} of {size} bytes")));
            }
            layers.push((digest, size, file));
        }
        Ok(StoredImage { manifest, media_type, config, layers })
    }
}

#[async_trait]
impl ImageSource for Layout {
    async fn resolve(&self) -> Result<ResolvedImage, ImageError> {
        let (digest, manifest) = self.chosen().await?;
        resolve_document(self, self.reference.clone(), digest, manifest)
            .await
            .map_err(|error| about_image(error, &self.reference))
    }

    async fn open(&self, layer: &LayerBlob) -> Result<Box<dyn Read + Send>, LayerError> {
        self.files.open(&blob_name(&digest_of(layer)?))
    }

    fn place(&self, layer: &LayerBlob) -> Result<Place, LayerError> {
        let Files::Folder(folder) = &self.files else { return Err(super::not_in_place()) };
        let path = folder.join(blob_name(&digest_of(layer)?));
        let path = std::path::absolute(&path)
            .map_err(|error| LayerError::io(format!("finding {}", path.display()), error))?;
        Ok(Place::File { path })
    }

    fn bytes(&self, layer: &LayerBlob) -> Result<Arc<dyn BlockSource>, LayerError> {
        let Place::File { path } = self.place(layer)? else { return Err(super::not_in_place()) };
        match FileSource::open(&path) {
            Ok(file) if file.size() == layer.expected.size => Ok(Arc::new(file)),
            Ok(file) => Err(LayerError::Damaged(format!(
                "its file has {} bytes, and the manifest says {}",
                file.size(),
                layer.expected.size
            ))),
            Err(_) if !path.exists() => Err(missing(&path.display().to_string())),
            Err(error) => {
                Err(LayerError::Io { context: "opening a layer".to_owned(), message: error.to_string() })
            }
        }
    }
}

fn digest_of(layer: &LayerBlob) -> Result<Digest, LayerError> {
    layer.key.parse().map_err(|_| LayerError::Damaged(format!("{:?} is no digest", layer.key)))
}

#[async_trait]
impl Blobs for Layout {
    async fn document(&self, descriptor: &Descriptor) -> Result<Vec<u8>, LayerError> {
        self.files.read(&blob_name(&config::digest_of(descriptor)?))
    }
}

fn blob_name(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

impl Files {
    fn open(&self, name: &str) -> Result<Box<dyn Read + Send>, LayerError> {
        match self {
            Self::Folder(folder) => match File::open(folder.join(name)) {
                Ok(file) => Ok(Box::new(file)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Err(missing(name)),
                Err(error) => Err(LayerError::io(format!("opening {name} of the image"), error)),
            },
            Self::Archive(index) => index.open(name),
        }
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, LayerError> {
        read_document(self.open(name)?, name)
    }
}

/// Reads a small file.
fn read_document(file: impl Read, name: &str) -> Result<Vec<u8>, LayerError> {
    let mut bytes = Vec::new();
    file.take(MAX_DOCUMENT + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| LayerError::io(format!("reading {name} of the image"), error))?;
    if bytes.len() as u64 > MAX_DOCUMENT {
        return Err(LayerError::Hostile(format!("{name} has more than {MAX_DOCUMENT} bytes")));
    }
    Ok(bytes)
}

fn missing(name: &str) -> LayerError {
    LayerError::Damaged(format!("it has no {name}"))
}

/// Where the files of a tar archive are in it.
pub(super) struct TarIndex {
    path: PathBuf,
    files: std::collections::HashMap<String, Member>,
}

/// A file in an archive.
enum Member {
    /// Its data: first byte and length.
    Data(u64, u64),
    /// Another file of the archive has it (older `docker save`).
    Link(String),
}

/// An archive of an image has a few files for each layer.
const MAX_ARCHIVE_FILES: usize = 10_000;

impl TarIndex {
    /// Reads the headers of an archive.
    pub(super) fn load(path: &Path, reference: &str) -> Result<Self, ImageError> {
        let damaged = |message: String| ImageError::Damaged { reference: reference.to_owned(), message };
        let mut file = File::open(path).map_err(|error| ImageError::NotFound {
            reference: reference.to_owned(),
            message: format!("{}: {error}", path.display()),
        })?;
        let mut start = Vec::new();
        (&mut file)
            .take(4)
            .read_to_end(&mut start)
            .and_then(|_| file.rewind())
            .map_err(|error| damaged(error.to_string()))?;
        if start.starts_with(&[0x1f, 0x8b]) || start == [0x28, 0xb5, 0x2f, 0xfd] {
            return Err(damaged(
                "the archive itself is compressed: unpack it with gunzip or unzstd first".to_owned(),
            ));
        }
        let length = file.metadata().map_err(|error| damaged(error.to_string()))?.len();
        let mut archive = tar::Archive::new(file);
        let entries = archive.entries_with_seek().map_err(|error| damaged(error.to_string()))?;
        let mut files = std::collections::HashMap::new();
        for entry in entries {
            let entry = entry.map_err(|error| damaged(format!("the archive cannot be read: {error}")))?;
            if files.len() >= MAX_ARCHIVE_FILES {
                return Err(damaged(format!("the archive has more than {MAX_ARCHIVE_FILES} files")));
            }
            let name = clean(&entry.path_bytes());
            let kind = entry.header().entry_type();
            if kind.is_file() {
                let (offset, size) = (entry.raw_file_position(), entry.size());
                if offset.checked_add(size).is_none_or(|end| end > length) {
                    return Err(damaged(format!("the archive ends in the middle of {name:?}")));
                }
                files.insert(name, Member::Data(offset, size));
            } else if kind.is_symlink() || kind.is_hard_link() {
                let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                let target = String::from_utf8_lossy(&target).into_owned();
                let target =
                    if kind.is_symlink() { beside(&name, &target) } else { clean(target.as_bytes()) };
                files.insert(name, Member::Link(target));
            }
        }
        Ok(Self { path: path.to_owned(), files })
    }

    fn place(&self, name: &str) -> Option<(u64, u64)> {
        let mut name = name.to_owned();
        for _ in 0..8 {
            match self.files.get(&name)? {
                Member::Data(offset, size) => return Some((*offset, *size)),
                Member::Link(target) => name = target.clone(),
            }
        }
        None
    }

    /// Bytes of a file.
    pub(super) fn size(&self, name: &str) -> Option<u64> {
        self.place(name).map(|(_, size)| size)
    }

    /// Reads a small file.
    pub(super) fn read(&self, name: &str) -> Result<Vec<u8>, LayerError> {
        read_document(self.open(name)?, name)
    }

    /// Opens a file.
    pub(super) fn open(&self, name: &str) -> Result<Box<dyn Read + Send>, LayerError> {
        let (offset, size) = self.place(name).ok_or_else(|| missing(name))?;
        let failed = |error| LayerError::io(format!("opening {}", self.path.display()), error);
        let mut file = File::open(&self.path).map_err(failed)?;
        file.seek(SeekFrom::Start(offset)).map_err(failed)?;
        Ok(Box::new(file.take(size)))
    }
}

fn clean(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    text.split('/').filter(|part| !part.is_empty() && *part != ".").collect::<Vec<_>>().join("/")
}

/// The target of a symlink, as a name in the archive.
fn beside(name: &str, target: &str) -> String {
    let mut parts: Vec<&str> = name.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            other => parts.push(other),
        }
    }
    parts.join("/")
}
