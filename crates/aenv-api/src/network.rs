//! Network options of a sandbox as clients write them, and what they mean as a policy.

use std::net::IpAddr;

use aenv_types::{EgressPolicy, EgressTarget};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{ApiError, NetworkRules, ProxyConfig, egress::rules};

/// `network` of a create.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxNetworkConfig)]
#[serde(rename_all = "camelCase")]
pub struct NetworkConfig {
    /// `false`: user ports ask for the traffic token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_public_traffic: Option<bool>,
    /// Addresses, ranges and domains that are reachable whatever `denyOut` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_out: Option<Vec<String>>,
    /// Addresses and ranges that are not reachable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deny_out: Option<Vec<String>>,
    /// Resolvers of the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns_servers: Option<Vec<String>>,
    /// SOCKS5 proxy that allowed TCP connections leave through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_proxy: Option<ProxyConfig>,
    /// `Host` header that the guest is shown; `${PORT}` is replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_request_host: Option<String>,
    /// Ports to which the proxy speaks TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub https_ports: Option<Vec<u16>>,
    /// Header rules by host. They allow nothing by themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<std::collections::BTreeMap<String, Vec<crate::NetworkRule>>>)]
    pub rules: Option<NetworkRules>,
}

/// Body of `PUT /sandboxes/{id}/network`: what is absent is cleared.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxNetworkUpdateConfig)]
#[serde(rename_all = "camelCase")]
pub struct NetworkUpdate {
    /// Addresses, ranges and domains that are reachable whatever `denyOut` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_out: Option<Vec<String>>,
    /// Addresses and ranges that are not reachable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deny_out: Option<Vec<String>>,
    /// Resolvers of the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns_servers: Option<Vec<String>>,
    /// SOCKS5 proxy that allowed TCP connections leave through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_proxy: Option<ProxyConfig>,
    /// Header rules by host. They allow nothing by themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<std::collections::BTreeMap<String, Vec<crate::NetworkRule>>>)]
    pub rules: Option<NetworkRules>,
    /// `false`: no egress at all.
    #[serde(
        default,
        rename = "allow_internet_access",
        alias = "allowInternetAccess",
        skip_serializing_if = "Option::is_none"
    )]
    pub allow_internet_access: Option<bool>,
}

/// Entries in one list.
const MAX_ENTRIES: usize = 1000;

impl NetworkConfig {
    /// What it means as a policy; 400 when it cannot mean anything.
    pub fn egress(&self, allow_internet_access: Option<bool>) -> Result<EgressPolicy, ApiError> {
        let by_address = policy(
            self.allow_out.as_deref(),
            self.deny_out.as_deref(),
            self.dns_servers.as_deref(),
            allow_internet_access,
        )?;
        on_their_way(by_address, self.rules.as_ref(), self.egress_proxy.as_ref())
    }

    /// As it may be shown: without secrets of the proxy.
    pub fn shown(&self) -> Self {
        Self { egress_proxy: self.egress_proxy.as_ref().map(ProxyConfig::shown), ..self.clone() }
    }
}

impl NetworkUpdate {
    /// What it means as a policy; 400 when it cannot mean anything.
    pub fn egress(&self) -> Result<EgressPolicy, ApiError> {
        let by_address = policy(
            self.allow_out.as_deref(),
            self.deny_out.as_deref(),
            self.dns_servers.as_deref(),
            self.allow_internet_access,
        )?;
        on_their_way(by_address, self.rules.as_ref(), self.egress_proxy.as_ref())
    }

    /// As it may be shown: without secrets of the proxy.
    pub fn shown(&self) -> Self {
        Self { egress_proxy: self.egress_proxy.as_ref().map(ProxyConfig::shown), ..self.clone() }
    }
}

fn on_their_way(
    policy: EgressPolicy,
    headers: Option<&NetworkRules>,
    proxy: Option<&ProxyConfig>,
) -> Result<EgressPolicy, ApiError> {
    let rules = headers.map(rules).transpose()?.unwrap_or_default();
    Ok(EgressPolicy { rules, proxy: proxy.map(ProxyConfig::parse).transpose()?, ..policy })
}

fn policy(
    allow: Option<&[String]>,
    deny: Option<&[String]>,
    dns: Option<&[String]>,
    internet: Option<bool>,
) -> Result<EgressPolicy, ApiError> {
    let allow = targets("allowOut", allow)?;
    let deny = targets("denyOut", deny)?;
    if let Some(EgressTarget::Domain(name)) = deny.iter().find(|t| matches!(t, EgressTarget::Domain(_))) {
        return Err(ApiError::bad_request(format!(
            "denyOut takes IP addresses and CIDR ranges only, but {name:?} is a domain"
        )));
    }
    let has_domain = allow.iter().any(|t| matches!(t, EgressTarget::Domain(_)));
    if has_domain && internet != Some(false) && !deny.iter().any(is_everything) {
        return Err(ApiError::bad_request(
            "allowOut names a domain: denyOut must then contain \"0.0.0.0/0\" (ALL_TRAFFIC)",
        ));
    }
    let mut dns_servers = Vec::new();
    for text in checked_len("dnsServers", dns)? {
        let server = text.parse::<IpAddr>().map_err(|_| {
            ApiError::bad_request(format!("dnsServers: {:?} is not an IP address", shortened(text)))
        })?;
        dns_servers.push(server);
    }
    let internet = internet.unwrap_or(true);
    Ok(EgressPolicy { internet, allow, deny, dns_servers, ..EgressPolicy::default() })
}

fn targets(field: &str, list: Option<&[String]>) -> Result<Vec<EgressTarget>, ApiError> {
    let parse = |text: &String| {
        text.parse::<EgressTarget>().map_err(|error| ApiError::bad_request(format!("{field}: {error}")))
    };
    checked_len(field, list)?.iter().map(parse).collect()
}

fn checked_len<'a>(field: &str, list: Option<&'a [String]>) -> Result<&'a [String], ApiError> {
    let list = list.unwrap_or_default();
    if list.len() > MAX_ENTRIES {
        return Err(ApiError::bad_request(format!(
            "{field} has {} entries; at most {MAX_ENTRIES} are allowed",
            list.len()
        )));
    }
    Ok(list)
}

fn is_everything(target: &EgressTarget) -> bool {
    matches!(target, EgressTarget::Cidr { prefix: 0, addr } if addr.is_ipv4())
}

fn shortened(text: &str) -> String {
    text.chars().take(100).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(allow: &[&str], deny: &[&str]) -> NetworkConfig {
        let own = |list: &[&str]| Some(list.iter().map(|s| (*s).to_owned()).collect());
        NetworkConfig { allow_out: own(allow), deny_out: own(deny), ..NetworkConfig::default() }
    }

    #[test]
    fn lists_become_targets() {
        let policy = config(&["1.1.1.1", "*.example.com"], &["0.0.0.0/0"]).egress(None).unwrap();
        assert!(policy.internet);
        assert_eq!(policy.allow.len(), 2);
        assert_eq!(policy.deny, vec!["0.0.0.0/0".parse().unwrap()]);
    }

    #[test]
    fn a_domain_needs_deny_all() {
        let error = config(&["example.com"], &["8.8.8.8"]).egress(None).unwrap_err();
        assert_eq!(error.status, 400);
        assert!(error.message.contains("0.0.0.0/0"), "{error}");
    }

    #[test]
    fn deny_takes_no_domain() {
        assert_eq!(config(&[], &["example.com"]).egress(None).unwrap_err().status, 400);
        assert_eq!(config(&[], &["300.1.1.1"]).egress(None).unwrap_err().status, 400);
    }

    #[test]
    fn no_internet_is_kept() {
        assert!(!NetworkConfig::default().egress(Some(false)).unwrap().internet);
    }

    #[test]
    fn rules_and_proxy_become_part_of_the_policy() {
        let json = serde_json::json!({
            "rules": {"a.com": [{"transform": {"headers": {"x": "1"}}}]},
            "egressProxy": {"address": "192.0.2.1:1080", "username": "me", "password": "hush"},
        });
        let config: NetworkConfig = serde_json::from_value(json).unwrap();
        let policy = config.egress(None).unwrap();
        assert!(policy.rules.len() == 1 && policy.proxy.is_some() && policy.needs_gate());
        assert!(!serde_json::to_string(&config.shown()).unwrap().contains("hush"));
        let nothing: NetworkUpdate = serde_json::from_str(r#"{"rules": {}, "egressProxy": null}"#).unwrap();
        assert_eq!(nothing.egress().unwrap(), EgressPolicy::default());
    }

    #[test]
    fn no_internet_is_deny_all() {
        assert!(config(&["example.com"], &[]).egress(Some(false)).is_ok());
    }
}
