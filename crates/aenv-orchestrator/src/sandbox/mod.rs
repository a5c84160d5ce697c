//! One sandbox: an actor task with an input queue, an explicit state machine, and a generation number.
//!
//! ```text
//!                create                          pause, deadline
//!      Creating ────────────> Running <──────> Pausing ────────> Paused
//!         │                    ^ │ ^                             │  │
//!         │ launch failed      │ │ └───────── Resuming <─────────┘  │  resume, traffic
//!         v                    │ │               └─> Paused         │  (a launch that failed: nothing is lost)
//!       Gone                   │ ├──> Snapshotting ──> Running       │
//!                              │ ├──> Forking ───────> Running       │
//!                              │ └──> RollingBack <──────────────────┘
//!                              └─────────┴─> Paused (in the checkpoint that could not be launched)
//!
//!      any of them ── kill ──> Killing ──> Gone
//!      Running, Pausing, Snapshotting, Forking, RollingBack ── the VMM ended by itself ──> Failed ── kill, 10 min ──> Gone
//! ```
//!
//! * **Creating**: nobody knows the id yet. A launch that fails leaves nothing behind.
//! * **Running**: VMM, exports, slot and a permit are held in one [`Generation`](crate::launch::Generation). The deadline counts.
//! * **Pausing**: the checkpoint is made; only when it is durable and in the journal does the generation end. A pause that
//!   fails goes back to Running with the vCPUs going on.
//! * **Paused**: no process, no memory, no deadline; but for a while after a deadline, if so configured, the VMM stands beside its
//!   checkpoint, and a resume goes on in place ([`standing`]). Where nodes share paused sandboxes ([`crate::shared`]), it is published
//!   in the background, and claimed before anything is done with it; one that another node has taken is Killing, then Gone.
//! * **Resuming**: a launch with the same identity and the next generation number. If it fails, the sandbox is Paused as before.
//! * **Snapshotting, Forking**: the vCPUs stop for the time of a copy; traffic is not refused.
//! * **RollingBack**: the generation ends and an earlier checkpoint is launched.
//! * **Killing**: from anywhere, even from within another transition; that one is told to stop and cleans up.
//! * **Failed**: the VMM ended by itself. Its resources are gone; the reason is kept for a while.
//!
//! Requests that come in a transition wait in the queue and are judged by the state that they find when their turn comes:
//! a second resume finds the sandbox running, a second pause finds it paused. The work belongs to the actor: a caller
//! that goes away cancels nothing. Every state is in the journal before its caller is answered.

mod actor;
mod balloon;
mod cell;
mod change;
mod ending;
mod merge;
mod pause;
mod publish;
mod record;
mod resume;
mod rollback;
mod snapshot;
mod stage;
mod standing;

pub(crate) use actor::{Adopted, restore, spawn_new};
pub(crate) use cell::{Cell, Command, NetworkChange, Published, Reply};
pub(crate) use record::{Launched, Phase, Record};
pub(crate) use stage::Stage;
