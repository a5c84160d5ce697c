//! A ZFile of any bytes. The headers' digests would refuse almost all of them, so they are made right first.
#![no_main]

use std::sync::Arc;

use aenv_layer::ZFileSource;
use aenv_store::{BlockSource, MemorySource};
use libfuzzer_sys::fuzz_target;

const MOST: u64 = 1 << 20;
const MAGIC: &[u8] = b"ZFile\0\x01\0tuji.yyf@Alibaba";
const DIGEST_FLAG: u8 = 1 << 4;

fuzz_target!(|bytes: &[u8]| {
    let mut bytes = bytes.to_vec();
    if bytes.len() >= 1024 {
        let trailer = bytes.len() - 512;
        for at in [0, trailer] {
            bytes[at..at + MAGIC.len()].copy_from_slice(MAGIC);
            bytes[at + 32] &= !DIGEST_FLAG;
        }
    }
    let source: Arc<dyn BlockSource> = Arc::new(MemorySource::new(bytes));
    if let Ok(Some(file)) = ZFileSource::open(&source) {
        let mut content = vec![0; file.size().min(MOST) as usize];
        let _ = file.read_at(&mut content, 0);
    }
});
