//! A bounded cache of remote bytes on the local disk. A [`CachedSource`] is a stage over a slow source: what was read once is
//! read from here the next time, also after a restart.
//!
//! ```text
//! source    CachedSource: a read, block by block        -> cache, flights, the source beneath
//! flights   one fetch for all that want a block now
//! ahead     sees sequential reads                       -> workers, which fetch what comes next
//! fill      fetches the rest of a source, last in line
//! cache     which block is in which slot, what goes     -> policy (S3-FIFO), slots (files)
//! ```
//!
//! * **Blocks** have 256 KiB. A ranged read of a registry or an object store takes 5 to 50 ms before its first byte, so that
//!   smaller blocks cost round trips; larger ones fetch more that nobody asked for, and a fixed cache holds fewer places that
//!   are hot. (`cargo bench -p aenv-cache --bench hit_rate` prints both sides for other sizes.)
//! * **Bounded**: the files never grow beyond the capacity, nor when less than the reserve is free on their filesystem; what is
//!   there is replaced then. A disk that is full costs speed, never a read.
//! * **Trusted is nothing**: each 16 KiB have a checksum that every read compares. What does not fit is fetched again.
//! * **Nothing is synced**: a record that a crash left beside bytes of another block does not fit them.
//!
//! This room never knows what the bytes mean, nor when they change: a source's id stands for bytes that never do.

#![forbid(unsafe_code)]

mod ahead;
mod cache;
mod fill;
mod flights;
pub mod policy;
mod slots;
mod source;
mod stats;
mod workers;

pub use cache::{BlockCache, CacheConfig, Observer, OpenCacheError};
pub use fill::Filled;
pub use slots::{BLOCK, SourceId};
pub use source::CachedSource;
pub use stats::CacheStats;
