//! The example in `docs/formats/overlaybd.md` shows what the writer really writes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{fs, path::Path};

use aenv_layer::LayerWriter;
use uuid::Uuid;

#[test]
fn the_documented_bytes_are_the_written_ones() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("example");
    let (uuid, parent) = (Uuid::from_bytes([0x11; 16]), Uuid::from_bytes([0x22; 16]));
    let mut writer = LayerWriter::create_with(&path, 1 << 20, uuid, Some(parent)).unwrap();
    writer.append(0, &[b'A'; 4096]).unwrap();
    writer.append_zeroes(4096, 4096).unwrap();
    writer.append(65_536, &[b'B'; 8192]).unwrap();
    writer.finish().unwrap();
    let bytes = fs::read(&path).unwrap();

    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/formats/overlaybd.md");
    let document = fs::read_to_string(document).unwrap();
    let example = document.split("## Example").nth(1).unwrap();
    let mut lines = 0;
    for line in example.lines() {
        let Some((offset, rest)) = line.split_once("  ") else { continue };
        let Ok(offset) = usize::from_str_radix(offset, 16) else { continue };
        let shown = rest.split("  ").next().unwrap();
        let shown: Vec<u8> = shown.split(' ').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
        assert_eq!(bytes[offset..offset + shown.len()], shown, "{line}");
        lines += 1;
    }
    assert!(lines >= 30, "only {lines} lines of the example were found");
    assert!(example.contains(&format!("{} bytes", bytes.len())));
}
