//! `process_vm_readv`: bytes out of another process, without stopping it and without its help.

use std::io::IoSliceMut;

use nix::{
    errno::Errno,
    sys::uio::{RemoteIoVec, process_vm_readv},
    unistd::Pid,
};
use thiserror::Error;

use crate::ram::{PAGE_SIZE, Ram, Range, split};

/// Ranges that one call takes (`IOV_MAX`).
const RANGES: usize = 1024;

/// Below this many bytes for each, more threads cost more than they bring.
const BYTES_FOR_A_THREAD: usize = 8 << 20;

const MOST_THREADS: usize = 4;

/// Why memory could not be copied.
#[derive(Debug, Error)]
#[error("cannot copy {len} bytes at {address:#x} of process {pid}: {source}")]
pub struct CopyError {
    /// The process.
    pub pid: u32,
    /// Where.
    pub address: u64,
    /// How much.
    pub len: u64,
    /// Why.
    #[source]
    pub source: Errno,
}

/// Copies ranges, one after the other, into `buffer`, which is as long as all of them.
pub(crate) fn copy(ram: &Ram, ranges: &[Range], buffer: &mut [u8]) -> Result<(), CopyError> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let threads = (buffer.len() / BYTES_FOR_A_THREAD).min(cores).clamp(1, MOST_THREADS);
    if threads == 1 {
        return copy_in_turn(ram, ranges, buffer);
    }
    let share = (buffer.len() / threads).next_multiple_of(PAGE_SIZE as usize);
    std::thread::scope(|scope| {
        let mut rest = ranges.to_vec();
        let mut workers = Vec::with_capacity(threads);
        for part in buffer.chunks_mut(share) {
            let (mine, others) = split(&rest, part.len() as u64);
            rest = others;
            workers.push(scope.spawn(move || copy_in_turn(ram, &mine, part)));
        }
        workers.into_iter().try_for_each(|worker| worker.join().expect("copying does not panic"))
    })
}

fn copy_in_turn(ram: &Ram, ranges: &[Range], buffer: &mut [u8]) -> Result<(), CopyError> {
    let pid = Pid::from_raw(ram.pid as i32);
    let mut rest = buffer;
    for ranges in ranges.chunks(RANGES) {
        let mut remote: Vec<RemoteIoVec> = ranges
            .iter()
            .map(|range| RemoteIoVec { base: ram.address(range.offset) as usize, len: range.len as usize })
            .collect();
        let mut remote = &mut remote[..];
        while !remote.is_empty() {
            let wanted: usize = remote.iter().map(|part| part.len).sum();
            let failed = |source| CopyError {
                pid: ram.pid,
                address: remote[0].base as u64,
                len: wanted as u64,
                source,
            };
            let mut copied = match process_vm_readv(pid, &mut [IoSliceMut::new(&mut rest[..wanted])], remote)
            {
                Ok(0) => return Err(failed(Errno::EFAULT)),
                Ok(copied) => copied,
                Err(Errno::EINTR) => continue,
                Err(source) => return Err(failed(source)),
            };
            rest = &mut rest[copied..];
            // Less than asked for: at the limit of one call (2 GiB), or before a range that is not there.
            while let Some(first) = remote.first_mut().filter(|_| copied > 0) {
                let step = copied.min(first.len);
                first.base += step;
                first.len -= step;
                copied -= step;
                if first.len > 0 {
                    break;
                }
                remote = &mut remote[1..];
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(bytes: &[u8]) -> Ram {
        Ram::whole(std::process::id(), bytes.as_ptr() as u64, bytes.len() as u64)
    }

    #[test]
    fn many_small_ranges_are_copied_in_order() {
        let source: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
        let ranges: Vec<Range> =
            (0..2500).map(|i| Range { offset: i * 1200 + i % 7, len: 100 + i % 50 }).collect();
        let expected: Vec<u8> = ranges
            .iter()
            .flat_map(|range| source[range.offset as usize..range.end() as usize].iter().copied())
            .collect();
        let mut buffer = vec![0; expected.len()];
        copy(&own(&source), &ranges, &mut buffer).unwrap();
        assert!(buffer == expected);
    }

    #[test]
    fn threads_share_a_large_copy() {
        let source: Vec<u8> = (0..40u64 << 20).map(|i| (i / 4096 % 253) as u8).collect();
        let ranges = [Range { offset: 4096, len: 30 << 20 }, Range { offset: 31 << 20, len: 8 << 20 }];
        let mut buffer = vec![0; 38 << 20];
        copy(&own(&source), &ranges, &mut buffer).unwrap();
        assert!(buffer[..30 << 20] == source[4096..4096 + (30 << 20)]);
        assert!(buffer[30 << 20..] == source[31 << 20..39 << 20]);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let ram = Ram::whole(std::process::id(), 0, 4096);
        let error = copy(&ram, &[Range { offset: 0, len: 4096 }], &mut [0; 4096]).unwrap_err();
        assert_eq!((error.address, error.source), (0, Errno::EFAULT));
    }
}
