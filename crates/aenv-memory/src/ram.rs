//! Where a guest's memory is.

/// Bytes in a page of memory.
pub const PAGE_SIZE: u64 = 4096;

/// A guest's memory in the address space of its VMM: private mappings of a memory image, which has every byte of it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ram {
    /// The VMM.
    pub pid: u32,
    /// Address of its first byte in the VMM; a multiple of [`PAGE_SIZE`].
    pub start: u64,
    /// Bytes; a multiple of [`PAGE_SIZE`].
    pub len: u64,
    /// Where the rest lies, if it does not follow.
    pub upper: Option<Upper>,
}

/// The second piece of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upper {
    /// Its first byte, from the beginning of the memory; a multiple of [`PAGE_SIZE`].
    pub offset: u64,
    /// That byte's address in the VMM; a multiple of [`PAGE_SIZE`].
    pub start: u64,
}

/// A part of memory that lies in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl Ram {
    /// Memory in one piece.
    pub fn whole(pid: u32, start: u64, len: u64) -> Self {
        Self { pid, start, len, upper: None }
    }

    /// Its pieces, in order.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece> {
        let cut = self.upper.map_or(self.len, |upper| upper.offset.min(self.len));
        let lower = Piece { offset: 0, start: self.start, len: cut };
        let upper = self.upper.map(|upper| Piece { offset: cut, start: upper.start, len: self.len - cut });
        std::iter::once(lower).chain(upper).filter(|piece| piece.len > 0)
    }

    /// Where a byte lies in the VMM. No range that a scan tells of reaches over the end of a piece.
    pub(crate) fn address(&self, offset: u64) -> u64 {
        match self.upper {
            Some(upper) if offset >= upper.offset => upper.start + (offset - upper.offset),
            _ => self.start + offset,
        }
    }
}

/// A part of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First byte, from the beginning of the memory.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Range {
    pub(crate) fn end(self) -> u64 {
        self.offset + self.len
    }
}

/// Bytes of all ranges.
pub(crate) fn total(ranges: &[Range]) -> u64 {
    ranges.iter().map(|range| range.len).sum()
}

/// Ranges cut in two at a number of bytes: those before it, and those from it on.
pub(crate) fn split(ranges: &[Range], bytes: u64) -> (Vec<Range>, Vec<Range>) {
    let (mut before, mut after) = (Vec::new(), Vec::with_capacity(ranges.len()));
    let mut left = bytes;
    for range in ranges {
        let first = range.len.min(left);
        left -= first;
        if first > 0 {
            before.push(Range { offset: range.offset, len: first });
        }
        if first < range.len {
            after.push(Range { offset: range.offset + first, len: range.len - first });
        }
    }
    (before, after)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranges() -> impl Strategy<Value = Vec<Range>> {
        proptest::collection::vec((1u64..50, 1u64..50), 0..20).prop_map(|gaps| {
            let mut at = 0;
            let range = |(gap, pages): (u64, u64)| {
                let range = Range { offset: at + gap * PAGE_SIZE, len: pages * PAGE_SIZE };
                at = range.end();
                range
            };
            gaps.into_iter().map(range).collect()
        })
    }

    #[test]
    fn two_pieces_have_every_byte_once() {
        let upper = Some(Upper { offset: 0x3000, start: 0x10_0000 });
        let ram = Ram { pid: 1, start: 0x50_0000, len: 0x5000, upper };
        let pieces: Vec<_> = ram.pieces().map(|p| (p.offset, p.start, p.len)).collect();
        assert_eq!(pieces, [(0, 0x50_0000, 0x3000), (0x3000, 0x10_0000, 0x2000)]);
        assert_eq!((ram.address(0x2fff), ram.address(0x3001)), (0x50_2fff, 0x10_0001));
        let one = Ram::whole(1, 0x50_0000, 0x5000);
        assert_eq!(one.pieces().count(), 1);
        assert_eq!(one.address(0x4000), 0x50_4000);
    }

    proptest! {
        #[test]
        fn a_split_loses_nothing(ranges in ranges(), pages in 0u64..400) {
            let bytes = pages * PAGE_SIZE;
            let (before, after) = split(&ranges, bytes);
            prop_assert_eq!(total(&before), bytes.min(total(&ranges)));
            let mut joined: Vec<Range> = Vec::new();
            for range in before.into_iter().chain(after) {
                match joined.last_mut() {
                    Some(last) if last.end() == range.offset => last.len += range.len,
                    _ => joined.push(range),
                }
            }
            prop_assert_eq!(joined, ranges);
        }
    }
}
