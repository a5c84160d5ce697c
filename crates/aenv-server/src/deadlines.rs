//! Notes what happened to sandboxes at their deadlines. Nobody asked for it in a request, so no handler could note it.

use aenv_orchestrator::{Expiry, OnTimeout};
use tokio::sync::mpsc;

use crate::events::{Event, Events};

/// Notes each, until the node is gone.
pub async fn note(mut expiries: mpsc::Receiver<Expiry>, events: Events) {
    while let Some(Expiry { sandbox, team, done }) = expiries.recv().await {
        let message = match done {
            OnTimeout::Pause => "sandbox paused: its timeout was reached",
            OnTimeout::Kill => "sandbox deleted: its timeout was reached",
        };
        events.push(Event::info(&team, &sandbox, message));
    }
}
