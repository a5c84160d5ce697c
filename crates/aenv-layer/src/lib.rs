//! Layers in the overlaybd format (LSMT, optionally ZFile-compressed, optionally inside a tar header), writable uppers,
//! and stacks of them that are block devices.
//!
//! * [`Layer`] is sealed and read-only; it is opened from any [`BlockSource`](aenv_store::BlockSource), whatever wraps it.
//! * [`LayerWriter`] writes a new layer in one pass, [`compact()`] writes one from several.
//! * [`Upper`] is the writable end of a disk: append-only data beside an append-only index, in a folder of its own.
//! * [`Stack`] shows layers and an upper as one [`BlockDevice`](aenv_store::BlockDevice), and seals its upper in O(index).
//!
//! This room owns the bytes of layer files and upper folders. It never decides which layers belong together, and it trusts
//! nothing that it reads: a hostile file ends in a typed error. The format is written down in `docs/formats/overlaybd.md`.

#![forbid(unsafe_code)]

mod compact;
mod durable;
mod format;
mod generation;
mod index;
mod layer;
mod mapping;
mod search;
mod segments;
mod stack;
mod tarball;
mod upper;
mod writer;
mod zfile;

pub use compact::{CompactError, compact};
pub use format::MAX_STACK_LAYERS;
pub use layer::{Layer, OpenLayerError};
pub use stack::{Extent, SealError, SealedLayer, Stack, StackError};
pub use tarball::TarFrame;
pub use upper::{OpenUpperError, Upper};
pub use writer::{LayerSummary, LayerWriter, WriteLayerError};
pub use zfile::{CompressError, CompressOptions, Compression, OpenZFileError, ZFileSource, compress_zfile};
