//! Which headers pass. Hop-by-hop ones end here; the platform's keys and routing headers never reach a guest.

use http::{HeaderMap, HeaderName, HeaderValue, header};

use super::{
    access::TRAFFIC_TOKEN_HEADER,
    target::{ID_HEADERS, PORT_HEADERS},
};
use crate::{auth, keys};

/// Removes what belongs to one connection only, and what `Connection` names.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in [
        header::CONNECTION,
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        header::TE,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
        HeaderName::from_static("http2-settings"),
    ] {
        headers.remove(name);
    }
}

/// Removes the platform's own: routing headers, the traffic token, and keys of this server (in either header).
pub fn strip_platform(headers: &mut HeaderMap, is_key: impl Fn(&str) -> bool) {
    for name in ID_HEADERS.iter().chain(&PORT_HEADERS) {
        headers.remove(*name);
    }
    headers.remove(TRAFFIC_TOKEN_HEADER);
    headers.remove(header::EXPECT);
    let is_platform_key = |key: &str| key.starts_with(keys::PREFIX) || is_key(key);
    let in_api_key =
        headers.get("x-api-key").and_then(|v| v.to_str().ok()).is_some_and(|k| is_platform_key(k.trim()));
    if in_api_key {
        headers.remove("x-api-key");
    }
    if auth::presented(headers).is_some_and(is_platform_key) {
        headers.remove("x-api-key");
        headers.remove(header::AUTHORIZATION);
    }
    let bearer =
        headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()).and_then(|v| v.split_once(' '));
    if bearer.is_some_and(|(_, token)| is_platform_key(token.trim())) {
        headers.remove(header::AUTHORIZATION);
    }
}

/// The protocol that a client wants to change to.
pub fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let wants = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|name| name.trim().eq_ignore_ascii_case("upgrade"));
    let protocol = headers.get(header::UPGRADE).filter(|_| wants)?;
    // h2c is offered by clients that speak HTTP/1.1 as well; the guest is spoken to in HTTP/1.1.
    (!protocol.as_bytes().eq_ignore_ascii_case(b"h2c")).then(|| protocol.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(*name, HeaderValue::from_static(value));
        }
        map
    }

    fn names(map: &HeaderMap) -> Vec<&str> {
        let mut names: Vec<_> = map.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn hop_by_hop_ends_here() {
        let mut map = headers(&[
            ("connection", "close, x-mine"),
            ("x-mine", "1"),
            ("keep-alive", "5"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("x-access-token", "stays"),
        ]);
        strip_hop_by_hop(&mut map);
        assert_eq!(names(&map), ["x-access-token"]);
    }

    #[test]
    fn the_platforms_own_never_reaches_a_guest() {
        let mut map = headers(&[
            ("e2b-sandbox-id", "i"),
            ("e2b-sandbox-port", "1"),
            ("x-agentenv-sandbox-id", "i"),
            ("x-agentenv-target-port", "1"),
            ("e2b-traffic-access-token", "t"),
            ("x-api-key", "e2b_00"),
            ("authorization", "Bearer known"),
            ("cookie", "stays"),
        ]);
        strip_platform(&mut map, |key| key == "known");
        assert_eq!(names(&map), ["cookie"]);
    }

    #[test]
    fn what_is_the_users_stays() {
        let mut map = headers(&[("x-api-key", "mine"), ("authorization", "Basic dXNlcjo=")]);
        strip_platform(&mut map, |_| false);
        assert_eq!(names(&map), ["authorization", "x-api-key"]);
    }

    #[test]
    fn upgrades_are_seen() {
        assert!(
            upgrade_of(&headers(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]))
                .is_some()
        );
        assert!(upgrade_of(&headers(&[("upgrade", "websocket")])).is_none());
        assert!(upgrade_of(&headers(&[("connection", "upgrade"), ("upgrade", "h2c")])).is_none());
    }
}
