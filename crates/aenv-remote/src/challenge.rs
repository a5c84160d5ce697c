//! What a registry wants to see before it answers: the header `WWW-Authenticate` of a 401.

/// A challenge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Challenge {
    /// User and password with each request.
    Basic,
    /// A token of another server.
    Bearer {
        /// Where tokens are given out.
        realm: String,
        /// For whom.
        service: Option<String>,
    },
}

impl Challenge {
    /// Reads the header; `None`: it asks for something else.
    pub fn parse(header: &str) -> Option<Self> {
        let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let parameters = parameters(rest);
        let find = |name: &str| {
            let found = parameters.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.clone())
        };
        Some(Self::Bearer { realm: find("realm")?, service: find("service") })
    }
}

/// `key="value"` or `key=value`, separated by commas, which values in quotes may have too.
fn parameters(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut rest = text.trim();
    while let Some((key, after)) = rest.split_once('=') {
        let (value, after) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => after.split_at(after.find(',').unwrap_or(after.len())),
        };
        found.push((key.trim().to_owned(), value.trim().to_owned()));
        rest = after.trim_start_matches([',', ' ']);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges() {
        let header = r#"Bearer realm="https://auth.example/token",service="registry.example",scope="repository:a/b:pull,push""#;
        let bearer = |realm: &str, service: Option<&str>| {
            Some(Challenge::Bearer { realm: realm.into(), service: service.map(Into::into) })
        };
        assert_eq!(Challenge::parse(header), bearer("https://auth.example/token", Some("registry.example")));
        assert_eq!(Challenge::parse("bearer realm=http://x/t , service=y"), bearer("http://x/t", Some("y")));
        assert_eq!(Challenge::parse(r#"Basic realm="x""#), Some(Challenge::Basic));
        for other in
            ["", "Digest realm=\"x\"", "Bearer", "Bearer service=\"x\"", "Bearer =", "\"", "Bearer realm"]
        {
            assert_eq!(Challenge::parse(other), None, "{other}");
        }
        assert_eq!(Challenge::parse("Bearer realm=\"unfinished"), bearer("unfinished", None));
    }
}
