//! An upper whose index file has any records: what is recovered reads, takes writes, and seals to a layer that opens.
#![no_main]

use std::{fs, io::Write};

use aenv_layer::{Layer, Stack, Upper};
use aenv_store::BlockDevice;
use libfuzzer_sys::fuzz_target;

const SIZE: u64 = 1 << 20;

fuzz_target!(|records: &[u8]| {
    let dir = tempfile::tempdir().expect("a folder in the temporary one");
    let upper_dir = dir.path().join("upper");
    let upper = Upper::create(&upper_dir, SIZE).expect("an upper in an empty folder");
    let stack = Stack::new(Vec::new(), Some(upper), SIZE).expect("an upper alone");
    stack.write_at(&[7; 65_536], 0).expect("room for 64 KiB");
    stack.flush().expect("a flush");
    drop(stack);
    let index = fs::OpenOptions::new().append(true).open(upper_dir.join("upper-00000001.index"));
    index.and_then(|mut file| file.write_all(records)).expect("room for the records");

    let upper = Upper::open(&upper_dir).expect("records that cannot be right are left out");
    let stack = Stack::new(Vec::new(), Some(upper), SIZE).expect("an upper alone");
    let mut content = vec![0; SIZE as usize];
    stack.read_at(&mut content, 0).expect("every mapping that was kept has its data");
    stack.write_at(&[9; 512], 0).expect("room for a sector");
    let sealed = dir.path().join("sealed");
    stack.seal(&sealed).expect("a seal").expect("a sector was written");
    Layer::open_file(&sealed).expect("what was sealed opens");
});
