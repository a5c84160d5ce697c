//! Host names as they come from outside.

use std::{fmt, str::FromStr};

use thiserror::Error;

/// A host name: lowercase, without a dot at its end, and no address.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostName(String);

/// Why a text is no host name.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is no host name")]
pub struct ParseHostNameError(String);

impl HostName {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for HostName {
    type Err = ParseHostNameError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let name = text.strip_suffix('.').unwrap_or(text);
        let label = |label: &str| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
        };
        let numeric = name.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        if name.len() > 253 || numeric || !name.split('.').all(label) {
            return Err(ParseHostNameError(text.chars().take(100).collect()));
        }
        Ok(Self(name.to_ascii_lowercase()))
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_made_comparable_and_the_rest_is_refused() {
        for (text, name) in
            [("Example.COM.", "example.com"), ("a_b.c-d.e", "a_b.c-d.e"), ("localhost", "localhost")]
        {
            assert_eq!(text.parse::<HostName>().unwrap().as_str(), name);
        }
        let long = format!("{}.com", "a".repeat(64));
        for bad in
            ["", ".", "..", "a..b", ".a", "1.2.3.4", "[::1]", "a b", "a/b", "a\0b", "*.a.com", "é.com", &long]
        {
            assert!(bad.parse::<HostName>().is_err(), "{bad:?} was taken");
        }
    }
}
