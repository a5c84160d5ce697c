//! The pace of a stream: when a silent one shows that it lives, and when its client has stopped waiting.

use std::{future::Future, time::Duration};

use tokio::time::{Instant, sleep_until, timeout_at};

/// Pause after which a silent stream shows that it lives, unless the request says otherwise.
const KEEPALIVE: Duration = Duration::from_secs(90);

/// How a stream is kept up and when it ends.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Silence after which a keepalive is sent.
    pub keepalive: Duration,
    /// When the client no longer waits.
    pub deadline: Option<Instant>,
}

impl Pace {
    /// From a request's `Keepalive-Ping-Interval` (seconds) and its deadline.
    pub fn of(context: &connectrpc::RequestContext) -> Self {
        let header =
            context.header("keepalive-ping-interval").and_then(|value| value.to_str().ok()?.parse().ok());
        let keepalive = header.filter(|seconds| *seconds > 0).map_or(KEEPALIVE, Duration::from_secs);
        Self { keepalive, deadline: context.deadline().map(Instant::from_std) }
    }

    /// Waits for the next item: `Silent` when a keepalive is due, `Late` at the deadline. Whatever gives the items must not
    /// lose one when it is cancelled.
    pub async fn next<T>(&self, item: impl Future<Output = Option<T>>) -> Next<T> {
        let keepalive = Instant::now() + self.keepalive;
        match self.deadline {
            Some(deadline) if deadline <= keepalive => match timeout_at(deadline, item).await {
                Ok(item) => item.map_or(Next::Closed, Next::Item),
                Err(_) => Next::Late,
            },
            _ => {
                tokio::select! {
                    biased;
                    item = item => item.map_or(Next::Closed, Next::Item),
                    () = sleep_until(keepalive) => Next::Silent,
                }
            }
        }
    }
}

/// What came out of a queue.
#[derive(Debug)]
pub enum Next<T> {
    /// This.
    Item(T),
    /// Nothing, for as long as a stream may be silent.
    Silent,
    /// Nothing more: the deadline.
    Late,
    /// Nothing more: the other end has gone.
    Closed,
}
