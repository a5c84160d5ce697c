//! PAX extended headers: `<length> <key>=<value>\n`, where a value may hold any byte.

use std::collections::BTreeMap;

use crate::error::LayerError;

/// The records of one header, or of all global headers so far. Keys that may repeat (GNU sparse 0.0) are kept in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Records {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Pairs of GNU sparse format 0.0, as they came.
    pub sparse_pairs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Records {
    /// Adds the records of one header; an empty value takes a key away.
    pub(super) fn parse(&mut self, mut bytes: &[u8]) -> Result<(), LayerError> {
        let wrong = || LayerError::Damaged("a PAX header is malformed".to_owned());
        while !bytes.is_empty() && bytes[0] != 0 {
            let space = bytes.iter().take(20).position(|byte| *byte == b' ').ok_or_else(wrong)?;
            let length: usize = std::str::from_utf8(&bytes[..space])
                .ok()
                .and_then(|text| text.parse().ok())
                .ok_or_else(wrong)?;
            if length <= space + 1 || length > bytes.len() || bytes[length - 1] != b'\n' {
                return Err(wrong());
            }
            let record = &bytes[space + 1..length - 1];
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(wrong)?;
            let (key, value) = (record[..equals].to_vec(), record[equals + 1..].to_vec());
            bytes = &bytes[length..];
            if key == b"GNU.sparse.offset" || key == b"GNU.sparse.numbytes" {
                self.sparse_pairs.push((key, value));
            } else {
                self.values.insert(key, value);
            }
        }
        Ok(())
    }

    /// A value; an empty one counts as none.
    pub(super) fn get(&self, key: &str) -> Option<&[u8]> {
        self.values.get(key.as_bytes()).map(Vec::as_slice).filter(|value| !value.is_empty())
    }

    /// Extended attributes, by name. An attribute may be empty.
    pub(super) fn xattrs(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        const PREFIX: &[u8] = b"SCHILY.xattr.";
        self.values
            .iter()
            .filter_map(|(key, value)| Some((key.strip_prefix(PREFIX)?.to_vec(), value.clone())))
            .collect()
    }

    /// These records over those of the global headers.
    pub(super) fn over(mut self, global: &Records) -> Records {
        for (key, value) in &global.values {
            self.values.entry(key.clone()).or_insert_with(|| value.clone());
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_may_hold_newlines_and_zeros() {
        let mut records = Records::default();
        records.parse(b"30 SCHILY.xattr.user.a=1\n2\0=3\n11 path=ab\n").unwrap();
        assert_eq!(records.xattrs(), [(b"user.a".to_vec(), b"1\n2\0=3".to_vec())]);
        assert_eq!(records.get("path"), Some(&b"ab"[..]));
    }

    #[test]
    fn lies_about_lengths_are_refused() {
        for bytes in [
            &b"99 path=ab\n"[..],
            b"3 path=ab\n",
            b"0 path=ab\n",
            b"path=ab\n",
            b"11 path.ab\n",
            b"18446744073709551616 a=b\n",
            b"11 path=abX",
        ] {
            assert!(Records::default().parse(bytes).is_err(), "{bytes:?} was taken");
        }
    }
}
