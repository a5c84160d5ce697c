//! Byte ranges on a device of 512-byte sectors. A guest's own I/O is aligned; host tools' need not be.

use aenv_store::{BlockDevice, DeviceError};
use parking_lot::Mutex;

const SECTOR: u64 = 512;

/// Fills `buf` from `offset`. The range must lie inside the device.
pub(crate) fn read(device: &dyn BlockDevice, buf: &mut [u8], offset: u64) -> Result<(), DeviceError> {
    let end = offset + buf.len() as u64;
    if offset.is_multiple_of(SECTOR) && end.is_multiple_of(SECTOR) {
        return device.read_at(buf, offset);
    }
    let first = offset - offset % SECTOR;
    let mut wide = vec![0; (end.next_multiple_of(SECTOR) - first) as usize];
    device.read_at(&mut wide, first)?;
    let start = (offset - first) as usize;
    buf.copy_from_slice(&wide[start..start + buf.len()]);
    Ok(())
}

/// Writes `data` at `offset`. `partial` keeps two writes to parts of one sector apart.
pub(crate) fn write(
    device: &dyn BlockDevice,
    partial: &Mutex<()>,
    data: &[u8],
    offset: u64,
) -> Result<(), DeviceError> {
    let end = offset + data.len() as u64;
    if offset.is_multiple_of(SECTOR) && end.is_multiple_of(SECTOR) {
        return device.write_at(data, offset);
    }
    let first = offset - offset % SECTOR;
    let mut wide = vec![0; (end.next_multiple_of(SECTOR) - first) as usize];
    let _alone = partial.lock();
    device.read_at(&mut wide, first)?;
    let start = (offset - first) as usize;
    wide[start..start + data.len()].copy_from_slice(data);
    device.write_at(&wide, first)
}

/// Makes a range read as zeros.
pub(crate) fn zero(
    device: &dyn BlockDevice,
    partial: &Mutex<()>,
    offset: u64,
    len: u64,
) -> Result<(), DeviceError> {
    let end = offset + len;
    let inner = offset.next_multiple_of(SECTOR)..end - end % SECTOR;
    if inner.is_empty() {
        // At most two parts of sectors.
        return write(device, partial, &vec![0; len as usize], offset);
    }
    if offset < inner.start {
        write(device, partial, &vec![0; (inner.start - offset) as usize], offset)?;
    }
    if inner.end < end {
        write(device, partial, &vec![0; (end - inner.end) as usize], inner.end)?;
    }
    device.discard(inner.start, inner.end - inner.start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::ram_disk::RamDisk;

    #[test]
    fn any_range_is_served() {
        let device = RamDisk::new(8192);
        let partial = Mutex::new(());
        let mut expected = vec![0u8; 8192];
        let ranges =
            [(0, 512), (1, 1), (511, 2), (100, 5000), (4096, 4096), (1023, 1025), (8191, 1), (700, 10)];
        for (round, (offset, len)) in ranges.into_iter().enumerate() {
            let data = vec![round as u8 + 1; len];
            write(&device, &partial, &data, offset as u64).unwrap();
            expected[offset..offset + len].copy_from_slice(&data);
            let mut all = vec![0; 8192];
            read(&device, &mut all, 0).unwrap();
            assert!(all == expected, "after {offset}+{len}");
            let mut part = vec![0; len];
            read(&device, &mut part, offset as u64).unwrap();
            assert_eq!(part, data);
        }
        for (offset, len) in [(3, 5), (500, 100), (1000, 3000), (0, 512), (8000, 192)] {
            zero(&device, &partial, offset as u64, len as u64).unwrap();
            expected[offset..offset + len].fill(0);
            let mut all = vec![0; 8192];
            read(&device, &mut all, 0).unwrap();
            assert!(all == expected, "after zeroing {offset}+{len}");
        }
    }
}
