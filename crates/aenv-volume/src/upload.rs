//! Files on their way into a volume.

use std::{fs::File, io::Write};

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};

use crate::{
    Volume, VolumePath,
    content::{Attributes, ContentError, Entry, Kind, describe, kind, parent, refused},
    sys, tree,
};

/// Permissions of files that name none.
const FILE_MODE: u32 = 0o644;

/// A file on its way into a volume. Nobody sees it before [`Upload::finish`]; dropped before, nothing stays of it.
pub struct Upload<'a> {
    volume: &'a Volume,
    path: VolumePath,
    name: String,
    file: File,
    received: u64,
    kept: bool,
}

impl<'a> Upload<'a> {
    /// Begins. Fails at once when the folder is missing, or when something is there and `force` is not set.
    pub fn begin(volume: &'a Volume, path: VolumePath, force: bool) -> Result<Self, ContentError> {
        let (folder, name) = parent(volume, &path)?;
        match sys::entry(&folder, name.as_bytes()) {
            Ok(there) if !force || kind(&sys::stat(&there).map_err(refused(&path))?) == Kind::Directory => {
                return Err(ContentError::Exists(path));
            }
            _ => {}
        }
        volume.room(4096).map_err(refused(&path))?;
        let name = volume.staging_name();
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(volume.staging(), &name, flags, Mode::from_raw_mode(0o600));
        let file = File::from(file.map_err(|errno| refused(&path)(errno.into()))?);
        Ok(Self { volume, path, name, file, received: 0, kept: false })
    }

    /// The next bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ContentError> {
        let more = bytes.len() as u64;
        let written = self.volume.room(self.received + more);
        written.and_then(|()| self.file.write_all(bytes)).map_err(refused(&self.path))?;
        self.received += more;
        Ok(())
    }

    /// Puts the whole file in its place, durable.
    pub fn finish(mut self, attributes: Attributes, force: bool) -> Result<Entry, ContentError> {
        let path = self.path.clone();
        let refused = refused(&path);
        let (folder, name) = parent(self.volume, &path)?;
        let (uid, gid) = (attributes.uid.or(Some(0)), attributes.gid.or(Some(0)));
        sys::chown(&self.file, uid, gid).map_err(&refused)?;
        sys::chmod(&self.file, attributes.mode.unwrap_or(FILE_MODE)).map_err(&refused)?;
        self.file.sync_all().map_err(&refused)?;
        let before = sys::entry(&folder, name.as_bytes()).and_then(sys::stat).ok();
        let flags = if force { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        rustix::fs::renameat_with(self.volume.staging(), &self.name, &folder, name, flags)
            .map_err(|errno| refused(errno.into()))?;
        self.kept = true;
        let after = sys::stat(&self.file).map_err(&refused)?;
        let before = before.filter(|before| before.st_nlink <= 1).map_or(0, |before| tree::cost(&before));
        self.volume.charge(before, tree::cost(&after));
        rustix::fs::fsync(&folder).map_err(|errno| refused(errno.into()))?;
        describe(path.clone(), &sys::entry(&folder, name.as_bytes()).map_err(&refused)?).map_err(refused)
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        if !self.kept {
            // What cannot be removed now is removed at the next start.
            let _ = rustix::fs::unlinkat(self.volume.staging(), &self.name, AtFlags::empty());
        }
    }
}
