//! A blob that is about to be sent: a file with bytes before and after it.

use std::{fs::File, io::Read, path::PathBuf, sync::atomic::Ordering};

use aenv_types::Digest;
use bytes::Bytes;
use futures::{Stream, stream};
use tokio::io::AsyncReadExt;

use crate::blob::Meter;

/// Bytes that are read at once, and sent at once where a blob is sent in several requests.
const CHUNK: usize = 4 << 20;

/// A blob.
pub(super) struct Blob {
    /// Digest of all its bytes.
    pub digest: Digest,
    /// All its bytes.
    pub size: u64,
    head: Vec<u8>,
    file: Option<PathBuf>,
    tail: Vec<u8>,
}

impl Blob {
    /// Bytes.
    pub fn of_bytes(bytes: Vec<u8>) -> Self {
        Self {
            digest: Digest::of(&bytes),
            size: bytes.len() as u64,
            head: bytes,
            file: None,
            tail: Vec::new(),
        }
    }

    /// A file of this digest and size, which are not compared with it here.
    pub fn of_file(digest: Digest, size: u64, file: PathBuf) -> Self {
        Self { digest, size, head: Vec::new(), file: Some(file), tail: Vec::new() }
    }

    /// A file between other bytes. Blocks: its digest is computed.
    pub fn framed(head: Vec<u8>, file: PathBuf, tail: Vec<u8>) -> std::io::Result<Self> {
        let whole = Read::chain(Read::chain(head.as_slice(), File::open(&file)?), tail.as_slice());
        let (digest, size) = Digest::of_reader(std::io::BufReader::with_capacity(CHUNK, whole))?;
        Ok(Self { digest, size, head, file: Some(file), tail })
    }

    /// All of it, in pieces; what was taken counts on the meter.
    pub async fn stream(
        &self,
        meter: &Meter,
    ) -> std::io::Result<impl Stream<Item = std::io::Result<Bytes>> + Send + use<>> {
        let file = match &self.file {
            Some(path) => Some(tokio::fs::File::open(path).await?),
            None => None,
        };
        let parts = (Bytes::from(self.head.clone()), file, Bytes::from(self.tail.clone()), meter.clone());
        Ok(stream::try_unfold(parts, |(mut head, mut file, mut tail, meter)| async move {
            let mut piece = std::mem::take(&mut head);
            if piece.is_empty()
                && let Some(open) = &mut file
            {
                let mut buffer = Vec::with_capacity(CHUNK);
                let read = open.take(CHUNK as u64).read_to_end(&mut buffer).await?;
                piece = Bytes::from(buffer);
                if read == 0 {
                    file = None;
                }
            }
            if piece.is_empty() {
                piece = std::mem::take(&mut tail);
            }
            if piece.is_empty() {
                return Ok(None);
            }
            meter.fetch_add(piece.len() as u64, Ordering::Relaxed);
            Ok(Some((piece, (head, file, tail, meter))))
        }))
    }

    /// Removes the file, which is of no use any more.
    pub fn remove(&self) {
        if let Some(file) = &self.file
            && let Err(error) = std::fs::remove_file(file)
        {
            tracing::warn!(file = %file.display(), %error, "a packed layer stays in staging for now");
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::TryStreamExt;

    use super::*;

    #[tokio::test]
    async fn all_parts_come_in_order_and_count() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, vec![5; CHUNK + 7]).unwrap();
        let blob = Blob::framed(b"head".to_vec(), file, b"tail".to_vec()).unwrap();
        let meter = Meter::default();
        let pieces: Vec<Bytes> = blob.stream(&meter).await.unwrap().try_collect().await.unwrap();
        let whole = pieces.concat();
        assert_eq!((whole.len(), Digest::of(&whole)), (CHUNK + 15, blob.digest));
        assert_eq!((blob.size, meter.load(Ordering::Relaxed)), (whole.len() as u64, whole.len() as u64));
        let empty = Blob::of_bytes(Vec::new());
        assert_eq!(empty.stream(&meter).await.unwrap().try_collect::<Vec<_>>().await.unwrap().len(), 0);
    }
}
