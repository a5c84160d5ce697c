//! Which modules a microVM needs, what they depend on, and the order to load them in.
//!
//! A package that was unpacked and not installed has no `modules.dep`, so dependencies are read where `depmod` reads
//! them: in the `.modinfo` section of each module.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use thiserror::Error;

/// A module that the guest loads if its kernel has it as a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WantedModule {
    /// Its name, with underscores.
    pub name: &'static str,
    /// The guest cannot work without it (built in, or as a module).
    pub required: bool,
}

const fn required(name: &'static str) -> WantedModule {
    WantedModule { name, required: true }
}

const fn optional(name: &'static str) -> WantedModule {
    WantedModule { name, required: false }
}

/// What a guest needs, in the order that they should be loaded in.
pub const MODULES: &[WantedModule] = &[
    required("virtio_mmio"),
    required("virtio_blk"),
    required("virtio_net"),
    required("virtio_balloon"),
    // Named after its file; the module in it is registered as virtio_rng.
    required("virtio_rng"),
    required("ext4"),
    // For programs in the sandbox: FUSE mounts and container engines.
    optional("fuse"),
    optional("overlay"),
];

/// What a guest needs to mount a volume. Not in the initramfs: a guest is given them when it is to mount one.
pub const VOLUME_MODULES: &[WantedModule] = &[required("nfs"), required("nfsv3")];

/// Why the modules of a kernel cannot be used.
#[derive(Debug, Error)]
pub enum ModuleError {
    /// Required modules are neither built in nor there.
    #[error("the kernel in {tree} lacks what a microVM needs: {}; use a kernel that has them, such as Debian's linux-image-cloud-amd64", names.join(", "))]
    Missing {
        /// The module tree.
        tree: PathBuf,
        /// Names of the modules.
        names: Vec<String>,
    },
    /// A module is compressed with something that we cannot undo.
    #[error("{path} is compressed with {method}, which is not supported (zstd and gzip are)")]
    Compression {
        /// The module.
        path: PathBuf,
        /// The method.
        method: &'static str,
    },
    /// A module is no ELF file with a `.modinfo` section.
    #[error("{0} is no kernel module")]
    NotAModule(PathBuf),
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

/// A module, decompressed, ready to be put into the initramfs.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

/// The wanted modules and what they depend on, each after all that it needs.
pub(crate) fn in_load_order(tree: &Path, wanted: &[WantedModule]) -> Result<Vec<Module>, ModuleError> {
    let mut search = Search { files: index(tree)?, builtin: builtin(tree)?, ..Search::default() };
    for module in wanted {
        search.visit(module.name, module.required)?;
    }
    if search.missing.is_empty() {
        return Ok(search.order);
    }
    let names = search.missing.into_iter().collect();
    Err(ModuleError::Missing { tree: tree.to_owned(), names })
}

#[derive(Default)]
struct Search {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
    seen: BTreeSet<String>,
    missing: BTreeSet<String>,
    order: Vec<Module>,
}

impl Search {
    /// Depth first; a cycle, which `depmod` refuses, cannot loop because `seen` is set on the way down.
    fn visit(&mut self, name: &str, needed: bool) -> Result<(), ModuleError> {
        if self.builtin.contains(name) || !self.seen.insert(name.to_owned()) {
            return Ok(());
        }
        let Some(path) = self.files.get(name).cloned() else {
            if needed {
                self.missing.insert(name.to_owned());
            }
            return Ok(());
        };
        let bytes = read(&path)?;
        for dependency in depends(&bytes).ok_or_else(|| ModuleError::NotAModule(path.clone()))? {
            self.visit(&dependency, needed)?;
        }
        self.order.push(Module { name: name.to_owned(), bytes });
        Ok(())
    }
}

fn refused(path: &Path) -> impl FnOnce(io::Error) -> ModuleError {
    move |source| ModuleError::Io { path: path.to_owned(), source }
}

/// `virtio-rng.ko.zst` is `virtio_rng`.
fn module_name(file: &str) -> Option<String> {
    let stem = ["", ".zst", ".gz", ".xz"].iter().find_map(|end| file.strip_suffix(&format!(".ko{end}")))?;
    Some(stem.replace('-', "_"))
}

fn index(tree: &Path) -> Result<BTreeMap<String, PathBuf>, ModuleError> {
    let mut files = BTreeMap::new();
    let mut folders = vec![tree.join("kernel")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(refused(&folder))? {
            let entry = entry.map_err(refused(&folder))?;
            if entry.file_type().map_err(refused(&folder))?.is_dir() {
                folders.push(entry.path());
            } else if let Some(name) = module_name(&entry.file_name().to_string_lossy()) {
                files.insert(name, entry.path());
            }
        }
    }
    Ok(files)
}

fn builtin(tree: &Path) -> Result<BTreeSet<String>, ModuleError> {
    let path = tree.join("modules.builtin");
    let text = fs::read_to_string(&path).map_err(refused(&path))?;
    Ok(text.lines().filter_map(|line| module_name(line.rsplit('/').next()?)).collect())
}

/// The plain bytes of a module.
fn read(path: &Path) -> Result<Vec<u8>, ModuleError> {
    let bytes = fs::read(path).map_err(refused(path))?;
    let mut plain = Vec::new();
    match &bytes[..] {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            zstd::stream::copy_decode(&bytes[..], &mut plain).map_err(refused(path))?;
        }
        [0x1f, 0x8b, ..] => {
            flate2::read::GzDecoder::new(&bytes[..]).read_to_end(&mut plain).map_err(refused(path))?;
        }
        [0xfd, b'7', b'z', b'X', b'Z', ..] => {
            return Err(ModuleError::Compression { path: path.to_owned(), method: "xz" });
        }
        _ => return Ok(bytes),
    }
    Ok(plain)
}

/// `depends=a,b` of the `.modinfo` section; `None` when this is no module.
fn depends(elf: &[u8]) -> Option<Vec<String>> {
    let info = section(elf, b".modinfo")?;
    let line = info.split(|byte| *byte == 0).find_map(|line| line.strip_prefix(b"depends="))?;
    let names = std::str::from_utf8(line).ok()?.split(',');
    Some(names.filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect())
}

/// A section of a 64-bit little-endian ELF file (`elf(5)`), by name.
fn section<'a>(elf: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |at: usize, len: usize| -> Option<usize> {
        let bytes = elf.get(at..at.checked_add(len)?)?;
        let value = bytes.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        usize::try_from(value).ok()
    };
    let (table, size, count) = (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?);
    let header = |index: usize| table.checked_add(index.checked_mul(size)?);
    let content = |at: usize| {
        let start = number(at + 0x18, 8)?;
        elf.get(start..start.checked_add(number(at + 0x20, 8)?)?)
    };
    let names = content(header(number(0x3e, 2)?)?)?;
    (0..count).find_map(|index| {
        let at = header(index)?;
        let label = names.get(number(at, 4)?..)?.split(|byte| *byte == 0).next()?;
        (label == name).then(|| content(at)).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest ELF file that has a `.modinfo` section.
    fn module(depends: &str) -> Vec<u8> {
        let info = format!("license=GPL\0depends={depends}\0name=x\0").into_bytes();
        let names = b"\0.modinfo\0.shstrtab\0";
        let mut elf = vec![0_u8; 64];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let (info_at, names_at) = (64, 64 + info.len());
        let table = names_at + names.len();
        elf[0x28..0x30].copy_from_slice(&(table as u64).to_le_bytes());
        elf[0x3a] = 64;
        elf[0x3c] = 3;
        elf[0x3e] = 2;
        elf.extend_from_slice(&info);
        elf.extend_from_slice(names);
        elf.extend([0_u8; 64]);
        for (name, at, len) in [(1_u32, info_at, info.len()), (10, names_at, names.len())] {
            let mut header = [0_u8; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(at as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(len as u64).to_le_bytes());
            elf.extend_from_slice(&header);
        }
        elf
    }

    fn tree(modules: &[(&str, Vec<u8>)], builtin: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("kernel/drivers")).unwrap();
        for (name, bytes) in modules {
            fs::write(folder.path().join("kernel/drivers").join(name), bytes).unwrap();
        }
        fs::write(folder.path().join("modules.builtin"), builtin).unwrap();
        folder
    }

    #[test]
    fn each_module_comes_after_what_it_needs() {
        let net = zstd::encode_all(&module("failover,virtio-ring")[..], 1).unwrap();
        let files = [
            ("virtio_net.ko.zst", net),
            ("failover.ko", module("")),
            ("virtio_ring.ko", module("virtio")),
            ("virtio.ko", module("core")),
        ];
        let folder = tree(&files, "kernel/lib/core.ko\n");
        let wanted = [required("virtio_net"), optional("overlay"), required("virtio_ring")];
        let order = in_load_order(folder.path(), &wanted).unwrap();
        let names: Vec<_> = order.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(names, ["failover", "virtio", "virtio_ring", "virtio_net"]);
        assert!(order[3].bytes.starts_with(b"\x7fELF"));
    }

    #[test]
    fn all_that_is_missing_is_named_at_once() {
        let folder = tree(&[("virtio_blk.ko", module("virtio"))], "");
        let wanted = [required("virtio_blk"), required("virtio_net"), optional("fuse")];
        let error = in_load_order(folder.path(), &wanted).unwrap_err();
        let ModuleError::Missing { names, .. } = &error else { panic!("{error}") };
        assert_eq!(names, &["virtio", "virtio_net"]);
        assert!(error.to_string().contains("virtio, virtio_net"));
    }

    #[test]
    fn damaged_modules_are_refused() {
        let folder = tree(&[("virtio_blk.ko", b"garbage".to_vec())], "");
        let error = in_load_order(folder.path(), &[required("virtio_blk")]).unwrap_err();
        assert!(matches!(error, ModuleError::NotAModule(_)));
        let mut cut = module("x");
        cut.truncate(80);
        assert_eq!(depends(&cut), None);
    }
}
