//! The control plane's end of blockd's socket.

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use futures::{SinkExt, StreamExt};
use parking_lot::Mutex;
use tokio::{
    net::{UnixStream, unix::OwnedReadHalf},
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep, timeout_at},
};
use tokio_util::codec::{FramedRead, FramedWrite, LinesCodec};
use tracing::{debug, warn};

use crate::{
    exports::{DiskExport, Export, ExportError, ExportInfo, ExportKind, Exports, MemoryExport, Sealed},
    protocol::{Answer, Call, MAX_REQUEST, MAX_RESPONSE, Outcome, Request, Response, VERSION},
};

/// Bound of every call, waiting for a blockd that is being restarted included.
pub const CALL_BOUND: Duration = Duration::from_secs(10);

const FIRST_BACKOFF: Duration = Duration::from_millis(10);
const LAST_BACKOFF: Duration = Duration::from_millis(500);

/// Requests that may wait for the socket to take them.
const SEND_QUEUE: usize = 64;

type Pending = Arc<Mutex<Option<HashMap<u64, oneshot::Sender<Outcome>>>>>;

/// blockd as seen from the control plane. Cheap to clone; all clones share one connection, which is made anew when
/// blockd was restarted. Calls run at the same time.
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

/// A client without its life.
pub(crate) struct WeakClient {
    shared: Weak<Shared>,
}

impl WeakClient {
    /// What ends when the present connection (if any) is gone. `None` when nobody holds the client any more.
    pub(crate) async fn closed(&self) -> Option<impl Future<Output = ()> + use<>> {
        let shared = self.shared.upgrade()?;
        let closed = shared.connection.lock().await.as_ref().map(|connection| connection.closed.clone());
        Some(async move {
            let Some(mut closed) = closed else { return };
            // The sender never sends: an error says that it was dropped, with the connection.
            while closed.changed().await.is_ok() {}
        })
    }

    pub(crate) fn upgrade(&self) -> Option<Client> {
        self.shared.upgrade().map(|shared| Client { shared })
    }
}

struct Shared {
    socket: PathBuf,
    next_id: AtomicU64,
    connection: tokio::sync::Mutex<Option<Connection>>,
}

#[derive(Clone)]
struct Connection {
    requests: mpsc::Sender<String>,
    pending: Pending,
    closed: watch::Receiver<()>,
    pid: u32,
    export: Export,
}

/// A call that may be tried again, or not.
enum Failure {
    /// The connection could not be made, or went away before the answer.
    Lost(String),
    /// blockd answered with an error.
    Refused(ExportError),
}

impl Client {
    /// A client of the blockd at `socket`. Connects with the first call.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        let shared = Shared {
            socket: socket.into(),
            next_id: AtomicU64::new(1),
            connection: tokio::sync::Mutex::new(None),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.shared.socket
    }

    /// The process id of the blockd that answers, connecting where needed, without waiting for one to come.
    pub async fn pid(&self) -> Result<u32, ExportError> {
        self.connected().await.map(|connection| connection.pid)
    }

    async fn connected(&self) -> Result<Connection, ExportError> {
        match timeout_at(Instant::now() + CALL_BOUND, self.shared.connection()).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(message)) => Err(ExportError::Unreachable { message }),
            Err(_) => Err(no_answer()),
        }
    }

    /// A reference that does not keep the client alive.
    pub(crate) fn downgrade(&self) -> WeakClient {
        WeakClient { shared: Arc::downgrade(&self.shared) }
    }

    async fn call(&self, call: Call) -> Result<Answer, ExportError> {
        let deadline = Instant::now() + CALL_BOUND;
        let mut backoff = FIRST_BACKOFF;
        loop {
            let lost = match timeout_at(deadline, self.shared.try_call(&call)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(Failure::Refused(error))) => return Err(error),
                Ok(Err(Failure::Lost(message))) => message,
                Err(_) => return Err(no_answer()),
            };
            if Instant::now() + backoff >= deadline {
                return Err(ExportError::Unreachable { message: lost });
            }
            debug!(error = %lost, "blockd is not there; trying again");
            sleep(backoff).await;
            backoff = (backoff * 2).min(LAST_BACKOFF);
        }
    }
}

fn no_answer() -> ExportError {
    ExportError::Unreachable { message: format!("no answer within {CALL_BOUND:?}") }
}

fn unexpected(answer: &Answer) -> ExportError {
    ExportError::Io { message: format!("blockd gave an answer to another question: {answer:?}") }
}

impl Shared {
    async fn try_call(&self, call: &Call) -> Result<Answer, Failure> {
        let connection = self.connection().await.map_err(Failure::Lost)?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let line = encode(&Request { id, call: call.clone() })?;
        match connection.call(id, line).await.map_err(Failure::Lost)? {
            Outcome::Ok(answer) => Ok(answer),
            Outcome::Error(error) => Err(Failure::Refused(error)),
        }
    }

    async fn connection(&self) -> Result<Connection, String> {
        let mut slot = self.connection.lock().await;
        if let Some(connection) = &*slot {
            if !connection.requests.is_closed() {
                return Ok(connection.clone());
            }
            *slot = None;
        }
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|error| format!("{}: {error}", self.socket.display()))?;
        let connection = Connection::start(stream).await?;
        *slot = Some(connection.clone());
        Ok(connection)
    }
}

impl Connection {
    async fn start(stream: UnixStream) -> Result<Self, String> {
        let (read, write) = stream.into_split();
        let pending: Pending = Arc::new(Mutex::new(Some(HashMap::new())));
        let (requests, mut queue) = mpsc::channel::<String>(SEND_QUEUE);
        let (alive, closed) = watch::channel(());

        // Ends when the last clone of the connection is dropped; its half of the socket then says so to blockd.
        let writer = tokio::spawn(async move {
            let mut sink = FramedWrite::new(write, LinesCodec::new());
            while let Some(line) = queue.recv().await {
                if let Err(error) = sink.send(line).await {
                    warn!(%error, "cannot write to blockd");
                    break;
                }
            }
        });
        let of_reader = Arc::clone(&pending);
        tokio::spawn(async move {
            if let Err(error) = read_answers(read, &of_reader).await {
                warn!(%error, "cannot read from blockd");
            }
            writer.abort();
            // Drops the senders: every caller that waits learns that its answer will not come.
            of_reader.lock().take();
            drop(alive);
        });

        let export =
            Export { kind: ExportKind::Fuse, why: "this blockd is of an earlier version".to_owned() };
        let mut connection = Self { requests, pending, closed, pid: 0, export };
        let hello = serde_json::to_string(&Request { id: 0, call: Call::Hello })
            .map_err(|error| error.to_string())?;
        match connection.call(0, hello).await? {
            Outcome::Ok(Answer::Hello { version: VERSION, pid, export }) => {
                connection.pid = pid;
                connection.export = export.unwrap_or(connection.export);
            }
            Outcome::Ok(Answer::Hello { version, pid, .. }) => {
                return Err(format!(
                    "the running blockd (pid {pid}) speaks protocol {version} and this server {VERSION}; \
                     end its sandboxes and restart blockd"
                ));
            }
            other => return Err(format!("something else answers at the socket: {other:?}")),
        }
        Ok(connection)
    }

    async fn call(&self, id: u64, line: String) -> Result<Outcome, String> {
        const GONE: &str = "blockd went away before it answered";
        let (answer, wait) = oneshot::channel();
        let mut pending = PendingCall { pending: &self.pending, id, answered: false };
        match &mut *self.pending.lock() {
            Some(pending) => pending.insert(id, answer),
            None => return Err(GONE.to_owned()),
        };
        self.requests.send(line).await.map_err(|_| GONE.to_owned())?;
        let outcome = wait.await.map_err(|_| GONE.to_owned())?;
        pending.answered = true;
        Ok(outcome)
    }
}

/// Takes a call off the list when its caller gives up, so that the list never grows with answers that nobody awaits.
struct PendingCall<'a> {
    pending: &'a Pending,
    id: u64,
    answered: bool,
}

impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        if !self.answered
            && let Some(pending) = &mut *self.pending.lock()
        {
            pending.remove(&self.id);
        }
    }
}

fn encode(request: &Request) -> Result<String, Failure> {
    let invalid = |message| Failure::Refused(ExportError::Invalid { message });
    let line = serde_json::to_string(request)
        .map_err(|error| invalid(format!("a request that is no JSON: {error}")))?;
    if line.len() > MAX_REQUEST {
        return Err(invalid(format!("a request of {} bytes is longer than {MAX_REQUEST}", line.len())));
    }
    Ok(line)
}

async fn read_answers(read: OwnedReadHalf, pending: &Pending) -> io::Result<()> {
    let mut lines = FramedRead::new(read, LinesCodec::new_with_max_length(MAX_RESPONSE));
    while let Some(line) = lines.next().await {
        let response: Response = serde_json::from_str(&line.map_err(io::Error::other)?)?;
        let waiting = pending.lock().as_mut().and_then(|pending| pending.remove(&response.id));
        if let Some(waiting) = waiting {
            // The caller may have given up in this moment.
            let _ = waiting.send(response.outcome);
        }
    }
    Ok(())
}

#[async_trait]
impl Exports for Client {
    async fn export(&self) -> Result<Export, ExportError> {
        self.connected().await.map(|connection| connection.export)
    }

    async fn instance(&self) -> Result<u32, ExportError> {
        self.pid().await
    }

    async fn open_disk(&self, export: DiskExport) -> Result<PathBuf, ExportError> {
        match self.call(Call::OpenDisk { export }).await? {
            Answer::Opened { path } => Ok(path),
            other => Err(unexpected(&other)),
        }
    }

    async fn open_memory(&self, export: MemoryExport) -> Result<PathBuf, ExportError> {
        match self.call(Call::OpenMemory { export }).await? {
            Answer::Opened { path } => Ok(path),
            other => Err(unexpected(&other)),
        }
    }

    async fn seal(&self, name: &str, target: PathBuf) -> Result<Sealed, ExportError> {
        match self.call(Call::Seal { name: name.to_owned(), target }).await? {
            Answer::Sealed { sealed } => Ok(sealed),
            other => Err(unexpected(&other)),
        }
    }

    async fn close_disk(&self, name: &str) -> Result<(), ExportError> {
        match self.call(Call::CloseDisk { name: name.to_owned() }).await? {
            Answer::Closed => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    async fn close_memory(&self, holder: &str) -> Result<(), ExportError> {
        match self.call(Call::CloseMemory { holder: holder.to_owned() }).await? {
            Answer::Closed => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    async fn list(&self) -> Result<Vec<ExportInfo>, ExportError> {
        match self.call(Call::List).await? {
            Answer::List { exports } => Ok(exports),
            other => Err(unexpected(&other)),
        }
    }
}
