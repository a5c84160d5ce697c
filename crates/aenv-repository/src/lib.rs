//! Committed snapshots: content-addressed blobs, then manifests, then names.
//!
//! One implementation over the `object_store` crate, with backends `posix_fs` and `oss` (S3-compatible). A commit is visible whole
//! or not at all; two writers of one document cannot both win; readers never see a missing blob.
//!
//! ```text
//! format.json                     {"format": 1}; a newer one is refused
//! blobs/sha256/<ab>/<hex>         layers and vm states, by the sha256 of their bytes
//! checkpoints/<id>.json           manifests; name blobs by digest only; never changed
//! teams/<team>/<key>.json         documents: {"format", "revision", "value"}; changed by conditional puts. Those of paused sandboxes
//!                                 (`paused/<id>`) are described in [`paused`]
//! commits/<uuid>.json             blobs that a commit under way relies on
//! collections/<uuid>.json         there while a garbage collection deletes
//! ```
//!
//! **A commit** writes its intent (`commits/`), then the blobs that are missing, then the manifest, then removes the intent.
//! A crash before the manifest leaves blobs that nothing names: [`Repository::gc`] takes them.
//!
//! **Garbage collection beside commits** is safe without a lock on the whole store: a commit writes its intent and then looks
//! for marks in `collections/` (and waits while there is one); a collection writes its mark and then reads the intents. Whichever
//! comes second sees the other, because both backends are consistent after each write. A mark is there for seconds, and lapses by
//! itself when its collection died.
//!
//! **Conditional puts.** S3 has them (`If-None-Match`, `If-Match`). A POSIX filesystem has only the first (a hard link), so that there
//! each change of a team's documents is made under an exclusive lock on `locks/<team>`, and the version is a revision inside the document.
//! The lock is the kernel's (`flock`; NFS version 4 carries it between hosts): it goes when its holder dies.

#![forbid(unsafe_code)]

mod backend;
mod blobs;
mod check;
mod collect;
mod documents;
mod elsewhere;
mod layout;
pub mod paused;
pub mod repository;
mod stall;
mod traces;

pub use check::{Damage, Depth, Usage};
pub use collect::{Collection, DryRun, GcReport, Pace, Progress, Watcher};
pub use paused::{Holder, Offer, PausedError, PausedSandbox, PausedSandboxes, PausedState};
pub use repository::{Backend, Layers, OssConfig, Repository, RepositoryError, Versioned};
