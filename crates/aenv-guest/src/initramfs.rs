//! The initramfs: init, envd, the modules and their order.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aenv_types::Digest;
use thiserror::Error;

use crate::{
    cpio::Archive,
    modules::{self, ModuleError, WantedModule},
};

/// What goes into an initramfs.
#[derive(Clone, Debug)]
pub struct InitramfsSpec<'a> {
    /// Module tree of the kernel that will boot it.
    pub modules: &'a Path,
    /// Modules that the guest wants; [`crate::MODULES`] for a sandbox.
    pub wanted: &'a [WantedModule],
    /// The static init (`aenv-init`).
    pub init: &'a Path,
    /// The static daemon (`aenv-envd`).
    pub envd: &'a Path,
}

/// A finished initramfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Initramfs {
    /// The file, named by its content.
    pub path: PathBuf,
    /// Names of its modules, in load order.
    pub modules: Vec<String>,
}

/// Why an initramfs could not be made.
#[derive(Debug, Error)]
pub enum InitramfsError {
    /// The kernel's modules cannot be used.
    #[error(transparent)]
    Modules(#[from] ModuleError),
    /// init or envd is no static x86-64 program.
    #[error("{path} cannot run in a guest: {why}; build it with `--target x86_64-unknown-linux-musl`")]
    Program {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
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

/// Makes the initramfs in `out`, as `initramfs-<digest>.cpio`, uncompressed (unpacking under emulation costs more than
/// reading). The same parts give the same file, which is then not written again.
pub fn build_initramfs(spec: &InitramfsSpec<'_>, out: &Path) -> Result<Initramfs, InitramfsError> {
    let refused = |path: &Path| {
        let path = path.to_owned();
        move |source| InitramfsError::Io { path, source }
    };
    let modules = modules::in_load_order(spec.modules, spec.wanted)?;
    let mut archive = Archive::new();
    archive.folder("dev");
    archive.character_device("dev/console", 0o600, (5, 1));
    archive.folder("modules");
    let mut order = String::new();
    for module in &modules {
        let file = format!("{}.ko", module.name);
        archive.file(&format!("modules/{file}"), 0o600, &module.bytes);
        order.push_str(&file);
        order.push('\n');
    }
    archive.file("modules/order", 0o600, order.as_bytes());
    for (name, path) in [("init", spec.init), ("envd", spec.envd)] {
        let program = fs::read(path).map_err(refused(path))?;
        check_program(&program).map_err(|why| InitramfsError::Program { path: path.to_owned(), why })?;
        archive.file(name, 0o755, &program);
    }
    let bytes = archive.finish();
    let digest = Digest::of(&bytes).hex();
    let path = out.join(format!("initramfs-{}.cpio", &digest[..16]));
    if !path.is_file() {
        fs::create_dir_all(out).map_err(refused(out))?;
        aenv_durable::write(&path, &bytes).map_err(refused(&path))?;
    }
    Ok(Initramfs { path, modules: modules.into_iter().map(|module| module.name).collect() })
}

/// An x86-64 ELF file without an interpreter, so that it runs in an image that has no libraries.
fn check_program(elf: &[u8]) -> Result<(), &'static str> {
    if !elf.starts_with(b"\x7fELF\x02\x01") || elf.get(18..20) != Some(&[62, 0]) {
        return Err("it is no x86-64 ELF program");
    }
    let number = |at: usize, len: usize| -> usize {
        let bytes = elf.get(at..at.saturating_add(len)).unwrap_or_default();
        bytes.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte))
    };
    let (table, size, count) = (number(0x20, 8), number(0x36, 2), number(0x38, 2));
    let interpreter = (0..count).any(|index| number(table.saturating_add(index * size), 4) == 3);
    if interpreter { Err("it is linked dynamically") } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(kind: u8) -> Vec<u8> {
        let mut elf = vec![0_u8; 0x40 + 56];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[18] = 62;
        elf[0x20] = 0x40;
        elf[0x36] = 56;
        elf[0x38] = 1;
        elf[0x40] = kind;
        elf
    }

    #[test]
    fn the_same_parts_give_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir_all(path("tree/kernel")).unwrap();
        fs::write(path("tree/modules.builtin"), "kernel/a.ko\n").unwrap();
        fs::write(path("init"), program(1)).unwrap();
        fs::write(path("dynamic"), program(3)).unwrap();
        let wanted = [WantedModule { name: "a", required: true }];
        let (tree, init, dynamic) = (path("tree"), path("init"), path("dynamic"));
        let spec = InitramfsSpec { modules: &tree, wanted: &wanted, init: &init, envd: &init };
        let first = build_initramfs(&spec, &path("out")).unwrap();
        let written = fs::metadata(&first.path).unwrap().modified().unwrap();
        let second = build_initramfs(&spec, &path("out")).unwrap();
        assert_eq!(first, second);
        assert_eq!(written, fs::metadata(&second.path).unwrap().modified().unwrap());
        assert_eq!(fs::read_dir(path("out")).unwrap().count(), 1);

        let refused = build_initramfs(&InitramfsSpec { envd: &dynamic, ..spec }, &path("out"));
        assert!(matches!(refused, Err(InitramfsError::Program { .. })));
    }
}
