//! `libaenv_track.so`, preloaded into a VMM: opens a userfaultfd and leaves it open.
//!
//! Through that descriptor memory can be marked (`UFFD_FEATURE_WP_ASYNC`, Linux 6.7): the kernel takes the mark of a page away at
//! the first write to it, by itself and without telling anybody, and `PAGEMAP_SCAN` shows what has lost its mark. Only the
//! process that owns the memory can open it. All else is done from outside, by `aenv-memory`.
//!
//! It does nothing that a VMM could notice, and nothing at all where the kernel refuses.

use libc::{c_long, c_ulong};

/// `UFFD_USER_MODE_ONLY`: needs no privilege. It bounds whose faults are told to the reader of the descriptor, and there is none.
const USER_MODE_ONLY: i32 = 1;
/// `UFFD_API`.
const API: u64 = 0xaa;
/// `UFFD_FEATURE_WP_ASYNC`.
const WP_ASYNC: u64 = 1 << 15;
/// `UFFDIO_API`: `_IOWR(0xaa, 0x3f, struct uffdio_api)`.
const UFFDIO_API: c_ulong = 0xc018_aa3f;

/// `struct uffdio_api` of `include/uapi/linux/userfaultfd.h`.
#[repr(C)]
struct Handshake {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = open;

/// Runs before the program's `main`, in its only thread.
extern "C" fn open() {
    // SAFETY: the name is a C string, and no other thread can be reading the environment yet.
    unsafe { libc::unsetenv(c"LD_PRELOAD".as_ptr()) };
    // SAFETY: the call takes flags and returns a descriptor or an error.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY) };
    if descriptor >= 0 && !agrees(descriptor) {
        // SAFETY: it was opened above, and nobody else knows of it.
        unsafe { libc::close(descriptor as i32) };
    }
}

/// Whether the kernel can mark pages in this way.
fn agrees(descriptor: c_long) -> bool {
    let mut handshake = Handshake { api: API, features: WP_ASYNC, ioctls: 0 };
    // SAFETY: the structure is the one that this ioctl reads and writes, and outlives the call.
    unsafe { libc::ioctl(descriptor as i32, UFFDIO_API, &raw mut handshake) == 0 }
}
