//! An empty ext4, the same bytes every time.
//!
//! It is made in a sparse file, where `mke2fs` knows that what it does not write is zero: inode tables are marked as
//! zeroed (no guest has to do it later) without a byte written. Only the blocks with content are then copied.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::Path,
    time::Duration,
};

use nix::{
    errno::Errno,
    unistd::{Whence, lseek64},
};
use tokio::process::Command;

use crate::error::LayerError;

/// The longest that `mke2fs` may take.
const FORMAT_BOUND: Duration = Duration::from_secs(60);
/// What the filesystem can do, all of it known to Linux 5.15 and later, whatever the host's `mke2fs.conf` says.
const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,\
    large_file,huge_file,dir_nlink,extra_isize,metadata_csum";
/// A filesystem's id means nothing where each machine has its own.
const UUID: &str = "61656e76-0000-4000-8000-000000000001";

/// Writes an empty ext4 of `size` bytes to `export`; `scratch` is a file that may be used meanwhile.
pub(crate) async fn format(export: &Path, size: u64, scratch: &Path) -> Result<(), LayerError> {
    let result = make(size, scratch).await;
    let copied = match result {
        Ok(()) => {
            let (from, to) = (scratch.to_owned(), export.to_owned());
            tokio::task::spawn_blocking(move || copy_content(&from, &to)).await.unwrap_or_else(|error| {
                Err(LayerError::Io { context: "copying".into(), message: error.to_string() })
            })
        }
        Err(error) => Err(error),
    };
    let _ = fs::remove_file(scratch);
    copied
}

async fn make(size: u64, scratch: &Path) -> Result<(), LayerError> {
    File::create(scratch)
        .and_then(|file| file.set_len(size))
        .map_err(|error| LayerError::io(format!("making {}", scratch.display()), error))?;
    let mut command = Command::new("mke2fs");
    command
        .env_clear()
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .env("MKE2FS_CONFIG", "/dev/null")
        .env("SOURCE_DATE_EPOCH", "0")
        .env("E2FSPROGS_FAKE_TIME", "1")
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-i", "16384", "-m", "0", "-O", FEATURES])
        .args(["-U", UUID, "-E"])
        .arg(format!("hash_seed={UUID},lazy_journal_init=1,lazy_itable_init=0,discard,root_owner=0:0"))
        .arg(scratch)
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true);
    let output = match tokio::time::timeout(FORMAT_BOUND, command.output()).await {
        Err(_) => Err("no end after 60 s".to_owned()),
        Ok(Err(error)) => Err(format!("{error}; install the package e2fsprogs")),
        Ok(Ok(output)) if output.status.success() => Ok(()),
        Ok(Ok(output)) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    };
    output.map_err(|message| LayerError::Io { context: "running mke2fs".to_owned(), message })
}

/// Copies what is not a hole.
fn copy_content(from: &Path, to: &Path) -> Result<(), LayerError> {
    let failed =
        |error: std::io::Error| LayerError::io(format!("writing the ext4 to {}", to.display()), error);
    let source = File::open(from).map_err(failed)?;
    let target = OpenOptions::new().read(true).write(true).open(to).map_err(failed)?;
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        at = match lseek64(&source, at, Whence::SeekData) {
            Ok(data) => data,
            Err(Errno::ENXIO) => break,
            Err(error) => return Err(failed(error.into())),
        };
        let end = lseek64(&source, at, Whence::SeekHole).map_err(|error| failed(error.into()))?;
        while at < end {
            let len = buffer.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
            let offset = u64::try_from(at).expect("a file offset is not negative");
            source.read_exact_at(&mut buffer[..len], offset).map_err(failed)?;
            target.write_all_at(&buffer[..len], offset).map_err(failed)?;
            at += i64::try_from(len).expect("a buffer's length fits");
        }
    }
    target.sync_all().map_err(failed)
}
