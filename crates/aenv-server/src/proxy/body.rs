//! An answer's body on its way from a guest. It breaks, and does not end, when the sandbox ends.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use aenv_types::SandboxId;
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::connect::{Lease, Pool};

/// The body. Holds the connection that it comes from, and gives it back after the last byte.
pub struct GuestBody {
    inner: Incoming,
    ended: CancellationToken,
    wait: Pin<Box<WaitForCancellationFutureOwned>>,
    lease: Option<Lease>,
    home: Option<(Arc<Pool>, SandboxId)>,
    whole: bool,
}

impl GuestBody {
    /// `home`: where the connection goes when the body was read to its end.
    pub fn new(
        inner: Incoming,
        ended: CancellationToken,
        lease: Lease,
        home: Option<(Arc<Pool>, SandboxId)>,
    ) -> Self {
        let wait = Box::pin(ended.clone().cancelled_owned());
        Self { inner, ended, wait, lease: Some(lease), home, whole: false }
    }
}

fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "the sandbox ended")
}

impl Body for GuestBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if self.wait.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(broken())));
        }
        match ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
            Some(Ok(frame)) => Poll::Ready(Some(Ok(frame))),
            Some(Err(error)) => Poll::Ready(Some(Err(io::Error::other(error)))),
            // A connection task that was stopped looks like a clean end.
            None if self.ended.is_cancelled() => Poll::Ready(Some(Err(broken()))),
            None => {
                self.whole = true;
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Drop for GuestBody {
    fn drop(&mut self) {
        let whole = self.whole || self.inner.is_end_stream();
        if let (true, Some(lease), Some((pool, id))) = (whole, self.lease.take(), self.home.take()) {
            pool.give_back(&id, lease);
        }
    }
}
