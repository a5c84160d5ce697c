//! Header rules and the upstream proxy, as clients write them.

use std::collections::BTreeMap;

use aenv_types::{EgressProxy, EgressTarget, HeaderRule, ProxyTls, Token, ValuePart, value_parts};
use http::{HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::ApiError;

/// `rules` of the network options: by host, what happens to requests for it.
pub type NetworkRules = BTreeMap<String, Vec<NetworkRule>>;

/// One rule.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxNetworkRule)]
pub struct NetworkRule {
    /// How requests are changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transform: Option<NetworkTransform>,
}

/// A change of requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxNetworkTransform)]
pub struct NetworkTransform {
    /// Headers that are set, in place of what the guest sent under these names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<BTreeMap<String, String>>)]
    pub headers: Option<BTreeMap<String, Token>>,
}

/// `egressProxy` of the network options: a SOCKS5 proxy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxEgressProxyConfig)]
pub struct ProxyConfig {
    /// `host:port`.
    pub address: String,
    /// User name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// Password; never shown again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub password: Option<Token>,
    /// TLS on the way to the proxy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<ProxyTlsConfig>,
}

/// TLS on the way to a proxy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxEgressProxyTLSConfig)]
#[serde(rename_all = "camelCase")]
pub struct ProxyTlsConfig {
    /// Whether it is used.
    #[serde(default)]
    pub enabled: bool,
    /// Name in the proxy's certificate; the host of its address when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_name: Option<String>,
    /// PEM of the CAs that vouch for the proxy, instead of the system's; never shown again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_cert: Option<String>,
}

/// Hosts with rules, and headers in all of a host's rules.
const MAX_HOSTS: usize = 100;
const MAX_HEADERS: usize = 50;
/// Bytes of a header's value, of a name or password (RFC 1929), and of CAs.
const MAX_VALUE: usize = 8192;
const MAX_LOGIN: usize = 255;
const MAX_CA: usize = 8192;
/// Headers that say how a message travels and whom it is for: no rule may set them.
const FORBIDDEN: [&str; 9] = [
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

impl ProxyConfig {
    /// As it may be shown.
    pub fn shown(&self) -> Self {
        let tls = self.tls.clone().map(|tls| ProxyTlsConfig { ca_cert: None, ..tls });
        Self { password: None, tls, ..self.clone() }
    }

    /// What it means; 400 when it cannot mean anything.
    pub(crate) fn parse(&self) -> Result<EgressProxy, ApiError> {
        let wrong = |what: &str| ApiError::bad_request(format!("egressProxy.{what}"));
        let address = || wrong("address takes host:port, such as proxy.example.com:1080");
        let (host, port) = self.address.rsplit_once(':').ok_or_else(address)?;
        let port: u16 = port.parse().map_err(|_| address())?;
        let host = match host.parse::<EgressTarget>() {
            Ok(EgressTarget::Cidr { addr, prefix: 32 }) if !host.contains('/') => addr.to_string(),
            Ok(EgressTarget::Domain(name)) if !name.starts_with("*.") => name,
            _ => return Err(address()),
        };
        if port == 0 {
            return Err(address());
        }
        let login = match (&self.username, &self.password) {
            (None, None) => None,
            (Some(name), password) => {
                let password = password.clone().unwrap_or_else(|| String::new().into());
                let fits = |text: &str| (1..=MAX_LOGIN).contains(&text.len());
                if !fits(name) || !fits(password.expose()) {
                    return Err(wrong("username and password take 1 to 255 bytes each"));
                }
                Some((name.clone(), password))
            }
            (None, Some(_)) => return Err(wrong("password needs a username")),
        };
        let tls = self.tls.as_ref().filter(|tls| tls.enabled);
        if tls
            .and_then(|tls| tls.ca_cert.as_ref())
            .is_some_and(|pem| pem.len() > MAX_CA || !pem.contains("-----BEGIN CERTIFICATE-----"))
        {
            return Err(wrong("tls.caCert takes PEM certificates of at most 8192 bytes"));
        }
        let server_name = tls.and_then(|tls| tls.server_name.as_ref());
        if server_name.is_some_and(
            |name| !matches!(name.parse(), Ok(EgressTarget::Domain(name)) if !name.starts_with("*.")),
        ) {
            return Err(wrong("tls.serverName takes a host name"));
        }
        let tls =
            tls.map(|tls| ProxyTls { server_name: tls.server_name.clone(), ca_cert: tls.ca_cert.clone() });
        Ok(EgressProxy { host, port, login, tls })
    }
}

/// What rules mean; 400 when they cannot mean anything.
pub(crate) fn rules(rules: &NetworkRules) -> Result<Vec<HeaderRule>, ApiError> {
    if rules.len() > MAX_HOSTS {
        return Err(ApiError::bad_request(format!(
            "rules name {} hosts; at most {MAX_HOSTS} are allowed",
            rules.len()
        )));
    }
    let mut parsed = Vec::new();
    for (host, list) in rules {
        let shown: String = host.chars().take(100).collect();
        let Ok(EgressTarget::Domain(name)) = host.parse() else {
            return Err(ApiError::bad_request(format!(
                "rules: {shown:?} is no domain such as api.example.com or *.example.com; addresses cannot have rules"
            )));
        };
        let all = list.iter().filter_map(|rule| rule.transform.as_ref()?.headers.as_ref()).flatten();
        let mut headers = BTreeMap::new();
        for (header, value) in all {
            let header = header_name(&shown, header)?;
            check_value(&shown, &header, value)?;
            headers.insert(header, value.clone());
        }
        if headers.len() > MAX_HEADERS {
            return Err(ApiError::bad_request(format!(
                "rules of {shown:?} set more than {MAX_HEADERS} headers"
            )));
        }
        if !headers.is_empty() {
            parsed.push(HeaderRule { host: name, headers });
        }
    }
    Ok(parsed)
}

fn header_name(host: &str, name: &str) -> Result<String, ApiError> {
    let shown: String = name.chars().take(100).collect();
    match name.parse::<HeaderName>() {
        Ok(name) if !FORBIDDEN.contains(&name.as_str()) => Ok(name.as_str().to_owned()),
        Ok(_) => {
            Err(ApiError::bad_request(format!("rules of {host:?}: no rule can set the header {shown:?}")))
        }
        Err(_) => Err(ApiError::bad_request(format!("rules of {host:?}: {shown:?} is no header name"))),
    }
}

fn check_value(host: &str, header: &str, value: &Token) -> Result<(), ApiError> {
    let value = value.expose();
    let parts = value_parts(value).map_err(|error| {
        ApiError::bad_request(format!("rules of {host:?}: the value of {header}: {error}"))
    })?;
    let texts = parts.into_iter().filter_map(|part| match part {
        ValuePart::Text(text) => Some(text),
        ValuePart::Secret(_) => None,
    });
    let fixed: String = texts.collect();
    if fixed.contains("${e2b.") {
        return Err(ApiError::bad_request(format!(
            "rules of {host:?}: the value of {header} has a placeholder that names no secret; workload identity is not supported by this server"
        ))
        .with_code("unsupported_option"));
    }
    if value.len() > MAX_VALUE || HeaderValue::from_str(&fixed).is_err() {
        return Err(ApiError::bad_request(format!(
            "rules of {host:?}: the value of {header} cannot be a header's: at most {MAX_VALUE} visible characters"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn proxy(value: serde_json::Value) -> Result<EgressProxy, ApiError> {
        serde_json::from_value::<ProxyConfig>(value).unwrap().parse()
    }

    fn parsed(value: serde_json::Value) -> Result<Vec<HeaderRule>, ApiError> {
        rules(&serde_json::from_value(value).unwrap())
    }

    #[test]
    fn a_proxy_has_an_address_and_perhaps_a_login() {
        let whole = proxy(json!({
            "address": "Proxy.example.com:1080", "username": "me", "password": "hush", "tls": {"enabled": true},
        }));
        let whole = whole.unwrap();
        assert_eq!((whole.host.as_str(), whole.port), ("proxy.example.com", 1080));
        assert!(whole.login.is_some() && whole.tls == Some(ProxyTls::default()));
        assert!(proxy(json!({"address": "192.0.2.1:1", "tls": {"enabled": false}})).unwrap().tls.is_none());
        for bad in [
            json!({"address": "proxy"}),
            json!({"address": "proxy:0"}),
            json!({"address": "http://proxy:1"}),
            json!({"address": "10.0.0.0/8:1"}),
            json!({"address": "*.a.com:1"}),
            json!({"address": "a b:1"}),
            json!({"address": "p:1", "password": "x"}),
            json!({"address": "p:1", "username": "x"}),
            json!({"address": "p:1", "tls": {"enabled": true, "caCert": "x"}}),
            json!({"address": "p:1", "tls": {"enabled": true, "serverName": "a b"}}),
        ] {
            assert_eq!(proxy(bad.clone()).unwrap_err().status, 400, "{bad}");
        }
    }

    #[test]
    fn secrets_of_a_proxy_are_not_shown() {
        let config = json!({
            "address": "p:1", "username": "me", "password": "hush", "tls": {"enabled": true, "caCert": "pem"},
        });
        let config: ProxyConfig = serde_json::from_value(config).unwrap();
        assert!(!format!("{config:?}").contains("hush"));
        let shown = serde_json::to_value(config.shown()).unwrap();
        assert_eq!(shown, json!({"address": "p:1", "username": "me", "tls": {"enabled": true}}));
    }

    #[test]
    fn rules_set_headers_of_hosts() {
        let found = parsed(json!({
            "API.example.com": [{"transform": {"headers": {"X-Key": "1"}}}, {}, {"transform": {"headers": {"x-key": "2"}}}],
            "*.example.org": [{"transform": {}}],
        }));
        let found = found.unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].host, "api.example.com");
        assert_eq!(found[0].headers["x-key"].expose(), "2");
        let with = |host: &str, header: &str, value: &str| json!({host: [{"transform": {"headers": {header: value}}}]});
        for bad in [
            with("192.0.2.1", "x", "1"),
            with("a b", "x", "1"),
            with("a.b", "x y", "1"),
            with("a.b", "Host", "c.d"),
            with("a.b", "transfer-encoding", "chunked"),
            with("a.b", "x", "1\r\ny: 2"),
        ] {
            assert_eq!(parsed(bad.clone()).unwrap_err().status, 400, "{bad}");
        }
        let identity = parsed(with("a.b", "authorization", "Bearer ${e2b.identity.tokens.aws}")).unwrap_err();
        assert_eq!(identity.error_code, Some("unsupported_option"));
        let named = parsed(with("a.b", "authorization", "Bearer ${e2b.secrets.Schlüssel} ${e2b.secrets.b}!"))
            .unwrap();
        assert!(named[0].headers["authorization"].expose().contains("${e2b.secrets.b}"));
        for bad in ["${e2b.secrets.open", "${e2b.secrets.a}${e2b.identity.tokens.b}", "${e2b.secrets.a}\n"] {
            assert_eq!(parsed(with("a.b", "x", bad)).unwrap_err().status, 400, "{bad}");
        }
    }
}
