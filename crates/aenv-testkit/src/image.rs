//! A tiny image for tests: Debian's static busybox in an OCI layout, made in well under a second.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use aenv_types::Digest;
use anyhow::{Context, ensure};
use serde_json::json;

/// A layout that [`tiny_image`] made.
#[derive(Clone, Debug)]
pub struct TinyImage {
    /// The layout's folder.
    pub folder: PathBuf,
    /// What to pull: `oci:<folder>:tiny`.
    pub reference: String,
    /// Digest of the manifest.
    pub manifest: Digest,
}

/// Everything in it is this old, so that equal busyboxes give equal images.
const MTIME: u64 = 1_735_689_600;

/// Makes an image in `folder`, which must be missing or empty: `/bin/busybox` with a link for each of its applets, `/bin/bash`
/// (busybox's shell), the users `root` and `user` (1000, home `/home/user`), and the usual empty folders. Needs
/// `/bin/busybox` (Debian: busybox-static).
pub fn tiny_image(folder: &Path) -> anyhow::Result<TinyImage> {
    let layer = rootfs()?;
    let blobs = folder.join("blobs/sha256");
    fs::create_dir_all(&blobs).with_context(|| format!("make {}", blobs.display()))?;
    let store = |bytes: &[u8]| -> anyhow::Result<(Digest, usize)> {
        let digest = Digest::of(bytes);
        fs::write(blobs.join(digest.hex()), bytes)?;
        Ok((digest, bytes.len()))
    };
    let (layer_digest, layer_size) = store(&layer)?;
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let config = json!({
        "architecture": architecture,
        "os": "linux",
        "config": { "Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"], "Cmd": ["/bin/sh"] },
        "rootfs": { "type": "layers", "diff_ids": [layer_digest.to_string()] },
    });
    let (config_digest, config_size) = store(config.to_string().as_bytes())?;
    let manifest_type = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": manifest_type,
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": config_digest.to_string(),
            "size": config_size,
        },
        "layers": [{
            "mediaType": "application/vnd.oci.image.layer.v1.tar",
            "digest": layer_digest.to_string(),
            "size": layer_size,
        }],
    });
    let (manifest, manifest_size) = store(manifest.to_string().as_bytes())?;
    let index = json!({ "schemaVersion": 2, "manifests": [{
        "mediaType": manifest_type,
        "digest": manifest.to_string(),
        "size": manifest_size,
        "annotations": { "org.opencontainers.image.ref.name": "tiny" },
    }]});
    fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    fs::write(folder.join("index.json"), index.to_string())?;
    let reference = format!("oci:{}:tiny", folder.display());
    Ok(TinyImage { folder: folder.to_owned(), reference, manifest })
}

/// The layer's tar.
fn rootfs() -> anyhow::Result<Vec<u8>> {
    let busybox =
        fs::read("/bin/busybox").context("read /bin/busybox (Debian: apt-get install busybox-static)")?;
    let listed = Command::new("/bin/busybox").arg("--list").output().context("run /bin/busybox")?;
    ensure!(listed.status.success(), "busybox --list failed");
    let applets = String::from_utf8(listed.stdout).context("busybox lists its applets")?;

    let mut tar = Tree(tar::Builder::new(Vec::new()));
    tar.folder("./", 0o755, 0)?;
    for folder in
        ["bin", "dev", "etc", "home", "mnt", "opt", "proc", "run", "sbin", "srv", "sys", "usr", "var"]
    {
        tar.folder(folder, 0o755, 0)?;
    }
    for folder in ["usr/bin", "usr/sbin", "usr/lib", "usr/local", "usr/local/bin", "var/log", "var/lib"] {
        tar.folder(folder, 0o755, 0)?;
    }
    tar.folder("tmp", 0o1777, 0)?;
    tar.folder("var/tmp", 0o1777, 0)?;
    tar.folder("root", 0o700, 0)?;
    tar.folder("home/user", 0o755, 1000)?;
    tar.file("bin/busybox", 0o755, &busybox)?;
    for applet in applets.lines().filter(|name| !["busybox", "bash"].contains(name)) {
        tar.link(&format!("bin/{applet}"), "busybox")?;
    }
    tar.file("bin/bash", 0o755, b"#!/bin/busybox sh\nexec /bin/busybox sh \"$@\"\n")?;
    tar.link("usr/bin/env", "/bin/busybox")?;
    tar.file(
        "etc/passwd",
        0o644,
        b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/bash\n",
    )?;
    tar.file("etc/group", 0o644, b"root:x:0:\nuser:x:1000:\n")?;
    tar.file("etc/shadow", 0o600, b"root:*:20000:0:99999:7:::\nuser:*:20000:0:99999:7:::\n")?;
    tar.file("etc/hosts", 0o644, b"127.0.0.1 localhost\n::1 localhost\n")?;
    tar.file("etc/os-release", 0o644, b"ID=tiny\nNAME=\"Tiny\"\nPRETTY_NAME=\"Tiny test image\"\n")?;
    tar.0.into_inner().context("end the tar")
}

/// A tar with one time and one owner.
struct Tree(tar::Builder<Vec<u8>>);

impl Tree {
    fn header(kind: tar::EntryType, mode: u32, owner: u64, size: usize) -> tar::Header {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(owner);
        header.set_gid(owner);
        header.set_mtime(MTIME);
        header.set_size(size as u64);
        header
    }

    fn folder(&mut self, path: &str, mode: u32, owner: u64) -> anyhow::Result<()> {
        let mut header = Self::header(tar::EntryType::Directory, mode, owner, 0);
        Ok(self.0.append_data(&mut header, path, std::io::empty())?)
    }

    fn file(&mut self, path: &str, mode: u32, bytes: &[u8]) -> anyhow::Result<()> {
        let mut header = Self::header(tar::EntryType::Regular, mode, 0, bytes.len());
        Ok(self.0.append_data(&mut header, path, bytes)?)
    }

    fn link(&mut self, path: &str, target: &str) -> anyhow::Result<()> {
        let mut header = Self::header(tar::EntryType::Symlink, 0o777, 0, 0);
        Ok(self.0.append_link(&mut header, path, target)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_busyboxes_give_equal_images() {
        let dir = tempfile::tempdir().unwrap();
        let first = tiny_image(&dir.path().join("a")).unwrap();
        let second = tiny_image(&dir.path().join("b")).unwrap();
        assert_eq!(first.manifest, second.manifest);
        let index = fs::read_to_string(first.folder.join("index.json")).unwrap();
        assert!(index.contains(&first.manifest.to_string()));
        assert!(first.folder.join("blobs/sha256").join(first.manifest.hex()).is_file());
    }
}
