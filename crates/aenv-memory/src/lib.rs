//! Capture of guest memory: the changed pages of a private mapping become one layer.
//!
//! Guest memory is a `MAP_PRIVATE` mapping of the checkpoint's memory image, in the VMM's address space. What the guest
//! changed is exactly the anonymous pages of that mapping; the `PAGEMAP_SCAN` ioctl (Linux 6.7) lists them from outside, for
//! every engine, without dirty logging. Pages can be marked as they are listed, and lose the mark when they are written to, so
//! that the next capture lists only these. A capture says [since when](Since) it counted.
//!
//! * [`scan()`] lists the changed ranges of a stopped VM's memory; [`mark()`] marks them as well.
//! * [`Snapshot::take`] copies them into a warm buffer while the vCPUs are stopped; [`Snapshot::write`] makes the layer
//!   after they go on.
//! * [`capture_stopped`] makes the layer at once, for a VM that will not go on.
//!
//! This room knows a process id and an address range, and no engine. It never stops or resumes anything.

mod buffer;
mod capture;
mod copy;
mod marks;
mod pagemap;
mod ram;

pub use buffer::{BufferPool, CaptureBuffer, DEFAULT_BUFFER, give_back};
pub use capture::{CaptureError, CaptureReport, Snapshot, capture_stopped};
pub use copy::CopyError;
pub use pagemap::{Changes, ScanError, Since, mark, scan};
pub use ram::{PAGE_SIZE, Ram, Range, Upper};
