//! One volume: its document, its open root, and what it holds.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
};

use aenv_types::{TeamId, Token, VolumeId};
use chrono::{DateTime, Utc};
use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use subtle::ConstantTimeEq;

use crate::{Limits, VolumeName, sys::Handle, tree};

/// Bytes of a handle's authentication code.
const CODE: usize = 16;

/// What is kept of a volume beside its files.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Document {
    pub id: VolumeId,
    pub name: VolumeName,
    pub team: TeamId,
    pub token: Token,
    /// Authenticates the handles that guests are given.
    pub handle_key: Token,
    pub created_at: DateTime<Utc>,
}

/// A volume that is open.
pub struct Volume {
    pub(crate) document: Document,
    /// The root of its files.
    root: File,
    /// Where uploads are received and what is removed ends; the same filesystem.
    staging: File,
    limits: Limits,
    used: AtomicI64,
    counted: OnceLock<()>,
    removed: AtomicBool,
    number: AtomicU64,
}

impl Volume {
    /// Opens the folder of a volume.
    pub(crate) fn open(folder: &Path, document: Document, limits: Limits) -> io::Result<Self> {
        let staging = File::open(folder.join("staging"))?;
        // What an upload or a removal that was cut off left.
        tree::clear(&staging)?;
        Ok(Self {
            document,
            root: File::open(folder.join("data"))?,
            staging,
            limits,
            used: AtomicI64::new(0),
            counted: OnceLock::new(),
            removed: AtomicBool::new(false),
            number: AtomicU64::new(0),
        })
    }

    /// Its id.
    pub fn id(&self) -> &VolumeId {
        &self.document.id
    }

    /// Its name.
    pub fn name(&self) -> &VolumeName {
        &self.document.name
    }

    /// Whose it is.
    pub fn team(&self) -> &TeamId {
        &self.document.team
    }

    /// The bearer token of its content.
    pub fn token(&self) -> &Token {
        &self.document.token
    }

    /// Whether this is its token, in constant time.
    pub fn opens_with(&self, token: &str) -> bool {
        self.document.token.expose().as_bytes().ct_eq(token.as_bytes()).into()
    }

    pub(crate) fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    pub(crate) fn staging(&self) -> BorrowedFd<'_> {
        self.staging.as_fd()
    }

    /// A name in the staging folder that nobody else uses.
    pub(crate) fn staging_name(&self) -> String {
        format!("{}", self.number.fetch_add(1, Ordering::Relaxed))
    }

    /// From now on nothing more is written.
    pub(crate) fn close(&self) {
        self.removed.store(true, Ordering::Release);
    }

    /// Whether it was removed.
    pub(crate) fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }

    /// Bytes that its files count. The first caller counts them.
    pub fn used(&self) -> u64 {
        self.counted.get_or_init(|| match tree::measure(&self.root) {
            Ok(sum) => {
                self.used.fetch_add(i64::try_from(sum).unwrap_or(i64::MAX), Ordering::Relaxed);
            }
            Err(error) => {
                tracing::warn!(volume = %self.id(), %error, "what a volume holds could not be counted");
            }
        });
        u64::try_from(self.used.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// Most bytes that its files may count.
    pub fn quota(&self) -> u64 {
        self.limits.quota
    }

    /// Refuses what does not fit the quota, or the host's disk.
    pub(crate) fn room(&self, more: u64) -> io::Result<()> {
        let refuse = |errno| Err(io::Error::from_raw_os_error(errno));
        if self.is_removed() {
            return refuse(libc::ESTALE);
        }
        if self.used().saturating_add(more) > self.limits.quota {
            return refuse(libc::EDQUOT);
        }
        let disk = rustix::fs::fstatvfs(&self.root)?;
        if disk.f_bavail.saturating_mul(disk.f_frsize) < self.limits.disk_reserve.saturating_add(more) {
            return refuse(libc::ENOSPC);
        }
        Ok(())
    }

    /// Notes that a file counted `before` and counts `after`.
    pub(crate) fn charge(&self, before: u64, after: u64) {
        let change = i64::try_from(after).unwrap_or(i64::MAX) - i64::try_from(before).unwrap_or(i64::MAX);
        self.used.fetch_add(change, Ordering::Relaxed);
    }

    /// What a guest is given to name a file: the handle, and a code that only this volume makes.
    pub(crate) fn seal(&self, handle: &Handle) -> Vec<u8> {
        let mut sealed = handle.kind.to_be_bytes().to_vec();
        sealed.extend_from_slice(&handle.bytes);
        let code = self.code(&sealed);
        sealed.extend_from_slice(&code);
        sealed
    }

    /// The handle in what a guest sent, if this volume made it.
    pub(crate) fn unseal(&self, sealed: &[u8]) -> Option<Handle> {
        let (plain, code) = sealed.split_at_checked(sealed.len().checked_sub(CODE)?)?;
        let genuine: bool = self.code(plain).ct_eq(code).into();
        let (kind, bytes) = plain.split_first_chunk::<4>()?;
        genuine.then(|| Handle { kind: i32::from_be_bytes(*kind), bytes: bytes.to_vec() })
    }

    fn code(&self, plain: &[u8]) -> [u8; CODE] {
        let key = self.document.handle_key.expose().as_bytes();
        let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
        mac.update(plain);
        let mut code = [0; CODE];
        code.copy_from_slice(&mac.finalize().into_bytes()[..CODE]);
        code
    }
}

#[cfg(test)]
mod tests {
    use crate::tests::volume;

    #[test]
    fn handles_of_others_are_refused() {
        let (_one, first) = volume();
        let (_two, second) = volume();
        let handle = crate::sys::handle_of(first.root()).unwrap();
        let sealed = first.seal(&handle);
        assert_eq!(first.unseal(&sealed), Some(handle));
        assert_eq!(second.unseal(&sealed), None);
        for at in 0..sealed.len() {
            let mut forged = sealed.clone();
            forged[at] ^= 1;
            assert_eq!(first.unseal(&forged), None, "byte {at}");
        }
        assert_eq!(first.unseal(&[]), None);
        assert!(sealed.len() <= 64);
    }
}
