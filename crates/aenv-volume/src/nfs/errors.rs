//! What NFS calls errors.

use std::io;

/// `nfsstat3`, but for success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Status(pub u32);

impl Status {
    pub(super) const EXIST: Self = Self(17);
    pub(super) const NOTDIR: Self = Self(20);
    pub(super) const ISDIR: Self = Self(21);
    pub(super) const INVAL: Self = Self(22);
    pub(super) const NAMETOOLONG: Self = Self(63);
    pub(super) const STALE: Self = Self(70);
    pub(super) const BADHANDLE: Self = Self(10001);
    pub(super) const NOT_SYNC: Self = Self(10002);
    pub(super) const NOTSUPP: Self = Self(10004);
    pub(super) const TOOSMALL: Self = Self(10005);
    const IO: Self = Self(5);
}

impl From<io::Error> for Status {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            // These have the numbers that they have on Linux.
            Some(
                number @ (libc::EPERM
                | libc::ENOENT
                | libc::EIO
                | libc::ENXIO
                | libc::EACCES
                | libc::EEXIST
                | libc::EXDEV
                | libc::ENODEV
                | libc::ENOTDIR
                | libc::EISDIR
                | libc::EINVAL
                | libc::EFBIG
                | libc::ENOSPC
                | libc::EROFS
                | libc::EMLINK),
            ) => Self(number.unsigned_abs()),
            Some(libc::ENAMETOOLONG) => Self::NAMETOOLONG,
            Some(libc::ENOTEMPTY) => Self(66),
            Some(libc::EDQUOT) => Self(69),
            Some(libc::ESTALE) => Self::STALE,
            Some(libc::ELOOP) => Self::INVAL,
            Some(libc::EOPNOTSUPP) => Self::NOTSUPP,
            _ => {
                tracing::warn!(%error, "a guest's request failed");
                Self::IO
            }
        }
    }
}

impl From<rustix::io::Errno> for Status {
    fn from(errno: rustix::io::Errno) -> Self {
        io::Error::from(errno).into()
    }
}
