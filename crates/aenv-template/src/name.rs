//! Names of templates, tags, and references to them.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::TemplateError;

/// The tag that a build gets when it names none.
pub const DEFAULT_TAG: &str = "default";

fn checked(text: &str, what: &str, extra: &[char]) -> Result<String, TemplateError> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || extra.contains(&c);
    if text.is_empty() || text.len() > 128 || !text.chars().all(fits) {
        let allowed: String = extra.iter().collect();
        return Err(TemplateError::Invalid(format!(
            "{what} '{}' is not allowed: use 1 to 128 of a-z, 0-9 and {allowed}",
            text.chars().take(140).collect::<String>()
        )));
    }
    Ok(text.to_owned())
}

/// A template's name: `[a-z0-9-_]`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TemplateName(String);

impl TemplateName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for TemplateName {
    type Err = TemplateError;
    /// Names are compared in lower case, so upper case is taken and lowered.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        checked(&text.to_ascii_lowercase(), "template name", &['-', '_']).map(Self)
    }
}

impl fmt::Display for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A tag: `[a-z0-9-_.]`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TagName(String);

impl TagName {
    /// [`DEFAULT_TAG`].
    pub fn default_tag() -> Self {
        Self(DEFAULT_TAG.to_owned())
    }

    /// The tag as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for TagName {
    type Err = TemplateError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        checked(&text.to_ascii_lowercase(), "tag", &['-', '_', '.']).map(Self)
    }
}

impl fmt::Display for TagName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What clients call a template: `[namespace/]name-or-id[:tag]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The team's slug, when it was given.
    pub namespace: Option<String>,
    /// A name or an id.
    pub name: String,
    /// The tag, when it was given.
    pub tag: Option<TagName>,
}

impl Reference {
    /// The tag, or `default`.
    pub fn tag_or_default(&self) -> TagName {
        self.tag.clone().unwrap_or_else(TagName::default_tag)
    }
}

impl FromStr for Reference {
    type Err = TemplateError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (namespace, rest) = match text.rsplit_once('/') {
            Some((namespace, rest)) => (Some(checked(namespace, "namespace", &['-', '_'])?), rest),
            None => (None, text),
        };
        let (name, tag) = match rest.split_once(':') {
            Some((name, tag)) => (name, Some(tag.parse()?)),
            None => (rest, None),
        };
        let name: TemplateName = name.parse()?;
        Ok(Self { namespace, name: name.0, tag })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_parse() {
        let parse = |t: &str| t.parse::<Reference>().unwrap();
        assert_eq!(parse("base").name, "base");
        assert_eq!(parse("base").tag_or_default().as_str(), "default");
        assert_eq!(parse("base:v1.2").tag.unwrap().as_str(), "v1.2");
        let full = parse("team/snap:default");
        assert_eq!((full.namespace.as_deref(), full.name.as_str()), (Some("team"), "snap"));
        assert_eq!(parse("Base").name, "base");
    }

    #[test]
    fn malformed_references_are_refused() {
        for bad in ["", ":x", "name:", "a b", "a/b/c", "../x", "name:t:u", "/name"] {
            assert!(bad.parse::<Reference>().is_err(), "{bad:?} was taken");
        }
    }
}
