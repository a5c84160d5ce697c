//! Where a guest's memory is.

/// Bytes in a page of memory.
pub const PAGE_SIZE: u64 = 4096;

/// A guest's memory in the address space of its VMM: one private mapping of a memory image, from its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ram {
    /// The VMM.
    pub pid: u32,
    /// Address of the mapping in the VMM; a multiple of [`PAGE_SIZE`].
    pub start: u64,
    /// Bytes; a multiple of [`PAGE_SIZE`].
    pub len: u64,
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
