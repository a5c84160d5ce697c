//! What a request may do: traffic tokens, paths that are the host's alone, and signatures.

use aenv_envd_api::{PORT, signature};
use aenv_orchestrator::Gate;
use aenv_types::{SandboxId, Token};
use http::HeaderMap;
use percent_encoding::percent_decode_str;
use subtle::ConstantTimeEq;

use super::target::SignedFile;

/// The header that user ports ask for where public traffic is off.
pub const TRAFFIC_TOKEN_HEADER: &str = "e2b-traffic-access-token";

/// What is wrong with a request's traffic token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenFault {
    /// There is none.
    Missing,
    /// It is another one.
    Wrong,
}

impl TokenFault {
    /// As the clients know it.
    pub fn message(self) -> &'static str {
        match self {
            Self::Missing => {
                "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
            }
            Self::Wrong => {
                "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid"
            }
        }
    }
}

/// Whether a request may go to `port`. envd asks for its own token itself.
pub fn check_traffic_token(gate: &Gate, port: u16, headers: &HeaderMap) -> Result<(), TokenFault> {
    let Gate::Token(token) = gate else { return Ok(()) };
    if port == PORT {
        return Ok(());
    }
    let presented = headers.get(TRAFFIC_TOKEN_HEADER).ok_or(TokenFault::Missing)?;
    let matches = |token: &Token| bool::from(token.expose().as_bytes().ct_eq(presented.as_bytes()));
    if token.as_ref().is_some_and(matches) { Ok(()) } else { Err(TokenFault::Wrong) }
}

/// Whether a path of envd is for the host alone: `/init`, and tunnels to loopback ports, which would go around traffic tokens.
/// However it is written.
pub fn is_host_only(path: &str) -> bool {
    let decoded = percent_decode_str(path).decode_utf8_lossy().to_ascii_lowercase();
    let mut segments = Vec::new();
    for segment in decoded.split(['/', '\\']) {
        match segment.trim() {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            other => segments.push(other),
        }
    }
    segments.first().is_some_and(|first| {
        let first = first.split([';', '?', '#']).next().unwrap_or_default();
        first == "init" || first == "tunnel"
    })
}

/// The sandbox whose token made the signature. All are tried: it costs microseconds each.
pub fn find_signer(tokens: Vec<(SandboxId, Token)>, file: &SignedFile) -> Option<SandboxId> {
    let made_it = |token: &Token| {
        signature::verify(&file.signature, &file.path, file.operation, &file.username, token, file.expiry)
    };
    tokens.into_iter().find(|(_, token)| made_it(token)).map(|(id, _)| id)
}

#[cfg(test)]
mod tests {
    use aenv_envd_api::FileOperation;

    use super::*;

    #[test]
    fn the_hosts_own_paths_are_closed() {
        for path in [
            "/init",
            "//init",
            "/init/",
            "/%69nit",
            "/INIT",
            "/./init",
            "/x/../init",
            "/tunnel/80",
            "/%74unnel/80",
            "/init;x",
            "/init%2f",
            "/\\init",
            "/%2e/init",
        ] {
            assert!(is_host_only(path), "{path}");
        }
        for path in ["/", "/health", "/initial", "/files", "/process.Process/Start", "/x/init"] {
            assert!(!is_host_only(path), "{path}");
        }
    }

    #[test]
    fn the_signer_is_found() {
        let (a, b) = (SandboxId::random(), SandboxId::random());
        let (token_a, token_b) = (Token::random(), Token::random());
        let signature = signature::sign("p", FileOperation::Write, "u", &token_b, Some(1));
        let mut file = SignedFile {
            signature,
            path: "p".into(),
            username: "u".into(),
            operation: FileOperation::Write,
            expiry: Some(1),
        };
        let tokens = || vec![(a.clone(), token_a.clone()), (b.clone(), token_b.clone())];
        assert_eq!(find_signer(tokens(), &file), Some(b.clone()));
        file.path = "q".into();
        assert_eq!(find_signer(tokens(), &file), None);
    }
}
