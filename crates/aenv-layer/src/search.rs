//! A static B-tree over sorted numbers.

use std::hint::select_unpredictable;

/// What a tree's keys are: narrow ones where all numbers fit, because a cache line then holds twice as many.
#[derive(Debug)]
pub(crate) enum Search {
    Narrow(Tree<u32, 16>),
    Wide(Tree<u64, 8>),
}

impl Search {
    /// A tree over sorted keys.
    pub fn new(keys: impl ExactSizeIterator<Item = u64> + DoubleEndedIterator + Clone) -> Self {
        if keys.clone().next_back().is_none_or(|last| last < u64::from(u32::MAX)) {
            Self::Narrow(Tree::new(keys.map(|key| key as u32).collect(), u32::MAX))
        } else {
            Self::Wide(Tree::new(keys.collect(), u64::MAX))
        }
    }

    /// Place of the last key that is not greater than `key`; zero when all are.
    pub fn last_at_most(&self, key: u64) -> usize {
        match self {
            Self::Narrow(tree) => tree.last_at_most(key.min(u64::from(u32::MAX) - 1) as u32),
            Self::Wide(tree) => tree.last_at_most(key.min(u64::MAX - 1)),
        }
    }
}

impl Default for Search {
    fn default() -> Self {
        Self::new([].into_iter())
    }
}

/// Level 0 has all keys, each further level every `N`-th of the one before, the last a single node.
#[derive(Debug)]
pub(crate) struct Tree<K, const N: usize> {
    levels: Vec<Vec<Node<K, N>>>,
}

/// One cache line of keys; those that it does not have are the greatest number.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Node<K, const N: usize>([K; N]);

impl<K: Copy + Ord, const N: usize> Tree<K, N> {
    fn new(mut keys: Vec<K>, missing: K) -> Self {
        let mut levels = Vec::new();
        while keys.len() > 1 {
            let node = |part: &[K]| Node(std::array::from_fn(|i| part.get(i).copied().unwrap_or(missing)));
            levels.push(keys.chunks(N).map(node).collect());
            keys = keys.into_iter().step_by(N).collect();
        }
        Self { levels }
    }

    fn last_at_most(&self, key: K) -> usize {
        let mut place = 0;
        for level in self.levels.iter().rev() {
            place = place * N + level[place].last_at_most(key);
        }
        place
    }
}

impl<K: Copy + Ord, const N: usize> Node<K, N> {
    const POWER_OF_TWO: () = assert!(N.is_power_of_two());

    /// By halves and without a branch: a look-up of few instructions leaves the CPU room to begin the next one while this one
    /// waits for memory.
    fn last_at_most(&self, key: K) -> usize {
        let () = Self::POWER_OF_TWO;
        let mut place = 0;
        let mut step = N / 2;
        while step > 0 {
            let fits = self.0[(place + step) % N] <= key;
            place += select_unpredictable(fits, step, 0);
            step /= 2;
        }
        place
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
    fn trees_of_every_height_and_either_width() {
        for len in [0_u64, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 70_000] {
            let keys: Vec<u64> = (0..len).map(|i| i * 10 + 5).collect();
            check(&keys, true);
            let far: Vec<u64> = keys.iter().map(|key| key + (1 << 40)).collect();
            check(&far, len == 0);
        }
        check(&[3, u64::from(u32::MAX) - 1], true);
        check(&[3, u64::from(u32::MAX)], false);
    }
}
