//! `lo` and `eth0`, by the classic interface ioctls: enough for one address and one route, and no library.

use std::{mem, net::Ipv4Addr, os::fd::AsRawFd};

use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};

use crate::{Fatal, cmdline::Net};

/// Brings `lo` up, and `eth0` with its address and default route if there is to be one.
pub fn up(net: Option<&Net>) -> Result<(), Fatal> {
    let fd = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
        .map_err(|errno| Fatal::new("open a socket", errno))?;
    let call = |what: &str, request: libc::c_ulong, argument: *mut libc::c_void| {
        // SAFETY: every caller passes a pointer to a live struct of the type that `request` takes.
        let code = unsafe { libc::ioctl(fd.as_raw_fd(), request as libc::Ioctl, argument) };
        Errno::result(code).map(drop).map_err(|errno| Fatal::new(what, errno))
    };
    let set = |what: &str, request: libc::c_ulong, mut interface: libc::ifreq| {
        call(what, request, (&raw mut interface).cast())
    };
    set("bring lo up", libc::SIOCSIFFLAGS, flags("lo"))?;
    let Some(net) = net else { return Ok(()) };
    set("set the address of eth0", libc::SIOCSIFADDR, address("eth0", net.address))?;
    let mask = Ipv4Addr::from(u32::MAX << (32 - u32::from(net.prefix)));
    set("set the netmask of eth0", libc::SIOCSIFNETMASK, address("eth0", mask))?;
    if let Some(mtu) = net.mtu {
        let mut interface = named("eth0");
        interface.ifr_ifru.ifru_mtu = i32::try_from(mtu).map_err(|e| Fatal::new("MTU of eth0", e))?;
        set("set the MTU of eth0", libc::SIOCSIFMTU, interface)?;
    }
    set("bring eth0 up", libc::SIOCSIFFLAGS, flags("eth0"))?;
    // SAFETY: rtentry is plain data; all zeroes are the empty route.
    let mut route: libc::rtentry = unsafe { mem::zeroed() };
    route.rt_dst = sockaddr(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = sockaddr(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = sockaddr(net.gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    call("set the default route", libc::SIOCADDRT, (&raw mut route).cast())
}

fn named(name: &str) -> libc::ifreq {
    // SAFETY: ifreq is plain data; all zeroes are a request without a name.
    let mut interface: libc::ifreq = unsafe { mem::zeroed() };
    for (slot, byte) in interface.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *slot = byte as libc::c_char;
    }
    interface
}

fn flags(name: &str) -> libc::ifreq {
    let mut interface = named(name);
    interface.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    interface
}

fn address(name: &str, address: Ipv4Addr) -> libc::ifreq {
    let mut interface = named(name);
    interface.ifr_ifru.ifru_addr = sockaddr(address);
    interface
}

fn sockaddr(address: Ipv4Addr) -> libc::sockaddr {
    let inet = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.octets()) },
        sin_zero: [0; 8],
    };
    // SAFETY: sockaddr_in and sockaddr have the same size and are plain data.
    unsafe { mem::transmute::<libc::sockaddr_in, libc::sockaddr>(inet) }
}
