//! A source whose blocks are kept.

use std::{ops::Range, sync::Arc, time::Duration};

use aenv_store::{BlockSource, SourceError};
use bytes::Bytes;

use crate::{
    ahead::Ahead,
    cache::BlockCache,
    flights::{Claim, Lead, same},
    slots::{BLOCK, Key, SourceId},
};

/// Blocks that one read of the source beneath gets at most.
const RUN: usize = 16;

/// Bound of waiting for a fetch of somebody else. Sources bound their reads by themselves, well below.
const JOIN_BOUND: Duration = Duration::from_secs(300);

/// A source over a slow one, with a cache between them. Clones are the same source.
#[derive(Clone)]
pub struct CachedSource(Arc<Parts>);

struct Parts {
    cache: BlockCache,
    id: SourceId,
    inner: Arc<dyn BlockSource>,
    ahead: Ahead,
}

impl CachedSource {
    pub(crate) fn new(cache: BlockCache, id: SourceId, inner: Arc<dyn BlockSource>) -> Self {
        Self(Arc::new(Parts { cache, id, inner, ahead: Ahead::default() }))
    }

    /// Its id.
    pub fn id(&self) -> SourceId {
        self.0.id
    }

    /// Lets go of its blocks (whose bytes turned out to be wrong).
    pub fn forget(&self) {
        self.cache().forget(self.0.id);
    }

    /// Fetches what is missing of these blocks, with as few reads as there are gaps in it. Waits for what it fetches itself, not for
    /// what others fetch.
    pub fn prefetch(&self, blocks: Range<u64>) -> Result<(), SourceError> {
        let end = blocks.end.min(self.blocks());
        let mut at = blocks.start;
        while at < end {
            at = self.fetch_missing(at..end, RUN)?.max(at + 1);
        }
        Ok(())
    }

    pub(crate) fn cache(&self) -> &BlockCache {
        &self.0.cache
    }

    /// Blocks that it has.
    pub fn blocks(&self) -> u64 {
        self.size().div_ceil(BLOCK)
    }

    pub(crate) fn key(&self, block: u64) -> Key {
        Key { source: self.0.id, block }
    }

    /// Bytes of a block.
    fn len(&self, block: u64) -> u64 {
        (self.size() - block * BLOCK).min(BLOCK)
    }

    /// Fetches the first blocks of a range that are missing and that nobody else fetches: at most `most` of them, adjacent. Returns
    /// the first block that it did not look at.
    pub(crate) fn fetch_missing(&self, blocks: Range<u64>, most: usize) -> Result<u64, SourceError> {
        let mut at = blocks.start;
        let mut leads = Vec::new();
        while at < blocks.end && leads.len() < most {
            match self.lead_of_missing(at) {
                Some(lead) => leads.push(lead),
                None if leads.is_empty() => {}
                None => break,
            }
            at += 1;
        }
        self.cache().counters().ahead.add(leads.len() as u64);
        self.fetch(leads).map(|_| at)
    }

    /// The right to fetch a block, if it is missing and nobody else fetches it.
    fn lead_of_missing(&self, block: u64) -> Option<Lead<'_>> {
        let key = self.key(block);
        if self.cache().contains(key) {
            return None;
        }
        let Claim::Lead(lead) = self.cache().flights().claim(key) else { return None };
        // Another fetch may have ended between the look and the claim.
        (!self.cache().contains(key)).then_some(lead)
    }

    /// Fetches adjacent blocks with one read; gives them to those who wait and to the cache.
    fn fetch(&self, leads: Vec<Lead<'_>>) -> Result<Bytes, SourceError> {
        let (Some(first), Some(last)) = (leads.first(), leads.last()) else { return Ok(Bytes::new()) };
        let start = first.key.block * BLOCK;
        let end = last.key.block * BLOCK + self.len(last.key.block);
        let mut bytes = vec![0; (end - start) as usize];
        if let Err(error) = self.0.inner.read_at(&mut bytes, start) {
            leads.iter().for_each(|lead| lead.land(Err(same(&error))));
            return Err(error);
        }
        self.cache().counters().fetched_bytes.add(end - start);
        let bytes = Bytes::from(bytes);
        let part = |lead: &Lead<'_>| {
            let from = (lead.key.block * BLOCK - start) as usize;
            bytes.slice(from..from + self.len(lead.key.block) as usize)
        };
        leads.iter().for_each(|lead| lead.land(Ok(part(lead))));
        for lead in leads {
            self.cache().insert(lead.key, &part(&lead));
        }
        Ok(bytes)
    }

    /// Fills `buf`, the beginning of which is byte `offset` of `block`, from the source beneath, and returns how much of it.
    fn miss(&self, buf: &mut [u8], block: u64, offset: u64) -> Result<usize, SourceError> {
        let cache = self.cache();
        let lead = match cache.flights().claim(self.key(block)) {
            Claim::Lead(lead) => lead,
            Claim::Join(flight) => {
                cache.counters().joined.add(1);
                let _waiting = cache.gate().enter();
                return Ok(copy(&flight.wait(JOIN_BOUND)?, offset, buf));
            }
        };
        // Another fetch may have ended between the look and the claim.
        let len = buf.len().min((self.len(block) - offset) as usize);
        if cache.read(lead.key, self.len(block), offset, &mut buf[..len]) {
            cache.counters().hits.add(1);
            return Ok(len);
        }
        let last = block + (offset + buf.len() as u64 - 1) / BLOCK;
        let mut leads = vec![lead];
        for next in block + 1..=last {
            if leads.len() == RUN || cache.contains(self.key(next)) {
                break;
            }
            let Claim::Lead(lead) = cache.flights().claim(self.key(next)) else { break };
            leads.push(lead);
        }
        cache.counters().misses.add(leads.len() as u64);
        let _waiting = cache.gate().enter();
        Ok(copy(&self.fetch(leads)?, offset, buf))
    }

    fn fetch_ahead(&self, blocks: Range<u64>) {
        let blocks = blocks.start..blocks.end.min(self.blocks());
        if blocks.is_empty() {
            return;
        }
        let source = self.clone();
        self.cache().workers().submit(move || {
            if let Err(error) = source.prefetch(blocks) {
                // Whoever needs the block will be told.
                tracing::debug!(%error, "not fetched ahead");
            }
        });
    }
}

/// Copies as much as there is.
fn copy(bytes: &[u8], offset: u64, buf: &mut [u8]) -> usize {
    let bytes = &bytes[offset as usize..];
    let len = bytes.len().min(buf.len());
    buf[..len].copy_from_slice(&bytes[..len]);
    len
}

impl BlockSource for CachedSource {
    fn may_wait(&self) -> bool {
        true
    }

    fn size(&self) -> u64 {
        self.0.inner.size()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        SourceError::check_range(offset, buf.len() as u64, self.size())?;
        if buf.is_empty() {
            return Ok(());
        }
        let touched = offset / BLOCK..(offset + buf.len() as u64).div_ceil(BLOCK);
        if let Some(observer) = self.cache().observer() {
            observer(self.0.id, touched.clone());
        }
        if let Some(blocks) = self.0.ahead.read(touched) {
            self.fetch_ahead(blocks);
        }
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let (block, within) = (at / BLOCK, at % BLOCK);
            let part = (buf.len() - done).min((self.len(block) - within) as usize);
            if self.cache().read(self.key(block), self.len(block), within, &mut buf[done..done + part]) {
                self.cache().counters().hits.add(1);
                done += part;
            } else {
                done += self.miss(&mut buf[done..], block, within)?;
            }
        }
        Ok(())
    }
}
