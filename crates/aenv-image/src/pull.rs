//! A pull: find the image, then make each layer that is not there yet, on the layers beneath it.
//!
//! ```text
//! for each layer, base first
//!   chain known, file there  -> reuse
//!   another pull makes it    -> wait for it
//!   otherwise                -> export (stack beneath + fresh upper), mount, apply, unmount, seal, record
//! ```
//!
//! A layer is made by a task of its own: who asked may go away, the layer is finished and found by the next pull.
//! Everything half-made lies in `<home>/staging/image-<uuid>`, and its export has the same name.

use std::{
    collections::HashMap,
    fs,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, Weak, atomic::Ordering},
    time::Duration,
};

use aenv_blockd::{DiskExport, Exports};
use aenv_types::{CacheRecord, Digest, Home, LayerName, LayerRef};
use nix::{sys::statvfs::statvfs, unistd::UnlinkatFlags};

use crate::{
    ImageError, ImageLimits, ImageReference, ImageSettings, PullProgress, PulledImage, RegistryAuth,
    apply::Applier,
    blob::{Meter, Stored, Unpacked},
    chain::{Chains, chain_ids},
    disk::{self, MountedDisk},
    error::LayerError,
    in_place,
    source::{DockerArchive, Form, ImageSource, LayerBlob, Layout, Registry, ResolvedImage},
    tarball::TarReader,
};

/// Half-made things of this crate: folders in `staging`, and exports.
pub(crate) const PREFIX: &str = "image-";
/// The file in a staging folder that names the layer which is about to appear.
const TARGET: &str = "target";
/// A host's disk with less is full.
const HOST_RESERVE: u64 = 64 << 20;
/// How often progress is told.
pub(crate) const TICK: Duration = Duration::from_millis(200);

/// Pulls images on a node. Cheap to clone.
#[derive(Clone)]
pub struct Images {
    inner: Arc<Inner>,
}

struct Inner {
    home: Home,
    exports: Arc<dyn Exports>,
    settings: ImageSettings,
    chains: Chains,
    /// Layers that are being made.
    work: Mutex<HashMap<Digest, Weak<Work>>>,
}

/// A layer that is being made: whoever holds the lock makes it, the others wait and see the meter.
#[derive(Default)]
struct Work {
    lock: Arc<tokio::sync::Mutex<()>>,
    meter: Meter,
}

/// One layer to make.
struct Job {
    reference: String,
    source: Arc<dyn ImageSource>,
    blob: LayerBlob,
    diff_id: Digest,
    chain: Digest,
    beneath: Vec<LayerRef>,
    meter: Meter,
}

impl Images {
    /// With default settings.
    pub fn new(home: Home, exports: Arc<dyn Exports>) -> Self {
        Self::with_settings(home, exports, ImageSettings::default())
    }

    /// With settings of one's own.
    pub fn with_settings(home: Home, exports: Arc<dyn Exports>, settings: ImageSettings) -> Self {
        let chains = Chains::new(&home);
        Self { inner: Arc::new(Inner { home, exports, settings, chains, work: Mutex::default() }) }
    }

    /// Makes an image's layers on this node, or finds them.
    ///
    /// A pull that fails leaves the layers that were finished, and nothing else; the next one goes on from there.
    pub async fn pull(
        &self,
        reference: &ImageReference,
        auth: Option<RegistryAuth>,
        progress: &(dyn Fn(PullProgress) + Send + Sync),
    ) -> Result<PulledImage, ImageError> {
        let (source, image) = self.resolve(reference, auth).await?;
        self.pull_resolved(source, image, progress).await
    }

    /// The same for an image that was found.
    pub(crate) async fn pull_resolved(
        &self,
        source: Arc<dyn ImageSource>,
        image: ResolvedImage,
        progress: &(dyn Fn(PullProgress) + Send + Sync),
    ) -> Result<PulledImage, ImageError> {
        let bytes = image.layers.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.expected.size));
        progress(PullProgress::Resolved { layers: image.layers.len(), bytes });
        self.check(&image)?;
        if image.form == Form::Overlaybd {
            let table_bytes = self.inner.settings.limits.table_bytes;
            return in_place::refer(&self.inner.home, &source, image, table_bytes, progress).await;
        }

        let chains = chain_ids(&image.config.diff_ids);
        let mut stack: Vec<LayerRef> = Vec::new();
        for (index, chain) in chains.iter().enumerate() {
            let job = Job {
                reference: image.reference.clone(),
                source: source.clone(),
                blob: image.layers[index].clone(),
                diff_id: image.config.diff_ids[index],
                chain: *chain,
                beneath: stack.clone(),
                meter: Meter::default(),
            };
            stack.extend(self.layer(index, job, progress).await?);
        }
        Ok(PulledImage {
            reference: image.reference,
            manifest: image.manifest,
            layers: stack,
            disk_size: self.inner.settings.disk_size,
            guest: image.config.guest,
        })
    }

    /// Removes what an earlier process left half-made: exports, staging folders, layers that no record names. Call it
    /// once at start, before the first pull. Mounts and loop devices go by themselves with the process.
    pub async fn recover(&self) -> Result<(), ImageError> {
        let inner = &self.inner;
        let failed = |context: &str, message: String| ImageError::Io { context: context.to_owned(), message };
        let shown = inner.exports.list().await.map_err(|e| failed("listing exports", e.to_string()))?;
        for export in shown.iter().filter(|export| !export.memory && export.name.starts_with(PREFIX)) {
            inner
                .exports
                .close_disk(&export.name)
                .await
                .map_err(|e| failed("closing an export", e.to_string()))?;
        }
        let inner = self.inner.clone();
        tokio::task::spawn_blocking(move || inner.clear_staging())
            .await
            .map_err(|e| failed("clearing the staging folder", e.to_string()))?
            .map_err(|e| failed("clearing the staging folder", e.to_string()))
    }

    /// What is kept for the next pull: the records of finished layers, and the layers that are about to be recorded. Blocks.
    pub fn cached(&self) -> std::io::Result<Vec<CacheRecord>> {
        // A note goes when its record is there, so that no layer is missed between the two.
        let mut found = self.inner.under_way()?;
        found.extend(self.inner.chains.list()?);
        Ok(found)
    }

    pub(crate) fn home(&self) -> &Home {
        &self.inner.home
    }

    pub(crate) fn settings(&self) -> &ImageSettings {
        &self.inner.settings
    }

    pub(crate) fn check_room(&self, bytes: u64) -> Result<(), LayerError> {
        self.inner.check_room(bytes)
    }

    /// Finds an image.
    pub(crate) async fn resolve(
        &self,
        reference: &ImageReference,
        auth: Option<RegistryAuth>,
    ) -> Result<(Arc<dyn ImageSource>, ResolvedImage), ImageError> {
        if let ImageReference::Registry(name) = reference {
            let mut misses = Vec::new();
            for candidate in Registry::candidates(name, auth.as_ref(), &self.inner.settings).await? {
                match candidate.resolve().await {
                    Ok(image) => return Ok((Arc::new(candidate), image)),
                    Err(ImageError::NotFound { message, .. }) => {
                        misses.push(format!("{}: {message}", candidate.reference()));
                    }
                    Err(error) => return Err(error),
                }
            }
            return Err(ImageError::NotFound { reference: name.clone(), message: misses.join("; ") });
        }
        // Reading the index of an archive goes through the whole file.
        let (wanted, shown) = (reference.clone(), reference.to_string());
        let source = tokio::task::spawn_blocking(move || -> Result<Arc<dyn ImageSource>, ImageError> {
            Ok(match wanted {
                ImageReference::OciDir { path, tag } => Arc::new(Layout::folder(shown, &path, tag)?),
                ImageReference::OciArchive { path, tag } => Arc::new(Layout::archive(shown, &path, tag)?),
                ImageReference::DockerArchive { path, tag } => {
                    Arc::new(DockerArchive::open(shown, &path, tag)?)
                }
                ImageReference::Registry(name) => return Err(ImageError::Reference(name)),
            })
        })
        .await
        .map_err(|error| ImageError::Io {
            context: "opening the image".to_owned(),
            message: error.to_string(),
        })??;
        let image = source.resolve().await?;
        Ok((source, image))
    }

    /// What can be refused before any work is done.
    fn check(&self, image: &ResolvedImage) -> Result<(), ImageError> {
        let (limits, layers) = (&self.inner.settings.limits, image.layers.len());
        let damaged = |message| ImageError::Damaged { reference: image.reference.clone(), message };
        if layers == 0 {
            return Err(damaged("it has no layers, so there is nothing to boot".to_owned()));
        }
        if layers > limits.layers {
            return Err(damaged(format!("it has {layers} layers, and {} are allowed", limits.layers)));
        }
        for layer in image.layers.iter().filter(|_| image.form == Form::Tars) {
            if layer.expected.size > limits.layer_bytes {
                return Err(ImageError::Hostile {
                    layer: layer.key.clone(),
                    message: format!(
                        "it has {} bytes, and {} are allowed",
                        layer.expected.size, limits.layer_bytes
                    ),
                });
            }
        }
        Ok(())
    }

    /// One layer: found, waited for, or made.
    async fn layer(
        &self,
        index: usize,
        mut job: Job,
        progress: &(dyn Fn(PullProgress) + Send + Sync),
    ) -> Result<Option<LayerRef>, ImageError> {
        let disk_size = self.inner.settings.disk_size;
        let find = |job: &Job| self.inner.chains.find(&job.chain, disk_size, &job.beneath);
        if let Some(record) = find(&job) {
            progress(PullProgress::Reused { index });
            return Ok(record.layer);
        }
        let work = self.work_on(job.chain);
        job.meter = work.meter.clone();
        let total = job.blob.expected.size;
        let mut ticks = tokio::time::interval(TICK);
        let mut told = None;
        let mut tell = || {
            let done = work.meter.load(Ordering::Relaxed);
            if told.replace(done) != Some(done) {
                progress(PullProgress::Applying { index, done, total });
            }
        };

        let mut waiting = std::pin::pin!(work.lock.clone().lock_owned());
        let turn = loop {
            tokio::select! {
                turn = &mut waiting => break turn,
                _ = ticks.tick() => tell(),
            }
        };
        if let Some(record) = find(&job) {
            progress(PullProgress::Reused { index });
            return Ok(record.layer);
        }
        work.meter.store(0, Ordering::Relaxed);
        let (inner, kept) = (self.inner.clone(), work.clone());
        let mut making = tokio::spawn(async move {
            let made = inner.make(&job).await;
            // Both live as long as the work: should who asked go away, whoever comes next finds it and waits.
            drop((turn, kept));
            made
        });
        let made = loop {
            tokio::select! {
                made = &mut making => break made,
                _ = ticks.tick() => tell(),
            }
        };
        let layer = made.map_err(|error| ImageError::Io {
            context: "making a layer".to_owned(),
            message: error.to_string(),
        })??;
        tell();
        progress(PullProgress::Sealed { index });
        Ok(layer)
    }

    fn work_on(&self, chain: Digest) -> Arc<Work> {
        let mut all = self.inner.work.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, work| work.strong_count() > 0);
        if let Some(work) = all.get(&chain).and_then(Weak::upgrade) {
            return work;
        }
        let work = Arc::new(Work::default());
        all.insert(chain, Arc::downgrade(&work));
        work
    }
}

impl Inner {
    /// Makes a layer, and leaves nothing else behind whether or not it succeeds.
    async fn make(&self, job: &Job) -> Result<Option<LayerRef>, ImageError> {
        let name = format!("{PREFIX}{}", uuid::Uuid::new_v4().simple());
        let staging = self.home.staging().join(&name);
        let about = |error: LayerError| error.of(&job.reference, &job.blob.key);
        fs::create_dir_all(&staging)
            .map_err(|error| about(LayerError::io(format!("making {}", staging.display()), error)))?;
        let made = self.make_in(job, &name, &staging).await;
        if let Err(error) = self.exports.close_disk(&name).await {
            tracing::error!(export = name, %error, "an image's export stays open");
        }
        if let Err(error) = fs::remove_dir_all(&staging) {
            tracing::error!(staging = %staging.display(), %error, "a staging folder stays");
        }
        made.map_err(|error| about(self.explain(error)))
    }

    async fn make_in(
        &self,
        job: &Job,
        name: &str,
        staging: &std::path::Path,
    ) -> Result<Option<LayerRef>, LayerError> {
        let disk_size = self.settings.disk_size;
        self.check_room(job.blob.expected.size)?;
        // Opened first: a registry that refuses costs nothing.
        let blob = job.source.open(&job.blob).await?;
        let export = self
            .exports
            .open_disk(DiskExport {
                name: name.to_owned(),
                size: disk_size,
                layers: job.beneath.iter().map(|layer| self.home.layer(&layer.name)).collect(),
                upper: Some(staging.join("upper")),
            })
            .await
            .map_err(|error| refused("opening an export", &error))?;
        if job.beneath.is_empty() {
            disk::format(&export, disk_size, &staging.join("blank.ext4")).await?;
        }

        let application = Application {
            export,
            is_base: job.beneath.is_empty(),
            limits: self.settings.limits.clone(),
            disk_size,
            diff_id: job.diff_id,
        };
        let stored = Stored::new(blob, job.blob.expected.clone(), job.meter.clone());
        tokio::task::spawn_blocking(move || application.run(stored)).await.map_err(|error| {
            LayerError::Io { context: "applying a layer".to_owned(), message: error.to_string() }
        })??;

        let layer_name = LayerName::new_local();
        let target = self.home.layer(&layer_name);
        let failed = |error| LayerError::io("recording a layer", error);
        // Should this process die between sealing and recording, `recover` finds the layer by this note.
        aenv_durable::write(&staging.join(TARGET), layer_name.file_name().as_bytes()).map_err(failed)?;
        let sealed = self
            .exports
            .seal(name, target.clone())
            .await
            .map_err(|error| refused("sealing a layer", &error))?;
        let layer = sealed.layer.map(|_| LayerRef { name: layer_name, size: sealed.size });
        self.chains.record(job.chain, disk_size, &job.beneath, layer).map_err(|error| {
            let _ = fs::remove_file(&target);
            failed(error)
        })?;
        Ok(layer)
    }

    /// Bytes that the disk of `<home>` has left.
    fn room(&self) -> Option<u64> {
        let state = statvfs(self.home.path()).ok()?;
        Some(state.blocks_available().saturating_mul(state.fragment_size()))
    }

    /// A layer unpacks to no less than its stored size.
    fn check_room(&self, bytes: u64) -> Result<(), LayerError> {
        match self.room() {
            Some(room) if room < bytes.saturating_add(HOST_RESERVE) => Err(LayerError::NoSpace(format!(
                "{} has {room} bytes left, and {bytes} bytes are to be written",
                self.home.path().display()
            ))),
            _ => Ok(()),
        }
    }

    /// A full disk beneath an export shows as an I/O error of the filesystem in it.
    fn explain(&self, error: LayerError) -> LayerError {
        match (&error, self.room()) {
            (LayerError::Io { .. }, Some(room)) if room < HOST_RESERVE => {
                LayerError::NoSpace(format!("{} has {room} bytes left: {error}", self.home.path().display()))
            }
            _ => error,
        }
    }

    /// Layers that are being sealed now, by the notes in the staging folder.
    fn under_way(&self) -> std::io::Result<Vec<CacheRecord>> {
        let mut found = Vec::new();
        for item in fs::read_dir(self.home.staging())? {
            let item = item?;
            if !item.file_name().to_string_lossy().starts_with(PREFIX) {
                continue;
            }
            let note = fs::read_to_string(item.path().join(TARGET)).unwrap_or_default();
            let Ok(name) = note.replacen('-', ":", 1).parse::<LayerName>() else { continue };
            found.push(CacheRecord {
                file: None,
                last_used: std::time::SystemTime::now(),
                own_bytes: 0,
                layers: vec![LayerRef { name, size: 0 }],
            });
        }
        Ok(found)
    }

    fn clear_staging(&self) -> std::io::Result<()> {
        let listing = match fs::read_dir(self.home.staging()) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        for item in listing {
            let item = item?;
            if !item.file_name().to_string_lossy().starts_with(PREFIX) {
                continue;
            }
            let note = fs::read_to_string(item.path().join(TARGET)).unwrap_or_default();
            // The note is ours, and still only a name of the layers folder is ever removed.
            let is_layer = note.replacen('-', ":", 1).parse::<LayerName>().is_ok();
            if is_layer && !self.chains.names(&note) {
                match fs::remove_file(self.home.layers().join(&note)) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
            fs::remove_dir_all(item.path())?;
        }
        Ok(())
    }
}

/// The part of a layer's making that blocks.
struct Application {
    export: PathBuf,
    /// Whether this is the first layer, whose filesystem was just made.
    is_base: bool,
    limits: ImageLimits,
    disk_size: u64,
    diff_id: Digest,
}

impl Application {
    fn run(&self, stored: Stored<Box<dyn std::io::Read + Send>>) -> Result<(), LayerError> {
        let disk = MountedDisk::mount(&self.export)?;
        match self.apply(&disk, stored) {
            Ok(()) => disk.unmount(),
            Err(LayerError::NoSpace(message)) if disk.is_full() => {
                let size = self.disk_size >> 20;
                Err(LayerError::NoSpace(format!(
                    "it does not fit on the image's disk of {size} MiB ({message})"
                )))
            }
            Err(error) => Err(error),
        }
    }

    fn apply(
        &self,
        disk: &MountedDisk,
        stored: Stored<Box<dyn std::io::Read + Send>>,
    ) -> Result<(), LayerError> {
        let root = disk.root()?;
        if self.is_base {
            // mke2fs's own folder; an image does not have it.
            nix::unistd::unlinkat(&root, "lost+found", UnlinkatFlags::RemoveDir)
                .map_err(|error| LayerError::io("emptying the new filesystem", error))?;
        }
        let mut tar = TarReader::new(Unpacked::new(stored, self.limits.layer_bytes)?);
        let entries = Applier::new(root, &self.limits, self.disk_size).apply(&mut tar)?;
        let found = tar.into_inner().finish()?;
        if found != self.diff_id {
            return Err(LayerError::Damaged(format!(
                "it unpacks to {found}, and the config says {}",
                self.diff_id
            )));
        }
        tracing::debug!(entries, diff_id = %self.diff_id, "layer applied");
        Ok(())
    }
}

fn refused(context: &str, error: &aenv_blockd::ExportError) -> LayerError {
    LayerError::Io { context: context.to_owned(), message: error.to_string() }
}
