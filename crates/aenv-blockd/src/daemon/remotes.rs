//! Layers that are elsewhere: beside the name of a layer's file, `<file>.remote` says where. They are read by ranges, through a
//! cache on the local disk.

use std::{
    fs::{self, Metadata},
    io,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, SystemTime},
};

use aenv_cache::{BlockCache, CacheConfig, CachedSource, SourceId};
use aenv_remote::{
    Bounds, Credentials, Identity, Location, ObjectSource, Place, RegistryClient, RegistrySource,
    Remotes as Settings,
};
use aenv_store::{BlockSource, FileSource};
use object_store::ObjectStore;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;

use super::{
    fill,
    trace::{self, Recording, Traces},
};

/// The file of a layer: its own, or the one that says where it is.
pub(crate) fn layer_file(path: &Path) -> io::Result<(PathBuf, Metadata)> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let remote = remote_file(path);
            // Without either, the error is about the file that was asked for.
            fs::metadata(&remote).map(|found| (remote, found)).map_err(|_| error)
        }
        found => found.map(|found| (path.to_owned(), found)),
    }
}

fn remote_file(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".remote");
    name.into()
}

/// The bytes of a layer that is elsewhere.
pub(crate) struct Remote {
    pub bytes: Arc<dyn BlockSource>,
    /// The same, where they come through the cache.
    pub cached: Option<CachedSource>,
    /// Bytes that its index, or its jump table, may have.
    pub table_bytes: u64,
}

/// Folder of boot traces in the cache's folder.
pub const TRACES: &str = "traces";

/// Opens layers that are elsewhere.
pub struct Remotes {
    /// Says how places are reached; read again when it changes.
    settings: PathBuf,
    runtime: Handle,
    opened: Mutex<Option<Opened>>,
    cache: Mutex<Option<BlockCache>>,
    fills: Mutex<Option<mpsc::Sender<(CachedSource, String)>>>,
}

#[derive(Clone)]
struct Opened {
    changed: Option<SystemTime>,
    settings: Arc<Settings>,
    repository: Arc<dyn ObjectStore>,
    registries: RegistryClient,
    bounds: Bounds,
}

impl Remotes {
    /// With the settings of a file, which need not be there yet.
    pub fn new(settings: PathBuf, runtime: Handle) -> Self {
        Self { settings, runtime, opened: Mutex::default(), cache: Mutex::default(), fills: Mutex::default() }
    }

    /// The bytes of the layer that a file tells of. Nothing is read of them yet.
    pub(crate) fn open(&self, file: &Path) -> Result<Remote, String> {
        let text = fs::read(file).map_err(|error| error.to_string())?;
        let location: Location =
            serde_json::from_slice(&text).map_err(|error| format!("it says no place: {error}"))?;
        let id = id(&location).ok_or_else(|| format!("{:?} is no digest", location.digest))?;
        let opened = self.opened()?;
        let source = opened.source(&location, &self.runtime)?;
        let table_bytes = opened.settings.table_bytes;
        // What a file holds is as near as the cache would be.
        if matches!(location.place, Place::File { .. }) {
            return Ok(Remote { bytes: source, cached: None, table_bytes });
        }
        let Some(cache) = self.cache(&opened.settings) else {
            return Ok(Remote { bytes: source, cached: None, table_bytes });
        };
        let cached = cache.source(id, source);
        if opened.settings.fill {
            self.fill(cached.clone(), location.digest);
        }
        Ok(Remote { bytes: Arc::new(cached.clone()), cached: Some(cached), table_bytes })
    }

    /// A launch begins that reads these layers, if there are any.
    pub(crate) fn launch(&self, layers: Vec<CachedSource>) -> Option<Arc<Recording>> {
        if layers.is_empty() {
            return None;
        }
        let folder = self.opened().ok()?.settings.cache.folder.join(TRACES);
        Some(Traces::new(folder, self.runtime.clone()).begin(layers))
    }

    fn opened(&self) -> Result<Opened, String> {
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", self.settings.display());
        let changed =
            fs::metadata(&self.settings).and_then(|file| file.modified()).map_err(|error| failed(&error))?;
        let mut slot = self.opened.lock();
        if let Some(opened) = slot.as_ref().filter(|opened| opened.changed == Some(changed)) {
            return Ok(opened.clone());
        }
        let text = fs::read(&self.settings).map_err(|error| failed(&error))?;
        let settings: Settings = serde_json::from_slice(&text).map_err(|error| failed(&error))?;
        let read = Duration::from_millis(settings.read_ms);
        let bounds = Bounds { read, attempt: Bounds::default().attempt.min(read), ..Bounds::default() };
        let repository = settings.repository.open_for_reads(&bounds).map_err(|error| failed(&error))?;
        let registries = RegistryClient::new().map_err(|error| failed(&error))?;
        let (changed, settings) = (Some(changed), Arc::new(settings));
        Ok(slot.insert(Opened { changed, settings, repository, registries, bounds }).clone())
    }

    /// The cache, which is opened once. Without one, layers are read all the same, slowly.
    fn cache(&self, settings: &Settings) -> Option<BlockCache> {
        let mut slot = self.cache.lock();
        if slot.is_none() {
            let cache = &settings.cache;
            let mut config = CacheConfig::new(&cache.folder, cache.capacity);
            config.reserve = cache.reserve;
            match BlockCache::open(&config) {
                Ok(cache) => {
                    cache.observe(Box::new(trace::observe));
                    *slot = Some(cache);
                }
                Err(error) => tracing::error!(%error, "remote layers are read without a cache"),
            }
        }
        slot.clone()
    }

    /// Has the rest of a layer fetched, after those that were asked for before.
    fn fill(&self, source: CachedSource, digest: String) {
        let mut fills = self.fills.lock();
        let sender = fills.get_or_insert_with(|| {
            let (sender, receiver) = mpsc::channel::<(CachedSource, String)>();
            let started = thread::Builder::new().name("fill".to_owned()).spawn(move || {
                receiver.into_iter().for_each(|(source, digest)| fill::fill(&source, &digest));
            });
            if let Err(error) = started {
                tracing::warn!(%error, "layers are not fetched in the background");
            }
            sender
        });
        // Without its thread there is nobody who fetches.
        let _ = sender.send((source, digest));
    }
}

impl Opened {
    fn source(&self, location: &Location, runtime: &Handle) -> Result<Arc<dyn BlockSource>, String> {
        match &location.place {
            Place::Repository { key } => {
                let path = object_store::path::Path::parse(key).map_err(|error| error.to_string())?;
                let store = Arc::clone(&self.repository);
                Ok(Arc::new(ObjectSource::new(runtime.clone(), store, path, location.size, self.bounds)))
            }
            Place::Registry { blob, login } => {
                let identity = match login {
                    Some(login) => Identity::Known(Credentials {
                        user: login.user.clone(),
                        password: login.password.clone(),
                    }),
                    None => Identity::Docker,
                };
                let (runtime, client) = (runtime.clone(), self.registries.clone());
                RegistrySource::new(runtime, client, blob.clone(), location.size, identity, self.bounds)
                    .map(|source| Arc::new(source) as Arc<dyn BlockSource>)
                    .map_err(|error| error.to_string())
            }
            Place::File { path } => local(path, location.size),
        }
    }
}

/// A file of this machine, which must not have changed its size.
fn local(path: &Path, size: u64) -> Result<Arc<dyn BlockSource>, String> {
    let file = FileSource::open(path).map_err(|error| error.to_string())?;
    if file.size() != size {
        return Err(format!("{} has {} bytes now and not {size}", path.display(), file.size()));
    }
    Ok(Arc::new(file))
}

/// What stands for a layer's bytes in the cache. A blob of the repository was compared with its digest when it was put there; of
/// a registry it is known only that it says so, so that its bytes stand for nothing but this place.
fn id(location: &Location) -> Option<SourceId> {
    let hex = location.digest.strip_prefix("sha256:").filter(|hex| hex.len() == 64)?;
    let mut whole = [0; 32];
    hex::decode_to_slice(hex, &mut whole).ok()?;
    if !matches!(location.place, Place::Repository { .. }) {
        whole = Sha256::digest(location.place.identity(&location.digest)).into();
    }
    whole.first_chunk().copied().map(SourceId)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes, changed in any way: what says a place is the place of one layer, and all else is refused.
    #[test]
    fn changed_notes_are_read_or_refused() {
        let digest = format!("sha256:{}", "5".repeat(64));
        let places = [
            r#"{"in":"repository","key":"blobs/x"}"#.to_owned(),
            format!(
                r#"{{"in":"registry","registry":"r","repository":"a/b","digest":"{digest}","login":{{"user":"u","password":"p"}}}}"#
            ),
            r#"{"in":"file","path":"/x"}"#.to_owned(),
        ];
        let note =
            |place: &String| format!(r#"{{"place":{place},"size":7,"digest":"{digest}","disk":4096}}"#);
        let corpus: Vec<_> = places.iter().map(|place| note(place).into_bytes()).collect();
        aenv_testkit::mutate("remote-notes", &corpus, |input| {
            serde_json::from_slice::<Location>(input).is_ok_and(|location| id(&location).is_some())
        });
    }
}
