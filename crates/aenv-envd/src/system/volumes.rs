//! Volumes: network filesystems that the host shows this guest, and the kernel modules that they need.

use std::{fs, io, net::IpAddr, path::Path};

use aenv_envd_api::VolumeMount;
use nix::{
    errno::Errno,
    kmod::init_module,
    mount::{MntFlags, MsFlags, mount, umount2},
};

use super::SystemError;
use crate::users::User;

/// The only kind of filesystem that is mounted here.
const KIND: &str = "nfs";

/// Whether the kernel can mount volumes as it is.
pub fn kernel_is_ready() -> bool {
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    known.lines().any(|line| line.split('\t').next_back() == Some(KIND))
}

/// Loads modules, each with its length before it.
pub fn load_modules(mut bundle: &[u8]) -> Result<(), SystemError> {
    let cut = || SystemError::Invalid { field: "modules", message: "a module is cut off".to_owned() };
    while !bundle.is_empty() {
        let (length, rest) = bundle.split_first_chunk::<4>().ok_or_else(cut)?;
        let (module, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize).ok_or_else(cut)?;
        match init_module(module, c"") {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(source) => return Err(SystemError::Kernel { step: "loading a kernel module", source }),
        }
        bundle = rest;
    }
    Ok(())
}

/// Makes the guest's mounts those of `wanted`: others from a host address are let go, missing ones are made. Blocks.
pub fn mount_all(
    wanted: &[VolumeMount],
    owner: Option<&User>,
    is_host: impl Fn(IpAddr) -> bool,
) -> Result<(), SystemError> {
    let table = fs::read_to_string("/proc/self/mountinfo");
    let table =
        table.map_err(|source| SystemError::File { path: "/proc/self/mountinfo".to_owned(), source })?;
    let there: Vec<_> = table.lines().filter_map(parse).filter(|found| found.comes_from(&is_host)).collect();
    let same = |found: &Found, mount: &VolumeMount| found.source == mount.source && found.path == mount.path;
    for stale in there.iter().filter(|found| !wanted.iter().any(|mount| same(found, mount))) {
        // Nobody answers for it any more: what waits for it is told so, and it goes when its last user does.
        let flags = MntFlags::MNT_FORCE | MntFlags::MNT_DETACH;
        if let Err(error) = umount2(stale.path.as_str(), flags) {
            tracing::warn!(path = stale.path, %error, "a volume of an earlier sandbox stays mounted");
        }
    }
    for missing in wanted.iter().filter(|mount| !there.iter().any(|found| same(found, mount))) {
        mount_one(missing, owner)?;
    }
    Ok(())
}

fn mount_one(wanted: &VolumeMount, owner: Option<&User>) -> Result<(), SystemError> {
    make_folder(Path::new(&wanted.path), owner)
        .map_err(|source| SystemError::File { path: wanted.path.clone(), source })?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(
        Some(wanted.source.as_str()),
        wanted.path.as_str(),
        Some(KIND),
        flags,
        Some(wanted.options.as_str()),
    )
    .map_err(|source| SystemError::Kernel { step: "mounting a volume", source })
}

/// Makes a folder and those above it; what is made belongs to `owner`.
fn make_folder(path: &Path, owner: Option<&User>) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        make_folder(parent, owner)?;
    }
    fs::create_dir(path)?;
    match owner {
        Some(owner) => std::os::unix::fs::chown(path, Some(owner.uid), Some(owner.gid)),
        None => Ok(()),
    }
}

/// A mount of our kind.
struct Found {
    source: String,
    path: String,
}

impl Found {
    fn comes_from(&self, is_host: impl Fn(IpAddr) -> bool) -> bool {
        let host = self.source.split_once(":/").and_then(|(host, _)| host.parse().ok());
        host.is_some_and(is_host)
    }
}

/// A line of `/proc/self/mountinfo`.
fn parse(line: &str) -> Option<Found> {
    let (mount, filesystem) = line.split_once(" - ")?;
    let mut filesystem = filesystem.split(' ');
    if filesystem.next()? != KIND {
        return None;
    }
    Some(Found { source: plain(filesystem.next()?), path: plain(mount.split(' ').nth(4)?) })
}

/// Spaces and the like stand there as `\\040`.
fn plain(text: &str) -> String {
    let mut pieces = text.split('\\');
    let mut bytes = pieces.next().unwrap_or_default().as_bytes().to_vec();
    for piece in pieces {
        let code = piece.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.extend(code);
        bytes.extend_from_slice(piece.get(3..).unwrap_or_default().as_bytes());
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_mounts_are_found_in_the_table() {
        let line =
            "36 25 0:32 / /mnt/my\\040data rw,nosuid shared:1 - nfs 10.0.0.1:/vol1 rw,vers=3,addr=10.0.0.1";
        let found = parse(line).unwrap();
        assert_eq!((found.source.as_str(), found.path.as_str()), ("10.0.0.1:/vol1", "/mnt/my data"));
        assert!(found.comes_from(|ip| ip.to_string() == "10.0.0.1"));
        assert!(!found.comes_from(|_| false));
        assert!(parse("22 1 254:0 / / rw - ext4 /dev/vda rw").is_none());
    }

    #[test]
    fn cut_modules_are_refused() {
        for bad in [&[0, 0][..], &[0, 0, 0, 9, 1]] {
            assert!(load_modules(bad).is_err());
        }
        assert!(load_modules(&[]).is_ok());
    }

    #[test]
    fn folders_are_made_down_to_the_last() {
        let outer = tempfile::tempdir().unwrap();
        let path = outer.path().join("a/b/c");
        make_folder(&path, None).unwrap();
        make_folder(&path, None).unwrap();
        assert!(path.is_dir());
        std::fs::write(outer.path().join("file"), "").unwrap();
        assert!(make_folder(&outer.path().join("file/x"), None).is_err());
    }
}
