//! What happens to connections on their way out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::Token;

/// What stands before a secret's name in a header's value, and `}` after it.
const SECRET: &str = "${e2b.secrets.";

/// A part of a header's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValuePart<'a> {
    /// Stands for itself.
    Text(&'a str),
    /// `${e2b.secrets.<name>}`: stands for the current value of the secret of this name.
    Secret(&'a str),
}

/// A placeholder in a header's value has no closing brace.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("it names a secret without a closing brace")]
pub struct UnclosedPlaceholder;

/// The parts of a header's value, in order.
pub fn value_parts(value: &str) -> Result<Vec<ValuePart<'_>>, UnclosedPlaceholder> {
    let mut pieces = value.split(SECRET);
    let mut parts = vec![ValuePart::Text(pieces.next().unwrap_or_default())];
    for piece in pieces {
        let (name, text) = piece.split_once('}').ok_or(UnclosedPlaceholder)?;
        parts.extend([ValuePart::Secret(name), ValuePart::Text(text)]);
    }
    Ok(parts)
}

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

#[cfg(test)]
mod tests {
    use super::{ValuePart::*, *};

    #[test]
    fn placeholders_stand_between_texts() {
        assert_eq!(value_parts("Bearer ${other}"), Ok(vec![Text("Bearer ${other}")]));
        assert_eq!(
            value_parts("a ${e2b.secrets.x}${e2b.secrets.y}!"),
            Ok(vec![Text("a "), Secret("x"), Text(""), Secret("y"), Text("!")])
        );
        assert_eq!(value_parts("${e2b.secrets.open"), Err(UnclosedPlaceholder));
        assert_eq!(value_parts("${e2b.secrets.a ${e2b.secrets.b}"), Err(UnclosedPlaceholder));
    }
}
