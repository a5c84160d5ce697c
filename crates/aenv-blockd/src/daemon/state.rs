//! The list of exports that a blockd which is started again shows again.

use std::{
    collections::BTreeSet,
    fs, io,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::exports::{DiskExport, Sealed};

/// All that is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    /// The next inode number; never used twice.
    pub(crate) next_ino: u64,
    /// What the ublk devices of this list, and no others, are marked with. 0: none was made yet.
    #[serde(default)]
    pub(crate) ublk_mark: u64,
    pub(crate) disks: Vec<DiskState>,
    pub(crate) images: Vec<ImageState>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskState {
    pub(crate) ino: u64,
    /// As it is now: with the layers that were sealed since it was opened.
    pub(crate) export: DiskExport,
    /// The number of the ublk device that shows it.
    #[serde(default)]
    pub(crate) ublk: Option<u32>,
    /// A seal was going on, to this file.
    pub(crate) sealing: Option<PathBuf>,
    /// The last seal, so that it may be asked for again.
    pub(crate) last_seal: Option<LastSeal>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LastSeal {
    pub(crate) target: PathBuf,
    pub(crate) sealed: Sealed,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ImageState {
    pub(crate) ino: u64,
    /// Its file's. A list that an earlier version kept has none.
    #[serde(default = "memory_name")]
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(crate) layers: Vec<PathBuf>,
    #[serde(default)]
    pub(crate) group: Option<String>,
    pub(crate) holders: BTreeSet<String>,
}

/// A name for the file of a memory image, which cannot be guessed: whoever knows it may open the file.
pub(crate) fn memory_name() -> String {
    format!("{}.ram", uuid::Uuid::new_v4().simple())
}

/// Why the list of exports could not be read.
#[derive(Debug, Error)]
pub enum LoadStateError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The refusal.
        #[source]
        source: io::Error,
    },
    /// It is no list of exports.
    #[error("{path} is no list of exports ({source}); move it away to start with none")]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: serde_json::Error,
    },
}

/// The file, written whole, beside and renamed. Writers that come while another one writes share the next write.
pub(crate) struct StateFile {
    path: PathBuf,
    wanted: AtomicU64,
    written: Mutex<u64>,
}

impl StateFile {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, wanted: AtomicU64::new(0), written: Mutex::new(0) }
    }

    /// What was kept; nothing where no file is.
    pub(crate) fn load(&self) -> Result<State, LoadStateError> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(State::default()),
            Err(source) => return Err(LoadStateError::Io { path: self.path.clone(), source }),
        };
        serde_json::from_slice(&bytes)
            .map_err(|source| LoadStateError::Parse { path: self.path.clone(), source })
    }

    /// Keeps what `current` returns, which is called after the change to be kept was made.
    pub(crate) fn save(&self, current: impl FnOnce() -> State) -> io::Result<()> {
        let mine = self.wanted.fetch_add(1, Ordering::SeqCst) + 1;
        let mut written = self.written.lock();
        if *written >= mine {
            return Ok(());
        }
        let covers = self.wanted.load(Ordering::SeqCst);
        aenv_durable::write_private(&self.path, &serde_json::to_vec(&current())?)?;
        *written = covers;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_saved_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let file = StateFile::new(folder.path().join("state"));
        assert_eq!(file.load().unwrap(), State::default());
        let state = State {
            next_ino: 9,
            ublk_mark: 7,
            disks: vec![DiskState {
                ino: 4,
                export: DiskExport { name: "a".into(), size: 4096, layers: vec![], upper: Some("/u".into()) },
                ublk: Some(3),
                sealing: Some("/t".into()),
                last_seal: None,
            }],
            images: vec![ImageState {
                ino: 5,
                name: memory_name(),
                size: 4096,
                layers: vec![],
                group: Some("g".into()),
                holders: ["h".to_owned()].into(),
            }],
        };
        file.save(|| state.clone()).unwrap();
        assert_eq!(StateFile::new(folder.path().join("state")).load().unwrap(), state);
    }

    #[test]
    fn an_image_of_an_earlier_version_gets_a_name_that_cannot_be_guessed() {
        let kept = r#"{"ino":5,"size":4096,"layers":[],"holders":[]}"#;
        let names = [(); 2].map(|()| serde_json::from_str::<ImageState>(kept).unwrap().name);
        assert_ne!(names[0], names[1]);
        assert!(names[0].len() == 36 && names[0].ends_with(".ram"), "{}", names[0]);
    }

    #[test]
    fn a_torn_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        fs::write(&path, "{\"next_ino\":").unwrap();
        let error = StateFile::new(path.clone()).load().unwrap_err().to_string();
        assert!(error.starts_with(&format!("{} is no list of exports", path.display())), "{error}");
    }
}
