//! Maps of sparse files: GNU's old header form, and the PAX forms 0.0, 0.1 and 1.0.

use super::{field, pax::Records};
use crate::error::LayerError;

/// A piece of a file that is on the tape; the rest of the file is a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Where in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// No honest file has more pieces.
const MAX_EXTENTS: usize = 1 << 20;

fn wrong() -> LayerError {
    LayerError::Damaged("the map of a sparse file is malformed".to_owned())
}

/// Adds a piece; pieces come in order and do not overlap.
pub(super) fn push(map: &mut Vec<Extent>, offset: u64, len: u64) -> Result<(), LayerError> {
    let end = map.last().map_or(0, |last| last.offset + last.len);
    if offset < end || offset.checked_add(len).is_none() || map.len() >= MAX_EXTENTS {
        return Err(wrong());
    }
    map.push(Extent { offset, len });
    Ok(())
}

/// Adds the pairs of an old GNU header or of one of its extension blocks.
pub(super) fn push_old(map: &mut Vec<Extent>, block: &[u8]) -> Result<(), LayerError> {
    for pair in block.chunks_exact(24) {
        if pair[0] == 0 || pair[12] == 0 {
            break;
        }
        push(map, field::unsigned(&pair[..12])?, field::unsigned(&pair[12..])?)?;
    }
    Ok(())
}

/// The map of PAX forms 0.0 and 0.1, where the records hold one.
pub(super) fn from_records(records: &Records) -> Result<Option<Vec<Extent>>, LayerError> {
    let mut map = Vec::new();
    if let Some(text) = records.get("GNU.sparse.map") {
        let numbers: Vec<&[u8]> = text.split(|byte| *byte == b',').collect();
        for pair in numbers.chunks(2) {
            let [offset, len] = pair else { return Err(wrong()) };
            push(&mut map, field::decimal(offset)?, field::decimal(len)?)?;
        }
        return Ok(Some(map));
    }
    if records.sparse_pairs.is_empty() {
        return Ok(None);
    }
    for pair in records.sparse_pairs.chunks(2) {
        match pair {
            [(a, offset), (b, len)] if a == b"GNU.sparse.offset" && b == b"GNU.sparse.numbytes" => {
                push(&mut map, field::decimal(offset)?, field::decimal(len)?)?;
            }
            _ => return Err(wrong()),
        }
    }
    Ok(Some(map))
}

/// Reads the map of PAX form 1.0, which precedes the data in whole blocks. Returns it and the bytes it took.
pub(super) fn from_data(
    mut next_block: impl FnMut() -> Result<[u8; 512], LayerError>,
) -> Result<(Vec<Extent>, u64), LayerError> {
    let (mut block, mut at, mut taken) = (next_block()?, 0, 512);
    let mut number = || -> Result<u64, LayerError> {
        let mut digits = Vec::new();
        loop {
            if at == block.len() {
                (block, at) = (next_block()?, 0);
                taken += 512;
            }
            let byte = block[at];
            at += 1;
            match byte {
                b'\n' => return field::decimal(&digits),
                b'0'..=b'9' if digits.len() < 20 => digits.push(byte),
                _ => return Err(wrong()),
            }
        }
    };
    let count = number()?;
    if count > MAX_EXTENTS as u64 {
        return Err(wrong());
    }
    let mut map = Vec::new();
    for _ in 0..count {
        let (offset, len) = (number()?, number()?);
        push(&mut map, offset, len)?;
    }
    Ok((map, taken))
}
