//! What happens to connections on their way out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Token;

/// What stands before a secret's name in a header's value, and `}` after it.
pub const SECRET_PLACEHOLDER: &str = "${e2b.secrets.";

/// Headers that requests to a host are given. The values may be secrets that the guest must not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderRule {
    /// A domain, or `*.domain` for all below it. Lowercase.
    pub host: String,
    /// Lowercase names, and values that replace what the guest sent. `${e2b.secrets.<name>}` in a value stands for the secret's
    /// current value.
    pub headers: BTreeMap<String, Token>,
}

/// A SOCKS5 proxy that a sandbox's TCP connections leave through.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressProxy {
    /// Its name or address.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// User name and password.
    pub login: Option<(String, Token)>,
    /// Set: the way to it is encrypted.
    pub tls: Option<ProxyTls>,
}

/// How a proxy is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxyTls {
    /// The name in its certificate; its host when `None`.
    pub server_name: Option<String>,
    /// PEM of the CAs that vouch for it, instead of the system's.
    pub ca_cert: Option<String>,
}
