//! Pulls of real images through a real blockd onto real ext4 filesystems. Needs root, e2fsprogs and loop devices; the
//! registry's tests also need the programs `docker-registry` and `skopeo`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its fixtures too")]

mod concurrency;
mod exact;
mod hostile;
mod measure;
mod published;
mod registry;
mod sources;
mod support;
