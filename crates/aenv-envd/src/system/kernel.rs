//! System calls of a launch.

use std::{
    fs::{self, File},
    io,
    os::fd::{AsFd, AsRawFd as _},
};

use chrono::{DateTime, Utc};
use nix::{
    errno::Errno,
    libc,
    sys::{
        socket::{setsockopt, sockopt},
        time::TimeSpec,
    },
    time::{ClockId, clock_settime},
    unistd,
};

use super::SystemError;

/// Idle time after which a connection's peer is asked whether it is there, seconds. A peer that vanished with the host (a
/// restore elsewhere) must not hold its stream for ever.
const KEEPALIVE_IDLE: u32 = 60;
/// Pause between questions, seconds; six without an answer end the connection.
const KEEPALIVE_INTERVAL: u32 = 10;

mod ioctl {
    use nix::libc;
    // _IOW('R', 0x03, int[2]) and _IO('R', 0x07) of <linux/random.h>.
    nix::ioctl_write_ptr!(add_entropy, b'R', 0x03, [libc::c_int; 2]);
    nix::ioctl_none!(reseed_crng, b'R', 0x07);
}

/// `struct rand_pool_info` with room for what a launch brings.
#[repr(C)]
struct RandPoolInfo {
    entropy_bits: libc::c_int,
    size: libc::c_int,
    bytes: [u8; super::MAX_ENTROPY],
}

/// Sets the wall clock. Timers do not notice: they run on the monotonic clock.
pub fn set_clock(now: DateTime<Utc>) -> Result<(), SystemError> {
    let time = TimeSpec::new(now.timestamp(), i64::from(now.timestamp_subsec_nanos().min(999_999_999)));
    clock_settime(ClockId::CLOCK_REALTIME, time)
        .map_err(|source| SystemError::Kernel { step: "setting the clock", source })
}

/// Mixes random bytes into the kernel's pool and makes the generator use them at once, so that two guests that were restored
/// from one memory image part ways before either draws a byte.
pub fn reseed(entropy: &[u8]) -> Result<(), SystemError> {
    let failed = |step| move |source: Errno| SystemError::Kernel { step, source };
    let random = File::options().read(true).write(true).open("/dev/random");
    let random = random.map_err(|source| SystemError::File { path: "/dev/random".to_owned(), source })?;
    let length = entropy.len().min(super::MAX_ENTROPY);
    let mut info = RandPoolInfo {
        entropy_bits: libc::c_int::try_from(length * 8).unwrap_or(0),
        size: libc::c_int::try_from(length).unwrap_or(0),
        bytes: [0; super::MAX_ENTROPY],
    };
    info.bytes[..length].copy_from_slice(&entropy[..length]);
    let pool = (&raw const info).cast::<[libc::c_int; 2]>();
    // SAFETY: RNDADDENTROPY reads a `rand_pool_info`: two ints and then `size` bytes, all of which lie within `info`.
    unsafe { ioctl::add_entropy(random.as_raw_fd(), pool) }.map_err(failed("adding entropy"))?;
    // SAFETY: RNDRESEEDCRNG takes no argument.
    unsafe { ioctl::reseed_crng(random.as_raw_fd()) }
        .map_err(failed("reseeding the random number generator"))?;
    Ok(())
}

/// Names the machine.
pub fn set_hostname(hostname: &str) -> Result<(), SystemError> {
    unistd::sethostname(hostname)
        .map_err(|source| SystemError::Kernel { step: "setting the hostname", source })
}

/// Keeps the guest's memory killer away from envd and gives files that it makes the usual modes.
pub fn protect_self() {
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "-1000") {
        tracing::warn!(%error, "envd is not protected from the guest's out-of-memory killer");
    }
}

/// Options of an accepted connection: answers leave at once, vanished peers are noticed.
pub fn tune_connection(stream: &impl AsFd) -> io::Result<()> {
    setsockopt(stream, sockopt::TcpNoDelay, &true)?;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &KEEPALIVE_INTERVAL)?;
    setsockopt(stream, sockopt::TcpKeepCount, &6)?;
    Ok(())
}
