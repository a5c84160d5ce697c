//! Where a number belongs among sorted ones.

use std::hint::select_unpredictable;

/// Keys for each entry of a table.
const SHARE: usize = 2;

/// A table over keys: narrow ones where all numbers fit, because a cache line then holds twice as many.
#[derive(Debug)]
pub(crate) enum Search {
    Narrow(Table<u32>),
    Wide(Table<u64>),
}

impl Search {
    /// A table over sorted keys.
    pub fn new(keys: impl ExactSizeIterator<Item = u64> + DoubleEndedIterator + Clone) -> Self {
        if keys.clone().next_back().is_none_or(|last| last < u64::from(u32::MAX)) {
            Self::Narrow(Table::new(keys.map(|key| key as u32).collect()))
        } else {
            Self::Wide(Table::new(keys.collect()))
        }
    }

    /// Place of the last key that is not greater than `key`; zero when all are.
    pub fn last_at_most(&self, key: u64) -> usize {
        match self {
            Self::Narrow(table) => table.last_at_most(u32::try_from(key).unwrap_or(u32::MAX)),
            Self::Wide(table) => table.last_at_most(key),
        }
    }
}

impl Default for Search {
    fn default() -> Self {
        Self::new([].into_iter())
    }
}

/// Sorted keys, and a table by their upper bits that says where to look. Where keys lie evenly, few are left to look at; where they do not,
/// at worst all of them, by halves. A look-up has few instructions, and no branch that depends on a key: the CPU then begins the next
/// ones while this one waits for memory.
#[derive(Debug)]
pub(crate) struct Table<K> {
    keys: Vec<K>,
    /// Place of the first key whose upper bits are not less than the number of the entry; at the end, the number of keys.
    starts: Vec<u32>,
    shift: u32,
}

impl<K: Copy + Ord + Into<u64>> Table<K> {
    fn new(keys: Vec<K>) -> Self {
        let last: u64 = keys.last().map_or(0, |&key| key.into());
        let most = (keys.len() / SHARE).max(1) as u64;
        let shift = (0..u64::BITS - 1).find(|shift| last >> shift < most).unwrap_or(u64::BITS - 1);
        let entries = (last >> shift) + 1;
        let mut starts = Vec::with_capacity(entries as usize + 1);
        let mut place = 0;
        for entry in 0..=entries {
            while keys.get(place).is_some_and(|&key| key.into() >> shift < entry) {
                place += 1;
            }
            // An index has fewer mappings than 2^32: 255 layers of 2^24 at most.
            starts.push(place as u32);
        }
        Self { keys, starts, shift }
    }

    fn last_at_most(&self, key: K) -> usize {
        let entry = ((key.into() >> self.shift) as usize).min(self.starts.len() - 2);
        // Keys before `place` are not greater; of the next `left` it is not known.
        let mut place = self.starts[entry] as usize;
        let mut left = self.starts[entry + 1] as usize - place;
        while left > 0 {
            let half = left / 2;
            let fits = self.keys[place + half] <= key;
            place = select_unpredictable(fits, place + half + 1, place);
            left = select_unpredictable(fits, left - half - 1, half);
        }
        place.saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(keys: &[u64], narrow: bool) {
        let search = Search::new(keys.iter().copied());
        assert_eq!(matches!(search, Search::Narrow(_)), narrow);
        let around = keys.iter().flat_map(|&key| [key.saturating_sub(1), key, key.saturating_add(1)]);
        for key in around.chain([0, u64::from(u32::MAX), u64::MAX]) {
            let expected = keys.partition_point(|&other| other <= key).saturating_sub(1);
            assert_eq!(search.last_at_most(key), expected, "{key} among {}", keys.len());
        }
    }

    #[test]
    fn tables_of_every_size_and_either_width() {
        for len in [0_u64, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 70_000] {
            let keys: Vec<u64> = (0..len).map(|i| i * 10 + 5).collect();
            check(&keys, true);
            let far: Vec<u64> = keys.iter().map(|key| key + (1 << 40)).collect();
            check(&far, len == 0);
            // All but one in one entry of the table.
            let mut uneven = keys.clone();
            uneven.extend([u64::from(u32::MAX) - 1]);
            check(&uneven, true);
        }
        check(&[3, u64::from(u32::MAX) - 1], true);
        check(&[3, u64::from(u32::MAX)], false);
    }
}
