//! The thread of one hardware queue: takes requests from the driver and gives it the answers.

use std::{
    cell::Cell,
    io::{self, Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
    sync::{Arc, mpsc::Sender},
};

use io_uring::{opcode, types};
use libublk::{
    BufDesc, BufDescList, UblkError, UblkIORes,
    ctrl::UblkCtrl,
    io::{UblkDev, UblkIOCtx, UblkQueue},
};
use parking_lot::Mutex;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use tracing::error;

use super::{
    Pools, UblkFailure,
    request::{Operation, Request},
};
use crate::daemon::node::Node;

/// Where a queue's requests go.
pub(super) struct Target {
    pub(super) node: Arc<Node>,
    pub(super) pools: Pools,
    /// Where the bytes of requests are.
    pub(super) data: Arc<std::fs::File>,
}

/// Answers that other threads have for a queue's thread.
struct Answers {
    ready: Mutex<Vec<(u16, i32)>>,
    wake: UnixStream,
}

impl Answers {
    fn give(&self, tag: u16, result: i32) {
        let mut ready = self.ready.lock();
        ready.push((tag, result));
        // The first one wakes the thread, which takes all. A socket that is full wakes it as well.
        if ready.len() == 1 {
            let _ = (&self.wake).write(&[0]);
        }
    }
}

/// Serves one queue until its device is stopped.
pub(super) fn serve(id: u16, device: &UblkDev, target: Target, ready: &Sender<Result<(), UblkFailure>>) {
    let prepared = prepare(id, device);
    let (queue, answers, woken) = match prepared {
        Ok(parts) => parts,
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    // Fetches are in the ring; the driver gets them with the first wait below.
    if ready.send(Ok(())).is_err() {
        return;
    }
    let in_flight = Cell::new(0_usize);
    queue.wait_and_handle_io(|queue, tag, io| {
        if io.is_tgt_io() {
            drain(&woken);
            let ready = std::mem::take(&mut *answers.ready.lock());
            in_flight.set(in_flight.get() - ready.len());
            for (tag, result) in ready {
                answer(queue, tag, result);
            }
            return arm(queue, &woken);
        }
        let request = Request::of(queue, tag);
        let alone = in_flight.get() == 0;
        if alone && request.is_short() && !target.node.may_wait() {
            return answer(queue, tag, request.perform(&target.node, &target.data));
        }
        in_flight.set(in_flight.get() + 1);
        let pool = match request.operation {
            Operation::Read if target.node.may_wait() => &target.pools.remote,
            _ => &target.pools.local,
        };
        let (node, data, answers) =
            (Arc::clone(&target.node), Arc::clone(&target.data), Arc::clone(&answers));
        pool.run(move || answers.give(tag, request.perform(&node, &data)));
    });
}

type Parts<'a> = (UblkQueue<'a>, Arc<Answers>, UnixStream);

fn prepare(id: u16, device: &UblkDev) -> Result<Parts<'_>, UblkFailure> {
    UblkCtrl::init_queue_thread();
    hide_partitions().map_err(|error| UblkFailure::Refused {
        what: "the thread of a queue keeps its rights",
        message: error.to_string(),
    })?;
    let failed = |error: io::Error| UblkFailure::Refused { what: "no socket", message: error.to_string() };
    let (wake, woken) = UnixStream::pair().map_err(failed)?;
    wake.set_nonblocking(true).map_err(failed)?;
    woken.set_nonblocking(true).map_err(failed)?;
    let queue = UblkQueue::new(id, device)
        .and_then(|queue| queue.submit_fetch_commands_unified(BufDescList::Slices(None)))
        .map_err(UblkFailure::refused("a queue cannot be served"))?;
    arm(&queue, &woken);
    Ok((queue, Arc::new(Answers { ready: Mutex::default(), wake }), woken))
}

/// The kernel looks for partitions on devices that are served by threads with this capability: what a guest wrote would be parsed
/// by the host. Threads of queues need no capability.
fn hide_partitions() -> rustix::io::Result<()> {
    let mut sets = capabilities(None)?;
    sets.effective.remove(CapabilitySet::SYS_ADMIN);
    set_capabilities(None, sets)
}

/// Has the ring say when an answer waits.
fn arm(queue: &UblkQueue<'_>, woken: &UnixStream) {
    let poll = opcode::PollAdd::new(types::Fd(woken.as_raw_fd()), libc::POLLIN as u32)
        .build()
        .user_data(UblkIOCtx::build_user_data(0, 0, 0, true));
    if let Err(error) = queue.ublk_submit_sqe_sync(poll) {
        error!(%error, "a queue does not hear of its answers");
    }
}

fn drain(mut woken: &UnixStream) {
    let mut bytes = [0; 64];
    while matches!(woken.read(&mut bytes), Ok(count) if count == bytes.len()) {}
}

fn answer(queue: &UblkQueue<'_>, tag: u16, result: i32) {
    let given: Result<(), UblkError> =
        queue.complete_io_cmd_unified(tag, BufDesc::Slice(&[]), Ok(UblkIORes::Result(result)));
    if let Err(error) = given {
        error!(%error, "a request stays without an answer");
    }
}
