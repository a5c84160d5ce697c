//! Files that a node needs and does not bring along: named by a manifest, fetched once, checked, kept.
//!
//! ```text
//!   there already, with the right digest  ->  nothing is done
//!   a folder was named (no network)       ->  copied from there
//!   else                                  ->  its URLs, in order; a transfer that broke goes on where it was
//!   then: digest, sync, rename
//! ```
//!
//! A file with another digest than the manifest's never gets its name. This room knows nothing of what the files are for, and never
//! runs one.

#![forbid(unsafe_code)]

mod archive;
mod fetch;
mod manifest;
mod transfer;

pub use archive::{ArchiveError, unpack_program};
pub use fetch::{FetchError, Fetcher};
pub use manifest::{Manifest, ManifestError, Pinned, Program};
