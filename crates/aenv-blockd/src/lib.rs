//! The data plane of a node: stacks of layers shown to VMMs: disks as ublk block devices where the kernel has
//! ublk, and everything else as files in a FUSE mount.
//!
//! [`Exports`] is what the control plane asks for and [`Client`] how it asks, over a unix socket; [`launch()`] finds or starts
//! the process. [`daemon`] is that process: it outlives the server, keeps its own list of exports, and a server that comes
//! back finds it at its socket.

#![forbid(unsafe_code)]

pub mod client;
pub mod daemon;
pub mod exports;
pub mod launch;
pub mod limits;
pub mod protocol;

pub use client::Client;
pub use daemon::remotes::TRACES;
pub use exports::{
    DiskExport, Export, ExportChoice, ExportError, ExportInfo, ExportKind, Exports, MemoryExport, Sealed,
};
pub use launch::{LaunchError, launch};
pub use limits::raise_open_files;
