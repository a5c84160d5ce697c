//! What tests share: a guest to boot, a tiny image to make a template of, a store that answers late or never, and wrong inputs for parsers.

#![forbid(unsafe_code)]

pub mod guest;
pub mod image;
pub mod mutate;
pub mod ranges;

pub use guest::{GuestArtifacts, GuestDaemon, firecracker_double, guest_artifacts, tiny_root};
pub use image::{TinyImage, tiny_image};
pub use mutate::mutate;
pub use ranges::RangeStore;
