//! Whatever the bytes are, opening and reading ends in a value or a typed error: no panic, no hang.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{fs, path::Path, sync::Arc};

use aenv_layer::{
    CompressOptions, Compression, Layer, LayerWriter, Stack, Upper, ZFileSource, compact, compress_zfile,
};
use aenv_store::{BlockDevice, BlockSource, FileSource, MemorySource};
use proptest::{prelude::*, sample::Index};

const SIZE: u64 = 1 << 20;

#[derive(Clone, Debug)]
enum Change {
    Set(Index, u8),
    Flip(Index, u8),
    Cut(Index),
    Grow(u16),
    /// Copies eight bytes from one place to another.
    Copy(Index, Index),
    /// Writes a number where one may be meant: 8 bytes, aligned.
    Number(Index, u64),
}

fn change() -> impl Strategy<Value = Change> {
    let number = prop_oneof![
        any::<u64>(),
        Just(u64::MAX),
        Just(0),
        0_u64..100_000,
        Just(1 << 63),
        Just((1 << 55) - 1)
    ];
    prop_oneof![
        any::<(Index, u8)>().prop_map(|(at, value)| Change::Set(at, value)),
        any::<(Index, u8)>().prop_map(|(at, bit)| Change::Flip(at, bit)),
        any::<Index>().prop_map(Change::Cut),
        any::<u16>().prop_map(Change::Grow),
        any::<(Index, Index)>().prop_map(|(from, to)| Change::Copy(from, to)),
        (any::<Index>(), number).prop_map(|(at, value)| Change::Number(at, value)),
    ]
}

/// Most of a file is data, in which no change matters to a parser: three of four changes go to the last two blocks, or
/// the first.
fn place(bytes: &[u8], index: Index) -> usize {
    let at = index.index(bytes.len() * 4);
    let near = at % 8192;
    match at % 4 {
        0 => at / 4,
        1 => near.min(bytes.len() - 1) % 512,
        _ => bytes.len() - 1 - near.min(bytes.len() - 1),
    }
}

fn apply(bytes: &mut Vec<u8>, changes: &[Change]) {
    for change in changes {
        if bytes.len() < 64 {
            return;
        }
        match *change {
            Change::Set(at, value) => {
                let at = place(bytes, at);
                bytes[at] = value;
            }
            Change::Flip(at, bit) => {
                let at = place(bytes, at);
                bytes[at] ^= 1 << (bit % 8);
            }
            Change::Cut(at) => bytes.truncate(place(bytes, at).max(64)),
            Change::Grow(by) => bytes.resize(bytes.len() + usize::from(by), 0x5a),
            Change::Copy(from, to) => {
                let (from, to) =
                    (place(bytes, from).min(bytes.len() - 8), place(bytes, to).min(bytes.len() - 8));
                bytes.copy_within(from..from + 8, to);
            }
            Change::Number(at, value) => {
                let at = place(bytes, at) / 8 * 8;
                let at = at.min(bytes.len() - 8);
                bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
        }
    }
}

/// A good layer: data, zeros and gaps.
fn layer(dir: &Path) -> Vec<u8> {
    let path = dir.join("good");
    let mut writer = LayerWriter::create(&path, SIZE).unwrap();
    for i in 0..40_u64 {
        writer.append(i * 8192, &[i as u8; 4096]).unwrap();
        writer.append_zeroes(i * 8192 + 4096, 512 * (i % 4)).unwrap();
    }
    writer.finish().unwrap();
    fs::read(path).unwrap()
}

fn packed(dir: &Path, compression: Compression) -> Vec<u8> {
    let path = dir.join("packed");
    let source = MemorySource::new(layer(dir));
    compress_zfile(&source, &path, CompressOptions::new(compression)).unwrap();
    fs::read(path).unwrap()
}

/// Opens bytes as a layer and reads all that it claims to have, within reason.
fn use_layer(bytes: Vec<u8>, dir: &Path) {
    let Ok(layer) = Layer::open(Arc::new(MemorySource::new(bytes))) else { return };
    let layer = Arc::new(layer);
    assert!(layer.ranges().count() == layer.segments());
    let size = layer.virtual_size().min(SIZE) / 512 * 512;
    let stack = Stack::new(vec![layer.clone(), layer.clone()], None, size).unwrap();
    let mut buf = vec![0; size as usize];
    let _ = stack.read_at(&mut buf, 0);
    for offset in (0..size).step_by(4096) {
        let extent = stack.extent(offset).unwrap();
        assert!(extent.len > 0 && extent.offset + extent.len <= size);
    }
    if layer.data_bytes() <= SIZE {
        let _ = compact(&[layer.clone(), layer], &dir.join("compacted"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn changed_layers(changes in prop::collection::vec(change(), 1..6)) {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = layer(dir.path());
        apply(&mut bytes, &changes);
        use_layer(bytes, dir.path());
    }

    #[test]
    fn changed_zfiles(changes in prop::collection::vec(change(), 1..6), zstd in any::<bool>()) {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = packed(dir.path(), if zstd { Compression::Zstd } else { Compression::Lz4 });
        apply(&mut bytes, &changes);
        if let Ok(Some(file)) = ZFileSource::open(&(Arc::new(MemorySource::new(bytes.clone())) as Arc<dyn BlockSource>)) {
            let mut buf = vec![0; file.size().min(SIZE) as usize];
            let _ = file.read_at(&mut buf, 0);
        }
        use_layer(bytes, dir.path());
    }

    #[test]
    fn changed_uppers(
        data_changes in prop::collection::vec(change(), 0..3),
        index_changes in prop::collection::vec(change(), 0..5),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let upper_dir = dir.path().join("upper");
        let stack = Stack::new(Vec::new(), Some(Upper::create(&upper_dir, SIZE).unwrap()), SIZE).unwrap();
        for i in 0..30_u64 {
            stack.write_at(&[i as u8; 4096], i % 11 * 8192).unwrap();
            stack.discard(i * 4096, 512).unwrap();
        }
        stack.flush().unwrap();
        drop(stack);
        for (ending, changes) in [("data", data_changes), ("index", index_changes)] {
            let path = upper_dir.join(format!("upper-00000001.{ending}"));
            let mut bytes = fs::read(&path).unwrap();
            apply(&mut bytes, &changes);
            fs::write(path, bytes).unwrap();
        }
        if let Ok(upper) = Upper::open(&upper_dir)
            && let Ok(stack) = Stack::new(Vec::new(), Some(upper), SIZE)
        {
            let mut content = vec![0; SIZE as usize];
            stack.read_at(&mut content, 0).unwrap();
            stack.write_at(&[9; 4096], 0).unwrap();
            let sealed = dir.path().join("sealed");
            let layer = stack.seal(&sealed).unwrap().unwrap();
            content[..4096].fill(9);
            let reopened = Layer::open(Arc::new(FileSource::open(&sealed).unwrap())).unwrap();
            prop_assert_eq!(reopened.uuid(), layer.uuid);
            let mut again = vec![0; SIZE as usize];
            Stack::new(vec![Arc::new(reopened)], None, SIZE).unwrap().read_at(&mut again, 0).unwrap();
            prop_assert!(again == content);
        }
    }

    #[test]
    fn bytes_from_nowhere(
        mut bytes in prop::collection::vec(any::<u8>(), 0..20_000),
        head in 0_usize..4,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let start: &[u8] = match head {
            0 => b"",
            1 => b"ZFile\0\x01\0tuji.yyf@Alibaba",
            _ => b"LSMT\0\x01\x02\0\x65\x7e\x63\xd2\x94\x44\x08\x4c\xa2\xd2\xc8\xec\x4f\xcf\xae\x8a\x86\x01\0\0\x07\0\0\0",
        };
        if bytes.len() >= start.len() {
            bytes[..start.len()].copy_from_slice(start);
        }
        use_layer(bytes, dir.path());
    }
}
