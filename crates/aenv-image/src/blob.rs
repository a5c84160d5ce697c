//! Checks a blob while it streams by: its size and digest as stored, then its size limit and digest unpacked.

use std::{
    io::{self, BufReader, Read},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use aenv_types::Digest;
use sha2::{Digest as _, Sha256};

use crate::error::LayerError;

/// What a blob must be.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    /// Digest of the stored bytes; `None` where the format has none (`docker save`).
    pub digest: Option<Digest>,
    /// Stored bytes.
    pub size: u64,
}

/// Bytes of a blob that were read so far, for progress.
pub(crate) type Meter = Arc<AtomicU64>;

/// Lets a blob's stored bytes through, and fails where they are not as expected. The end is only reported after the
/// digest was found right.
pub(crate) struct Stored<R> {
    inner: R,
    expected: Expected,
    hasher: Sha256,
    done: u64,
    complete: bool,
    meter: Meter,
}

impl<R: Read> Stored<R> {
    /// Checks what `inner` gives.
    pub(crate) fn new(inner: R, expected: Expected, meter: Meter) -> Self {
        Self { inner, expected, hasher: Sha256::new(), done: 0, complete: false, meter }
    }

    fn check(&mut self) -> Result<(), LayerError> {
        if self.done < self.expected.size {
            return Err(LayerError::Damaged(format!(
                "its blob ends after {} of {} bytes",
                self.done, self.expected.size
            )));
        }
        if let Some(digest) = self.expected.digest {
            let found = Digest::from_bytes(self.hasher.finalize_reset().into());
            if found != digest {
                return Err(LayerError::Damaged(format!("its blob has the digest {found} and not {digest}")));
            }
        }
        self.complete = true;
        Ok(())
    }
}

impl<R: Read> Read for Stored<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        if self.complete {
            // What fails behind the last byte of a blob that was found right is no matter.
            return match self.inner.read(&mut buf[..1]) {
                Ok(0) | Err(_) => Ok(0),
                Ok(_) => Err(LayerError::Damaged(format!(
                    "its blob is longer than the {} bytes that the manifest says",
                    self.expected.size
                ))
                .into()),
            };
        }
        let left = usize::try_from(self.expected.size - self.done).unwrap_or(usize::MAX);
        if left == 0 {
            self.check()?;
            return self.read(buf);
        }
        let want = left.min(buf.len());
        let got = self.inner.read(&mut buf[..want])?;
        if got == 0 {
            self.check()?;
            return Ok(0);
        }
        self.hasher.update(&buf[..got]);
        self.done += got as u64;
        self.meter.store(self.done, Ordering::Relaxed);
        Ok(got)
    }
}

/// A layer's tar stream: unpacked, counted and hashed.
pub(crate) struct Unpacked<'a> {
    inner: Box<dyn Read + Send + 'a>,
    hasher: Sha256,
    done: u64,
    limit: u64,
}

impl<'a> Unpacked<'a> {
    /// Unpacks gzip, zstd or plain tar, whichever the first bytes say; at most `limit` bytes.
    pub(crate) fn new(stored: impl Read + Send + 'a, limit: u64) -> Result<Self, LayerError> {
        let mut stored = BufReader::with_capacity(256 << 10, stored);
        let start =
            io::BufRead::fill_buf(&mut stored).map_err(|error| LayerError::io("reading the layer", error))?;
        let inner: Box<dyn Read + Send + 'a> = if start.starts_with(&[0x1f, 0x8b]) {
            Box::new(flate2::bufread::MultiGzDecoder::new(stored))
        } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
            let mut decoder = zstd::Decoder::with_buffer(stored)
                .map_err(|error| LayerError::io("starting the zstd decoder", error))?;
            // 128 MiB of window: what the format's own tools accept by default.
            decoder.window_log_max(27).map_err(|error| LayerError::io("starting the zstd decoder", error))?;
            Box::new(decoder)
        } else {
            Box::new(stored)
        };
        Ok(Self { inner, hasher: Sha256::new(), done: 0, limit })
    }

    /// Reads what is behind the archive's end, which belongs to the digests, and returns the digest of the tar stream.
    pub(crate) fn finish(mut self) -> Result<Digest, LayerError> {
        io::copy(&mut self, &mut io::sink()).map_err(|error| LayerError::io("reading the layer", error))?;
        Ok(Digest::from_bytes(self.hasher.finalize().into()))
    }
}

impl Read for Unpacked<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let got = self.inner.read(buf).map_err(|error| match error.kind() {
            // The decoders' own ways of saying that the stream is broken.
            io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => {
                LayerError::Damaged(format!("it cannot be unpacked: {error}")).into()
            }
            io::ErrorKind::Other if !error.get_ref().is_some_and(|inner| inner.is::<LayerError>()) => {
                LayerError::Damaged(format!("it cannot be unpacked: {error}")).into()
            }
            _ => error,
        })?;
        self.done += got as u64;
        if self.done > self.limit {
            return Err(LayerError::Hostile(format!("it unpacks to more than {} bytes", self.limit)).into());
        }
        self.hasher.update(&buf[..got]);
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn stored(bytes: &[u8], digest: Digest, size: u64) -> Result<Vec<u8>, LayerError> {
        let expected = Expected { digest: Some(digest), size };
        let mut out = Vec::new();
        Stored::new(bytes, expected, Meter::default())
            .read_to_end(&mut out)
            .map_err(|error| LayerError::io("reading", error))?;
        Ok(out)
    }

    #[test]
    fn size_and_digest_are_checked() {
        let digest = Digest::of(b"hello");
        assert_eq!(stored(b"hello", digest, 5).unwrap(), b"hello");
        assert_eq!(stored(b"", Digest::of(b""), 0).unwrap(), b"");
        for (bytes, digest, size, says) in [
            (&b"hell"[..], digest, 5, "ends after 4 of 5"),
            (b"hello!", digest, 5, "longer than the 5"),
            (b"hello", digest, 4, "and not"),
            (b"hallo", digest, 5, "and not"),
        ] {
            let error = stored(bytes, digest, size).unwrap_err();
            assert!(matches!(&error, LayerError::Damaged(text) if text.contains(says)), "{error}");
        }
    }

    #[test]
    fn gzip_members_and_zstd_frames_are_unpacked_and_bounded() {
        let gzip = |bytes: &[u8]| {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        };
        let two_members = [gzip(b"one"), gzip(b"two")].concat();
        let two_frames =
            [zstd::encode_all(&b"one"[..], 1).unwrap(), zstd::encode_all(&b"two"[..], 1).unwrap()].concat();
        for packed in [&two_members[..], &two_frames, b"onetwo"] {
            let unpacked = Unpacked::new(packed, 6).unwrap();
            assert_eq!(unpacked.finish().unwrap(), Digest::of(b"onetwo"));
            let error = Unpacked::new(packed, 5).unwrap().finish().unwrap_err();
            assert!(matches!(error, LayerError::Hostile(_)), "{error}");
        }
        for broken in [&two_members[..10], &two_frames[..6], b"\x1f\x8bgarbage garbage"] {
            let error = Unpacked::new(broken, 100).and_then(Unpacked::finish).unwrap_err();
            assert!(matches!(error, LayerError::Damaged(_)), "{error}");
        }
    }

    /// Packed layers, changed in any way: each is unpacked or refused, and never to more than the limit.
    #[test]
    fn changed_packings_are_unpacked_or_refused() {
        const LIMIT: u64 = 64 << 10;
        let content: Vec<u8> = (0..9000_u32).map(|i| (i / 90) as u8).collect();
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(&content).unwrap();
        let corpus = [encoder.finish().unwrap(), zstd::encode_all(&content[..], 1).unwrap()];
        aenv_testkit::mutate("packed-layers", &corpus, |input| {
            let mut out = Vec::new();
            let Ok(mut unpacked) = Unpacked::new(input, LIMIT) else { return false };
            let read = unpacked.read_to_end(&mut out);
            assert!(out.len() as u64 <= LIMIT, "{} bytes came out", out.len());
            read.is_ok()
        });
    }
}
