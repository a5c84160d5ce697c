//! XDR (RFC 4506), as far as NFS needs it. Nothing is allocated by a length that the peer only claims.

/// The arguments do not have the form that they should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Garbage;

/// Reads arguments.
pub(super) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Garbage> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Garbage)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Garbage> {
        self.take(4)?.try_into().map(u32::from_be_bytes).map_err(|_| Garbage)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Garbage> {
        self.take(8)?.try_into().map(u64::from_be_bytes).map_err(|_| Garbage)
    }

    pub(super) fn flag(&mut self) -> Result<bool, Garbage> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Garbage),
        }
    }

    /// Bytes of a fixed length.
    pub(super) fn fixed(&mut self, length: usize) -> Result<&'a [u8], Garbage> {
        let taken = self.take(length)?;
        self.take(length.wrapping_neg() & 3)?;
        Ok(taken)
    }

    /// Bytes with their length before them, at most `limit` of them.
    pub(super) fn opaque(&mut self, limit: usize) -> Result<&'a [u8], Garbage> {
        let length = self.u32()? as usize;
        if length > limit { Err(Garbage) } else { self.fixed(length) }
    }

    /// What a flag says is there.
    pub(super) fn optional<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, Garbage>,
    ) -> Result<Option<T>, Garbage> {
        if self.flag()? { read(self).map(Some) } else { Ok(None) }
    }
}

/// Writes results.
#[derive(Default)]
pub(super) struct Writer(pub Vec<u8>);

impl Writer {
    pub(super) fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_be_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_be_bytes());
    }

    pub(super) fn flag(&mut self, value: bool) {
        self.u32(u32::from(value));
    }

    pub(super) fn fixed(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len() + (bytes.len().wrapping_neg() & 3), 0);
    }

    pub(super) fn opaque(&mut self, bytes: &[u8]) {
        self.u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.fixed(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_can_be_read() {
        let mut out = Writer::default();
        out.u32(7);
        out.u64(1 << 40);
        out.flag(true);
        out.opaque(b"abcde");
        out.fixed(b"xy");
        assert_eq!(out.0.len() % 4, 0);
        let mut read = Reader(&out.0);
        assert_eq!((read.u32(), read.u64(), read.flag()), (Ok(7), Ok(1 << 40), Ok(true)));
        assert_eq!(read.opaque(5), Ok(&b"abcde"[..]));
        assert_eq!(read.fixed(2), Ok(&b"xy"[..]));
        assert_eq!(read.u32(), Err(Garbage));
    }

    #[test]
    fn claimed_lengths_are_not_believed() {
        assert_eq!(Reader(&[0xff, 0xff, 0xff, 0xff, 1]).opaque(usize::MAX), Err(Garbage));
        assert_eq!(Reader(&[0, 0, 0, 9, 1, 2, 3, 4]).opaque(8), Err(Garbage));
        assert_eq!(Reader(&[0, 0, 0, 2]).flag(), Err(Garbage));
    }
}
