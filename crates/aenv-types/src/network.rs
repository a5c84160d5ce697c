//! Egress policy of a sandbox, parsed from the API's network options.

mod egress;

use std::{collections::BTreeMap, fmt, net::IpAddr, str::FromStr};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::TeamId;

pub use egress::{EgressProxy, HeaderRule, ProxyTls, UnclosedPlaceholder, ValuePart, value_parts};

/// What a sandbox may reach. Allow beats deny; the node's always-denied ranges beat both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EgressPolicy {
    /// `false`: nothing at all, DNS included.
    pub internet: bool,
    /// Reachable whatever `deny` says.
    pub allow: Vec<EgressTarget>,
    /// Unreachable unless `allow` names it. Addresses and ranges only.
    pub deny: Vec<EgressTarget>,
    /// Resolvers of the guest; the node's default when empty.
    pub dns_servers: Vec<IpAddr>,
    /// Headers that requests to some hosts are given on their way out. They allow nothing.
    pub rules: Vec<HeaderRule>,
    /// Where all outgoing TCP connections that are allowed go through.
    pub proxy: Option<EgressProxy>,
    /// Whose secrets the values of `rules` may name; `None` without rules.
    pub team: Option<TeamId>,
}

impl Default for EgressPolicy {
    fn default() -> Self {
        Self {
            internet: true,
            allow: Vec::new(),
            deny: Vec::new(),
            dns_servers: Vec::new(),
            rules: Vec::new(),
            proxy: None,
            team: None,
        }
    }
}

impl EgressPolicy {
    /// The policy of a sandbox of this team.
    pub fn of_team(self, team: &TeamId) -> Self {
        let team = (!self.rules.is_empty()).then(|| team.clone());
        Self { team, ..self }
    }

    /// Whether something can be allowed by name only.
    pub fn names_domains(&self) -> bool {
        self.allow.iter().any(|target| matches!(target, EgressTarget::Domain(_)))
    }

    /// Whether connections of a sandbox with this policy have to be judged or changed by more than their address.
    pub fn needs_gate(&self) -> bool {
        self.names_domains() || !self.rules.is_empty() || self.proxy.is_some()
    }

    /// Whether this address is reachable whatever its name is. (The node's always-denied ranges are not looked at.)
    pub fn allows_address(&self, address: IpAddr) -> bool {
        let within = |targets: &[EgressTarget]| targets.iter().any(|target| target.contains(address));
        within(&self.allow) || (self.internet && !within(&self.deny))
    }

    /// Whether this name (lowercase, without a dot at its end) is among the allowed ones.
    pub fn allows_name(&self, name: &str) -> bool {
        self.allow
            .iter()
            .any(|target| matches!(target, EgressTarget::Domain(pattern) if covers(pattern, name)))
    }

    /// Headers that requests to this host (lowercase) are given; rules for the exact name beat those with a wildcard.
    pub fn headers_for(&self, host: &str) -> Option<BTreeMap<&str, &str>> {
        let mut fitting: Vec<&HeaderRule> =
            self.rules.iter().filter(|rule| covers(&rule.host, host)).collect();
        fitting.sort_by_key(|rule| !rule.host.starts_with("*."));
        let headers = fitting.iter().flat_map(|rule| &rule.headers);
        let merged: BTreeMap<_, _> = headers.map(|(name, value)| (name.as_str(), value.expose())).collect();
        (!merged.is_empty()).then_some(merged)
    }
}

/// Whether a domain, or `*.domain`, covers a name. `*.example.com` does not cover `example.com`.
fn covers(pattern: &str, name: &str) -> bool {
    match pattern.strip_prefix("*.") {
        Some(domain) => name.strip_suffix(domain).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.')),
        None => pattern == name,
    }
}

/// An address range or a domain.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum EgressTarget {
    /// A range; a single address has the full prefix length.
    Cidr {
        /// First address, host bits cleared.
        addr: IpAddr,
        /// 0 to 32 or 128.
        prefix: u8,
    },
    /// A domain, or `*.domain` for all below it. Lowercase.
    Domain(String),
}

impl EgressTarget {
    /// Whether an address lies in it; never, for a domain.
    pub fn contains(&self, address: IpAddr) -> bool {
        match self {
            Self::Cidr { addr, prefix } => {
                addr.is_ipv4() == address.is_ipv4() && mask(address, *prefix) == *addr
            }
            Self::Domain(_) => false,
        }
    }
}

/// Why a text is no egress target.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is neither an IP address, a CIDR range nor a domain")]
pub struct ParseTargetError(String);

impl FromStr for EgressTarget {
    type Err = ParseTargetError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseTargetError(text.chars().take(100).collect());
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix.parse::<u8>().map_err(|_| wrong())?)),
            None => (text, None),
        };
        if let Ok(addr) = address.parse::<IpAddr>() {
            let full = if addr.is_ipv4() { 32 } else { 128 };
            let prefix = prefix.unwrap_or(full);
            return if prefix <= full {
                Ok(Self::Cidr { addr: mask(addr, prefix), prefix })
            } else {
                Err(wrong())
            };
        }
        let name = text.strip_prefix("*.").unwrap_or(text);
        let label = |l: &str| {
            (1..=63).contains(&l.len())
                && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
                && !l.starts_with('-')
                && !l.ends_with('-')
        };
        let numeric = name.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        if prefix.is_some() || name.len() > 253 || numeric || !name.split('.').all(label) {
            return Err(wrong());
        }
        Ok(Self::Domain(text.to_ascii_lowercase()))
    }
}

fn mask(addr: IpAddr, prefix: u8) -> IpAddr {
    match addr {
        IpAddr::V4(v4) => {
            let bits = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            IpAddr::V4((u32::from(v4) & bits).into())
        }
        IpAddr::V6(v6) => {
            let bits = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
            IpAddr::V6((u128::from(v6) & bits).into())
        }
    }
}

impl TryFrom<String> for EgressTarget {
    type Error = ParseTargetError;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<EgressTarget> for String {
    fn from(target: EgressTarget) -> Self {
        target.to_string()
    }
}

impl fmt::Display for EgressTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cidr { addr, prefix } => write!(f, "{addr}/{prefix}"),
            Self::Domain(name) => f.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_parse() {
        let parse = |t: &str| t.parse::<EgressTarget>().map(|t| t.to_string());
        assert_eq!(parse("8.8.8.8").unwrap(), "8.8.8.8/32");
        assert_eq!(parse("10.1.2.3/8").unwrap(), "10.0.0.0/8");
        assert_eq!(parse("0.0.0.0/0").unwrap(), "0.0.0.0/0");
        assert_eq!(parse("*.Example.com").unwrap(), "*.example.com");
        for bad in ["", "10.0.0.0/33", "300.1.1.1", "a b", "exa mple.com", "-a.com", "a..b", "x/8", "*"] {
            assert!(parse(bad).is_err(), "{bad:?} was taken");
        }
    }

    fn policy(allow: &[&str], deny: &[&str]) -> EgressPolicy {
        let parse = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        EgressPolicy { allow: parse(allow), deny: parse(deny), ..EgressPolicy::default() }
    }

    #[test]
    fn names_are_allowed_by_name_only() {
        let policy = policy(&["example.com", "*.example.org", "1.2.3.0/24"], &["0.0.0.0/0"]);
        for (name, allowed) in [
            ("example.com", true),
            ("www.example.com", false),
            ("example.org", false),
            ("a.b.example.org", true),
            (".example.org", false),
            ("badexample.org", false),
            ("example.com.evil.net", false),
            ("1.2.3.4", false),
        ] {
            assert_eq!(policy.allows_name(name), allowed, "{name}");
        }
        assert!(policy.allows_address([1, 2, 3, 4].into()) && !policy.allows_address([1, 2, 4, 4].into()));
        assert!(policy.names_domains() && policy.needs_gate());
    }

    #[test]
    fn allow_beats_deny_and_no_internet_denies_the_rest() {
        assert!(policy(&["8.8.8.8"], &["8.8.8.0/24"]).allows_address([8, 8, 8, 8].into()));
        let closed = EgressPolicy { internet: false, ..policy(&["8.8.8.8"], &[]) };
        assert!(closed.allows_address([8, 8, 8, 8].into()) && !closed.allows_address([1, 1, 1, 1].into()));
        assert!(!EgressPolicy::default().needs_gate());
    }

    #[test]
    fn the_exact_rule_has_the_last_word() {
        let rule = |host: &str, value: &str| HeaderRule {
            host: host.to_owned(),
            headers: [("x-key".to_owned(), value.to_owned().into())].into(),
        };
        let rules = vec![rule("api.example.com", "exact"), rule("*.example.com", "wild")];
        let policy = EgressPolicy { rules, ..EgressPolicy::default() };
        assert_eq!(policy.headers_for("api.example.com").unwrap()["x-key"], "exact");
        assert_eq!(policy.headers_for("b.example.com").unwrap()["x-key"], "wild");
        assert_eq!(policy.headers_for("example.com"), None);
    }

    #[test]
    fn secrets_are_not_shown() {
        let rule =
            HeaderRule { host: "a.b".into(), headers: [("x".to_owned(), "hush".to_owned().into())].into() };
        let proxy = EgressProxy {
            host: "proxy.example.com".into(),
            port: 1080,
            login: Some(("me".into(), "hush".to_owned().into())),
            tls: None,
        };
        let policy = EgressPolicy { rules: vec![rule], proxy: Some(proxy), ..EgressPolicy::default() };
        assert!(!format!("{policy:?}").contains("hush"));
        let text = serde_json::to_string(&policy).unwrap();
        assert_eq!(serde_json::from_str::<EgressPolicy>(&text).unwrap(), policy);
        assert_eq!(serde_json::from_str::<EgressPolicy>("{}").unwrap(), EgressPolicy::default());
    }
}
