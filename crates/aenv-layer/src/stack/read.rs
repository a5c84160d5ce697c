//! Reading: every part of a range from the topmost place that has it.

use aenv_store::{BlockSource, DeviceError};

use super::{Extent, State};
use crate::{mapping::SECTOR, segments::Span};

/// Times that a read looks its mappings up again because data was punched out meanwhile, before it keeps punches away.
const ATTEMPTS: usize = 4;

/// A part of a range, in sectors.
struct Piece<'a> {
    start: u64,
    end: u64,
    from: Place<'a>,
}

enum Place<'a> {
    Zeros,
    /// At a sector of a file.
    At(&'a dyn BlockSource, u64),
}

pub(super) fn read(state: &State, buf: &mut [u8], offset: u64) -> Result<(), DeviceError> {
    // Dead data of an upper may be punched out between look-up and read. Its mapping was replaced before that, so looking up
    // again finds what replaced it.
    for _ in 0..ATTEMPTS {
        let before = punches(state);
        gather(state, buf, offset)?;
        if punches(state) == before {
            return Ok(());
        }
    }
    let _held: Vec<_> = state.uppers().map(|generation| generation.hold_punches()).collect();
    gather(state, buf, offset)
}

fn punches(state: &State) -> u64 {
    state.uppers().map(|generation| generation.punches()).sum()
}

fn gather(state: &State, buf: &mut [u8], offset: u64) -> Result<(), DeviceError> {
    let start = offset / SECTOR;
    let end = start + buf.len() as u64 / SECTOR;
    let mut pieces = Vec::with_capacity(4);
    look_up(state, 0, start, end, &mut pieces);
    for piece in pieces {
        let part =
            &mut buf[((piece.start - start) * SECTOR) as usize..((piece.end - start) * SECTOR) as usize];
        match piece.from {
            Place::Zeros => part.fill(0),
            Place::At(source, sector) => source.read_at(part, sector * SECTOR)?,
        }
    }
    Ok(())
}

/// Sectors that an extent is looked for in.
const EXTENT: u64 = 1 << 14;

pub(super) fn extent(state: &State, offset: u64, size: u64) -> Extent {
    let start = offset / SECTOR;
    if state.uppers().next().is_none() {
        let (end, data) = state.merged.index().extent(start);
        return limited(offset, end, size, data);
    }
    let mut pieces = Vec::with_capacity(4);
    look_up(state, 0, start, (start + EXTENT).min(size / SECTOR), &mut pieces);
    let (end, data) = match pieces.first() {
        Some(piece) => (piece.end, matches!(piece.from, Place::At(..))),
        None => (start + 1, false),
    };
    limited(offset, end, size, data)
}

fn limited(offset: u64, end_sector: u64, size: u64, data: bool) -> Extent {
    let end = end_sector.saturating_mul(SECTOR).min(size);
    Extent { offset, len: end - offset, data }
}

/// Looks a range up in the `level`-th upper from the top, its gaps in the one beneath, and at last in the layers.
fn look_up<'a>(state: &'a State, level: usize, start: u64, end: u64, pieces: &mut Vec<Piece<'a>>) {
    let Some(upper) = state.uppers().nth(level) else {
        return look_up_layers(state, start, end, pieces);
    };
    upper.walk(start, end, |span| match span {
        Span::Gap(from, to) => look_up(state, level + 1, from, to, pieces),
        Span::Mapped(mapping) => {
            let place = if mapping.zeroed() { Place::Zeros } else { Place::At(&**upper, mapping.moffset()) };
            add(pieces, Piece { start: mapping.offset(), end: mapping.end(), from: place });
        }
    });
}

fn look_up_layers<'a>(state: &'a State, start: u64, end: u64, pieces: &mut Vec<Piece<'a>>) {
    state.merged.index().walk(start, end, |span| {
        let (start, end, from) = match span {
            Span::Gap(from, to) => (from, to, Place::Zeros),
            Span::Mapped(mapping) if mapping.zeroed() => (mapping.offset(), mapping.end(), Place::Zeros),
            Span::Mapped(mapping) => {
                let layer = &state.layers[usize::from(mapping.tag())];
                (mapping.offset(), mapping.end(), Place::At(layer.source(), mapping.moffset()))
            }
        };
        add(pieces, Piece { start, end, from });
    });
}

/// Adds a piece, joined to the last one where one read gets both.
fn add<'a>(pieces: &mut Vec<Piece<'a>>, piece: Piece<'a>) {
    if let Some(last) = pieces.last_mut() {
        let joins = match (&last.from, &piece.from) {
            (Place::Zeros, Place::Zeros) => true,
            (Place::At(one, at), Place::At(other, next)) => {
                std::ptr::addr_eq(*one, *other) && at + (last.end - last.start) == *next
            }
            _ => false,
        };
        if joins {
            last.end = piece.end;
            return;
        }
    }
    pieces.push(piece);
}
