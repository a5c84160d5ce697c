//! Fetches a layer whole in the background, and then looks whether it is the right one.

use aenv_cache::{CachedSource, Filled};
use aenv_store::{BlockSource, SourceError};
use sha2::{Digest, Sha256};

const CHUNK: usize = 1 << 20;

/// Fetches what is missing of a layer, last in line. Reads by ranges cannot be compared with the digest of the whole; this can.
pub(crate) fn fill(source: &CachedSource, digest: &str) {
    let filled = match source.fill(|| false) {
        Ok(Filled::Whole) => hash(source),
        Ok(other) => return tracing::info!(digest, ?other, "a layer is not fetched whole"),
        Err(error) => Err(error),
    };
    match filled {
        Ok(found) if found == digest => tracing::info!(digest, "a layer is here whole"),
        Ok(found) => {
            tracing::error!(
                digest,
                found,
                "the bytes of a remote layer are not those of its digest; they are forgotten"
            );
            source.forget();
        }
        Err(error) => tracing::warn!(digest, %error, "a layer could not be fetched in the background"),
    }
}

fn hash(source: &CachedSource) -> Result<String, SourceError> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    for at in (0..source.size()).step_by(CHUNK) {
        let part = &mut buffer[..(source.size() - at).min(CHUNK as u64) as usize];
        source.read_at(part, at)?;
        hasher.update(&part);
    }
    Ok(format!("sha256:{}", hex::encode(hasher.finalize())))
}
