//! One entry of an index: which sectors of the disk lie where in a layer's file.

/// Bytes in a sector, the unit of every index.
pub(crate) const SECTOR: u64 = 512;

/// Sectors that one mapping written here covers at most: the largest whole number of 4 KiB that its 14 bits hold.
pub(crate) const MAX_LEN: u32 = (1 << 14) - 8;

const OFFSET_BITS: u32 = 50;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;
const MOFFSET_MASK: u64 = (1 << 55) - 1;
const ZEROED: u64 = 1 << 55;
const TAG_SHIFT: u32 = 56;

/// The first sector that no disk can have; marks padding in an index.
pub(crate) const INVALID_OFFSET: u64 = OFFSET_MASK;

/// `length` sectors of the disk from `offset` are found at sector `moffset` of a file (or are zeros). Its memory form is its
/// disk form; the tag, unused on disk, says in memory which layer of a stack the file is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mapping {
    low: u64,
    high: u64,
}

impl Mapping {
    /// Bytes of one entry in an index.
    pub const SIZE: usize = 16;

    /// Data at `moffset`.
    pub fn data(offset: u64, len: u32, moffset: u64) -> Self {
        debug_assert!(offset <= OFFSET_MASK && len < 1 << 14 && moffset <= MOFFSET_MASK);
        Self { low: offset | u64::from(len) << OFFSET_BITS, high: moffset }
    }

    /// Zeros that hide what lies beneath. The mapped offset of zeros means nothing, but other readers check it: it points
    /// to the first sector after the header.
    pub fn zeros(offset: u64, len: u32) -> Self {
        let mapping = Self::data(offset, len, 8);
        Self { high: mapping.high | ZEROED, ..mapping }
    }

    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> Self {
        let value = u128::from_le_bytes(bytes);
        Self { low: value as u64, high: (value >> 64) as u64 }
    }

    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let high = self.high & !(0xff << TAG_SHIFT);
        (u128::from(self.low) | u128::from(high) << 64).to_le_bytes()
    }

    pub fn offset(self) -> u64 {
        self.low & OFFSET_MASK
    }

    pub fn len(self) -> u32 {
        (self.low >> OFFSET_BITS) as u32
    }

    pub fn end(self) -> u64 {
        self.offset() + u64::from(self.len())
    }

    pub fn moffset(self) -> u64 {
        self.high & MOFFSET_MASK
    }

    pub fn zeroed(self) -> bool {
        self.high & ZEROED != 0
    }

    pub fn tag(self) -> u8 {
        (self.high >> TAG_SHIFT) as u8
    }

    pub fn with_tag(self, tag: u8) -> Self {
        Self { high: self.high & !(0xff << TAG_SHIFT) | u64::from(tag) << TAG_SHIFT, ..self }
    }

    /// The part of it within `[from, to)`, which must overlap it.
    pub fn clip(self, from: u64, to: u64) -> Self {
        let start = self.offset().max(from);
        let end = self.end().min(to);
        debug_assert!(start < end);
        let skipped = if self.zeroed() { 0 } else { start - self.offset() };
        Self { low: start | (end - start) << OFFSET_BITS, high: self.high + skipped }
    }

    /// Both as one mapping, when `next` goes on where this one ends, on the disk and in the same file.
    pub fn join(self, next: Self) -> Option<Self> {
        let together = self.len() + next.len();
        let flags = self.high & !MOFFSET_MASK;
        let follows =
            self.end() == next.offset() && flags == next.high & !MOFFSET_MASK && together <= MAX_LEN;
        let adjacent = self.zeroed() || self.moffset() + u64::from(self.len()) == next.moffset();
        (follows && adjacent)
            .then_some(Self { low: self.offset() | u64::from(together) << OFFSET_BITS, high: self.high })
    }
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}+{} ", self.offset(), self.len())?;
        if self.zeroed() { write!(f, "zeros") } else { write!(f, "at {} of {}", self.moffset(), self.tag()) }
    }
}

/// Splits a range of sectors into pieces that a mapping can hold, as `(first sector, sectors)`.
pub(crate) fn pieces(offset: u64, sectors: u64) -> impl Iterator<Item = (u64, u32)> {
    (0..sectors)
        .step_by(MAX_LEN as usize)
        .map(move |done| (offset + done, (sectors - done).min(u64::from(MAX_LEN)) as u32))
}

/// Appends a mapping to a list, joined to the last one where they are adjacent.
pub(crate) fn push_joined(list: &mut Vec<Mapping>, mapping: Mapping) {
    match list.last_mut().and_then(|last| last.join(mapping).map(|joined| (last, joined))) {
        Some((last, joined)) => *last = joined,
        None => list.push(mapping),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_where_the_format_says() {
        let mapping = Mapping::data(0x3_1234_5678_9abc, 0x2ffe, 0x7f_0102_0304_0506).with_tag(0xee);
        assert_eq!(mapping.offset(), 0x3_1234_5678_9abc);
        assert_eq!(mapping.len(), 0x2ffe);
        assert_eq!(mapping.moffset(), 0x7f_0102_0304_0506);
        assert_eq!((mapping.tag(), mapping.zeroed()), (0xee, false));
        let low = 0x3_1234_5678_9abc_u64 | 0x2ffe << 50;
        let high = 0x7f_0102_0304_0506_u64;
        assert_eq!(mapping.to_bytes()[..8], low.to_le_bytes());
        assert_eq!(mapping.to_bytes()[8..], high.to_le_bytes(), "the tag stays in memory");
        let zeros = Mapping::zeros(8, 8);
        assert_eq!(zeros.to_bytes()[14], 0x80);
        assert_eq!(Mapping::from_bytes(zeros.to_bytes()), zeros);
    }

    #[test]
    fn clip_moves_the_mapped_offset_of_data_only() {
        let clipped = Mapping::data(100, 50, 1000).with_tag(3).clip(110, 120);
        assert_eq!(clipped, Mapping::data(110, 10, 1010).with_tag(3));
        assert_eq!(Mapping::zeros(100, 50).clip(0, 101), Mapping::zeros(100, 1));
    }

    #[test]
    fn join_needs_both_sides_adjacent() {
        let first = Mapping::data(0, 8, 8);
        assert_eq!(first.join(Mapping::data(8, 8, 16)), Some(Mapping::data(0, 16, 8)));
        assert_eq!(first.join(Mapping::data(8, 8, 17)), None);
        assert_eq!(first.join(Mapping::data(9, 8, 16)), None);
        assert_eq!(first.join(Mapping::data(8, 8, 16).with_tag(1)), None);
        assert_eq!(first.join(Mapping::zeros(8, 8)), None);
        assert_eq!(Mapping::zeros(0, 8).join(Mapping::zeros(8, 8)), Some(Mapping::zeros(0, 16)));
        assert_eq!(Mapping::data(0, MAX_LEN, 8).join(Mapping::data(u64::from(MAX_LEN), 1, 16384)), None);
    }

    #[test]
    fn pieces_cover_the_range() {
        let split: Vec<_> = pieces(5, 40_000).collect();
        assert_eq!(split, [(5, 16376), (16381, 16376), (32757, 7248)]);
        assert_eq!(pieces(5, 0).count(), 0);
    }
}
