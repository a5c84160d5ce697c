//! Options on the kernel's command line: `aenv.root=/dev/vda`, `aenv.net=ADDRESS/PREFIX,GATEWAY[,MTU]` and `aenv.off=reset`.

use std::{fs, net::Ipv4Addr};

use nix::sys::reboot::RebootMode;

use crate::Fatal;

/// What the host asked for.
#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    /// The root disk.
    pub root: String,
    /// The network; without it only the loopback comes up.
    pub net: Option<Net>,
}

/// Address of `eth0`.
#[derive(Debug, PartialEq, Eq)]
pub struct Net {
    /// The guest's own address.
    pub address: Ipv4Addr,
    /// Prefix length of its link.
    pub prefix: u8,
    /// The way out.
    pub gateway: Ipv4Addr,
    /// MTU of the link, if it is not the device's own.
    pub mtu: Option<u32>,
}

/// Reads `/proc/cmdline`.
pub fn read() -> Result<Options, Fatal> {
    let text = fs::read_to_string("/proc/cmdline").map_err(|e| Fatal::new("read /proc/cmdline", e))?;
    parse(&text)
}

/// How the machine ends: it is switched off, or reset where that ends it and it has no switch. Asked for at the end only, when
/// nothing may go wrong any more.
pub fn way_off() -> RebootMode {
    let text = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    match text.split_ascii_whitespace().any(|word| word == "aenv.off=reset") {
        true => RebootMode::RB_AUTOBOOT,
        false => RebootMode::RB_POWER_OFF,
    }
}

fn parse(text: &str) -> Result<Options, Fatal> {
    let value = |key: &str| text.split_ascii_whitespace().find_map(|word| word.strip_prefix(key));
    let root = value("aenv.root=").unwrap_or("/dev/vda").to_owned();
    let net = match value("aenv.net=") {
        Some(word) => Some(parse_net(word).ok_or_else(|| {
            Fatal::new(format_args!("aenv.net={word}"), "the form is ADDRESS/PREFIX,GATEWAY[,MTU]")
        })?),
        None => None,
    };
    Ok(Options { root, net })
}

fn parse_net(word: &str) -> Option<Net> {
    let mut parts = word.split(',');
    let (address, prefix) = parts.next()?.split_once('/')?;
    let net = Net {
        address: address.parse().ok()?,
        prefix: prefix.parse().ok().filter(|prefix| (1..=32).contains(prefix))?,
        gateway: parts.next()?.parse().ok()?,
        mtu: match parts.next() {
            Some(mtu) => Some(mtu.parse().ok()?),
            None => None,
        },
    };
    parts.next().is_none().then_some(net)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_found_among_the_kernels_own() {
        let options = parse("console=ttyS0 quiet aenv.net=169.254.0.21/30,169.254.0.22 panic=-1\n").unwrap();
        let net = Net {
            address: Ipv4Addr::new(169, 254, 0, 21),
            prefix: 30,
            gateway: Ipv4Addr::new(169, 254, 0, 22),
            mtu: None,
        };
        assert_eq!(options, Options { root: "/dev/vda".to_owned(), net: Some(net) });
        assert_eq!(parse("aenv.root=/dev/vdb").unwrap().root, "/dev/vdb");
        assert_eq!(parse("aenv.net=10.0.0.2/24,10.0.0.1,1400").unwrap().net.unwrap().mtu, Some(1400));
    }

    #[test]
    fn a_damaged_network_is_an_error_and_not_no_network() {
        for bad in ["", "10.0.0.2", "10.0.0.2/24", "10.0.0.2/0,10.0.0.1", "10.0.0.2/33,10.0.0.1", "a/24,b"] {
            assert!(parse(&format!("aenv.net={bad}")).is_err(), "{bad:?} was taken");
        }
        assert!(parse("aenv.net=10.0.0.2/24,10.0.0.1,1400,7").is_err());
    }
}
