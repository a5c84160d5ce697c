//! Boot traces: what a launch reads of layers that are elsewhere in its first seconds is remembered, and fetched ahead of demand the
//! next time, in the order in which it was needed and with few large reads.
//!
//! A trace belongs to a stack of layers, and so to one image (memory or a disk) of a checkpoint. It holds blocks of the cache, those with
//! the layers' indexes included, and lies in `<cache>/traces`. It may be lost or wrong at any time: then a launch is slower.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet, VecDeque},
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, SystemTime},
};

use aenv_cache::{CachedSource, SourceId};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;

/// Version of the file's form.
const FORMAT: u32 = 1;
/// How long a launch is watched.
const WINDOW: Duration = Duration::from_secs(10);
/// Blocks of a trace at most: 256 MiB.
const MOST: usize = 1024;
/// No layer has a block with a greater number. A trace may come from another node.
const LAST: u64 = 1 << 40;
/// Blocks that one read gets at most.
const RUN: u64 = 16;
/// Reads that are under way at the same time.
const READS: usize = 4;
/// Traces that are kept, the youngest ones.
const KEPT: usize = 4096;

thread_local! {
    /// The launch that the reads of this thread belong to.
    static CURRENT: RefCell<Option<Arc<Recording>>> = const { RefCell::new(None) };
}

/// The traces of a node.
pub(crate) struct Traces {
    folder: PathBuf,
    runtime: Handle,
}

/// Blocks in the order in which they were needed: the number of the layer in its stack, and the number of the block in the layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Trace {
    format: u32,
    blocks: Vec<(u16, u64)>,
}

/// A launch that is watched.
pub(crate) struct Recording {
    path: PathBuf,
    layers: HashMap<SourceId, u16>,
    active: AtomicBool,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    known: HashSet<(u16, u64)>,
    order: Vec<(u16, u64)>,
}

/// While it lives, reads of its thread belong to a recording.
pub(crate) struct Watching(Option<Arc<Recording>>);

impl Traces {
    /// In a folder, which need not be there yet.
    pub fn new(folder: PathBuf, runtime: Handle) -> Self {
        Self { folder, runtime }
    }

    /// A launch begins that reads these layers, base first: fetches what the last one needed, and watches what this one needs.
    pub fn begin(&self, layers: Vec<CachedSource>) -> Arc<Recording> {
        let path = self.folder.join(format!("{}.json", key(&layers)));
        if let Some(trace) = Trace::load(&path) {
            prefetch(trace.plan(), layers.clone());
        }
        let numbers = layers.iter().zip(0..).map(|(layer, number)| (layer.id(), number)).collect();
        let recording = Arc::new(Recording {
            path,
            layers: numbers,
            active: AtomicBool::new(true),
            seen: Mutex::default(),
        });
        let (watched, runtime) = (Arc::clone(&recording), self.runtime.clone());
        self.runtime.spawn(async move {
            tokio::time::sleep(WINDOW).await;
            runtime.spawn_blocking(move || watched.finish());
        });
        recording
    }
}

/// What stands for a stack of layers.
fn key(layers: &[CachedSource]) -> String {
    let mut hasher = Sha256::new();
    layers.iter().for_each(|layer| hasher.update(hex::encode(layer.id().0)));
    hex::encode(hasher.finalize())
}

/// What the cache is to tell of reads.
pub(crate) fn observe(source: SourceId, blocks: Range<u64>) {
    CURRENT.with_borrow(|current| {
        if let Some(recording) = current {
            recording.note(source, blocks);
        }
    });
}

impl Recording {
    /// Watches the reads of this thread.
    pub fn watch(self: &Arc<Self>) -> Watching {
        if !self.active.load(Ordering::Relaxed) {
            return Watching(None);
        }
        CURRENT.set(Some(Arc::clone(self)));
        Watching(Some(Arc::clone(self)))
    }

    fn note(&self, source: SourceId, blocks: Range<u64>) {
        let Some(&layer) = self.layers.get(&source) else { return };
        let mut seen = self.seen.lock();
        for block in blocks {
            if seen.order.len() < MOST && seen.known.insert((layer, block)) {
                seen.order.push((layer, block));
            }
        }
    }

    /// The launch is over: keeps what was seen, if a trace that is there does not have it.
    pub fn finish(&self) {
        if !self.active.swap(false, Ordering::Relaxed) {
            return;
        }
        let Seen { order, .. } = std::mem::take(&mut *self.seen.lock());
        let before: HashSet<_> = Trace::load(&self.path).unwrap_or_default().blocks.into_iter().collect();
        let new = order.iter().filter(|block| !before.contains(block)).count();
        if order.is_empty() || new * 10 <= before.len() {
            return;
        }
        let trace = Trace { format: FORMAT, blocks: order };
        if let Err(error) = trace.save(&self.path) {
            tracing::warn!(%error, "what a launch reads is not remembered");
        }
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        if self.0.is_some() {
            CURRENT.set(None);
        }
    }
}

impl Trace {
    fn load(path: &Path) -> Option<Self> {
        let trace: Self = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        let possible = trace.blocks.iter().all(|(_, block)| *block <= LAST);
        (trace.format == FORMAT && trace.blocks.len() <= MOST && possible).then_some(trace)
    }

    fn save(&self, path: &Path) -> io::Result<()> {
        let folder = path.parent().unwrap_or(path);
        fs::create_dir_all(folder)?;
        let mut others: Vec<(SystemTime, PathBuf)> = Vec::new();
        for item in fs::read_dir(folder)? {
            let item = item?;
            others.push((item.metadata()?.modified()?, item.path()));
        }
        if others.len() >= KEPT {
            others.sort();
            others[..=others.len() - KEPT].iter().try_for_each(|(_, path)| fs::remove_file(path))?;
        }
        let text = serde_json::to_vec(self).map_err(io::Error::other)?;
        aenv_durable::write(path, &text)
    }

    /// Reads that fetch all of it: neighbours together, each read at the place of that of its blocks that was needed first. A gap of one
    /// block is read as well.
    fn plan(&self) -> VecDeque<(u16, Range<u64>)> {
        let wanted: HashSet<(u16, u64)> = self.blocks.iter().copied().collect();
        let mut planned: HashSet<(u16, u64)> = HashSet::new();
        let mut plan = VecDeque::new();
        for &(layer, block) in &self.blocks {
            if planned.contains(&(layer, block)) {
                continue;
            }
            let is_free = |at: u64| wanted.contains(&(layer, at)) && !planned.contains(&(layer, at));
            let mut range = block..block + 1;
            while range.end - range.start < RUN {
                if is_free(range.end) {
                    range.end += 1;
                } else if range.end - range.start + 1 < RUN && is_free(range.end.saturating_add(1)) {
                    range.end += 2;
                } else if range.start > 0 && is_free(range.start - 1) {
                    range.start -= 1;
                } else {
                    break;
                }
            }
            planned.extend(range.clone().map(|at| (layer, at)));
            plan.push_back((layer, range));
        }
        plan
    }
}

/// Fetches in order, a few reads at a time, by threads of its own.
fn prefetch(plan: VecDeque<(u16, Range<u64>)>, layers: Vec<CachedSource>) {
    let plan = Arc::new(Mutex::new(plan));
    for _ in 0..READS {
        let (plan, layers) = (Arc::clone(&plan), layers.clone());
        let started = thread::Builder::new().name("boot-trace".to_owned()).spawn(move || {
            loop {
                let Some((layer, blocks)) = plan.lock().pop_front() else { return };
                let Some(source) = layers.get(usize::from(layer)) else { continue };
                if let Err(error) = source.prefetch(blocks) {
                    // Whoever needs a block will be told.
                    return tracing::debug!(%error, "not fetched ahead");
                }
            }
        });
        if let Err(error) = started {
            tracing::warn!(%error, "what a launch needs is not fetched ahead");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn trace(blocks: &[(u16, u64)]) -> Trace {
        Trace { format: FORMAT, blocks: blocks.to_vec() }
    }

    #[test]
    fn neighbours_are_read_together_in_the_order_of_need() {
        let plan = trace(&[(1, 9), (0, 100), (1, 8), (0, 102), (0, 5), (1, 10)]).plan();
        assert_eq!(plan, [(1, 8..11), (0, 100..103), (0, 5..6)]);
        let long: Vec<_> = (0..40).map(|block| (0, block)).collect();
        assert_eq!(trace(&long).plan(), [(0, 0..16), (0, 16..32), (0, 32..40)]);
    }

    proptest! {
        #[test]
        fn a_plan_has_all_of_it_and_little_more(blocks in proptest::collection::vec((0..3_u16, 0..60_u64), 0..100)) {
            let plan = trace(&blocks).plan();
            let wanted: HashSet<_> = blocks.iter().copied().collect();
            let mut read = Vec::new();
            for (layer, range) in plan {
                prop_assert!(range.end - range.start <= RUN);
                read.extend(range.map(|block| (layer, block)));
            }
            let distinct: HashSet<_> = read.iter().copied().collect();
            prop_assert!(wanted.is_subset(&distinct));
            prop_assert!(read.len() <= 2 * wanted.len());
        }
    }

    #[test]
    fn what_is_no_trace_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("traces").join("one.json");
        assert_eq!(Trace::load(&path), None);
        let kept = trace(&[(0, 1)]);
        kept.save(&path).unwrap();
        assert_eq!(Trace::load(&path), Some(kept));
        for text in [
            "",
            "{}",
            "[1]",
            r#"{"format":9,"blocks":[]}"#,
            r#"{"format":1,"blocks":[[0,-1]]}"#,
            r#"{"format":1,"blocks":[[0,18446744073709551615]]}"#,
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(Trace::load(&path), None, "{text}");
        }
    }

    /// Files of traces, changed in any way: what is a trace has a plan that is bounded, and all else is none.
    #[test]
    fn changed_traces_are_bounded_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one.json");
        let valid = trace(&[(0, 1), (0, 2), (3, 70), (1, LAST), (0, 9)]);
        let valid = serde_json::to_vec(&valid).unwrap();
        aenv_testkit::mutate("boot-traces", &[valid], |input| {
            fs::write(&path, input).unwrap();
            let Some(trace) = Trace::load(&path) else { return false };
            let blocks: u64 = trace.plan().iter().map(|(_, run)| run.end - run.start).sum();
            assert!(blocks <= 2 * MOST as u64);
            true
        });
    }
}
