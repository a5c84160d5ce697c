//! Whether a guest kernel was built for PVM hosts, where guests run without hardware virtualization.
//!
//! What says so, in this order:
//!
//! 1. `<vmlinux>.config` beside it, as a build leaves it in `.config`, for kernels that tell nothing by themselves;
//! 2. the configuration in the kernel (`CONFIG_IKCONFIG`: gzip between `IKCFG_ST` and `IKCFG_ED`);
//! 3. its code: a guest asks the host who it is by `invlpg 0xffffffffff4d5650; cpuid`
//!    (`PVM_SYNTHETIC_CPUID` of the published patches, arch/x86/include/uapi/asm/pvm_para.h).
//!
//! In a configuration, an option that ends in `PVM_GUEST` counts. Whether it is the PVM of this host nobody can read: its guest
//! interface differs between vendors.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::Path,
};

use crate::bzimage::MAX_VMLINUX;

const CONFIG_START: &[u8] = b"IKCFG_ST";
const SYNTHETIC_CPUID: &[u8] = &[0x0f, 0x01, 0x3c, 0x25, 0x50, 0x56, 0x4d, 0xff, 0x0f, 0xa2];
/// A configuration has some 300 kB.
const LARGEST_CONFIG: u64 = 16 << 20;

/// Reads a vmlinux and tells whether it was built for PVM hosts.
pub fn supports_pvm(vmlinux: &Path) -> io::Result<bool> {
    let mut beside = vmlinux.as_os_str().to_owned();
    beside.push(".config");
    match File::open(Path::new(&beside)).and_then(read_config) {
        Ok(config) => return Ok(names_pvm(&config)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    if fs::metadata(vmlinux)?.len() > MAX_VMLINUX {
        return Err(io::Error::other("it is larger than any kernel"));
    }
    let image = fs::read(vmlinux)?;
    if let Some(at) = position(&image, CONFIG_START) {
        let packed = &image[at + CONFIG_START.len()..];
        return Ok(names_pvm(&read_config(flate2::read::GzDecoder::new(packed))?));
    }
    Ok(position(&image, SYNTHETIC_CPUID).is_some())
}

fn read_config(config: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    config.take(LARGEST_CONFIG).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn names_pvm(config: &str) -> bool {
    config.lines().any(|line| line.trim_end().ends_with("PVM_GUEST=y") && line.starts_with("CONFIG_"))
}

fn position(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn kernel(folder: &Path, parts: &[&[u8]]) -> std::path::PathBuf {
        let path = folder.join("vmlinux");
        fs::write(&path, parts.concat()).unwrap();
        path
    }

    fn packed(config: &str) -> Vec<u8> {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(config.as_bytes()).unwrap();
        [CONFIG_START, &gzip.finish().unwrap(), b"IKCFG_ED"].concat()
    }

    #[test]
    fn the_configuration_in_a_kernel_says_it() {
        let folder = tempfile::tempdir().unwrap();
        let says = |config: &str, code: &[u8]| {
            supports_pvm(&kernel(folder.path(), &[b"\x7fELF", &packed(config), code])).unwrap()
        };
        assert!(says("CONFIG_X=y\nCONFIG_PVM_GUEST=y\n", b""));
        assert!(!says("# CONFIG_PVM_GUEST is not set\n", b""));
        assert!(!says("CONFIG_X=y\n", SYNTHETIC_CPUID), "the configuration counts, not what looks like code");
        assert!(!says("CONFIG_PVM_GUEST=m\n", b""));
    }

    #[test]
    fn without_one_its_code_does_and_a_file_beside_it_counts_most() {
        let folder = tempfile::tempdir().unwrap();
        let stock = kernel(folder.path(), &[b"\x7fELF", &[0x0f, 0xa2]]);
        assert!(!supports_pvm(&stock).unwrap());
        fs::write(folder.path().join("vmlinux.config"), "CONFIG_OWN_PVM_GUEST=y\n").unwrap();
        assert!(supports_pvm(&stock).unwrap());
        fs::remove_file(folder.path().join("vmlinux.config")).unwrap();
        assert!(supports_pvm(&kernel(folder.path(), &[b"\x7fELF", SYNTHETIC_CPUID])).unwrap());
        assert!(supports_pvm(&folder.path().join("nothing")).is_err());
        let damaged = kernel(folder.path(), &[CONFIG_START, &[0x1f, 0x8b, 8, 0]]);
        assert!(supports_pvm(&damaged).is_err());
    }
}
