//! Which block goes when there is no room: S3-FIFO (Yang et al., SOSP 2023).
//!
//! New blocks wait in a small queue, a tenth of the room. Those that were asked for again meanwhile move on to the main queue, the
//! others go, and their names are remembered for a while: one that comes back soon goes to the main queue at once. In the main queue
//! a block that was asked for goes round again. So a scan (a background fill, a backup inside a guest) passes through the small queue
//! and leaves what is hot alone, which it does not with LRU; and a hit only raises a counter, where LRU takes a lock to reorder a list.

use std::{
    collections::{HashMap, VecDeque},
    hash::Hash,
    sync::atomic::{AtomicU8, Ordering},
};

/// Times that a block was asked for, up to three.
#[derive(Debug, Default)]
pub struct Uses(AtomicU8);

impl Uses {
    const MOST: u8 = 3;

    /// One more.
    pub fn add(&self) {
        // Two that add at once may count as one: nothing depends on it.
        let uses = self.0.load(Ordering::Relaxed);
        if uses < Self::MOST {
            self.0.store(uses + 1, Ordering::Relaxed);
        }
    }

    fn take_one(&self) -> bool {
        let uses = self.0.load(Ordering::Relaxed);
        self.0.store(uses.saturating_sub(1), Ordering::Relaxed);
        uses > 0
    }

    fn take_all(&self) -> bool {
        self.0.swap(0, Ordering::Relaxed) > 0
    }
}

/// What can be in the queues.
pub trait Item {
    /// What tells it from others.
    type Key: Copy + Eq + Hash;

    /// Its key.
    fn key(&self) -> Self::Key;

    /// How often it was asked for.
    fn uses(&self) -> &Uses;
}

/// The queues.
pub struct S3Fifo<T: Item> {
    small: VecDeque<T>,
    main: VecDeque<T>,
    ghosts: Ghosts<T::Key>,
    small_room: usize,
}

impl<T: Item> S3Fifo<T> {
    /// Queues for a cache that has room for so many.
    pub fn new(room: usize) -> Self {
        let small_room = (room / 10).max(1);
        let ghosts = Ghosts::new(room - small_room.min(room));
        Self { small: VecDeque::new(), main: VecDeque::new(), ghosts, small_room }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a new one. The caller makes room before.
    pub fn insert(&mut self, item: T) {
        if self.ghosts.take(&item.key()) {
            self.main.push_back(item);
        } else {
            self.small.push_back(item);
        }
    }

    /// Adds one of which is known that it was kept before (in a cache that was opened again).
    pub fn insert_kept(&mut self, item: T) {
        self.main.push_back(item);
    }

    /// Takes out the one that is needed least.
    pub fn evict(&mut self) -> Option<T> {
        while self.small.len() >= self.small_room || self.main.is_empty() {
            let item = self.small.pop_front()?;
            if item.uses().take_all() {
                self.main.push_back(item);
            } else {
                self.ghosts.add(item.key());
                return Some(item);
            }
        }
        // Ends: each round takes a use from every item.
        loop {
            let item = self.main.pop_front()?;
            if !item.uses().take_one() {
                return Some(item);
            }
            self.main.push_back(item);
        }
    }

    /// Takes those out that `unwanted` says. Looks at all.
    pub fn remove(&mut self, unwanted: impl Fn(&T) -> bool) {
        self.small.retain(|item| !unwanted(item));
        self.main.retain(|item| !unwanted(item));
    }
}

/// Names of those that went from the small queue, the last `room` of them.
struct Ghosts<K> {
    queue: VecDeque<(K, u64)>,
    /// With the number of the queue's entry that counts; others of the name are of the past.
    names: HashMap<K, u64>,
    next: u64,
    room: usize,
}

impl<K: Copy + Eq + Hash> Ghosts<K> {
    fn new(room: usize) -> Self {
        Self { queue: VecDeque::new(), names: HashMap::new(), next: 0, room }
    }

    fn add(&mut self, key: K) {
        self.names.insert(key, self.next);
        self.queue.push_back((key, self.next));
        self.next += 1;
        while self.queue.len() > self.room {
            let Some((key, number)) = self.queue.pop_front() else { return };
            if self.names.get(&key) == Some(&number) {
                self.names.remove(&key);
            }
        }
    }

    fn take(&mut self, key: &K) -> bool {
        self.names.remove(key).is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, rc::Rc};

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    struct Named(u32, Rc<Uses>);

    impl Item for Named {
        type Key = u32;

        fn key(&self) -> u32 {
            self.0
        }

        fn uses(&self) -> &Uses {
            &self.1
        }
    }

    fn named(name: u32) -> Named {
        Named(name, Rc::default())
    }

    #[test]
    fn a_scan_leaves_what_is_hot() {
        let mut queues = S3Fifo::new(100);
        let hot: Vec<Named> = (0..50).map(named).collect();
        for item in &hot {
            queues.insert(item.clone());
            item.uses().add();
        }
        let mut gone = HashSet::new();
        for name in 1000..2000 {
            if queues.len() == 100 {
                gone.insert(queues.evict().unwrap().0);
            }
            queues.insert(named(name));
        }
        assert!(hot.iter().all(|item| !gone.contains(&item.0)));
        assert_eq!(gone.len(), 950);
    }

    #[test]
    fn one_that_comes_back_soon_is_kept() {
        let mut queues = S3Fifo::new(20);
        for name in 0..20 {
            queues.insert(named(name));
        }
        let first = queues.evict().unwrap();
        assert_eq!(first.0, 0);
        queues.insert(first);
        // Eighteen that nobody asked for go before it.
        let gone: Vec<u32> = (0..18).map(|_| queues.evict().unwrap().0).collect();
        assert!(!gone.contains(&0), "{gone:?}");
    }

    proptest! {
        /// Whatever happens, each comes out once, and only when it was in.
        #[test]
        fn nothing_is_lost_or_doubled(steps in prop::collection::vec((0_u8..4, 0_u32..40), 1..400), room in 1_usize..30) {
            let mut queues: S3Fifo<Named> = S3Fifo::new(room);
            let mut inside: HashMap<u32, Named> = HashMap::new();
            for (step, name) in steps {
                match step {
                    0 => if let Some(item) = inside.get(&name) { item.uses().add() },
                    1 if inside.contains_key(&name) => {
                        queues.remove(|item| item.0 == name);
                        inside.remove(&name);
                    }
                    _ if inside.contains_key(&name) => {}
                    _ => {
                        if inside.len() == room {
                            let gone = queues.evict().unwrap();
                            prop_assert!(inside.remove(&gone.0).is_some());
                        }
                        inside.insert(name, named(name));
                        queues.insert(inside[&name].clone());
                    }
                }
                prop_assert_eq!(queues.len(), inside.len());
                prop_assert!(queues.ghosts.queue.len() <= room);
            }
            while let Some(gone) = queues.evict() {
                prop_assert!(inside.remove(&gone.0).is_some());
            }
            prop_assert!(inside.is_empty());
        }
    }
}
