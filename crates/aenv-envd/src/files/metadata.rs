//! Metadata of a file: what a client sends in `X-Metadata-*` headers, kept in extended attributes `user.e2b.*`.

use std::{collections::BTreeMap, io, path::Path};

use axum::http::HeaderMap;
use thiserror::Error;

const HEADER: &str = "x-metadata-";
const ATTRIBUTE: &str = "user.e2b.";
/// An attribute's name has 255 bytes, prefix included.
const MAX_KEY: usize = 246;
/// Keys and values together; what an ext4 inode can surely hold.
const MAX_TOTAL: usize = 4096;

/// Keys and values.
pub type Metadata = BTreeMap<String, String>;

/// Why metadata is refused.
#[derive(Debug, Error)]
pub enum MetadataError {
    /// A key has no valid form.
    #[error("metadata key '{0}' is invalid: it must be 1 to {MAX_KEY} printable ASCII characters")]
    Key(String),
    /// A value has no valid form.
    #[error("the value of metadata key '{0}' is invalid: it must be printable ASCII")]
    Value(String),
    /// Too much.
    #[error("metadata is {0} bytes long: at most {MAX_TOTAL} fit")]
    TooLong(usize),
}

/// The metadata that a request's headers carry; header names are lowercase already.
pub fn from_headers(headers: &HeaderMap) -> Result<Metadata, MetadataError> {
    let mut metadata = Metadata::new();
    let mut total = 0;
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(HEADER) else { continue };
        if key.is_empty() || key.len() > MAX_KEY {
            return Err(MetadataError::Key(key.chars().take(300).collect()));
        }
        let text = value.to_str().ok().filter(|text| text.bytes().all(|byte| (0x20..0x7f).contains(&byte)));
        let text = text.ok_or_else(|| MetadataError::Value(key.to_owned()))?;
        total += key.len() + text.len();
        metadata.insert(key.to_owned(), text.to_owned());
    }
    if total > MAX_TOTAL {
        return Err(MetadataError::TooLong(total));
    }
    Ok(metadata)
}

/// The metadata of a file; none where the filesystem has no attributes.
pub fn read(path: &Path) -> Metadata {
    let mut metadata = Metadata::new();
    let Ok(names) = xattr::list(path) else {
        return metadata;
    };
    for name in names {
        let Some(key) = name.to_str().and_then(|name| name.strip_prefix(ATTRIBUTE)) else { continue };
        if let Ok(Some(value)) = xattr::get(path, &name) {
            metadata.insert(key.to_owned(), String::from_utf8_lossy(&value).into_owned());
        }
    }
    metadata
}

/// Makes `metadata` the whole metadata of a file. Changes nothing where nothing differs, so that watchers see no change.
pub fn replace(path: &Path, metadata: &Metadata) -> io::Result<()> {
    let present = read(path);
    for key in present.keys().filter(|key| !metadata.contains_key(*key)) {
        xattr::remove(path, format!("{ATTRIBUTE}{key}"))?;
    }
    for (key, value) in metadata {
        if present.get(key) != Some(value) {
            xattr::set(path, format!("{ATTRIBUTE}{key}"), value.as_bytes())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{HeaderName, HeaderValue};

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&str, &str)| {
            (
                HeaderName::from_bytes(name.as_bytes()).unwrap(),
                HeaderValue::from_bytes(value.as_bytes()).unwrap(),
            )
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn keys_are_lowercase() {
        let metadata = from_headers(&headers(&[("X-Metadata-Author", "me"), ("content-type", "x")])).unwrap();
        assert_eq!(metadata, Metadata::from([("author".to_owned(), "me".to_owned())]));
    }

    #[test]
    fn limits() {
        let long = "v".repeat(MAX_TOTAL);
        assert!(matches!(
            from_headers(&headers(&[("x-metadata-a", &long)])),
            Err(MetadataError::TooLong(4097))
        ));
        let key = format!("x-metadata-{}", "k".repeat(MAX_KEY + 1));
        assert!(matches!(from_headers(&headers(&[(&key, "v")])), Err(MetadataError::Key(_))));
        assert!(matches!(from_headers(&headers(&[("x-metadata-", "v")])), Err(MetadataError::Key(_))));
        assert!(matches!(from_headers(&headers(&[("x-metadata-a", "ü")])), Err(MetadataError::Value(_))));
    }
}
