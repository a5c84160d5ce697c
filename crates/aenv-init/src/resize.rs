//! Grows the root filesystem to its disk, online.

use std::{
    fs::File,
    os::{fd::AsRawFd, unix::fs::FileExt},
};

use crate::{Fatal, say};

// linux/fs/ext4: _IOW('f', 16, __u64), the new number of blocks.
nix::ioctl_write_ptr!(ext4_resize, b'f', 16, u64);
// linux/fs.h: _IOR(0x12, 114, size_t), the size of a block device in bytes.
nix::ioctl_read!(block_size_64, 0x12, 114, u64);

/// Free space at the end of the disk that is not worth a resize.
const SLACK_BYTES: u64 = 1 << 20;

/// Size of a filesystem as its superblock tells it.
#[derive(Debug, PartialEq, Eq)]
struct Extent {
    block: u64,
    blocks: u64,
}

/// Grows the ext4 on `device`, mounted at `mounted`, if the device is larger.
pub fn grow(device: &str, mounted: &str) -> Result<(), Fatal> {
    let disk = File::open(device).map_err(|e| Fatal::new(format_args!("open {device}"), e))?;
    let mut bytes = 0_u64;
    // SAFETY: the descriptor is open and the kernel writes one u64 into `bytes`.
    unsafe { block_size_64(disk.as_raw_fd(), &mut bytes) }
        .map_err(|errno| Fatal::new(format_args!("size of {device}"), errno))?;
    let mut superblock = [0_u8; 1024];
    disk.read_exact_at(&mut superblock, 1024).map_err(|e| Fatal::new("read the superblock", e))?;
    let extent = parse(&superblock).ok_or_else(|| Fatal::new("read the superblock", "it is not ext4's"))?;
    if bytes < extent.block * extent.blocks + SLACK_BYTES {
        return Ok(());
    }
    let blocks = bytes / extent.block;
    let root = File::open(mounted).map_err(|e| Fatal::new(format_args!("open {mounted}"), e))?;
    // SAFETY: the descriptor is a folder of the mounted filesystem and the kernel reads one u64.
    unsafe { ext4_resize(root.as_raw_fd(), &blocks) }.map_err(|errno| {
        Fatal::new(format_args!("grow it from {} to {blocks} blocks", extent.blocks), errno)
    })?;
    say(format_args!("the root filesystem has {} MiB now", (blocks * extent.block) >> 20));
    Ok(())
}

/// Offsets from the kernel's `struct ext4_super_block`.
fn parse(superblock: &[u8; 1024]) -> Option<Extent> {
    let word = |at: usize| {
        u32::from_le_bytes([superblock[at], superblock[at + 1], superblock[at + 2], superblock[at + 3]])
    };
    let magic = u16::from_le_bytes([superblock[0x38], superblock[0x39]]);
    let shift = word(0x18);
    if magic != 0xef53 || shift > 6 {
        return None;
    }
    let wide = word(0x60) & 0x80 != 0;
    let high = if wide { u64::from(word(0x150)) << 32 } else { 0 };
    Some(Extent { block: 1024 << shift, blocks: high | u64::from(word(0x4)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn superblocks_are_read_with_and_without_64bit() {
        let mut superblock = [0_u8; 1024];
        assert_eq!(parse(&superblock), None);
        superblock[0x38..0x3a].copy_from_slice(&0xef53_u16.to_le_bytes());
        superblock[0x18] = 2;
        superblock[4..8].copy_from_slice(&1000_u32.to_le_bytes());
        superblock[0x150] = 1;
        assert_eq!(parse(&superblock), Some(Extent { block: 4096, blocks: 1000 }));
        superblock[0x60] = 0x80;
        assert_eq!(parse(&superblock), Some(Extent { block: 4096, blocks: (1 << 32) + 1000 }));
        superblock[0x18] = 200;
        assert_eq!(parse(&superblock), None);
    }
}
