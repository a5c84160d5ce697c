//! Signatures of `/files` URLs: whoever knows a sandbox's token can hand out a link to one path without handing out the token.

use aenv_types::Token;
use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

/// What a signed URL allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileOperation {
    /// `GET /files`.
    Read,
    /// `POST /files`.
    Write,
}

impl FileOperation {
    /// As it stands in the signed text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// The signature of a URL: `v1_` and the unpadded base64 of the SHA-256 of `path:operation:username:token[:expiry]`.
///
/// `path` and `username` are the literal (decoded) query values, empty where the query has none; `expiry` is in seconds since
/// the epoch. The form is E2B's: its clients compute it themselves.
pub fn sign(
    path: &str,
    operation: FileOperation,
    username: &str,
    token: &Token,
    expiry: Option<i64>,
) -> String {
    let mut hasher = Sha256::new();
    for part in [path, ":", operation.as_str(), ":", username, ":", token.expose()] {
        hasher.update(part.as_bytes());
    }
    if let Some(expiry) = expiry {
        hasher.update(format!(":{expiry}").as_bytes());
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(hasher.finalize()))
}

/// Whether `given` is the signature that [`sign`] makes, compared in constant time.
pub fn verify(
    given: &str,
    path: &str,
    operation: FileOperation,
    username: &str,
    token: &Token,
    expiry: Option<i64>,
) -> bool {
    let expected = sign(path, operation, username, token, expiry);
    expected.as_bytes().ct_eq(given.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> Token {
        Token::from("0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0".to_owned())
    }

    #[test]
    fn vector_of_the_clients_own_tests() {
        let signature = sign("hello.txt", FileOperation::Read, "user", &token(), None);
        assert_eq!(signature, "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E");
    }

    #[test]
    fn everything_is_signed() {
        let good = sign("a", FileOperation::Read, "u", &token(), Some(5));
        assert!(verify(&good, "a", FileOperation::Read, "u", &token(), Some(5)));
        assert!(!verify(&good, "b", FileOperation::Read, "u", &token(), Some(5)));
        assert!(!verify(&good, "a", FileOperation::Write, "u", &token(), Some(5)));
        assert!(!verify(&good, "a", FileOperation::Read, "v", &token(), Some(5)));
        assert!(!verify(&good, "a", FileOperation::Read, "u", &Token::from("x".to_owned()), Some(5)));
        assert!(!verify(&good, "a", FileOperation::Read, "u", &token(), Some(6)));
        assert!(!verify(&good, "a", FileOperation::Read, "u", &token(), None));
        assert!(!verify("", "a", FileOperation::Read, "u", &token(), Some(5)));
    }
}
