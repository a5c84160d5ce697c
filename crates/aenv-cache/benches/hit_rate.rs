//! Which policy and which block size: `cargo bench -p aenv-cache --bench hit_rate`. Replays a trace of launches against S3-FIFO, LRU and
//! FIFO, without any disk, and prints hit rates and what was fetched for what was asked for.
//!
//! The trace: 200 templates of 1 GiB, launched with a Zipf distribution. A launch reads its template's boot set in order (runs of 16 to
//! 512 KiB that lie anywhere, 96 MiB in all, the same each time) and then 16 MiB here and there that no other launch need read. After
//! every 50th one image is read from end to end (a scan inside a guest, or a background fill).

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for the terminal")]

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap, VecDeque},
    rc::Rc,
};

use aenv_cache::policy::{Item, S3Fifo, Uses};

const TEMPLATES: u64 = 200;
const IMAGE: u64 = 1 << 30;
const LAUNCHES: u64 = 2500;
const GRAIN: u64 = 16 << 10;
const BOOT: u64 = 96 << 20;
const TAIL: u64 = 16 << 20;
const SCAN_EVERY: u64 = 50;

/// A read: template, first byte, bytes.
type Read = (u64, u64, u64);
type Key = (u64, u64);

fn main() {
    let trace = trace();
    let asked: u64 = trace.iter().map(|read| read.2).sum();
    let footprint = TEMPLATES * (BOOT + TAIL);
    println!(
        "{} reads, {} GiB asked for, {LAUNCHES} launches of {TEMPLATES} templates",
        trace.len(),
        asked >> 30
    );
    for block in [64 << 10, 256 << 10, 1 << 20] {
        for capacity in [footprint / 20, footprint / 5, footprint] {
            let room = (capacity / block) as usize;
            let line: Vec<String> = [
                ("S3-FIFO", replay(&trace, block, &mut S3::new(room))),
                ("LRU", replay(&trace, block, &mut Lru::new(room))),
                ("FIFO", replay(&trace, block, &mut Fifo::new(room))),
            ]
            .into_iter()
            .map(|(name, (hits, blocks, fetched))| {
                let (rate, ratio) = (100.0 * hits as f64 / blocks as f64, fetched as f64 / asked as f64);
                format!("{name} {rate:.1} % hits, {ratio:.2} B fetched for each asked")
            })
            .collect();
            println!("{:>4} KiB blocks, {:>5} MiB: {}", block >> 10, capacity >> 20, line.join("; "));
        }
    }
}

fn trace() -> Vec<Read> {
    let mut random = random();
    let mut next = move |below: u64| random.next().unwrap() % below;
    let mut runs = |total: u64| {
        let mut runs = Vec::new();
        let mut sum = 0;
        while sum < total {
            let len = GRAIN << next(6);
            runs.push((next((IMAGE - len) / GRAIN) * GRAIN, len));
            sum += len;
        }
        runs
    };
    let boots: Vec<_> = (0..TEMPLATES).map(|_| runs(BOOT)).collect();
    let mut reads = Vec::new();
    let weights: Vec<f64> = (1..=TEMPLATES).map(|rank| 1.0 / rank as f64).collect();
    let total: f64 = weights.iter().sum();
    let mut chosen = random_from(7);
    for launch in 0..LAUNCHES {
        let mut at = (chosen.next().unwrap() >> 11) as f64 / (1_u64 << 53) as f64 * total;
        let template = weights
            .iter()
            .position(|weight| {
                at -= weight;
                at < 0.0
            })
            .unwrap_or(0) as u64;
        reads.extend(boots[template as usize].iter().map(|&(from, len)| (template, from, len)));
        reads.extend(runs(TAIL).into_iter().map(|(from, len)| (template, from, len)));
        if launch % SCAN_EVERY == SCAN_EVERY - 1 {
            let scanned = chosen.next().unwrap() % TEMPLATES;
            reads.extend((0..IMAGE).step_by(128 << 10).map(|at| (scanned, at, 128 << 10)));
        }
    }
    reads
}

fn random() -> impl Iterator<Item = u64> {
    random_from(0x9e37_79b9_7f4a_7c15)
}

fn random_from(mut random: u64) -> impl Iterator<Item = u64> {
    std::iter::repeat_with(move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    })
}

trait Policy {
    /// Whether the block was there; it is afterwards.
    fn touch(&mut self, key: Key, time: u64) -> bool;
}

/// Hits, blocks looked for, and bytes fetched.
fn replay(trace: &[Read], block: u64, policy: &mut dyn Policy) -> (u64, u64, u64) {
    let (mut hits, mut blocks) = (0, 0);
    for (time, &(template, from, len)) in trace.iter().enumerate() {
        for number in from / block..(from + len).div_ceil(block) {
            blocks += 1;
            hits += u64::from(policy.touch((template, number), time as u64));
        }
    }
    (hits, blocks, (blocks - hits) * block)
}

struct Entry(Key, Uses, Cell<u64>);

#[derive(Clone)]
struct Kept(Rc<Entry>);

impl Item for Kept {
    type Key = Key;

    fn key(&self) -> Key {
        self.0.0
    }

    fn uses(&self) -> &Uses {
        &self.0.1
    }
}

struct S3 {
    queues: S3Fifo<Kept>,
    map: HashMap<Key, Kept>,
    room: usize,
}

impl S3 {
    fn new(room: usize) -> Self {
        Self { queues: S3Fifo::new(room), map: HashMap::new(), room }
    }
}

/// Reads in about a second: touches of a block within it are one use, as in the cache.
const ONE_USE: u64 = 1000;

impl Policy for S3 {
    fn touch(&mut self, key: Key, time: u64) -> bool {
        if let Some(entry) = self.map.get(&key) {
            if time - entry.0.2.replace(time) >= ONE_USE {
                entry.0.1.add();
            }
            return true;
        }
        if self.queues.len() == self.room {
            let gone = self.queues.evict().unwrap();
            self.map.remove(&gone.key());
        }
        let entry = Kept(Rc::new(Entry(key, Uses::default(), time.into())));
        self.map.insert(key, entry.clone());
        self.queues.insert(entry);
        false
    }
}

struct Lru {
    times: HashMap<Key, u64>,
    order: BTreeMap<u64, Key>,
    clock: u64,
    room: usize,
}

impl Lru {
    fn new(room: usize) -> Self {
        Self { times: HashMap::new(), order: BTreeMap::new(), clock: 0, room }
    }
}

impl Policy for Lru {
    fn touch(&mut self, key: Key, _time: u64) -> bool {
        self.clock += 1;
        let before = self.times.insert(key, self.clock);
        self.order.insert(self.clock, key);
        match before {
            Some(before) => self.order.remove(&before),
            None if self.times.len() > self.room => {
                let (_, gone) = self.order.pop_first().unwrap();
                self.times.remove(&gone);
                None
            }
            None => None,
        };
        before.is_some()
    }
}

struct Fifo {
    inside: HashMap<Key, ()>,
    order: VecDeque<Key>,
    room: usize,
}

impl Fifo {
    fn new(room: usize) -> Self {
        Self { inside: HashMap::new(), order: VecDeque::new(), room }
    }
}

impl Policy for Fifo {
    fn touch(&mut self, key: Key, _time: u64) -> bool {
        if self.inside.contains_key(&key) {
            return true;
        }
        if self.inside.len() == self.room {
            let gone = self.order.pop_front().unwrap();
            self.inside.remove(&gone);
        }
        self.inside.insert(key, ());
        self.order.push_back(key);
        false
    }
}
