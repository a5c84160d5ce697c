//! Values at rest: XChaCha20-Poly1305 under the node's key, bound to the secret and the version that they belong to.

use std::path::Path;

use anyhow::{Context, bail};
use chacha20poly1305::{
    XChaCha20Poly1305, XNonce,
    aead::{Aead, AeadCore, KeyInit, OsRng, Payload},
};

/// Bytes of the key.
const KEY: usize = 32;

/// The node's key.
#[derive(Clone)]
pub(super) struct Key(XChaCha20Poly1305);

/// A value as it is kept.
pub(super) struct Sealed {
    pub id: String,
    pub version: u32,
    pub nonce: Vec<u8>,
    pub text: Vec<u8>,
}

impl Key {
    /// Reads the key, or makes one when nothing was sealed yet.
    pub(super) fn open(path: &Path, used: bool) -> anyhow::Result<Self> {
        let shown = path.display();
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !used => {
                let key = XChaCha20Poly1305::generate_key(&mut OsRng);
                aenv_durable::write_private(path, &key)
                    .with_context(|| format!("{shown} cannot be written"))?;
                key.to_vec()
            }
            Err(error) => {
                return Err(error).with_context(|| {
                    format!("{shown} cannot be read, and the secrets beside it cannot be opened without it; put it back, or move secrets.db away")
                });
            }
        };
        if bytes.len() != KEY {
            bail!("{shown} is no key: it has {} bytes and not {KEY}", bytes.len());
        }
        Ok(Self(XChaCha20Poly1305::new_from_slice(&bytes).context("the key of the secrets")?))
    }

    /// Seals a value; `None` when it is too long for the cipher, which no value is.
    pub(super) fn seal(&self, id: &str, version: u32, value: &str) -> Option<Sealed> {
        let nonce = XChaCha20Poly1305::generate_nonce(&mut OsRng);
        let bound = bound(id, version);
        let text = self.0.encrypt(&nonce, Payload { msg: value.as_bytes(), aad: &bound }).ok()?;
        Some(Sealed { id: id.to_owned(), version, nonce: nonce.to_vec(), text })
    }

    /// The value; `None` when it was changed, moved, or sealed with another key.
    pub(super) fn open_value(&self, sealed: &Sealed) -> Option<String> {
        let nonce: [u8; 24] = sealed.nonce.as_slice().try_into().ok()?;
        let bound = bound(&sealed.id, sealed.version);
        let payload = Payload { msg: &sealed.text, aad: &bound };
        let plain = self.0.decrypt(&XNonce::from(nonce), payload).ok()?;
        String::from_utf8(plain).ok()
    }
}

fn bound(id: &str, version: u32) -> Vec<u8> {
    format!("aenv secret 1 {id} {version}").into_bytes()
}
