//! One network namespace for each sandbox, from a pool made ahead.
//!
//! ```text
//!            the slot's namespace  /run/netns/aenv<tag>-<n>                      the host
//! guest ──► tap0 169.254.0.22/30 ─► forward, egress rules, masquerade ─► veth0 ══ aenv<tag>-<n> ─► forward rules, masquerade ─► uplink
//!            │ netdev ingress: only the guest's MAC and address
//!            └ the server's sockets to the guest ([`Slot`]'s `Dial`) are made here
//! ```
//!
//! Inside: a tap that always has the same addresses (a checkpoint contains its guest's address). To the host: one veth pair
//! and nftables rules. Owns namespaces, taps, veths and rules whose names begin with `aenv` and the instance's tag;
//! touches no others, and never runs a shell. The rules themselves are in the module `rules`, with the reason for each.
//!
//! A slot is used once: [`Network::release`] removes its namespace in the background and the pool makes a fresh one, so that no
//! connection, counter, rule or neighbour entry of one sandbox can be seen by the next.

pub mod config;
pub mod dns;
mod host;
mod netns;
mod pool;
mod rules;
pub mod slot;
mod slot_ns;
mod tap;
mod wiring;
mod workers;

pub use config::{Cidr, InstanceTag, NetworkConfig, ParseCidrError, ParseTagError};
pub use dns::default_dns;
pub use pool::Slots;
pub use rules::{DNS_PORT, GATE_PORT};
pub use slot::{Network, NetworkError, Slot, SlotRecord};
pub use slot_ns::{GateSockets, NamespaceSlot};

/// Addresses that are the same in every namespace.
pub mod guest {
    use std::net::Ipv4Addr;

    /// The guest's address.
    pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 21);
    /// The tap's address: the guest's gateway.
    pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 22);
    /// Prefix length of the link between them.
    pub const PREFIX: u8 = 30;
    /// The guest's MAC address.
    pub const MAC: [u8; 6] = [0x02, 0xae, 0, 0, 0, 0x15];
    /// The tap's MAC address: what a checkpointed guest has in its neighbour table for the gateway.
    pub const GATEWAY_MAC: [u8; 6] = [0x02, 0xae, 0, 0, 0, 0x16];
    /// Name of the tap in every namespace. It is persistent and made with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`.
    pub const TAP: &str = "tap0";
}
