//! Fetches the rest of a source when nobody needs anything else.

use std::time::Duration;

use aenv_store::SourceError;

use crate::source::CachedSource;

/// Blocks of one step: a guest that needs one of them waits for no more than a megabyte.
const STEP: usize = 4;

/// How long a step waits for others at most.
const YIELD: Duration = Duration::from_secs(2);

/// How a fill ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// Every block was fetched, now or before.
    Whole,
    /// Not all could be kept: the cache has no room left that nobody has, and filling up would drive out what was asked for.
    NoRoom,
    /// It was to stop.
    Stopped,
}

impl CachedSource {
    /// Fetches all blocks that are missing, in order, each step only when no read waits for any source of the cache. Blocks the
    /// thread. Ends when `stop` says so, before each step.
    pub fn fill(&self, stop: impl Fn() -> bool) -> Result<Filled, SourceError> {
        let mut at = 0;
        while at < self.blocks() {
            self.cache().gate().wait_for_none(YIELD);
            if stop() {
                return Ok(Filled::Stopped);
            }
            let step = self.cache().room().min(STEP);
            if step == 0 {
                return Ok(Filled::NoRoom);
            }
            at = self.fetch_missing(at..self.blocks(), step)?.max(at + 1);
        }
        // What others fetched meanwhile was passed over, and may have failed or gone.
        let whole = (0..self.blocks()).all(|block| self.cache().contains(self.key(block)));
        Ok(if whole { Filled::Whole } else { Filled::NoRoom })
    }
}
