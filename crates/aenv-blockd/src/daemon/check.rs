//! What may be exported: names, sizes and paths from the socket are checked before anything is done with them.

use std::path::{Component, Path, PathBuf};

use crate::exports::{DiskExport, ExportError, MemoryExport};

const LONGEST_NAME: usize = 80;
const MOST_LAYERS: usize = 512;
const LARGEST: u64 = 64 << 40;
const GRAIN: u64 = 4096;

pub(crate) fn disk(export: &DiskExport) -> Result<(), ExportError> {
    name(&export.name)?;
    size(export.size)?;
    layers(&export.layers)?;
    export.upper.as_deref().map_or(Ok(()), path)
}

pub(crate) fn memory(export: &MemoryExport) -> Result<(), ExportError> {
    name(&export.holder)?;
    size(export.size)?;
    layers(&export.layers)
}

fn name(name: &str) -> Result<(), ExportError> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if name.is_empty() || name.len() > LONGEST_NAME || !name.bytes().all(allowed) {
        let shown: String = name.chars().take(LONGEST_NAME).collect();
        return invalid(format!("{shown:?} is no export name: 1 to {LONGEST_NAME} of a-z, 0-9 and -"));
    }
    Ok(())
}

fn size(size: u64) -> Result<(), ExportError> {
    if size == 0 || size > LARGEST || !size.is_multiple_of(GRAIN) {
        return invalid(format!(
            "{size} bytes is no size of an export: a multiple of {GRAIN} up to {LARGEST}"
        ));
    }
    Ok(())
}

fn layers(layers: &[PathBuf]) -> Result<(), ExportError> {
    if layers.len() > MOST_LAYERS {
        return invalid(format!("a stack of {} layers is higher than {MOST_LAYERS}", layers.len()));
    }
    layers.iter().try_for_each(|layer| path(layer))
}

/// An absolute path without `..`.
pub(crate) fn path(path: &Path) -> Result<(), ExportError> {
    let plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    if !path.is_absolute()
        || !path.components().all(plain)
        || path.as_os_str().as_encoded_bytes().contains(&0)
    {
        return invalid(format!("{path:?} is no absolute path without .. in it"));
    }
    Ok(())
}

fn invalid(message: String) -> Result<(), ExportError> {
    Err(ExportError::Invalid { message })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk_export(name: &str, size: u64, layers: &[&str]) -> DiskExport {
        DiskExport {
            name: name.into(),
            size,
            layers: layers.iter().map(PathBuf::from).collect(),
            upper: None,
        }
    }

    #[test]
    fn good_ones_pass() {
        disk(&disk_export("sbx-1-root", 4096, &["/var/lib/aenv/layers/a"])).unwrap();
        disk(&disk_export(&"a".repeat(80), 1 << 40, &[])).unwrap();
    }

    #[test]
    fn bad_ones_are_refused() {
        let bad = [
            disk_export("", 4096, &[]),
            disk_export("../x", 4096, &[]),
            disk_export("A", 4096, &[]),
            disk_export("a.disk", 4096, &[]),
            disk_export(&"a".repeat(81), 4096, &[]),
            disk_export("a", 0, &[]),
            disk_export("a", 4097, &[]),
            disk_export("a", u64::MAX - 4095, &[]),
            disk_export("a", 4096, &["relative"]),
            disk_export("a", 4096, &["/a/../b"]),
            disk_export("a", 4096, &["/a\0b"]),
            disk_export("a", 4096, &vec!["/a"; 513]),
            DiskExport { upper: Some("upper".into()), ..disk_export("a", 4096, &[]) },
        ];
        for export in bad {
            assert!(matches!(disk(&export), Err(ExportError::Invalid { .. })), "{export:?}");
        }
    }
}
