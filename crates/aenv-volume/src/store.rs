//! The volumes of a node.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use aenv_types::{Home, TeamId, Token, VolumeId};
use chrono::Utc;
use parking_lot::RwLock;
use thiserror::Error;

use crate::{Limits, Volume, VolumeName, sys, tree, volume::Document};

/// Why something could not be done with volumes.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The team has one of this name.
    #[error("there is a volume {0} already; delete it first, or choose another name")]
    Exists(VolumeName),
    /// The team has too many.
    #[error("this team has {0} volumes, as many as it may; delete one first, or raise volumes.max_per_team")]
    TooMany(usize),
    /// The filesystem under the home has no file handles, which guests need.
    #[error(
        "volumes cannot be kept in {path}: its filesystem has no file handles (ext4, xfs, btrfs and tmpfs have)"
    )]
    NoHandles {
        /// The folder.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The refusal.
        #[source]
        source: io::Error,
    },
}

fn refused(path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    move |source| StoreError::Io { path: path.to_owned(), source }
}

/// The volumes of a node. Cheap to clone. What touches the disk blocks.
#[derive(Clone)]
pub struct Volumes(Arc<Shared>);

struct Shared {
    folder: PathBuf,
    limits: Limits,
    volumes: RwLock<BTreeMap<VolumeId, Arc<Volume>>>,
}

impl Volumes {
    /// Opens all that are there. One that is damaged is left alone and told of in the log.
    pub fn open(home: &Home, limits: Limits) -> Result<Self, StoreError> {
        let folder = home.volumes();
        let mut volumes = BTreeMap::new();
        for entry in fs::read_dir(&folder).map_err(refused(&folder))? {
            let path = entry.map_err(refused(&folder))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with('.') {
                // A create or a removal that was cut off.
                discard(&path)?;
                continue;
            }
            match load(&path, limits) {
                Ok(volume) if volume.id().as_str() == name => {
                    volumes.insert(volume.id().clone(), Arc::new(volume));
                }
                Ok(_) => tracing::error!(path = %path.display(), "a volume lies under another one's id"),
                Err(error) => tracing::error!(path = %path.display(), %error, "a volume cannot be opened"),
            }
        }
        Ok(Self(Arc::new(Shared { folder, limits, volumes: RwLock::new(volumes) })))
    }

    /// Makes an empty one, which everybody in a guest may write to.
    pub fn create(&self, team: &TeamId, name: VolumeName) -> Result<Arc<Volume>, StoreError> {
        let mut volumes = self.0.volumes.write();
        let own: Vec<_> = volumes.values().filter(|volume| volume.team() == team).collect();
        if own.iter().any(|volume| *volume.name() == name) {
            return Err(StoreError::Exists(name));
        }
        if own.len() >= self.0.limits.count {
            return Err(StoreError::TooMany(own.len()));
        }
        let id = VolumeId::random();
        let document = Document {
            id: id.clone(),
            name,
            team: team.clone(),
            token: Token::random(),
            handle_key: Token::random(),
            created_at: Utc::now(),
        };
        let (made, path) = (self.0.folder.join(format!(".new-{id}")), self.0.folder.join(id.as_str()));
        let new = build(&made, &document).and_then(|()| fs::rename(&made, &path).map_err(refused(&path)));
        if let Err(error) = new {
            // The error that matters is the first one.
            let _ = discard(&made);
            return Err(error);
        }
        fs::File::open(&self.0.folder)
            .and_then(|folder| folder.sync_all())
            .map_err(refused(&self.0.folder))?;
        let volume = Arc::new(Volume::open(&path, document, self.0.limits).map_err(refused(&path))?);
        if let Err(error) = sys::handle_of(volume.root()) {
            tracing::error!(path = %path.display(), %error, "no file handles");
            discard(&path)?;
            return Err(StoreError::NoHandles { path: self.0.folder.clone() });
        }
        volumes.insert(id, Arc::clone(&volume));
        Ok(volume)
    }

    /// Those of a team, by name.
    pub fn list(&self, team: &TeamId) -> Vec<Arc<Volume>> {
        let volumes = self.0.volumes.read();
        let mut own: Vec<_> = volumes.values().filter(|volume| volume.team() == team).cloned().collect();
        own.sort_by(|a, b| a.name().cmp(b.name()));
        own
    }

    /// One of a team.
    pub fn get(&self, team: &TeamId, id: &VolumeId) -> Option<Arc<Volume>> {
        self.any(id).filter(|volume| volume.team() == team)
    }

    /// One of whichever team: for those who show its token, and for guests.
    pub fn any(&self, id: &VolumeId) -> Option<Arc<Volume>> {
        self.0.volumes.read().get(id).cloned()
    }

    /// One of a team, by its name.
    pub fn named(&self, team: &TeamId, name: &VolumeName) -> Option<Arc<Volume>> {
        self.list(team).into_iter().find(|volume| volume.name() == name)
    }

    /// Removes one and all its files. `false`: there is none.
    pub fn remove(&self, team: &TeamId, id: &VolumeId) -> Result<bool, StoreError> {
        let mut volumes = self.0.volumes.write();
        if volumes.get(id).is_none_or(|volume| volume.team() != team) {
            return Ok(false);
        }
        let (path, hidden) = (self.0.folder.join(id.as_str()), self.0.folder.join(format!(".removed-{id}")));
        fs::rename(&path, &hidden).map_err(refused(&path))?;
        if let Some(volume) = volumes.remove(id) {
            volume.close();
        }
        drop(volumes);
        fs::File::open(&self.0.folder)
            .and_then(|folder| folder.sync_all())
            .map_err(refused(&self.0.folder))?;
        // The name is free and nobody finds it any more; what stays of it goes at the next start.
        if let Err(error) = discard(&hidden) {
            tracing::error!(volume = %id, %error, "the files of a removed volume stay until the next start");
        }
        Ok(true)
    }
}

fn load(path: &Path, limits: Limits) -> Result<Volume, StoreError> {
    let file = path.join("volume.json");
    let text = fs::read(&file).map_err(refused(&file))?;
    let document = serde_json::from_slice(&text).map_err(|error| refused(&file)(error.into()))?;
    Volume::open(path, document, limits).map_err(refused(path))
}

fn build(folder: &Path, document: &Document) -> Result<(), StoreError> {
    let mut private = fs::DirBuilder::new();
    private.mode(0o700);
    for path in [folder.to_owned(), folder.join("staging"), folder.join("data")] {
        private.create(&path).map_err(refused(&path))?;
    }
    let data = folder.join("data");
    fs::File::open(&data).and_then(|data| sys::chmod(data, 0o777)).map_err(refused(&data))?;
    let (text, file) = (serde_json::to_vec(document), folder.join("volume.json"));
    let text = text.map_err(|error| refused(&file)(error.into()))?;
    aenv_durable::write_private(&file, &text).map_err(refused(&file))
}

/// Removes a volume's folder, however its files are nested.
fn discard(folder: &Path) -> Result<(), StoreError> {
    match fs::File::open(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened.and_then(tree::clear).map_err(refused(folder))?,
    };
    fs::remove_dir(folder).map_err(refused(folder))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn volumes_come_back_and_are_a_teams_own() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(folder.path(), folder.path());
        home.create().unwrap();
        let limits = Limits { count: 2, quota: 1 << 20, disk_reserve: 0 };
        let volumes = Volumes::open(&home, limits).unwrap();
        let (mine, other): (TeamId, TeamId) = ("mine".parse().unwrap(), "other".parse().unwrap());
        let name = |text: &str| text.parse::<VolumeName>().unwrap();
        let one = volumes.create(&mine, name("one")).unwrap();
        assert!(matches!(volumes.create(&mine, name("one")), Err(StoreError::Exists(_))));
        volumes.create(&other, name("one")).unwrap();
        volumes.create(&mine, name("two")).unwrap();
        assert!(matches!(volumes.create(&mine, name("three")), Err(StoreError::TooMany(2))));
        assert!(volumes.get(&other, one.id()).is_none());
        assert!(!volumes.remove(&other, one.id()).unwrap());
        let document = home.volumes().join(one.id().as_str()).join("volume.json");
        assert_eq!(fs::metadata(&document).unwrap().permissions().mode() & 0o777, 0o600);

        fs::create_dir(home.volumes().join(".new-volx")).unwrap();
        fs::create_dir(home.volumes().join("damaged")).unwrap();
        let again = Volumes::open(&home, limits).unwrap();
        let names: Vec<_> = again.list(&mine).iter().map(|volume| volume.name().to_string()).collect();
        assert_eq!(names, ["one", "two"]);
        let same = again.get(&mine, one.id()).unwrap();
        assert!(same.opens_with(one.token().expose()) && !same.opens_with("x"));
        assert!(!home.volumes().join(".new-volx").exists());
        assert!(again.remove(&mine, one.id()).unwrap());
        assert!(!again.remove(&mine, one.id()).unwrap());
        assert!(same.is_removed() && !home.volumes().join(one.id().as_str()).exists());
    }
}
