//! Long operations that tell how far they are: lines of `{"progress": ...}`, at last `{"result": ...}` or `{"error": ...}`.

use std::time::{Duration, Instant};

use aenv_api::ApiError;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// Progress is told so often at most.
const TELL_EVERY: Duration = Duration::from_millis(300);
/// Progress that nobody has read yet.
const UNREAD: usize = 16;

/// What an operation says, line by line.
pub type Said = mpsc::Receiver<Value>;

/// The operation's end of it.
pub struct Telling {
    sender: mpsc::Sender<Value>,
}

/// Tells a listener, now and then, how far the operation is. What a slow listener has not read is left out.
pub struct Teller {
    sender: mpsc::WeakSender<Value>,
    last: Mutex<Option<Instant>>,
}

/// Both ends.
pub fn telling() -> (Telling, Said) {
    let (sender, said) = mpsc::channel(UNREAD);
    (Telling { sender }, said)
}

impl Telling {
    /// For its progress.
    pub fn teller(&self) -> Teller {
        Teller { sender: self.sender.downgrade(), last: Mutex::new(None) }
    }

    /// Returns when nobody listens any more.
    pub async fn closed(&self) {
        self.sender.closed().await;
    }

    /// Says what came of it. That nobody listens any more is no error: whoever asks again finds what was done.
    pub async fn end<T: Serialize>(self, outcome: Result<T, ApiError>) {
        let line = match outcome {
            Ok(result) => json!({ "result": serde_json::to_value(result).unwrap_or(Value::Null) }),
            Err(error) => json!({ "error": error.body() }),
        };
        self.sender.send(line).await.ok();
    }
}

impl Teller {
    /// Says how far it is, unless it was said just now.
    pub fn tell(&self, progress: impl FnOnce() -> Value) {
        let mut last = self.last.lock();
        if last.is_some_and(|last| last.elapsed() < TELL_EVERY) {
            return;
        }
        *last = Some(Instant::now());
        if let Some(sender) = self.sender.upgrade() {
            sender.try_send(json!({ "progress": progress() })).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn progress_is_told_now_and_then_and_the_end_always() {
        let (telling, mut said) = telling();
        let teller = telling.teller();
        for done in 0..1000 {
            teller.tell(|| json!({ "done": done }));
        }
        telling.end(Ok::<_, ApiError>(7)).await;
        assert_eq!(said.recv().await, Some(json!({ "progress": { "done": 0 } })));
        let mut last = said.recv().await;
        while let Some(line) = said.recv().await {
            last = Some(line);
        }
        assert_eq!(last, Some(json!({ "result": 7 })));
        // After the end it has nobody to tell.
        teller.tell(|| json!("late"));
    }
}
