//! Whose request it is: header first, then host name, then signature. Everything else is the control plane's.

use aenv_api::ApiError;
use aenv_envd_api::{FileOperation, PORT};
use aenv_types::SandboxId;
use http::{HeaderMap, Method, Request, Uri, header, uri::PathAndQuery};

use crate::extract::Query;

/// Headers that name a sandbox, the first one that is there wins.
pub const ID_HEADERS: [&str; 2] = ["e2b-sandbox-id", "x-agentenv-sandbox-id"];

/// Headers that name a port.
pub const PORT_HEADERS: [&str; 2] = ["e2b-sandbox-port", "x-agentenv-target-port"];

/// Whose request it is.
#[derive(Debug)]
pub enum Claim {
    /// The control plane's.
    Control,
    /// A sandbox's.
    Sandbox(Target),
    /// That of the sandbox whose token made the signature.
    Signed(SignedFile),
    /// It names a sandbox in a form that no sandbox has: as good as one that is gone.
    Unknown(String),
    /// It cannot be understood.
    Bad(ApiError),
}

/// A port of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The sandbox.
    pub id: SandboxId,
    /// The port in the guest.
    pub port: u16,
    /// What the guest is asked for, where it is not what the client asked for.
    pub path: Option<PathAndQuery>,
}

impl Target {
    /// envd of a sandbox.
    pub fn envd(id: SandboxId) -> Self {
        Self { id, port: PORT, path: None }
    }
}

/// What a signature of a file URL is made over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedFile {
    /// The signature.
    pub signature: String,
    /// `path`, as it is in the query, decoded once.
    pub path: String,
    /// `username`.
    pub username: String,
    /// Read or write.
    pub operation: FileOperation,
    /// `signature_expiration`.
    pub expiry: Option<i64>,
}

/// Decides whose request it is.
pub fn claim<B>(request: &Request<B>, domains: &[String]) -> Claim {
    let headers = request.headers();
    let under_prefix = strip_prefix(request.uri());
    if let Some(id) = ID_HEADERS.iter().find_map(|name| headers.get(*name)) {
        return by_header(headers, id.to_str().unwrap_or_default(), under_prefix);
    }
    if let Some((id, port)) = host_of(request).and_then(|host| parse_host(host, domains)) {
        return Claim::Sandbox(Target { id, port, path: None });
    }
    if let Some(file) = signed_file(request.method(), request.uri()) {
        return Claim::Signed(file);
    }
    if under_prefix.is_some() {
        return Claim::Bad(ApiError::bad_request(
            "/proxy needs to know the sandbox: send headers e2b-sandbox-id and e2b-sandbox-port",
        ));
    }
    Claim::Control
}

fn by_header(headers: &HeaderMap, id: &str, path: Option<PathAndQuery>) -> Claim {
    let Ok(id) = SandboxId::from_client(id.trim()) else {
        return Claim::Unknown(id.chars().take(64).collect());
    };
    let port = match PORT_HEADERS.iter().find_map(|name| headers.get(*name)) {
        None => PORT,
        Some(value) => match value.to_str().ok().and_then(|text| parse_port(text.trim())) {
            Some(port) => port,
            None => {
                return Claim::Bad(ApiError::bad_request("e2b-sandbox-port takes a port from 1 to 65535"));
            }
        },
    };
    Claim::Sandbox(Target { id, port, path })
}

fn parse_port(text: &str) -> Option<u16> {
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|port| plain && *port != 0)
}

/// The path after `/proxy`, for a request that is under it.
fn strip_prefix(uri: &Uri) -> Option<PathAndQuery> {
    let rest = uri.path().strip_prefix("/proxy")?;
    if !(rest.is_empty() || rest.starts_with('/')) {
        return None;
    }
    let path = if rest.is_empty() { "/" } else { rest };
    let text = uri.query().map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"));
    PathAndQuery::try_from(text).ok()
}

/// The host that a request names, without its port.
fn host_of<B>(request: &Request<B>) -> Option<&str> {
    if let Some(host) = request.uri().host() {
        return Some(host);
    }
    let host = request.headers().get(header::HOST)?.to_str().ok()?;
    Some(
        host.rsplit_once(':')
            .map_or(host, |(name, port)| if port.bytes().all(|b| b.is_ascii_digit()) { name } else { host }),
    )
}

/// `<port>-<sandbox id>.<domain>`.
fn parse_host(host: &str, domains: &[String]) -> Option<(SandboxId, u16)> {
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    let (label, domain) = host.split_once('.')?;
    if !domains.is_empty() && !domains.iter().any(|known| known == domain) {
        return None;
    }
    let (port, id) = label.split_once('-')?;
    let id = SandboxId::from_client(id).ok()?;
    let port = parse_port(port)?;
    // Any domain will do only for what certainly is a sandbox's name.
    let certain = id.as_str().len() == 20 && id.as_str().starts_with('i');
    (certain || !domains.is_empty()).then_some((id, port))
}

fn signed_file(method: &Method, uri: &Uri) -> Option<SignedFile> {
    if uri.path() != "/files" {
        return None;
    }
    let query = Query::parse(uri.query()?);
    let value = |name: &str| query.get(name).unwrap_or_default().to_owned();
    let operation = match *method {
        Method::GET | Method::HEAD => FileOperation::Read,
        _ => FileOperation::Write,
    };
    Some(SignedFile {
        signature: query.get("signature")?.to_owned(),
        path: value("path"),
        username: value("username"),
        operation,
        expiry: query.get("signature_expiration").and_then(|text| text.parse().ok()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "i0123456789abcdefghi";

    fn request(uri: &str, headers: &[(&str, &str)]) -> Request<()> {
        let mut builder = Request::get(uri);
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        builder.body(()).unwrap()
    }

    fn target(
        uri: &str,
        headers: &[(&str, &str)],
        domains: &[&str],
    ) -> Option<(String, u16, Option<String>)> {
        let domains: Vec<String> = domains.iter().map(|d| (*d).to_owned()).collect();
        match claim(&request(uri, headers), &domains) {
            Claim::Sandbox(t) => Some((t.id.to_string(), t.port, t.path.map(|p| p.to_string()))),
            Claim::Control => None,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_header_wins_on_any_path() {
        let both = [
            ("e2b-sandbox-id", "iabc-client"),
            ("e2b-sandbox-port", "8080"),
            ("host", &format!("1-{ID}.x.y")),
        ];
        assert_eq!(target("/health", &both, &[]), Some(("iabc".into(), 8080, None)));
        let own = [("x-agentenv-sandbox-id", "iabc"), ("x-agentenv-target-port", "9")];
        assert_eq!(target("/sandboxes", &own, &[]), Some(("iabc".into(), 9, None)));
        assert_eq!(target("/", &[("e2b-sandbox-id", "iabc")], &[]), Some(("iabc".into(), PORT, None)));
    }

    #[test]
    fn the_prefix_is_cut() {
        let id = [("e2b-sandbox-id", "iabc")];
        let path = |uri: &str| target(uri, &id, &[]).unwrap().2;
        assert_eq!(path("/proxy/a/b?c=d").as_deref(), Some("/a/b?c=d"));
        assert_eq!(path("/proxy").as_deref(), Some("/"));
        assert_eq!(path("/proxy/").as_deref(), Some("/"));
        assert_eq!(path("/proxyfoo"), None);
        assert!(matches!(claim(&request("/proxy/x", &[]), &[]), Claim::Bad(_)));
    }

    #[test]
    fn host_names() {
        let host = |host: &str, domains: &[&str]| {
            target("/", &[("host", host)], domains).map(|(id, port, _)| (id, port))
        };
        assert_eq!(host(&format!("49983-{ID}.e2b.app"), &[]), Some((ID.into(), 49983)));
        assert_eq!(host(&format!("3000-{ID}.box.example.com:8000"), &[]), Some((ID.into(), 3000)));
        assert_eq!(host(&format!("3000-{ID}-client.e2b.app"), &[]), Some((ID.into(), 3000)));
        assert_eq!(host(&format!("3000-{ID}.E2B.app."), &["e2b.app"]), Some((ID.into(), 3000)));
        assert_eq!(host(&format!("3000-{ID}.evil.app"), &["e2b.app"]), None);
        assert_eq!(host("3000-iabc.e2b.app", &["e2b.app"]), Some(("iabc".into(), 3000)));
        assert_eq!(host("3000-iabc.e2b.app", &[]), None, "too short to be certain");
        for other in [
            "localhost:8000",
            "127.0.0.1",
            "[::1]:80",
            "api.e2b.app",
            &format!("0-{ID}.a.b"),
            &format!("70000-{ID}.a.b"),
        ] {
            assert_eq!(host(other, &[]), None, "{other}");
        }
        let absolute = format!("http://80-{ID}.a.b/x");
        assert_eq!(target(&absolute, &[], &[]), Some((ID.into(), 80, None)));
    }

    #[test]
    fn signatures() {
        let signed = request("/files?path=a%20b&username=u&signature=v1_x%2By&signature_expiration=7", &[]);
        let Claim::Signed(file) = claim(&signed, &[]) else { panic!() };
        let expected = SignedFile {
            signature: "v1_x+y".into(),
            path: "a b".into(),
            username: "u".into(),
            operation: FileOperation::Read,
            expiry: Some(7),
        };
        assert_eq!(file, expected);
        assert!(matches!(claim(&request("/files?path=x", &[]), &[]), Claim::Control));
        assert!(matches!(claim(&request("/sandboxes?signature=x", &[]), &[]), Claim::Control));
    }

    #[test]
    fn nonsense_is_no_sandbox() {
        assert!(matches!(claim(&request("/", &[("e2b-sandbox-id", "../x")]), &[]), Claim::Unknown(_)));
        assert!(matches!(claim(&request("/", &[("e2b-sandbox-id", "")]), &[]), Claim::Unknown(_)));
        for port in ["0", "65536", "-1", "+80", "x", ""] {
            let headers = [("e2b-sandbox-id", "iabc"), ("e2b-sandbox-port", port)];
            assert!(matches!(claim(&request("/", &headers), &[]), Claim::Bad(_)), "{port:?}");
        }
    }
}
