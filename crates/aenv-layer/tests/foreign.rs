//! Layers that another implementation wrote are read with the same bytes.
//!
//! The files in `vectors/` were made by containerd's overlaybd (commit 063821fc, PhotonLibOS 0178d144), whose library was given the five
//! operations below on a disk of 32 KiB: `committed.lz4.tar` is its commit of them to a ZFile (lz4, blocks of 4 KiB, the header rewritten
//! when the file is complete) in a tar, `committed.zstd` the same with zstd and blocks of 8 KiB and without a tar, and `sealed` the data
//! file of its writable layer after `close_seal`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{path::Path, sync::Arc};

use aenv_layer::{Layer, Stack};
use aenv_store::BlockDevice;

const SIZE: usize = 32 << 10;

/// What was written where: the offset, the bytes, and the number that they come from. `None`: discarded.
const OPERATIONS: [(usize, usize, Option<u32>); 5] = [
    (0, 4096, Some(1)),
    (8192, 1536, Some(2)),
    (9216, 512, None),
    (20_480, 512, Some(3)),
    (24_576, 8192, None),
];

/// Sectors of noise, and sectors of one letter.
fn content(len: usize, number: u32) -> Vec<u8> {
    let mut state = number.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as u8
    };
    let noisy = |at: usize| (at / 512 + number as usize).is_multiple_of(3);
    (0..len).map(|at| if noisy(at) { next() } else { b'a' + (number % 26) as u8 }).collect()
}

#[test]
fn layers_of_overlaybd_are_read() {
    let mut expected = vec![0; SIZE];
    for (offset, len, number) in OPERATIONS {
        let bytes = number.map_or_else(|| vec![0; len], |number| content(len, number));
        expected[offset..offset + len].copy_from_slice(&bytes);
    }
    for name in ["committed.lz4.tar", "committed.zstd", "sealed"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors").join(name);
        let layer = Layer::open_file(&path).unwrap();
        assert_eq!((layer.virtual_size(), layer.segments()), (SIZE as u64, 5), "{name}");
        let stack = Stack::new(vec![Arc::new(layer)], None, SIZE as u64).unwrap();
        let mut found = vec![7; SIZE];
        stack.read_at(&mut found, 0).unwrap();
        assert!(found == expected, "{name}");
    }
}
