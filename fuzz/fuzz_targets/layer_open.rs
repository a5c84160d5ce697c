//! A layer of any bytes: it opens or is refused, and what opens reads or fails. Nothing panics or hangs.
#![no_main]

use std::sync::Arc;

use aenv_layer::{Layer, Stack};
use aenv_store::{BlockDevice, MemorySource};
use libfuzzer_sys::fuzz_target;

const MOST: u64 = 1 << 20;

fuzz_target!(|bytes: &[u8]| {
    let Ok(layer) = Layer::open(Arc::new(MemorySource::new(bytes.to_vec()))) else { return };
    let size = layer.virtual_size().min(MOST) / 512 * 512;
    let layer = Arc::new(layer);
    let stack = Stack::new(vec![layer.clone(), layer], None, size).expect("two layers and whole sectors fit");
    let mut content = vec![0; size as usize];
    let _ = stack.read_at(&mut content, 0);
});
