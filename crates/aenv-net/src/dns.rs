//! Resolvers for guests.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
};

/// The host's resolvers as a guest can use them, or public ones where the host has only a local stub.
///
/// A resolver on a loopback address (systemd-resolved, dnsmasq) answers on the host only; systemd-resolved lists
/// the real ones in a file of its own. Guests have no IPv6, so that IPv6 resolvers are left out.
pub fn default_dns() -> Vec<IpAddr> {
    for file in ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"] {
        let servers = fs::read_to_string(file).map(|text| usable(&text)).unwrap_or_default();
        if !servers.is_empty() {
            return servers;
        }
    }
    vec![Ipv4Addr::new(1, 1, 1, 1).into(), Ipv4Addr::new(8, 8, 8, 8).into()]
}

/// The resolvers in a `resolv.conf` that are reachable from elsewhere, at most three (what libc reads).
fn usable(resolv_conf: &str) -> Vec<IpAddr> {
    let lines = resolv_conf.lines();
    let servers = lines.filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()).flatten()
    });
    let addresses = servers.filter_map(|text| text.parse::<Ipv4Addr>().ok());
    addresses.filter(|ip| !ip.is_loopback() && !ip.is_unspecified()).map(IpAddr::V4).take(3).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stubs_and_ipv6_are_left_out() {
        let text = "# x\nsearch a b\nnameserver 127.0.0.53\nnameserver ::1\nnameserver  9.9.9.9 \n#nameserver 1.2.3.4\nnameserver";
        assert_eq!(usable(text), [IpAddr::from([9, 9, 9, 9])]);
        assert!(usable("").is_empty());
    }

    #[test]
    fn there_is_always_one() {
        assert!(!default_dns().is_empty());
    }
}
