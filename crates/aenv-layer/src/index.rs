//! The read-only index of a layer, or of several merged: sorted mappings, and a table of their offsets.

use crate::{
    mapping::{Mapping, push_joined},
    search::Search,
    segments::Span,
};

/// Mappings that share a key of the table: as many as a cache line holds.
const GROUP: usize = 4;

/// Sorted mappings that do not overlap, with a table over every 4th offset (one and a half megabytes for a million segments, so that it
/// stays close to the CPU). A look-up goes through the table to a group of mappings, which need not be close.
#[derive(Debug, Default)]
pub(crate) struct Index {
    mappings: Vec<Mapping>,
    groups: Search,
}

impl Index {
    /// Takes mappings that are sorted and do not overlap.
    pub fn new(mut mappings: Vec<Mapping>) -> Self {
        debug_assert!(mappings.windows(2).all(|pair| pair[0].end() <= pair[1].offset()));
        mappings.shrink_to_fit();
        let groups = Search::new(mappings.iter().step_by(GROUP).map(|mapping| mapping.offset()));
        Self { mappings, groups }
    }

    /// Merges the indexes of layers, base first; mappings are tagged with their layer's place.
    pub fn merge(layers: &[&Index]) -> Self {
        Self::new(merge_tagged(layers, 0))
    }

    /// This one with `top` over it, whose mappings get the tag `tag`.
    pub fn with_top(&self, top: &Index, tag: u8) -> Self {
        let top: Vec<Mapping> = top.mappings.iter().map(|mapping| mapping.with_tag(tag)).collect();
        Self::new(overlay(&self.mappings, &top))
    }

    pub fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    /// Place of the first mapping that ends after `sector`.
    pub fn find(&self, sector: u64) -> usize {
        let start = self.groups.last_at_most(sector) * GROUP;
        let group = &self.mappings[start.min(self.mappings.len())..];
        let group = &group[..group.len().min(GROUP)];
        let count: usize = group.iter().map(|mapping| usize::from(mapping.offset() <= sector)).sum();
        let at = start + count;
        if count > 0 && self.mappings[at - 1].end() > sector { at - 1 } else { at }
    }

    /// Where the mapping or gap at `sector` ends, and whether there is data.
    pub fn extent(&self, sector: u64) -> (u64, bool) {
        match self.mappings.get(self.find(sector)) {
            Some(mapping) if mapping.offset() <= sector => (mapping.end(), !mapping.zeroed()),
            Some(mapping) => (mapping.offset(), false),
            None => (u64::MAX, false),
        }
    }

    /// Walks `[start, end)` in order: mappings clipped to it, and the gaps between them.
    pub fn walk(&self, start: u64, end: u64, mut visit: impl FnMut(Span)) {
        let mut at = start;
        for mapping in &self.mappings[self.find(start)..] {
            if mapping.offset() >= end {
                break;
            }
            if mapping.offset() > at {
                visit(Span::Gap(at, mapping.offset()));
            }
            let part = mapping.clip(start, end);
            visit(Span::Mapped(part));
            at = part.end();
        }
        if at < end {
            visit(Span::Gap(at, end));
        }
    }
}

/// Merges by halves, so that each mapping is copied O(log layers) times.
fn merge_tagged(layers: &[&Index], first_tag: u8) -> Vec<Mapping> {
    match layers {
        [] => Vec::new(),
        [layer] => layer.mappings.iter().map(|mapping| mapping.with_tag(first_tag)).collect(),
        _ => {
            let (low, high) = layers.split_at(layers.len() / 2);
            let below = merge_tagged(low, first_tag);
            overlay(&below, &merge_tagged(high, first_tag + low.len() as u8))
        }
    }
}

/// `top` where it maps something, `below` elsewhere.
fn overlay(below: &[Mapping], top: &[Mapping]) -> Vec<Mapping> {
    let mut out = Vec::with_capacity(below.len() + top.len());
    let mut rest = below.iter().copied();
    let mut current = rest.next();
    for &over in top {
        while let Some(under) = current {
            if under.offset() >= over.offset() {
                break;
            }
            push_joined(&mut out, under.clip(under.offset(), over.offset()));
            current = if under.end() > over.offset() {
                Some(under.clip(over.offset(), under.end()))
            } else {
                rest.next()
            };
        }
        while let Some(under) = current {
            if under.end() > over.end() {
                current = Some(under.clip(over.end(), under.end()));
                break;
            }
            current = rest.next();
        }
        push_joined(&mut out, over);
    }
    for under in current.into_iter().chain(rest) {
        push_joined(&mut out, under);
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sorted(parts: Vec<(u64, u32, bool)>) -> Index {
        let mut at = 0;
        let mut moffset = 8;
        let mut list = Vec::new();
        for (gap, len, zeroed) in parts {
            at += gap;
            list.push(if zeroed { Mapping::zeros(at, len) } else { Mapping::data(at, len, moffset) });
            at += u64::from(len);
            moffset += u64::from(len) + 8;
        }
        Index::new(list)
    }

    fn layer() -> impl Strategy<Value = Index> {
        prop::collection::vec((0_u64..20, 1_u32..20, any::<bool>()), 0..120).prop_map(sorted)
    }

    fn look_up(index: &Index, sector: u64) -> Option<Mapping> {
        let mut found = None;
        index.walk(sector, sector + 1, |span| {
            if let Span::Mapped(mapping) = span {
                found = Some(mapping);
            }
        });
        found
    }

    proptest! {
        #[test]
        fn find_is_a_partition_point(index in layer(), sector in 0_u64..5000) {
            let expected = index.mappings.partition_point(|mapping| mapping.end() <= sector);
            prop_assert_eq!(index.find(sector), expected);
        }

        #[test]
        fn merged_is_the_topmost_of_each_sector(layers in prop::collection::vec(layer(), 0..6)) {
            let merged = Index::merge(&layers.iter().collect::<Vec<_>>());
            prop_assert!(merged.mappings.windows(2).all(|pair| pair[0].end() <= pair[1].offset()));
            for sector in 0..4900 {
                let top = layers.iter().enumerate().rev()
                    .find_map(|(tag, layer)| look_up(layer, sector).map(|mapping| mapping.with_tag(tag as u8)));
                prop_assert_eq!(look_up(&merged, sector), top);
            }
            if let Some((top, below)) = layers.split_last() {
                let step = Index::merge(&below.iter().collect::<Vec<_>>()).with_top(top, below.len() as u8);
                for sector in 0..4900 {
                    prop_assert_eq!(look_up(&step, sector), look_up(&merged, sector));
                }
            }
        }
    }

    #[test]
    fn find_in_tables_of_every_size() {
        for len in [0_u64, 1, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097, 70_000] {
            let index = Index::new((0..len).map(|i| Mapping::data(i * 10 + 5, 3, 8)).collect());
            for sector in (0..len * 10 + 20).step_by(if len > 5000 { 7 } else { 1 }) {
                assert_eq!(
                    index.find(sector),
                    index.mappings.partition_point(|mapping| mapping.end() <= sector)
                );
            }
        }
    }
}
