//! The tap, by ioctl: netlink cannot make a persistent one.

use std::{fs::OpenOptions, io, os::fd::AsRawFd};

nix::ioctl_write_ptr_bad!(
    /// `TUNSETIFF`: attaches the descriptor to an interface, making it if need be.
    tun_set_iff,
    nix::request_code_write!(b'T', 202, size_of::<libc::c_int>()),
    libc::ifreq
);
nix::ioctl_write_int_bad!(
    /// `TUNSETPERSIST`: the interface outlives the descriptor.
    tun_set_persist,
    nix::request_code_write!(b'T', 203, size_of::<libc::c_int>())
);

/// Makes a persistent tap in the calling thread's network namespace.
pub(crate) fn create(name: &str) -> io::Result<()> {
    let tun = open(name)?;
    // SAFETY: TUNSETPERSIST takes an integer by value and touches no memory of ours.
    unsafe { tun_set_persist(tun.as_raw_fd(), 1) }?;
    Ok(())
}

/// Opens a tap of the calling thread's network namespace as a VMM does; makes a transient one where there is none.
pub(crate) fn open(name: &str) -> io::Result<std::fs::File> {
    assert!(name.len() < libc::IFNAMSIZ, "interface names of this crate are short");
    let tun = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: ifreq is a plain C struct for which all zeros is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: the pointer is to a live, initialized ifreq with a terminated name; the kernel reads and writes only that.
    unsafe { tun_set_iff(tun.as_raw_fd(), &request) }?;
    Ok(tun)
}
