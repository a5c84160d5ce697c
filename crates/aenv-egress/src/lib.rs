//! The egress gate: what leaves a sandbox and cannot be judged by its address alone.
//!
//! ```text
//!   guest ─ TCP 80, 443 ─► rules of the slot ─► the gate ─ peek: SNI, Host ─ policy ─ resolve ─► connect, from the slot
//!         ─ DNS ─────────► (module gate of   ─► the gate's DNS ─ policy ─────────────────────► resolvers, from the slot
//!                           aenv-net)
//! ```
//!
//! A sandbox whose policy names domains has two sockets of the server's in its slot's namespace. Connections that no address
//! rule allows are handed to them by the slot's nftables rules. The gate reads the first bytes, which say whom the connection
//! is for, asks the policy, and connects **to an address of that name** as the sandbox's resolvers give it: what the guest
//! claims about a name's address counts for nothing. Bytes are then passed on as they are.
//!
//! Where the policy has header rules for the host, the gate ends the guest's TLS with a certificate of the node's own CA, adds the
//! headers, and speaks TLS to the host itself. Where the policy names an upstream proxy, all TCP connections come to the gate and
//! leave through that.
//!
//! The sockets that the gate opens to the outside are made in the slot's namespace as well, so that the slot's and the host's
//! rules hold for them: nothing always-denied is reachable through the gate.
//!
//! Owns the gate of each slot ([`GatedSlots`] is an `aenv_net::Network`); makes no rules of its own. Everything is bounded:
//! bytes and time of a peek, connections of a sandbox, queries under way, remembered answers.

#![forbid(unsafe_code)]

mod authority;
mod connection;
mod dial;
mod dns;
mod gate;
mod inject;
mod name;
mod network;
mod peek;
mod proxy;
mod resolver;
mod secrets;
mod trust;
mod tunnel;

pub use authority::{Authority, AuthorityError, Issued, Purpose};
pub use name::{HostName, ParseHostNameError};
pub use network::GatedSlots;
pub use secrets::SecretSource;
pub use trust::Trust;
