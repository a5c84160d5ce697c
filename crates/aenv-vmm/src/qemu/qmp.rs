//! QMP: one JSON object a line over a unix socket (`docs/interop/qmp-spec`). Commands are answered in order; every wait is bounded.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};
use tokio::{
    io::Interest,
    net::UnixStream,
    sync::{Mutex, broadcast, oneshot},
    task::JoinHandle,
    time::timeout,
};

use crate::{EngineError, process::io_error};

/// A single answer is never larger than this.
const MAX_LINE: usize = 4 << 20;
const EVENTS: usize = 64;

type Answer = Result<Value, String>;

/// What QEMU told by itself.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) name: String,
    pub(crate) data: Value,
}

/// A connection to one QEMU.
pub(crate) struct Qmp {
    wire: Arc<Wire>,
    sending: Mutex<()>,
    next: AtomicU64,
    reader: JoinHandle<()>,
}

struct Wire {
    stream: UnixStream,
    waiting: std::sync::Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    answers: HashMap<u64, oneshot::Sender<Answer>>,
    greeting: Option<oneshot::Sender<()>>,
    /// Goes with the connection, so that who waits for an event gets to know.
    events: Option<broadcast::Sender<Event>>,
    closed: bool,
}

impl Qmp {
    /// Takes a connected socket, waits so long for the greeting, and so long for the end of the negotiation after it.
    pub(crate) async fn open(
        stream: UnixStream,
        bound: Duration,
        negotiation: Duration,
    ) -> Result<Self, EngineError> {
        let (greeted, greeting) = oneshot::channel();
        let (events, _) = broadcast::channel(EVENTS);
        let waiting = Waiting { greeting: Some(greeted), events: Some(events), ..Waiting::default() };
        let wire = Arc::new(Wire { stream, waiting: std::sync::Mutex::new(waiting) });
        let reader = tokio::spawn({
            let wire = Arc::clone(&wire);
            async move {
                let end = wire.read_all().await;
                tracing::debug!(?end, "QMP connection ended");
                wire.close();
            }
        });
        let qmp = Self { wire, sending: Mutex::new(()), next: AtomicU64::new(1), reader };
        match timeout(bound, greeting).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(EngineError::Exited("before it greeted".to_owned())),
            Err(_) => {
                let command = "the QMP greeting".to_owned();
                return Err(EngineError::TimedOut { command, secs: bound.as_secs() });
            }
        }
        qmp.execute("qmp_capabilities", json!({}), &[], negotiation).await?;
        Ok(qmp)
    }

    /// Runs a command; `fds` travel with it.
    pub(crate) async fn execute(
        &self,
        command: &str,
        arguments: Value,
        fds: &[BorrowedFd<'_>],
        bound: Duration,
    ) -> Result<Value, EngineError> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        if !self.wire.expect_answer(id, sender) {
            return Err(EngineError::Exited("its QMP connection is closed".to_owned()));
        }
        let line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string();
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let exchange = async {
            let turn = self.sending.lock().await;
            self.wire.send(line.as_bytes(), &raw).await.map_err(|e| io_error("send to QMP", e))?;
            drop(turn);
            match receiver.await {
                Ok(Ok(value)) => Ok(value),
                Ok(Err(message)) => Err(EngineError::Refused { command: command.to_owned(), message }),
                Err(_) => Err(EngineError::Exited(format!("while it executed {command}"))),
            }
        };
        timeout(bound, exchange).await.unwrap_or_else(|_| {
            Err(EngineError::TimedOut { command: command.to_owned(), secs: bound.as_secs() })
        })
    }

    /// Events from now on. Ends when the connection does.
    pub(crate) fn events(&self) -> broadcast::Receiver<Event> {
        match &self.wire.lock().events {
            Some(events) => events.subscribe(),
            // Its sender goes at once: the receiver says that there is no connection.
            None => broadcast::channel(1).1,
        }
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Wire {
    fn lock(&self) -> std::sync::MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn expect_answer(&self, id: u64, sender: oneshot::Sender<Answer>) -> bool {
        let mut waiting = self.lock();
        if !waiting.closed {
            waiting.answers.insert(id, sender);
        }
        !waiting.closed
    }

    /// Whoever waits gets to know that there will be no answer.
    fn close(&self) {
        let mut waiting = self.lock();
        waiting.closed = true;
        waiting.answers.clear();
        waiting.greeting = None;
        waiting.events = None;
    }

    async fn send(&self, mut bytes: &[u8], mut fds: &[RawFd]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.stream.writable().await?;
            let sent = self.stream.try_io(Interest::WRITABLE, || {
                let rights = [ControlMessage::ScmRights(fds)];
                let control = if fds.is_empty() { &[][..] } else { &rights[..] };
                let vector = [io::IoSlice::new(bytes)];
                let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
                Ok(sendmsg::<()>(self.stream.as_raw_fd(), &vector, control, flags, None)?)
            });
            match sent {
                Ok(count) => {
                    bytes = &bytes[count..];
                    fds = &[];
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn read_all(&self) -> io::Result<()> {
        let mut buffer = Vec::with_capacity(8192);
        loop {
            self.stream.readable().await?;
            match self.stream.try_read_buf(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            }
            while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = buffer.drain(..=end).collect();
                self.take_line(&line);
            }
            if buffer.len() > MAX_LINE {
                return Err(io::Error::other("a QMP line is too long"));
            }
        }
    }

    fn take_line(&self, line: &[u8]) {
        let Ok(message) = serde_json::from_slice::<Value>(line) else {
            tracing::warn!("QMP sent a line that is no JSON");
            return;
        };
        if let Some(event) = message["event"].as_str() {
            tracing::debug!(event, data = %message["data"], "QMP event");
            if let Some(events) = &self.lock().events {
                // Nobody may be listening.
                let _ = events.send(Event { name: event.to_owned(), data: message["data"].clone() });
            }
        } else if let Some(id) = message["id"].as_u64() {
            let answer = match message.get("error") {
                Some(error) => Err(error["desc"].as_str().unwrap_or("without a reason").to_owned()),
                None => Ok(message["return"].clone()),
            };
            if let Some(sender) = self.lock().answers.remove(&id) {
                // The caller may have given up.
                let _ = sender.send(answer);
            }
        } else if message.get("QMP").is_some()
            && let Some(greeting) = self.lock().greeting.take()
        {
            let _ = greeting.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    use super::*;

    const BOUND: Duration = Duration::from_secs(5);

    /// Greets, answers `good` and refuses `bad`, says nothing to `mute`, goes away on `die`.
    async fn fake(stream: UnixStream) {
        let (read, mut write) = stream.into_split();
        write.write_all(b"{\"QMP\": {\"version\": {}}}\r\n").await.unwrap();
        let mut lines = BufReader::new(read);
        let mut line = String::new();
        loop {
            line.clear();
            // Commands come without a newline: QMP reads JSON tokens, this fake reads up to the closing brace.
            let mut depth = 0;
            loop {
                let buffer = lines.fill_buf().await.unwrap();
                if buffer.is_empty() {
                    return;
                }
                let byte = buffer[0];
                lines.consume(1);
                line.push(char::from(byte));
                depth += i32::from(byte == b'{') - i32::from(byte == b'}');
                if depth == 0 {
                    break;
                }
            }
            let command: Value = serde_json::from_str(&line).unwrap();
            let id = &command["id"];
            let answer = match command["execute"].as_str().unwrap() {
                "bad" => json!({ "error": { "desc": "no" }, "id": id }),
                "mute" => continue,
                "die" => return,
                _ => json!({ "return": command["arguments"], "id": id }),
            };
            write.write_all(b"{\"event\": \"RESUME\"}\r\n").await.unwrap();
            write.write_all(format!("{answer}\r\n").as_bytes()).await.unwrap();
        }
    }

    #[tokio::test]
    async fn answers_refusals_silence_and_death_are_told_apart() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(fake(theirs));
        let qmp = Qmp::open(ours, BOUND, BOUND).await.unwrap();
        let mut events = qmp.events();
        assert_eq!(qmp.execute("good", json!({ "a": 1 }), &[], BOUND).await.unwrap(), json!({ "a": 1 }));
        assert_eq!(events.recv().await.unwrap().name, "RESUME");
        let refused = qmp.execute("bad", json!({}), &[], BOUND).await.unwrap_err();
        assert!(matches!(refused, EngineError::Refused { message, .. } if message == "no"));
        let silent = qmp.execute("mute", json!({}), &[], Duration::from_millis(20)).await.unwrap_err();
        assert!(matches!(silent, EngineError::TimedOut { .. }));
        let dead = qmp.execute("die", json!({}), &[], BOUND).await.unwrap_err();
        assert!(matches!(dead, EngineError::Exited(_)));
        while let Ok(event) = timeout(BOUND, events.recv()).await.expect("an end is no silence") {
            assert_eq!(event.name, "RESUME");
        }
        assert!(qmp.events().recv().await.is_err());
        let after = qmp.execute("good", json!({}), &[], BOUND).await.unwrap_err();
        assert!(matches!(after, EngineError::Exited(_)));
    }
}
