//! What the operator decides about the network.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    path::Path,
    str::FromStr,
};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Settings of [`crate::Slots`].
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// Part of every name, so that several servers share a host. See [`InstanceTag::of_home`].
    pub tag: InstanceTag,
    /// Slots that are kept ready while little happens (`pool.low_watermark`).
    pub low_watermark: u32,
    /// Slots that are kept ready at most, when many are taken at once (`pool.high_watermark`).
    pub high_watermark: u32,
    /// Slots in use at most. The size of `veth_cidr` is a limit too: two addresses for each slot.
    pub limit: u32,
    /// Addresses of the veth pairs (`network.internal.veth_cidr`). Servers on one host may share the range.
    pub veth_cidr: Cidr,
    /// Never reachable from a guest, whatever its policy allows (`network.egress.always_denied_cidrs`). Link-local and other
    /// sandboxes' addresses, and the host's own, are denied even when they are not in here.
    pub always_denied_cidrs: Vec<Cidr>,
    /// Resolvers of guests whose policy names none. They are reachable on port 53 even inside an always-denied
    /// range, because the operator chose them; a policy can still deny them.
    pub dns_servers: Vec<IpAddr>,
    /// Whether the host rewrites the source of packets that leave it. Off only where the network routes `veth_cidr` back.
    pub masquerade: bool,
    /// Connections that one guest may have open to the outside.
    pub connection_limit: u32,
}

impl NetworkConfig {
    /// The defaults, for one instance.
    pub fn new(tag: InstanceTag) -> Self {
        Self {
            tag,
            low_watermark: 2,
            high_watermark: 64,
            limit: 4096,
            veth_cidr: Cidr::new(Ipv4Addr::new(10, 200, 0, 0), 16),
            always_denied_cidrs: private_ranges(),
            dns_servers: crate::default_dns(),
            masquerade: true,
            connection_limit: 8192,
        }
    }

    /// Slots that can exist: the limit, or fewer where the address range is small.
    pub fn capacity(&self) -> u32 {
        let pairs = 1_u64 << (31 - u32::from(self.veth_cidr.prefix).min(31));
        self.limit.min(u32::try_from(pairs).unwrap_or(u32::MAX)).min(MAX_INDEX)
    }

    /// The two addresses of a slot: the host's end of the veth pair and the namespace's.
    pub(crate) fn addresses(&self, index: u32) -> (Ipv4Addr, Ipv4Addr) {
        let first = u32::from(self.veth_cidr.addr) + index * 2;
        (first.into(), (first + 1).into())
    }

    /// Every range that no policy opens: the configured ones, this product's own, and what is not a unicast address.
    pub fn denied(&self) -> Vec<Cidr> {
        let mut denied = self.always_denied_cidrs.clone();
        denied.push(self.veth_cidr);
        denied.extend([
            Cidr::new(Ipv4Addr::UNSPECIFIED, 8),
            Cidr::new(Ipv4Addr::LOCALHOST, 8),
            Cidr::new(Ipv4Addr::new(169, 254, 0, 0), 16),
            Cidr::new(Ipv4Addr::new(224, 0, 0, 0), 3),
        ]);
        denied
    }
}

/// Interface names have 15 bytes, of which an index may use 5.
const MAX_INDEX: u32 = 99_999;

/// The default of `always_denied_cidrs`: private ranges (RFC 1918) and shared ones (RFC 6598).
pub fn private_ranges() -> Vec<Cidr> {
    vec![
        Cidr::new(Ipv4Addr::new(10, 0, 0, 0), 8),
        Cidr::new(Ipv4Addr::new(100, 64, 0, 0), 10),
        Cidr::new(Ipv4Addr::new(172, 16, 0, 0), 12),
        Cidr::new(Ipv4Addr::new(192, 168, 0, 0), 16),
    ]
}

/// An IPv4 range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cidr {
    addr: Ipv4Addr,
    prefix: u8,
}

/// Why a text is not an IPv4 range.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is not an IPv4 range such as 10.0.0.0/8")]
pub struct ParseCidrError(String);

impl Cidr {
    /// The range of this prefix length (at most 32; more is taken as 32) that holds `addr`.
    pub fn new(addr: Ipv4Addr, prefix: u8) -> Self {
        let prefix = prefix.min(32);
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
        Self { addr: (u32::from(addr) & mask).into(), prefix }
    }

    /// Its first address.
    pub fn addr(&self) -> Ipv4Addr {
        self.addr
    }

    /// Its prefix length.
    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Whether all of `other` lies in it.
    pub fn contains(&self, other: &Self) -> bool {
        self.prefix <= other.prefix && Self::new(other.addr, self.prefix).addr == self.addr
    }
}

impl FromStr for Cidr {
    type Err = ParseCidrError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseCidrError(text.chars().take(100).collect());
        let (addr, prefix) = text.split_once('/').unwrap_or((text, "32"));
        let addr = addr.parse().map_err(|_| wrong())?;
        match prefix.parse() {
            Ok(prefix) if prefix <= 32 => Ok(Self::new(addr, prefix)),
            _ => Err(wrong()),
        }
    }
}

impl TryFrom<String> for Cidr {
    type Error = ParseCidrError;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Cidr> for String {
    fn from(cidr: Cidr) -> Self {
        cidr.to_string()
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.addr, self.prefix)
    }
}

/// What tells the names of several servers on one host apart: 1 to 4 lowercase letters or digits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InstanceTag(String);

/// Why a text is not an instance tag.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is not an instance tag: 1 to 4 lowercase letters or digits")]
pub struct ParseTagError(String);

impl InstanceTag {
    /// The tag of the server with this home: the same after each restart, another one for another home (out of 1.6 million).
    pub fn of_home(home: &Path) -> Self {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64; // FNV-1a, because it must never change between versions
        for byte in home.as_os_str().as_encoded_bytes() {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        let digits = b"0123456789abcdefghijklmnopqrstuvwxyz";
        let digit = |shift: u32| char::from(digits[((hash >> shift) % 36) as usize]);
        Self([48, 32, 16, 0].map(digit).iter().collect())
    }

    /// Name of a slot's namespace and of its veth on the host.
    pub(crate) fn slot_name(&self, index: u32) -> String {
        format!("aenv{}-{index}", self.0)
    }

    /// What all of this instance's names begin with.
    pub(crate) fn prefix(&self) -> String {
        format!("aenv{}-", self.0)
    }

    /// Name of the host's nftables table.
    pub(crate) fn table(&self) -> String {
        format!("aenv{}", self.0)
    }
}

impl FromStr for InstanceTag {
    type Err = ParseTagError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        if (1..=4).contains(&text.len()) && text.chars().all(fits) {
            Ok(Self(text.to_owned()))
        } else {
            Err(ParseTagError(text.chars().take(100).collect()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_parse_and_nest() {
        let cidr = |t: &str| t.parse::<Cidr>().unwrap();
        assert_eq!(cidr("10.1.2.3/8").to_string(), "10.0.0.0/8");
        assert_eq!(cidr("1.2.3.4").prefix(), 32);
        assert!(cidr("0.0.0.0/0").contains(&cidr("255.255.255.255")));
        assert!(!cidr("10.0.0.0/9").contains(&cidr("10.0.0.0/8")));
        for bad in ["", "10.0.0.0/33", "::1/128", "10.0.0/8", "a/8"] {
            assert!(bad.parse::<Cidr>().is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn tags_differ_by_home_and_fit_an_interface_name() {
        let one = InstanceTag::of_home(Path::new("/var/lib/aenv"));
        assert_eq!(one, InstanceTag::of_home(Path::new("/var/lib/aenv")));
        assert_ne!(one, InstanceTag::of_home(Path::new("/var/lib/aenv2")));
        assert!(one.slot_name(MAX_INDEX).len() <= 15);
        for bad in ["", "abcde", "A", "a-b", "../"] {
            assert!(bad.parse::<InstanceTag>().is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn capacity_is_what_the_addresses_allow() {
        let mut config = NetworkConfig::new("t".parse().unwrap());
        config.veth_cidr = "10.77.0.0/28".parse().unwrap();
        assert_eq!(config.capacity(), 8);
        assert_eq!(config.addresses(7).1, Ipv4Addr::new(10, 77, 0, 15));
        config.limit = 3;
        assert_eq!(config.capacity(), 3);
    }
}
