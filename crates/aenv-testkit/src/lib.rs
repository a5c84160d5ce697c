//! What tests share: a guest to boot, and a tiny image to make a template of.

#![forbid(unsafe_code)]

pub mod guest;
pub mod image;

pub use guest::{GuestArtifacts, GuestDaemon, firecracker_double, guest_artifacts, tiny_root};
pub use image::{TinyImage, tiny_image};
