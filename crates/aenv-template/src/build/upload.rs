//! Files that clients upload for `COPY` steps: gzip tars, named by the hash that the client computed.

use std::{
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use aenv_types::{Home, TeamId, Token, cache};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;
use tokio::io::AsyncWriteExt;
use uuid::Uuid;

use crate::TemplateError;

/// How long an upload URL is good for.
const URL_LIFETIME: Duration = Duration::from_secs(3600);

/// Where uploaded files are kept, and the key that signs upload URLs. Cheap to clone.
#[derive(Clone)]
pub struct Uploads {
    folder: PathBuf,
    key: Token,
}

/// What an upload URL carries: it authorises one upload of one hash by itself, since the client sends no API key with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadGrant {
    /// Whose.
    pub team: TeamId,
    /// The hash that the client computed.
    pub hash: String,
    /// Unix seconds.
    pub expires: u64,
    /// Signature over the rest.
    pub signature: String,
}

impl Uploads {
    /// Opens `<home>/cache/uploads`; the signing key is made at the first start and kept under `<home>/secrets`.
    pub fn open(home: &Home) -> Result<Self, TemplateError> {
        let folder = home.cache().join("uploads");
        std::fs::create_dir_all(&folder).map_err(TemplateError::io(format!("{}", folder.display())))?;
        Ok(Self { folder, key: signing_key(home)? })
    }

    fn path(&self, team: &TeamId, hash: &str) -> Result<PathBuf, TemplateError> {
        if hash.len() != 64 || !hash.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
            return Err(TemplateError::Invalid("a files hash is 64 lowercase hex digits".to_owned()));
        }
        Ok(self.folder.join(format!("{team}-{hash}.tar.gz")))
    }

    /// The file of a hash, if it was uploaded.
    pub fn find(&self, team: &TeamId, hash: &str) -> Result<Option<PathBuf>, TemplateError> {
        let path = self.path(team, hash)?;
        // Noted as its last use, so that it is not forgotten before the build that asks comes to it.
        Ok(cache::touch(&path).is_ok().then_some(path))
    }

    /// A grant for one upload.
    pub fn grant(&self, team: &TeamId, hash: &str) -> Result<UploadGrant, TemplateError> {
        self.path(team, hash)?;
        let expires = unix_now() + URL_LIFETIME.as_secs();
        let signature = self.sign(team, hash, expires);
        Ok(UploadGrant { team: team.clone(), hash: hash.to_owned(), expires, signature })
    }

    /// Stores an upload whose grant holds; whole or not at all.
    pub async fn store<E: std::fmt::Display>(
        &self,
        grant: &UploadGrant,
        mut body: impl Stream<Item = Result<Bytes, E>> + Unpin,
        limit: u64,
    ) -> Result<(), TemplateError> {
        let path = self.path(&grant.team, &grant.hash)?;
        let expected = self.sign(&grant.team, &grant.hash, grant.expires);
        if !bool::from(expected.as_bytes().ct_eq(grant.signature.as_bytes())) {
            return Err(TemplateError::Invalid(
                "the upload URL's signature is wrong; ask for a new URL".to_owned(),
            ));
        }
        if grant.expires < unix_now() {
            return Err(TemplateError::Invalid("the upload URL has expired; ask for a new one".to_owned()));
        }
        let beside = self.folder.join(format!(".{}.part", Uuid::new_v4()));
        let written = async {
            let mut file = tokio::fs::File::create(&beside).await?;
            let mut size = 0u64;
            while let Some(piece) = body.next().await {
                let piece = piece.map_err(|error| std::io::Error::other(error.to_string()))?;
                size += piece.len() as u64;
                if size > limit {
                    return Err(std::io::Error::other(format!("more than {limit} bytes were sent")));
                }
                file.write_all(&piece).await?;
            }
            file.sync_all().await?;
            tokio::fs::rename(&beside, &path).await?;
            tokio::fs::File::open(&self.folder).await?.sync_all().await
        }
        .await;
        if written.is_err() {
            // Nothing half-made stays; a file that is not there is what we want.
            tokio::fs::remove_file(&beside).await.ok();
        }
        written.map_err(TemplateError::io("upload"))
    }

    fn sign(&self, team: &TeamId, hash: &str, expires: u64) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.key.expose().as_bytes())
            .expect("HMAC takes a key of any length");
        // Lines that cannot contain a line break.
        mac.update(format!("upload\n{team}\n{hash}\n{expires}").as_bytes());
        hex::encode(mac.finalize().into_bytes())
    }
}

fn signing_key(home: &Home) -> Result<Token, TemplateError> {
    let path = home.secrets().join("upload-key");
    let context = || format!("{}", path.display());
    match std::fs::read_to_string(&path) {
        Ok(key) if key.len() == 32 => return Ok(Token::from(key)),
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(TemplateError::io(context())(error)),
    }
    let key = Token::random();
    let written = aenv_durable::write_private(&path, key.expose().as_bytes());
    written.map_err(TemplateError::io(context()))?;
    Ok(key)
}

fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uploads() -> (tempfile::TempDir, Uploads) {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path().join("home"), dir.path().join("run"));
        home.create().unwrap();
        let uploads = Uploads::open(&home).unwrap();
        (dir, uploads)
    }

    fn body(bytes: &'static [u8]) -> impl Stream<Item = Result<Bytes, std::io::Error>> + Unpin {
        futures::stream::iter([Ok(Bytes::from_static(bytes))])
    }

    #[tokio::test]
    async fn a_grant_stores_its_hash_and_no_other() {
        let (_dir, uploads) = uploads();
        let team = TeamId::default_team();
        let hash = "a".repeat(64);
        let grant = uploads.grant(&team, &hash).unwrap();
        assert!(uploads.find(&team, &hash).unwrap().is_none());
        uploads.store(&grant, body(b"tar"), 100).await.unwrap();
        assert_eq!(std::fs::read(uploads.find(&team, &hash).unwrap().unwrap()).unwrap(), b"tar");

        let forged = UploadGrant { hash: "b".repeat(64), ..grant.clone() };
        assert!(uploads.store(&forged, body(b"tar"), 100).await.is_err());
        let stretched = UploadGrant { expires: grant.expires + 1, ..grant.clone() };
        assert!(uploads.store(&stretched, body(b"tar"), 100).await.is_err());
        assert!(uploads.grant(&team, "../../etc/passwd").is_err());
    }

    #[tokio::test]
    async fn too_much_leaves_nothing() {
        let (_dir, uploads) = uploads();
        let team = TeamId::default_team();
        let grant = uploads.grant(&team, &"c".repeat(64)).unwrap();
        assert!(uploads.store(&grant, body(b"0123456789"), 5).await.is_err());
        assert_eq!(std::fs::read_dir(&uploads.folder).unwrap().count(), 0);
    }
}
