//! How long a read may take, and how often it is tried.

use std::{
    sync::mpsc::{RecvTimeoutError, sync_channel},
    time::Duration,
};

use aenv_store::SourceError;
use tokio::{runtime::Handle, time::timeout};

/// Bounds of a read.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The whole read, all attempts and pauses included.
    pub read: Duration,
    /// One attempt.
    pub attempt: Duration,
    /// Attempts.
    pub attempts: u32,
    /// The pause before the second attempt; each further one is twice as long. It varies by a half.
    pub pause: Duration,
}

impl Default for Bounds {
    /// 30 s in all (a guest's disk driver waits that long before it complains), 10 s for each of four attempts.
    fn default() -> Self {
        Self {
            read: Duration::from_secs(30),
            attempt: Duration::from_secs(10),
            attempts: 4,
            pause: Duration::from_millis(200),
        }
    }
}

/// Why an attempt failed.
pub(crate) enum Failure {
    /// It may go better next time; not before so long, if the far end said so.
    Passing(String, Option<Duration>),
    /// It will not.
    Final(String),
    /// The far end wants to see (other) credentials.
    Denied(String),
    /// The bytes are wrong.
    Wrong(String),
}

impl Bounds {
    /// Runs an operation of `runtime` from a thread of any kind, and waits for it no longer than the bound.
    pub(crate) fn wait<T: Send + 'static>(
        &self,
        runtime: &Handle,
        context: &str,
        work: impl Future<Output = Result<T, SourceError>> + Send + 'static,
    ) -> Result<T, SourceError> {
        let bound = self.read;
        let (send, receive) = sync_channel(1);
        let task = runtime.spawn(async move {
            // Nobody listens any more when the thread has given up.
            let _ = send.send(timeout(bound, work).await);
        });
        // The runtime's own clock first; the second one is for a runtime that is stuck.
        match receive.recv_timeout(bound + Duration::from_secs(1)) {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) | Err(RecvTimeoutError::Timeout) => {
                task.abort();
                Err(SourceError::TimedOut { context: context.to_owned(), after: bound })
            }
            Err(RecvTimeoutError::Disconnected) => {
                let message = "the process is ending".to_owned();
                Err(SourceError::Remote { context: context.to_owned(), message })
            }
        }
    }

    /// Tries until it goes well, or will not, or was tried often enough.
    pub(crate) async fn attempts<T, F>(
        &self,
        context: &str,
        mut attempt: impl FnMut() -> F,
    ) -> Result<T, SourceError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let context = || context.to_owned();
        let mut number = 1;
        loop {
            let tried = match timeout(self.attempt, attempt()).await {
                Ok(tried) => tried,
                Err(_) => Err(Failure::Passing(format!("no answer within {:?}", self.attempt), None)),
            };
            match tried {
                Ok(value) => return Ok(value),
                Err(Failure::Final(message)) => {
                    return Err(SourceError::Remote { context: context(), message });
                }
                Err(Failure::Denied(message)) => {
                    return Err(SourceError::Denied { context: context(), message });
                }
                Err(Failure::Wrong(message)) => return Err(SourceError::corrupt(context(), message)),
                Err(Failure::Passing(message, _)) if number >= self.attempts => {
                    let message = format!("{message} (tried {number} times)");
                    return Err(SourceError::Away { context: context(), message });
                }
                Err(Failure::Passing(message, not_before)) => {
                    let pause = self.pause(number).max(not_before.unwrap_or_default());
                    tracing::debug!(context = context(), attempt = number, message, ?pause, "trying again");
                    tokio::time::sleep(pause).await;
                    number += 1;
                }
            }
        }
    }

    fn pause(&self, attempt: u32) -> Duration {
        let longest = self.pause.saturating_mul(1 << (attempt - 1).min(6));
        longest.mul_f64(rand::random_range(0.5..1.0))
    }
}
