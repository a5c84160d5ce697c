//! Network namespaces, as far as a VMM needs them: an open tap, and an empty namespace to wait in.
//!
//! A thread that enters a namespace is never given back to a pool: each call uses a thread of its own.

use std::{
    ffi::CString,
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
};

use nix::sched::{CloneFlags, setns, unshare};

use crate::{EngineError, process::io_error};

// linux/if_tun.h: _IOW('T', 202, int).
nix::ioctl_write_ptr_bad!(tun_set_iff, nix::request_code_write!(b'T', 202, 4), libc::ifreq);

// linux/if_tun.h: _IOW('T', 213, struct sock_fprog) and _IOW('T', 214, struct sock_fprog).
nix::ioctl_write_ptr_bad!(tun_attach_filter, nix::request_code_write!(b'T', 213, 16), libc::sock_fprog);
nix::ioctl_write_ptr_bad!(tun_detach_filter, nix::request_code_write!(b'T', 214, 16), libc::sock_fprog);

/// A tap that is open but shut: no packet comes out of it before [`Tap::let_packets_through`].
///
/// QEMU makes a descriptor that it was sent blocking again with everything that it reads from the control socket, until the
/// descriptor has a name there, which it can get only after the machine is built. A packet before that moment would
/// block QEMU's main loop in a read.
pub(crate) struct Tap {
    file: File,
}

impl Tap {
    /// Opens the tap `name` in the namespace `netns`, for packets with virtio headers. The tap must be there.
    pub(crate) async fn open(netns: &Path, name: &'static str) -> Result<Self, EngineError> {
        let path = netns.to_owned();
        let opened = on_own_thread(move || {
            setns(File::open(&path)?, CloneFlags::CLONE_NEWNET)?;
            attach(name)
        });
        match opened.await {
            Ok(fd) => Ok(Self { file: fd.into() }),
            Err(e) => Err(io_error(format!("open the tap {name} in {}", netns.display()), e)),
        }
    }

    /// Makes the description non-blocking, for whoever else holds it too, and ends the shutting.
    pub(crate) fn let_packets_through(&self) -> Result<(), EngineError> {
        let program = libc::sock_fprog { len: 0, filter: std::ptr::null_mut() };
        nix::fcntl::fcntl(&self.file, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))
            .and_then(|_| {
                // SAFETY: the descriptor is open; detaching reads nothing from the program.
                unsafe { tun_detach_filter(self.file.as_raw_fd(), &raw const program) }
            })
            .map(drop)
            .map_err(|errno| io_error("open the tap for packets", errno.into()))
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A new namespace with nothing in it, for VMMs that wait for work.
pub(crate) async fn empty_netns() -> Result<OwnedFd, EngineError> {
    let made = on_own_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        Ok(File::open("/proc/thread-self/ns/net")?.into())
    });
    made.await.map_err(|e| io_error("make a network namespace", e))
}

async fn on_own_thread(work: impl FnOnce() -> io::Result<OwnedFd> + Send + 'static) -> io::Result<OwnedFd> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name("aenv-netns".to_owned()).spawn(move || {
        // A receiver that went away has no use for the descriptor.
        let _ = sender.send(work());
    })?;
    receiver.await.map_err(|_| io::Error::other("the thread ended early"))?
}

fn attach(name: &str) -> io::Result<OwnedFd> {
    let text = CString::new(name)?;
    // SAFETY: the name is a C string. Without this check TUNSETIFF would make a tap that leads nowhere.
    if unsafe { libc::if_nametoindex(text.as_ptr()) } == 0 {
        return Err(io::Error::new(io::ErrorKind::NotFound, "there is no such interface"));
    }
    let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
    let mut file = File::options().read(true).write(true).custom_flags(flags).open("/dev/net/tun")?;
    // SAFETY: ifreq is plain data; all zeroes are a request without a name.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *slot = byte as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: the descriptor is open and `request` is a live ifreq.
    unsafe { tun_set_iff(file.as_raw_fd(), &raw const request) }?;
    // One instruction: return 0, keep no byte of any packet.
    let code = u16::try_from(libc::BPF_RET | libc::BPF_K).map_err(io::Error::other)?;
    let mut drop_all = [libc::sock_filter { code, jt: 0, jf: 0, k: 0 }];
    let program = libc::sock_fprog { len: 1, filter: drop_all.as_mut_ptr() };
    // SAFETY: the descriptor is open, and the program and its one instruction are live.
    unsafe { tun_attach_filter(file.as_raw_fd(), &raw const program) }?;
    // What came in between the two calls.
    let mut packet = [0; 2048];
    while file.read(&mut packet).is_ok_and(|count| count > 0) {}
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_tap_that_is_not_there_is_not_made() {
        let netns = empty_netns().await.unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), netns.as_raw_fd());
        let error = Tap::open(Path::new(&path), "tap0").await.err().unwrap();
        assert!(error.to_string().contains("tap0") && error.to_string().contains("open the tap"), "{error}");
    }
}
