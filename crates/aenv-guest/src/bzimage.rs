//! The ELF vmlinux inside a bzImage. Layout: `Documentation/x86/boot.rst`, fields `setup_sects`, `payload_offset`, `payload_length`.

use std::io::Read;

use thiserror::Error;

/// No kernel is larger than this when unpacked; bounds what a damaged file can make us allocate.
pub(crate) const MAX_VMLINUX: u64 = 512 << 20;

/// Why no vmlinux could be taken out of a kernel image.
#[derive(Debug, Error)]
pub enum ExtractError {
    /// Neither a bzImage nor an ELF file.
    #[error("it is no x86 Linux kernel (neither a bzImage nor an ELF vmlinux)")]
    NotAKernel,
    /// The header names a payload that is not there.
    #[error("the kernel image is truncated")]
    Truncated,
    /// A compression that this version cannot undo.
    #[error("its payload is compressed with {0}, which is not supported (LZ4, zstd and gzip are)")]
    Compression(String),
    /// The payload is damaged.
    #[error("its payload is damaged: {0}")]
    Damaged(String),
    /// The payload is no x86-64 ELF file.
    #[error("its payload is no x86-64 ELF vmlinux")]
    NotElf,
    /// No PVH entry.
    #[error("the kernel has no PVH entry point (CONFIG_PVH), so that it cannot be started directly")]
    NoPvh,
}

/// Takes the vmlinux out of `image` (a bzImage, or a vmlinux already) and checks that engines can boot it.
pub(crate) fn vmlinux(image: &[u8]) -> Result<Vec<u8>, ExtractError> {
    let elf = if image.starts_with(b"\x7fELF") { image.to_vec() } else { decompress(payload(image)?)? };
    check(&elf)?;
    Ok(elf)
}

fn payload(image: &[u8]) -> Result<&[u8], ExtractError> {
    if image.get(0x202..0x206) != Some(b"HdrS") {
        return Err(ExtractError::NotAKernel);
    }
    let word = |at: usize| -> Result<usize, ExtractError> {
        let bytes = image.get(at..at + 4).and_then(|b| b.try_into().ok()).ok_or(ExtractError::Truncated)?;
        Ok(u32::from_le_bytes(bytes) as usize)
    };
    let setup = match image.get(0x1f1) {
        Some(0) => 4,
        Some(sectors) => usize::from(*sectors),
        None => return Err(ExtractError::Truncated),
    };
    let start = (setup + 1) * 512 + word(0x248)?;
    image.get(start..start + word(0x24c)?).ok_or(ExtractError::Truncated)
}

fn decompress(payload: &[u8]) -> Result<Vec<u8>, ExtractError> {
    match payload {
        [0x7f, b'E', b'L', b'F', ..] => Ok(payload.to_vec()),
        [0x02, 0x21, 0x4c, 0x18, rest @ ..] => lz4_legacy(rest),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let decoder = zstd::stream::read::Decoder::new(payload)
                .map_err(|e| ExtractError::Damaged(e.to_string()))?
                .single_frame();
            read_bounded(decoder)
        }
        [0x1f, 0x8b, ..] => read_bounded(flate2::read::GzDecoder::new(payload)),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => Err(ExtractError::Compression("xz".to_owned())),
        [b'B', b'Z', b'h', ..] => Err(ExtractError::Compression("bzip2".to_owned())),
        [0x89, b'L', b'Z', b'O', ..] => Err(ExtractError::Compression("lzo".to_owned())),
        [0x5d, 0, 0, ..] => Err(ExtractError::Compression("lzma".to_owned())),
        _ => Err(ExtractError::Compression("an unknown method".to_owned())),
    }
}

fn read_bounded(reader: impl Read) -> Result<Vec<u8>, ExtractError> {
    let mut out = Vec::new();
    reader.take(MAX_VMLINUX + 1).read_to_end(&mut out).map_err(|e| ExtractError::Damaged(e.to_string()))?;
    if out.len() as u64 > MAX_VMLINUX {
        return Err(ExtractError::Damaged("it is larger than any kernel".to_owned()));
    }
    Ok(out)
}

/// `lz4 -l`: blocks of at most 8 MiB, each after its compressed size. The kernel's build appends the unpacked size.
fn lz4_legacy(mut rest: &[u8]) -> Result<Vec<u8>, ExtractError> {
    const BLOCK: usize = 8 << 20;
    let mut out = Vec::new();
    while rest.len() > 4 {
        let (size, tail) = rest.split_at(4);
        let size = u32::from_le_bytes([size[0], size[1], size[2], size[3]]) as usize;
        let block = tail.get(..size).ok_or(ExtractError::Truncated)?;
        let plain =
            lz4_flex::block::decompress(block, BLOCK).map_err(|e| ExtractError::Damaged(e.to_string()))?;
        if (out.len() + plain.len()) as u64 > MAX_VMLINUX {
            return Err(ExtractError::Damaged("it is larger than any kernel".to_owned()));
        }
        out.extend_from_slice(&plain);
        rest = &tail[size..];
    }
    if rest.len() == 4 && u32::from_le_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize != out.len() {
        return Err(ExtractError::Damaged("it unpacks to another size than it says".to_owned()));
    }
    Ok(out)
}

/// x86-64 ELF with the note `XEN_ELFNOTE_PHYS32_ENTRY` (type 18, owner `Xen`), which is the PVH entry.
fn check(elf: &[u8]) -> Result<(), ExtractError> {
    let is_elf = elf.starts_with(b"\x7fELF\x02\x01") && elf.get(18..20) == Some(&[62, 0]);
    if !is_elf {
        return Err(ExtractError::NotElf);
    }
    let mut note = Vec::new();
    note.extend_from_slice(&4_u32.to_le_bytes());
    let kind = 18_u32.to_le_bytes();
    let has = |size: u32| {
        let wanted = [&note[..], &size.to_le_bytes(), &kind, b"Xen\0"].concat();
        notes(elf).any(|segment| segment.windows(wanted.len()).any(|window| window == wanted))
    };
    if has(4) || has(8) { Ok(()) } else { Err(ExtractError::NoPvh) }
}

/// The PT_NOTE segments.
fn notes(elf: &[u8]) -> impl Iterator<Item = &[u8]> {
    let number = |at: usize, len: usize| -> Option<usize> {
        let bytes = elf.get(at..at.checked_add(len)?)?;
        let value = bytes.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        usize::try_from(value).ok()
    };
    let table = number(0x20, 8).unwrap_or(0);
    let size = number(0x36, 2).unwrap_or(0);
    let count = number(0x38, 2).unwrap_or(0);
    (0..count).filter_map(move |index| {
        let at = table.checked_add(index.checked_mul(size)?)?;
        if number(at, 4)? != 4 {
            return None;
        }
        let start = number(at + 8, 8)?;
        elf.get(start..start.checked_add(number(at + 32, 8)?)?)
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn elf(with_note: bool) -> Vec<u8> {
        let mut elf = vec![0_u8; 0x40 + 56];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[18] = 62;
        elf[0x20] = 0x40;
        elf[0x36] = 56;
        elf[0x38] = 1;
        elf[0x40] = 4;
        elf[0x48] = (0x40 + 56) as u8;
        let note = [&4_u32.to_le_bytes()[..], &4_u32.to_le_bytes(), &18_u32.to_le_bytes(), b"Xen\0", &[1; 4]];
        let note = note.concat();
        elf[0x60] = note.len() as u8;
        if with_note {
            elf.extend_from_slice(&note);
        } else {
            elf.extend(vec![0; note.len()]);
        }
        elf
    }

    fn bzimage(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0_u8; 1024];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend_from_slice(payload);
        image
    }

    fn lz4(plain: &[u8]) -> Vec<u8> {
        let block = lz4_flex::block::compress(plain);
        let size = (block.len() as u32).to_le_bytes();
        [&[2, 0x21, 0x4c, 0x18][..], &size, &block, &(plain.len() as u32).to_le_bytes()].concat()
    }

    #[test]
    fn every_payload_unpacks_to_the_same_kernel() {
        let plain = elf(true);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&plain).unwrap();
        let mut zstd = zstd::encode_all(&plain[..], 1).unwrap();
        zstd.extend((plain.len() as u32).to_le_bytes());
        for payload in [lz4(&plain), gzip.finish().unwrap(), zstd, plain.clone()] {
            assert_eq!(vmlinux(&bzimage(&payload)).unwrap(), plain);
        }
        assert_eq!(vmlinux(&plain).unwrap(), plain);
    }

    #[test]
    fn damage_is_named() {
        assert!(matches!(vmlinux(b"not a kernel"), Err(ExtractError::NotAKernel)));
        assert!(matches!(vmlinux(&bzimage(&lz4(&elf(false)))), Err(ExtractError::NoPvh)));
        let image = bzimage(&lz4(&elf(true)));
        assert!(matches!(vmlinux(&image[..image.len() - 9]), Err(ExtractError::Truncated)));
        assert!(matches!(
            vmlinux(&bzimage(&[0xfd, b'7', b'z', b'X', b'Z'])),
            Err(ExtractError::Compression(_))
        ));
        let mut wrong = lz4(&elf(true));
        let last = wrong.len() - 1;
        wrong[last] ^= 1;
        assert!(matches!(vmlinux(&bzimage(&wrong)), Err(ExtractError::Damaged(_))));
    }
}
