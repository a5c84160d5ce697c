//! The control socket: requests by line, each answered when it is done, many at once.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use futures::{SinkExt, StreamExt};
use nix::unistd::geteuid;
use serde_json::Value;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task,
};
use tokio_util::codec::{FramedRead, FramedWrite, LinesCodec, LinesCodecError};
use tracing::{debug, warn};

use super::table::Table;
use crate::{
    exports::{Export, ExportError},
    protocol::{Answer, Call, MAX_REQUEST, Request, Response, VERSION},
};

/// Connections at once. More wait in the socket's backlog.
const CONNECTIONS: usize = 32;

/// Calls in progress for one connection. Its next line is read when one is done.
const CALLS: usize = 64;

/// Makes the socket, for its owner only. A dead blockd's socket is taken away; the caller holds the lock that says it is dead.
pub(crate) fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Bound under another name, so that nobody can connect before the mode is right.
    let beside: PathBuf = path.with_extension("new");
    match fs::remove_file(&beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&beside)?;
    fs::set_permissions(&beside, fs::Permissions::from_mode(0o600))?;
    fs::rename(&beside, path)?;
    Ok(listener)
}

/// Serves connections for ever.
pub(crate) async fn serve(listener: UnixListener, table: Arc<Table>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(connection(stream, Arc::clone(&table), place));
            }
            Err(error) => {
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(stream: UnixStream, table: Arc<Table>, _place: OwnedSemaphorePermit) {
    match stream.peer_cred() {
        Ok(peer) if peer.uid() == 0 || peer.uid() == geteuid().as_raw() => {}
        Ok(peer) => return warn!(uid = peer.uid(), "refused a connection of another user"),
        Err(error) => return warn!(%error, "refused a connection of nobody"),
    }
    let (read, write) = stream.into_split();
    let (answers, mut queue) = mpsc::channel::<Response>(CALLS);
    let writer = tokio::spawn(async move {
        let mut sink = FramedWrite::new(write, LinesCodec::new());
        while let Some(response) = queue.recv().await {
            let sent = match serde_json::to_string(&response) {
                Ok(line) => sink.send(line).await.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            if let Err(error) = sent {
                debug!(error, "a client went away before its answer");
                return;
            }
        }
    });
    let calls = Arc::new(Semaphore::new(CALLS));
    let mut lines = FramedRead::new(read, LinesCodec::new_with_max_length(MAX_REQUEST));
    while let Some(line) = lines.next().await {
        let request = match line {
            Ok(line) => parse(&line),
            Err(LinesCodecError::MaxLineLengthExceeded) => {
                Err((0, format!("a request is longer than {MAX_REQUEST} bytes")))
            }
            Err(LinesCodecError::Io(error)) if error.kind() == io::ErrorKind::InvalidData => {
                Err((0, "a request is not UTF-8".to_owned()))
            }
            Err(error) => {
                debug!(%error, "a connection broke");
                break;
            }
        };
        let request = match request {
            Ok(request) => request,
            Err((id, message)) => {
                warn!(message, "refused a request");
                let outcome = Err(ExportError::Invalid { message }).into();
                // Without an id nobody knows which question this answers: the connection is of no more use.
                if answers.send(Response { id, outcome }).await.is_err() || id == 0 {
                    break;
                }
                continue;
            }
        };
        let Ok(turn) = Arc::clone(&calls).acquire_owned().await else { break };
        let (table, answers) = (Arc::clone(&table), answers.clone());
        tokio::spawn(async move {
            let id = request.id;
            let outcome = match task::spawn_blocking(move || perform(&table, request.call)).await {
                Ok(result) => result.into(),
                Err(error) => {
                    tracing::error!(%error, "a call panicked");
                    Err(ExportError::Io { message: "blockd failed inside; its log says why".to_owned() })
                        .into()
                }
            };
            // The client may be gone; what was asked is done all the same.
            let _ = answers.send(Response { id, outcome }).await;
            drop(turn);
        });
    }
    drop(answers);
    if let Err(error) = writer.await {
        tracing::error!(%error, "a writer panicked");
    }
}

fn parse(line: &str) -> Result<Request, (u64, String)> {
    serde_json::from_str(line).map_err(|error| {
        let id = serde_json::from_str::<Value>(line).ok().and_then(|value| value.get("id")?.as_u64());
        (id.unwrap_or(0), format!("no request that this blockd knows: {error}"))
    })
}

fn perform(table: &Table, call: Call) -> Result<Answer, ExportError> {
    match call {
        Call::Hello => {
            let shown = table.shown();
            let export = Some(Export { kind: shown.kind(), why: shown.why().to_owned() });
            Ok(Answer::Hello { version: VERSION, pid: std::process::id(), export })
        }
        Call::OpenDisk { export } => table.open_disk(export).map(|path| Answer::Opened { path }),
        Call::OpenMemory { export } => table.open_memory(export).map(|path| Answer::Opened { path }),
        Call::Seal { name, target } => table.seal(&name, &target).map(|sealed| Answer::Sealed { sealed }),
        Call::CloseDisk { name } => table.close_disk(&name).map(|()| Answer::Closed),
        Call::CloseMemory { holder } => table.close_memory(&holder).map(|()| Answer::Closed),
        Call::List => Ok(Answer::List { exports: table.list() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests, changed in any way: each is understood or refused.
    #[test]
    fn changed_requests_are_understood_or_refused() {
        let corpus = [
            r#"{"id":7,"call":"open_disk","export":{"name":"a","size":4096,"layers":["/l"],"upper":null}}"#,
            r#"{"id":8,"call":"seal","name":"a","target":"/t"}"#,
            r#"{"id":9,"call":"list"}"#,
        ];
        let corpus: Vec<_> = corpus.iter().map(|line| line.as_bytes().to_vec()).collect();
        aenv_testkit::mutate("blockd-requests", &corpus, |input| {
            std::str::from_utf8(input).is_ok_and(|line| parse(line).is_ok())
        });
    }
}
