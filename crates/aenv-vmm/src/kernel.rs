//! The digest of a guest kernel, which checkpoints are stamped with.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::SystemTime,
};

use aenv_types::Digest;

use crate::{EngineError, process::io_error};

/// Reads a kernel once, as long as the file is the same.
#[derive(Debug, Default)]
pub(crate) struct KernelDigest {
    known: Mutex<Option<Known>>,
}

#[derive(Debug)]
struct Known {
    path: PathBuf,
    modified: SystemTime,
    digest: Digest,
}

impl KernelDigest {
    /// The digest of a kernel's file.
    pub(crate) fn of(&self, kernel: &Path) -> Result<Digest, EngineError> {
        let refused = |e| io_error(format!("read the guest kernel {}", kernel.display()), e);
        let modified = fs::metadata(kernel).and_then(|meta| meta.modified()).map_err(refused)?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(same) = known.as_ref().filter(|same| same.path == kernel && same.modified == modified) {
            return Ok(same.digest);
        }
        let (digest, _) = File::open(kernel).and_then(Digest::of_reader).map_err(refused)?;
        *known = Some(Known { path: kernel.to_owned(), modified, digest });
        Ok(digest)
    }
}
