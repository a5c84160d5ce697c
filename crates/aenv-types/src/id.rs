//! Typed identifiers. Every id is parsed once, where it enters, and is safe in a path, a URL and a log line after that.

use std::{fmt, str::FromStr};

use rand::Rng;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a text is not an id.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ParseIdError {
    /// Empty, or longer than 64 bytes.
    #[error("an id has 1 to 64 characters, this one has {0}")]
    Length(usize),
    /// A character outside `[a-z0-9]` (ids) or `[a-zA-Z0-9_-]` (names).
    #[error("an id has only lowercase letters and digits, this one has {0:?}")]
    Character(char),
}

const BASE36: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

fn random_base36(len: usize) -> String {
    let mut rng = rand::rng();
    (0..len).map(|_| char::from(BASE36[rng.random_range(0..36)])).collect()
}

fn check(text: &str) -> Result<(), ParseIdError> {
    if text.is_empty() || text.len() > 64 {
        return Err(ParseIdError::Length(text.len()));
    }
    match text.chars().find(|c| !c.is_ascii_lowercase() && !c.is_ascii_digit()) {
        Some(bad) => Err(ParseIdError::Character(bad)),
        None => Ok(()),
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal, $random:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// A fresh random id.
            pub fn random() -> Self {
                Self(format!(concat!($prefix, "{}"), random_base36($random)))
            }

            /// The id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                check(text)?;
                Ok(Self(text.to_owned()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = ParseIdError;
            fn try_from(text: String) -> Result<Self, Self::Error> {
                check(&text)?;
                Ok(Self(text))
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id!(
    /// A sandbox: `i` and 19 base-36 characters, as E2B's clients expect.
    SandboxId, "i", 19
);
id!(
    /// A checkpoint: `c` and 19 base-36 characters.
    CheckpointId, "c", 19
);
id!(
    /// A template: 20 base-36 characters, the first one a `t`.
    TemplateId, "t", 19
);
id!(
    /// A volume: `vol` and 17 base-36 characters.
    VolumeId, "vol", 17
);

impl SandboxId {
    /// Parses an id as clients send it: `{id}` or the long form `{id}-{clientID}`, of which only the id is kept.
    pub fn from_client(text: &str) -> Result<Self, ParseIdError> {
        text.split('-').next().unwrap_or_default().parse()
    }
}

/// A team. Teams see nothing of each other.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TeamId(String);

impl TeamId {
    /// The team that the first API key of a server belongs to.
    pub fn default_team() -> Self {
        Self("default".to_owned())
    }

    /// The team's slug; also the namespace of its template names.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for TeamId {
    type Err = ParseIdError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() || text.len() > 64 {
            return Err(ParseIdError::Length(text.len()));
        }
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        match text.chars().find(|c| !fits(*c)) {
            Some(bad) => Err(ParseIdError::Character(bad)),
            None => Ok(Self(text.to_owned())),
        }
    }
}

impl TryFrom<String> for TeamId {
    type Error = ParseIdError;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<TeamId> for String {
    fn from(team: TeamId) -> Self {
        team.0
    }
}

impl fmt::Display for TeamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One build of a template (a uuid, because E2B's clients parse it as one).
pub type BuildId = uuid::Uuid;

/// A bearer secret: envd's access token, a traffic token. Never printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(String);

impl Token {
    /// A fresh token with 190 bits of entropy, letters and digits only.
    pub fn random() -> Self {
        const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
        let mut rng = rand::rng();
        Self((0..32).map(|_| char::from(ALPHABET[rng.random_range(0..ALPHABET.len())])).collect())
    }

    /// The secret itself. Compare with a constant-time comparison only.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Token {
    fn from(secret: String) -> Self {
        Self(secret)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_ids_parse_again() {
        for _ in 0..100 {
            let id = SandboxId::random();
            assert_eq!(id.as_str().len(), 20);
            assert!(id.as_str().starts_with('i'));
            assert_eq!(id.as_str().parse::<SandboxId>().unwrap(), id);
        }
    }

    #[test]
    fn hostile_ids_are_refused() {
        for bad in ["", "../etc", "a/b", "A", "a b", "é", "a\0"] {
            assert!(bad.parse::<SandboxId>().is_err(), "{bad:?} was taken");
        }
        assert!("a".repeat(65).parse::<SandboxId>().is_err());
    }

    #[test]
    fn long_form_is_shortened() {
        assert_eq!(SandboxId::from_client("iabc-6532622b").unwrap().as_str(), "iabc");
    }

    #[test]
    fn tokens_do_not_print() {
        let token = Token::random();
        assert!(!format!("{token:?}").contains(token.expose()));
    }
}
