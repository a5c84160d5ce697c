//! What is read of a guest kernel: its digest, which checkpoints are stamped with, and what it was built for.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::SystemTime,
};

use aenv_types::Digest;

use crate::{EngineError, process::io_error};

/// Something that is read of a kernel once, as long as the file is the same.
#[derive(Debug)]
pub(crate) struct PerKernel<T> {
    read: fn(&Path) -> io::Result<T>,
    known: Mutex<Option<Known<T>>>,
}

#[derive(Debug)]
struct Known<T> {
    path: PathBuf,
    modified: SystemTime,
    value: T,
}

impl<T: Copy> PerKernel<T> {
    pub(crate) fn new(read: fn(&Path) -> io::Result<T>) -> Self {
        Self { read, known: Mutex::new(None) }
    }

    /// What there is of a kernel's file.
    pub(crate) fn of(&self, kernel: &Path) -> Result<T, EngineError> {
        let refused = |e| io_error(format!("read the guest kernel {}", kernel.display()), e);
        let modified = fs::metadata(kernel).and_then(|meta| meta.modified()).map_err(refused)?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(same) = known.as_ref().filter(|same| same.path == kernel && same.modified == modified) {
            return Ok(same.value);
        }
        let value = (self.read)(kernel).map_err(refused)?;
        *known = Some(Known { path: kernel.to_owned(), modified, value });
        Ok(value)
    }
}

/// The digest of a kernel's file.
pub(crate) fn digest(kernel: &Path) -> io::Result<Digest> {
    Ok(File::open(kernel).and_then(Digest::of_reader)?.0)
}
