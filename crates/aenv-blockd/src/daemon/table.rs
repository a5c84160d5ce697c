//! What is shown now: names, inodes, and who holds what.
//!
//! Operations on one name run one after the other (a stripe of locks keeps them apart); operations on different names do
//! not wait for each other, because opening a stack may take a while. `inner` is only ever held for moments.

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    hash::{BuildHasher, RandomState},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use aenv_store::BlockDevice;
use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::sync::Notify;
use tracing::{error, info};

use super::{
    backend::{Backend, Disk},
    check,
    node::{Node, NodeKind},
    remotes::layer_file,
    shown::{RestoreError, Shown},
    state::{DiskState, ImageState, LastSeal, State, StateFile, memory_name},
    ublk::Device,
};
use crate::exports::{DiskExport, ExportChoice, ExportError, ExportInfo, MemoryExport, Sealed};

/// Inode number of the folder.
pub(crate) const ROOT: u64 = 1;

const STRIPES: usize = 64;

/// Memory images that nobody holds and whose inode is kept, because the kernel may still have their pages: a launch from
/// the same checkpoint a little later then reads nothing.
const IDLE_IMAGES: usize = 32;

/// Everything that is shown.
pub(crate) struct Table {
    mount: PathBuf,
    backend: Box<dyn Backend>,
    shown: Shown,
    file: StateFile,
    inner: RwLock<Inner>,
    disk_stripes: Stripes,
    holder_stripes: Stripes,
    image_stripes: Stripes,
    changed: Notify,
}

#[derive(Default)]
struct Inner {
    next_ino: u64,
    nodes: HashMap<u64, Arc<Node>>,
    names: HashMap<String, u64>,
    disks: HashMap<String, ShownDisk>,
    images: HashMap<ImageKey, Image>,
    holders: HashMap<String, ImageKey>,
    /// Images without holders, longest idle first.
    idle: VecDeque<ImageKey>,
    /// Files whose inodes and pages the kernel need not keep any longer.
    forgotten: Vec<Forgotten>,
    /// Inodes whose pages the kernel must read again.
    spoiled: Vec<u64>,
}

struct ShownDisk {
    export: DiskExport,
    node: Arc<Node>,
    disk: Arc<dyn Disk>,
    /// What shows it, if it is not a file of the mount.
    device: Option<Device>,
    sealing: Option<PathBuf>,
    last_seal: Option<LastSeal>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct ImageKey {
    layers: Vec<PathBuf>,
    size: u64,
    group: Option<String>,
}

struct Image {
    node: Arc<Node>,
    /// What the layers' files were when the inode was made: other files under the same names are another image.
    stamps: Vec<Stamp>,
    holders: BTreeSet<String>,
}

/// A file that is gone: its inode number and its name.
pub(crate) type Forgotten = (u64, String);

type Stamp = (u64, u64, u64, i64, i64);

struct Stripes {
    hasher: RandomState,
    locks: Vec<Mutex<()>>,
}

impl Stripes {
    fn new() -> Self {
        Self { hasher: RandomState::new(), locks: (0..STRIPES).map(|_| Mutex::new(())).collect() }
    }

    fn lock(&self, name: &impl std::hash::Hash) -> MutexGuard<'_, ()> {
        self.locks[self.hasher.hash_one(name) as usize % STRIPES].lock()
    }
}

impl Table {
    /// A table that shows again what `state` lists. What cannot be shown any more is logged and left out. `workers` do the I/O of
    /// block devices.
    pub(crate) fn restore(
        mount: PathBuf,
        backend: Box<dyn Backend>,
        state: PathBuf,
        choice: ExportChoice,
        workers: usize,
    ) -> Result<Self, RestoreError> {
        let file = StateFile::new(state);
        let kept = file.load()?;
        let shown = Shown::choose(choice, &kept, workers)?;
        let inner = Inner { next_ino: kept.next_ino.max(ROOT + 1), ..Inner::default() };
        let table = Self {
            mount,
            backend,
            shown,
            file,
            inner: RwLock::new(inner),
            disk_stripes: Stripes::new(),
            holder_stripes: Stripes::new(),
            image_stripes: Stripes::new(),
            changed: Notify::new(),
        };
        let exports = kept.disks.len() + kept.images.len();
        for disk in kept.disks {
            let name = disk.export.name.clone();
            if let Err(error) = table.restore_disk(disk) {
                error!(export = name, %error, "a disk of the blockd before cannot be shown any more");
            }
        }
        for image in kept.images {
            let holders = format!("{:?}", image.holders);
            if let Err(error) = table.restore_image(image) {
                error!(holders, %error, "a memory image of the blockd before cannot be shown any more");
            }
        }
        if exports > 0 {
            info!(exports, "took over the exports of the blockd before");
        }
        if let Some(devices) = table.shown.devices() {
            let inner = table.inner.read();
            let known = inner.disks.values().filter_map(|disk| Some(disk.device.as_ref()?.id()));
            let known: HashSet<u32> = known.collect();
            drop(inner);
            devices.sweep(&known);
        }
        // The mark before the first device that has it, and the devices that are there now.
        table.save().map_err(|error| RestoreError::Keep { message: error.to_string() })?;
        Ok(table)
    }

    fn restore_disk(&self, kept: DiskState) -> Result<(), ExportError> {
        let mut export = kept.export;
        // The seal that was going on is done if its layer is there: the upper beneath the name is a fresh one then.
        if let Some(target) = kept.sealing
            && target.exists()
        {
            export.layers.push(target);
        }
        let disk = self.backend.disk(&export)?;
        let node = disk_node(kept.ino, &export, &disk);
        let taken = kept.ublk.and_then(|id| match self.shown.take_over(id, &node) {
            Ok(device) => Some(device),
            Err(error) => {
                error!(export = export.name, %error, "who has the disk open cannot use it any more");
                None
            }
        });
        let device = match taken {
            Some(device) => Some(device),
            None => self.shown.new_device(&node)?,
        };
        self.inner.write().show_disk(node, export, disk, device, kept.last_seal);
        Ok(())
    }

    fn restore_image(&self, kept: ImageState) -> Result<(), ExportError> {
        let key = ImageKey { layers: kept.layers, size: kept.size, group: kept.group };
        let stamps = stamps(&key.layers)?;
        let device = self.backend.memory(&key.layers, key.size)?;
        let mut inner = self.inner.write();
        let node = Arc::new(Node::new(kept.ino, kept.name, key.size, NodeKind::Memory, device));
        inner.add_node(Arc::clone(&node));
        for holder in &kept.holders {
            inner.holders.insert(holder.clone(), key.clone());
        }
        inner.images.insert(key, Image { node, stamps, holders: kept.holders });
        Ok(())
    }

    /// See [`crate::Exports::open_disk`]. The same export again is no error.
    pub(crate) fn open_disk(&self, export: DiskExport) -> Result<PathBuf, ExportError> {
        check::disk(&export)?;
        let _alone = self.disk_stripes.lock(&export.name);
        let path = self.mount.join(disk_name(&export.name));
        if let Some(shown) = self.inner.read().disks.get(&export.name) {
            if shown.export == export {
                return Ok(path);
            }
            return Err(ExportError::Exists { name: export.name });
        }
        let taken = |shown: &&ShownDisk| shown.export.upper == export.upper;
        if export.upper.is_some()
            && let Some(other) = self.inner.read().disks.values().find(taken)
        {
            let message =
                format!("the upper of {} is in use by the export {}", export.name, other.export.name);
            return Err(ExportError::Invalid { message });
        }
        let disk = self.backend.disk(&export)?;
        let name = export.name.clone();
        let ino = self.inner.write().take_ino();
        let node = disk_node(ino, &export, &disk);
        let device = self.shown.new_device(&node)?;
        let number = device.as_ref().map(Device::id);
        self.inner.write().show_disk(node, export, disk, device, None);
        if let Err(error) = self.save() {
            self.take_away(&name);
            return Err(error);
        }
        info!(export = name, ublk = number, "shown");
        Ok(path)
    }

    /// See [`crate::Exports::open_memory`]. A holder that held another image lets go of it.
    pub(crate) fn open_memory(&self, export: MemoryExport) -> Result<PathBuf, ExportError> {
        check::memory(&export)?;
        let MemoryExport { holder, size, layers, group } = export;
        let key = ImageKey { layers, size, group };
        let _alone = self.holder_stripes.lock(&holder);
        let opening = self.image_stripes.lock(&key);
        let stamps = stamps(&key.layers)?;
        let fits = |image: &&Image| image.stamps == stamps && image.node.is_served();
        // Opened outside of `inner`; nobody else opens this image meanwhile. The last VMM that has it open may close it
        // meanwhile, though: then a device is needed after all.
        let mut device = None;
        let name = loop {
            if device.is_none() && self.inner.read().images.get(&key).filter(fits).is_none() {
                device = Some(self.backend.memory(&key.layers, key.size)?);
            }
            if let Some(name) = self.inner.write().hold(&holder, &key, &stamps, device.clone()) {
                break name;
            }
        };
        drop(opening);
        self.save()?;
        info!(holder, "memory image held");
        Ok(self.mount.join(name))
    }

    /// See [`crate::Exports::seal`]. The same seal again gives the same answer.
    pub(crate) fn seal(&self, name: &str, target: &Path) -> Result<Sealed, ExportError> {
        check::path(target)?;
        let _alone = self.disk_stripes.lock(&name.to_owned());
        let disk = {
            let mut inner = self.inner.write();
            let Some(shown) = inner.disks.get_mut(name) else {
                return Err(ExportError::NotFound { name: name.to_owned() });
            };
            if let Some(last) = shown.last_seal.as_ref().filter(|last| last.target == target) {
                return Ok(last.sealed.clone());
            }
            if shown.node.kind == NodeKind::ReadOnlyDisk {
                let message = format!("{name} is read-only: there is nothing to seal");
                return Err(ExportError::Invalid { message });
            }
            shown.sealing = Some(target.to_owned());
            Arc::clone(&shown.disk)
        };
        // A blockd that dies in the seal is followed by one that knows where to look.
        self.save()?;
        let result = self.write_back(name).and_then(|()| disk.seal(target));
        {
            let mut inner = self.inner.write();
            if let Some(shown) = inner.disks.get_mut(name) {
                shown.sealing = None;
                if let Ok(sealed) = &result {
                    shown.export.layers.extend(sealed.layer.clone());
                    shown.last_seal = Some(LastSeal { target: target.to_owned(), sealed: sealed.clone() });
                }
            }
        }
        self.save()?;
        let sealed = result?;
        info!(export = name, layer = ?sealed.layer, size = sealed.size, "sealed");
        Ok(sealed)
    }

    /// See [`crate::Exports::close_disk`]. After it nothing writes to the upper, even if a VMM still has the file open.
    pub(crate) fn close_disk(&self, name: &str) -> Result<(), ExportError> {
        let _alone = self.disk_stripes.lock(&name.to_owned());
        let Some(shown) = self.take_away(name) else { return Ok(()) };
        shown.node.revoke();
        if shown.node.kind == NodeKind::Disk
            && let Err(error) = shown.disk.flush()
        {
            error!(export = name, %error, "what was written last may not be on the host's disk");
        }
        self.save()?;
        info!(export = name, "closed");
        Ok(())
    }

    /// Stops showing a disk: its block device first, which may still hand over what was written to it.
    fn take_away(&self, name: &str) -> Option<ShownDisk> {
        let device = self.inner.write().disks.get_mut(name).and_then(|shown| shown.device.take());
        if let Some(device) = device {
            device.remove();
        }
        self.inner.write().hide_disk(name)
    }

    /// What a VMM wrote to a block device may lie in the host's page cache; a seal has it all.
    fn write_back(&self, name: &str) -> Result<(), ExportError> {
        let path = self.inner.read().disks.get(name).and_then(|shown| Some(shown.device.as_ref()?.path()));
        let Some(path) = path else { return Ok(()) };
        let synced = std::fs::File::open(&path).and_then(|device| device.sync_all());
        synced.map_err(|error| ExportError::Io { message: format!("{}: {error}", path.display()) })
    }

    /// See [`crate::Exports::close_memory`]. VMMs that still map the image go on reading it.
    pub(crate) fn close_memory(&self, holder: &str) -> Result<(), ExportError> {
        let _alone = self.holder_stripes.lock(&holder.to_owned());
        if !self.inner.write().let_go(holder) {
            return Ok(());
        }
        self.save()?;
        info!(holder, "memory image let go");
        Ok(())
    }

    /// See [`crate::Exports::list`].
    pub(crate) fn list(&self) -> Vec<ExportInfo> {
        let inner = self.inner.read();
        let disks = inner.disks.values().map(|shown| ExportInfo {
            name: shown.export.name.clone(),
            memory: false,
            path: self.mount.join(disk_name(&shown.export.name)),
            size: shown.export.size,
            layers: shown.export.layers.clone(),
        });
        let holders = inner.holders.iter().filter_map(|(holder, key)| {
            let image = inner.images.get(key)?;
            Some(ExportInfo {
                name: holder.clone(),
                memory: true,
                path: self.mount.join(&image.node.name),
                size: key.size,
                layers: key.layers.clone(),
            })
        });
        let mut all: Vec<_> = disks.chain(holders).collect();
        all.sort_by(|a, b| (a.memory, &a.name).cmp(&(b.memory, &b.name)));
        all
    }

    /// How disks are shown that are opened now, and why.
    pub(crate) fn shown(&self) -> &Shown {
        &self.shown
    }

    /// Makes what was written to all disks durable.
    pub(crate) fn flush_all(&self) {
        let disks: Vec<_> = self
            .inner
            .read()
            .disks
            .values()
            .map(|shown| (shown.export.name.clone(), Arc::clone(&shown.disk)))
            .collect();
        for (name, disk) in disks {
            if let Err(error) = disk.flush() {
                error!(export = name, %error, "cannot flush");
            }
        }
    }

    /// A shown file, by name.
    pub(crate) fn lookup(&self, name: &str) -> Option<Arc<Node>> {
        let inner = self.inner.read();
        inner.names.get(name).and_then(|ino| inner.nodes.get(ino)).cloned()
    }

    /// A shown or still open file, by inode number.
    pub(crate) fn node(&self, ino: u64) -> Option<Arc<Node>> {
        self.inner.read().nodes.get(&ino).cloned()
    }

    /// The names in the folder, with their inode numbers, in order of the latter.
    pub(crate) fn names(&self) -> Vec<(u64, String)> {
        let mut names: Vec<_> =
            self.inner.read().names.iter().map(|(name, ino)| (*ino, name.clone())).collect();
        names.sort();
        names
    }

    /// Takes note that an open file of a node was closed.
    pub(crate) fn released(&self, node: &Node) {
        if node.released() {
            self.inner.write().tidy(node.ino);
        }
    }

    /// Takes note that somebody wrote to a memory image. The write was refused, but only after the kernel had put it in its
    /// cached pages, which siblings map: it must read them again.
    pub(crate) fn spoiled(&self, node: &Node) {
        error!(image = node.ino, "a process wrote to a memory image; its siblings get the right pages again");
        {
            let mut inner = self.inner.write();
            if !inner.spoiled.contains(&node.ino) {
                inner.spoiled.push(node.ino);
            }
        }
        self.changed.notify_one();
    }

    /// Inodes whose cached pages the kernel must read again, since the last call.
    pub(crate) fn take_spoiled(&self) -> Vec<u64> {
        std::mem::take(&mut self.inner.write().spoiled)
    }

    /// Resolves when there is something to tell the kernel at once.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Files that the kernel may drop, since the last call.
    pub(crate) fn take_forgotten(&self) -> Vec<Forgotten> {
        std::mem::take(&mut self.inner.write().forgotten)
    }

    fn save(&self) -> Result<(), ExportError> {
        let mark = self.shown.mark();
        self.file.save(|| State { ublk_mark: mark, ..self.inner.read().state() }).map_err(|error| {
            ExportError::Io { message: format!("the list of exports cannot be kept: {error}") }
        })
    }
}

impl Inner {
    fn take_ino(&mut self) -> u64 {
        let ino = self.next_ino;
        self.next_ino += 1;
        ino
    }

    fn add_node(&mut self, node: Arc<Node>) {
        self.names.insert(node.name.clone(), node.ino);
        self.nodes.insert(node.ino, node);
    }

    fn show_disk(
        &mut self,
        node: Arc<Node>,
        export: DiskExport,
        disk: Arc<dyn Disk>,
        device: Option<Device>,
        last_seal: Option<LastSeal>,
    ) {
        self.add_node(Arc::clone(&node));
        let shown = ShownDisk { export, node, disk, device, sealing: None, last_seal };
        self.disks.insert(shown.export.name.clone(), shown);
    }

    fn hide_disk(&mut self, name: &str) -> Option<ShownDisk> {
        let shown = self.disks.remove(name)?;
        self.names.remove(&shown.node.name);
        self.tidy(shown.node.ino);
        Some(shown)
    }

    /// Makes `holder` a holder of an image and returns its file's name. `None` when `device` is missing and no inode of the
    /// image is served.
    fn hold(
        &mut self,
        holder: &str,
        key: &ImageKey,
        stamps: &[Stamp],
        device: Option<Arc<dyn BlockDevice>>,
    ) -> Option<String> {
        let fitting = self.images.get(key).filter(|image| image.stamps == stamps);
        match (fitting.map(|image| Arc::clone(&image.node)), device) {
            (Some(node), _) if node.is_served() => {
                self.names.insert(node.name.clone(), node.ino);
            }
            (Some(node), Some(device)) => {
                node.restore(device);
                self.names.insert(node.name.clone(), node.ino);
            }
            (None, Some(device)) => {
                let ino = self.take_ino();
                let node = Arc::new(Node::new(ino, memory_name(), key.size, NodeKind::Memory, device));
                self.add_node(Arc::clone(&node));
                let image = Image { node, stamps: stamps.to_vec(), holders: BTreeSet::new() };
                if let Some(before) = self.images.insert(key.clone(), image) {
                    self.names.remove(&before.node.name);
                    self.tidy(before.node.ino);
                }
            }
            (_, None) => return None,
        }
        if self.holders.get(holder).is_some_and(|held| held != key) {
            self.let_go(holder);
        }
        self.idle.retain(|idle| idle != key);
        self.holders.insert(holder.to_owned(), key.clone());
        let image = self.images.get_mut(key)?;
        image.holders.insert(holder.to_owned());
        Some(image.node.name.clone())
    }

    /// `false` when the holder held nothing.
    fn let_go(&mut self, holder: &str) -> bool {
        let Some(key) = self.holders.remove(holder) else { return false };
        let Some(image) = self.images.get_mut(&key) else { return true };
        image.holders.remove(holder);
        if image.holders.is_empty() {
            let ino = image.node.ino;
            self.names.remove(&image.node.name);
            self.idle.push_back(key);
            self.tidy(ino);
            while self.idle.len() > IDLE_IMAGES {
                if let Some(image) = self.idle.pop_front().and_then(|oldest| self.images.remove(&oldest)) {
                    self.tidy(image.node.ino);
                }
            }
        }
        true
    }

    /// Gives back what a node that is neither shown nor open has no need of.
    fn tidy(&mut self, ino: u64) {
        let Some(node) = self.nodes.get(&ino) else { return };
        if self.names.contains_key(&node.name) || node.is_open() {
            return;
        }
        // The layers' files may be deleted now, and their room on the host's disk with them.
        node.revoke();
        let kept = node.kind == NodeKind::Memory && self.images.values().any(|image| image.node.ino == ino);
        if !kept {
            self.forgotten.push((ino, node.name.clone()));
            self.nodes.remove(&ino);
        }
    }

    fn state(&self) -> State {
        let disks = self.disks.values().map(|shown| DiskState {
            ino: shown.node.ino,
            export: shown.export.clone(),
            ublk: shown.device.as_ref().map(Device::id),
            sealing: shown.sealing.clone(),
            last_seal: shown.last_seal.clone(),
        });
        let held = self.images.iter().filter(|(_, image)| !image.holders.is_empty());
        let images = held.map(|(key, image)| ImageState {
            ino: image.node.ino,
            name: image.node.name.clone(),
            size: key.size,
            layers: key.layers.clone(),
            group: key.group.clone(),
            holders: image.holders.clone(),
        });
        let (disks, images) = (disks.collect(), images.collect());
        State { next_ino: self.next_ino, ublk_mark: 0, disks, images }
    }
}

fn disk_node(ino: u64, export: &DiskExport, disk: &Arc<dyn Disk>) -> Arc<Node> {
    let kind = if export.upper.is_some() { NodeKind::Disk } else { NodeKind::ReadOnlyDisk };
    let device = Arc::clone(disk) as Arc<dyn BlockDevice>;
    Arc::new(Node::new(ino, disk_name(&export.name), export.size, kind, device))
}

fn disk_name(name: &str) -> String {
    format!("{name}.disk")
}

fn stamps(layers: &[PathBuf]) -> Result<Vec<Stamp>, ExportError> {
    let stamp = |layer: &PathBuf| match layer_file(layer) {
        Ok((_, file)) => Ok((file.dev(), file.ino(), file.size(), file.mtime(), file.mtime_nsec())),
        Err(error) => Err(ExportError::Layer { path: layer.clone(), message: error.to_string() }),
    };
    layers.iter().map(stamp).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::daemon::ram_disk::RamBackend;

    struct Shared(Arc<RamBackend>);

    impl Backend for Shared {
        fn disk(&self, export: &DiskExport) -> Result<Arc<dyn Disk>, ExportError> {
            self.0.disk(export)
        }

        fn memory(&self, layers: &[PathBuf], size: u64) -> Result<Arc<dyn BlockDevice>, ExportError> {
            self.0.memory(layers, size)
        }
    }

    fn table(folder: &Path, backend: &Arc<RamBackend>) -> Table {
        let backend = Box::new(Shared(Arc::clone(backend)));
        Table::restore("/exports".into(), backend, folder.join("state"), ExportChoice::Fuse, 1).unwrap()
    }

    fn disk(name: &str) -> DiskExport {
        DiskExport { name: name.into(), size: 4096, layers: vec![], upper: Some(format!("/{name}").into()) }
    }

    fn image(holder: &str, layer: &Path) -> MemoryExport {
        MemoryExport { holder: holder.into(), size: 4096, layers: vec![layer.to_owned()], group: None }
    }

    #[test]
    fn a_seal_that_was_cut_short_is_taken_as_what_it_became() {
        let folder = tempfile::tempdir().unwrap();
        let backend = Arc::new(RamBackend::default());
        for (name, exists) in [("done", true), ("undone", false)] {
            let before = table(folder.path(), &backend);
            before.open_disk(disk(name)).unwrap();
            let target = folder.path().join(name);
            before.inner.write().disks.get_mut(name).unwrap().sealing = Some(target.clone());
            before.save().unwrap();
            if exists {
                std::fs::write(&target, "a layer").unwrap();
            }
            let after = table(folder.path(), &backend);
            let listed = after.list().into_iter().find(|export| export.name == name).unwrap();
            assert_eq!(listed.layers, if exists { vec![target] } else { vec![] });
        }
    }

    #[test]
    fn an_image_is_open_as_long_as_it_is_held_or_mapped() {
        let folder = tempfile::tempdir().unwrap();
        let layer = folder.path().join("layer");
        std::fs::write(&layer, "x").unwrap();
        let backend = Arc::new(RamBackend::default());
        let table = table(folder.path(), &backend);
        let opens = || backend.memory_opens.load(Ordering::Relaxed);
        let path = table.open_memory(image("a", &layer)).unwrap();
        assert_eq!(table.open_memory(image("b", &layer)).unwrap(), path);
        assert_eq!(opens(), 1);
        let name = path.file_name().unwrap().to_str().unwrap();
        let node = table.lookup(name).unwrap();
        node.opened();
        table.close_memory("a").unwrap();
        assert!(table.lookup(name).is_some());
        table.close_memory("b").unwrap();
        assert!(table.lookup(name).is_none());
        assert!(node.is_served(), "it is mapped still");
        table.released(&node);
        assert!(!node.is_served());
        assert_eq!(table.open_memory(image("c", &layer)).unwrap(), path, "the inode was kept");
        assert_eq!(opens(), 2);
        // Other bytes under the same name are another image.
        std::fs::write(&layer, "other").unwrap();
        assert_ne!(table.open_memory(image("d", &layer)).unwrap(), path);
    }

    #[test]
    fn idle_images_are_forgotten_in_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let table = table(folder.path(), &Arc::new(RamBackend::default()));
        for number in 0..IDLE_IMAGES + 3 {
            let layer = folder.path().join(format!("layer-{number}"));
            std::fs::write(&layer, "x").unwrap();
            table.open_memory(image("a", &layer)).unwrap();
        }
        table.close_memory("a").unwrap();
        let gone: Vec<_> = table.take_forgotten().into_iter().map(|(ino, _)| ino).collect();
        assert_eq!(gone, [2, 3, 4]);
        assert!(table.list().is_empty());
    }
}
