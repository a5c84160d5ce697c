//! Modules that a guest is given later, in one file: each with its length before it (four bytes, the highest first), in load order.

use std::{
    fs,
    path::{Path, PathBuf},
};

use aenv_types::Digest;

use crate::{
    initramfs::InitramfsError,
    modules::{self, WantedModule},
};

/// Makes the file in `out`, as `modules-<digest>`. The same modules give the same file, which is then not written again.
pub fn build_bundle(tree: &Path, wanted: &[WantedModule], out: &Path) -> Result<PathBuf, InitramfsError> {
    let mut bytes = Vec::new();
    for module in modules::in_load_order(tree, wanted)? {
        let length = u32::try_from(module.bytes.len()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(&module.bytes);
    }
    let path = out.join(format!("modules-{}", &Digest::of(&bytes).hex()[..16]));
    let refused = |source| InitramfsError::Io { path: path.clone(), source };
    if !path.is_file() {
        fs::create_dir_all(out).map_err(refused)?;
        aenv_durable::write(&path, &bytes).map_err(refused)?;
    }
    Ok(path)
}
