//! The index of an upper: grows with each write, ordered by the place on the disk.

use std::collections::BTreeMap;

use crate::mapping::{MAX_LEN, Mapping};

/// Segments that do not overlap, joined where they are adjacent. 16 bytes for each (and the map's slack).
#[derive(Default)]
pub(crate) struct SegmentMap {
    map: BTreeMap<u64, Packed>,
}

/// Length, mapped offset and zero flag of a segment in 8 bytes: the key in the map is its offset.
#[derive(Clone, Copy)]
struct Packed(u64);

const LEN_SHIFT: u32 = 49;
const ZEROED: u64 = 1 << 63;

impl Packed {
    fn of(mapping: Mapping) -> Self {
        let len = u64::from(mapping.len()) << LEN_SHIFT;
        if mapping.zeroed() {
            return Self(len | ZEROED);
        }
        debug_assert!(mapping.moffset() < 1 << LEN_SHIFT);
        Self(mapping.moffset() | len)
    }

    fn len(self) -> u32 {
        (self.0 >> LEN_SHIFT) as u32 & 0x3fff
    }

    fn mapping(self, offset: u64) -> Mapping {
        if self.0 & ZEROED != 0 {
            Mapping::zeros(offset, self.len())
        } else {
            Mapping::data(offset, self.len(), self.0 & ((1 << LEN_SHIFT) - 1))
        }
    }
}

impl SegmentMap {
    /// Segments in it.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Maps a range anew. What it replaces goes to `replaced`: mappings of data that nothing refers to any more.
    pub fn insert(&mut self, mapping: Mapping, mut replaced: impl FnMut(Mapping)) {
        let (start, end) = (mapping.offset(), mapping.end());
        if start == end {
            return;
        }
        let mut note = |old: Mapping| {
            if !old.zeroed() {
                replaced(old);
            }
        };
        let before = self.map.range_mut(..start).next_back();
        if let Some((&offset, packed)) = before
            && offset + u64::from(packed.len()) > start
        {
            let old = packed.mapping(offset);
            *packed = Packed::of(old.clip(offset, start));
            note(old.clip(start, end));
            if old.end() > end {
                self.map.insert(end, Packed::of(old.clip(end, old.end())));
            }
        }
        while let Some((&offset, &packed)) = self.map.range(start..end).next() {
            let old = packed.mapping(offset);
            self.map.remove(&offset);
            note(old.clip(start, end));
            if old.end() > end {
                self.map.insert(end, Packed::of(old.clip(end, old.end())));
            }
        }
        self.place(mapping);
    }

    /// Puts a mapping into a gap, joined to its neighbours where they are adjacent.
    fn place(&mut self, mut mapping: Mapping) {
        if mapping.len() < MAX_LEN
            && let Some(&after) = self.map.get(&mapping.end())
            && let Some(joined) = mapping.join(after.mapping(mapping.end()))
        {
            self.map.remove(&mapping.end());
            mapping = joined;
        }
        if let Some((&offset, packed)) = self.map.range_mut(..mapping.offset()).next_back()
            && let Some(joined) = packed.mapping(offset).join(mapping)
        {
            *packed = Packed::of(joined);
            return;
        }
        self.map.insert(mapping.offset(), Packed::of(mapping));
    }

    /// Walks `[start, end)` in order: mappings clipped to it, and the gaps between them.
    pub fn walk(&self, start: u64, end: u64, mut visit: impl FnMut(Span)) {
        let mut at = start;
        let first = self.map.range(..start).next_back();
        for (&offset, &packed) in first.into_iter().chain(self.map.range(start..end)) {
            let mapping = packed.mapping(offset);
            if mapping.end() <= at {
                continue;
            }
            if offset > at {
                visit(Span::Gap(at, offset));
            }
            visit(Span::Mapped(mapping.clip(at, end)));
            at = mapping.end().min(end);
        }
        if at < end {
            visit(Span::Gap(at, end));
        }
    }

    /// All of it, sorted.
    pub fn iter(&self) -> impl Iterator<Item = Mapping> {
        self.map.iter().map(|(&offset, packed)| packed.mapping(offset))
    }
}

/// A part of a range that was looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Span {
    /// Mapped so.
    Mapped(Mapping),
    /// Not mapped, from the first sector up to the second.
    Gap(u64, u64),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn adjacent_writes_become_one_segment() {
        let mut map = SegmentMap::default();
        for i in 0..1000 {
            map.insert(Mapping::data(i * 8, 8, 8 + i * 8), |_| unreachable!());
        }
        assert_eq!(map.len(), 1);
        map.insert(Mapping::zeros(16, 8), |old| assert_eq!(old, Mapping::data(16, 8, 24)));
        assert_eq!(map.len(), 3);
    }

    proptest! {
        /// Against a model with one entry for each sector.
        #[test]
        fn like_an_array(writes in prop::collection::vec((0_u64..300, 1_u32..60, any::<bool>()), 1..80)) {
            let mut map = SegmentMap::default();
            let mut model = vec![None; 400];
            let mut moffset = 8;
            let mut dead = 0;
            for (offset, len, zeroed) in writes {
                let mapping =
                    if zeroed { Mapping::zeros(offset, len) } else { Mapping::data(offset, len, moffset) };
                let mut replaced = Vec::new();
                map.insert(mapping, |old| replaced.push(old));
                for old in replaced {
                    for i in 0..u64::from(old.len()) {
                        prop_assert_eq!(model[(old.offset() + i) as usize], Some(old.moffset() + i));
                        dead += 1;
                    }
                }
                for i in 0..u64::from(len) {
                    model[(offset + i) as usize] = Some(if zeroed { 0 } else { moffset + i });
                }
                if !zeroed {
                    moffset += u64::from(len);
                }
            }
            let live = model.iter().filter(|entry| entry.is_some_and(|at| at > 0)).count();
            prop_assert_eq!(live as u64 + dead, moffset - 8);
            let mut seen = vec![None; 400];
            let mut at = 3;
            map.walk(3, 390, |span| match span {
                Span::Gap(from, to) => {
                    assert_eq!(from, at);
                    at = to;
                }
                Span::Mapped(mapping) => {
                    assert_eq!(mapping.offset(), at);
                    at = mapping.end();
                    for i in 0..u64::from(mapping.len()) {
                        let value = if mapping.zeroed() { 0 } else { mapping.moffset() + i };
                        seen[(mapping.offset() + i) as usize] = Some(value);
                    }
                }
            });
            prop_assert_eq!(at, 390);
            prop_assert_eq!(&seen[3..390], &model[3..390]);
        }
    }
}
