//! An NFS version 3 server (RFC 1813) for the guest of one sandbox, which shows this sandbox's volumes and nothing else.
//!
//! It listens on an address that only this guest reaches. Only the guest's kernel may ask (its source port is privileged), so the
//! guest's kernel keeps the guest's users apart: it asks for each access. What changes ownership or folders is done with the user's
//! rights here as well, so that new files are the user's. A guest's root is root in its volumes.
//!
//! A file is named by the host kernel's own handle for it, with a code that only its volume makes: it stays valid over a restart of
//! this process, and no other can be guessed. There is no lock manager, no device node, and no state about clients.

mod change;
mod errors;
mod folders;
mod look;
mod make;
mod mount;
mod replies;
mod rpc;
mod server;
mod xdr;

#[cfg(test)]
mod tests;

use std::{io, sync::Arc, time::Duration};

use aenv_types::VolumeId;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, mpsc},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::Volume;
use server::Server;

/// The port on the gateway's address.
pub const PORT: u16 = 2049;

/// Bytes of one read or write.
const TRANSFER: u32 = 256 << 10;
/// Bytes of one request: a write, and room for what is around it.
const MAX_RECORD: usize = TRANSFER as usize + 4096;
/// Requests of one connection that are worked on at once.
const IN_FLIGHT: usize = 8;
/// Connections of one guest.
const CONNECTIONS: usize = 8;
/// Requests of all guests that are worked on at once.
static GATE: Semaphore = Semaphore::const_new(64);
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A server that runs; it ends when this is dropped.
#[derive(Debug)]
pub struct Serving {
    _end: DropGuard,
}

impl Serving {
    /// Serves `volumes` to whoever connects with a privileged port. Each is exported as `/<id>`.
    pub fn start(listener: TcpListener, volumes: Vec<Arc<Volume>>) -> Self {
        let end = CancellationToken::new();
        tokio::spawn(accept(listener, Arc::new(Server::new(volumes)), end.clone()));
        Self { _end: end.drop_guard() }
    }

    /// The path by which a guest mounts a volume.
    pub fn export(id: &VolumeId) -> String {
        format!("/{id}")
    }
}

async fn accept(listener: TcpListener, server: Arc<Server>, end: CancellationToken) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            () = end.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a guest's connection was not taken");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // A port below 1024: the guest's kernel or its root, not one of its users.
        let Some(place) =
            (peer.port() < 1024).then(|| Arc::clone(&places).try_acquire_owned().ok()).flatten()
        else {
            tracing::debug!(%peer, "a guest's connection is refused");
            continue;
        };
        let (server, end) = (Arc::clone(&server), end.clone());
        tokio::spawn(async move {
            let outcome = tokio::select! {
                () = end.cancelled() => Ok(()),
                outcome = connection(stream, server) => outcome,
            };
            if let Err(error) = outcome {
                tracing::debug!(%error, "a guest's connection ended");
            }
            drop(place);
        });
    }
}

async fn connection(stream: TcpStream, server: Arc<Server>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut requests, mut answers) = stream.into_split();
    let (sender, mut ready) = mpsc::channel::<Vec<u8>>(IN_FLIGHT);
    let places = Arc::new(Semaphore::new(IN_FLIGHT));
    let reader = async {
        loop {
            let Some(record) = read_record(&mut requests).await? else { return Ok(()) };
            let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
            let (server, sender) = (Arc::clone(&server), sender.clone());
            tokio::spawn(async move {
                let Ok(_turn) = GATE.acquire().await else { return };
                let answer = tokio::task::spawn_blocking(move || server.answer(&record)).await;
                // A request that makes no sense, or a connection that has gone: nobody waits for an answer.
                if let Ok(Some(answer)) = answer {
                    drop(sender.send(answer).await);
                }
                drop(place);
            });
        }
    };
    let writer = async {
        while let Some(answer) = ready.recv().await {
            answers.write_all(&answer).await?;
        }
        Ok(())
    };
    tokio::select! {
        ended = reader => ended,
        ended = writer => ended,
    }
}

/// One record (RFC 5531, 11): fragments, the last one of them marked. `None`: the peer has gone.
async fn read_record(stream: &mut (impl AsyncReadExt + Unpin)) -> io::Result<Option<Vec<u8>>> {
    let mut record = Vec::new();
    loop {
        let mut head = [0; 4];
        match stream.read_exact(&mut head).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && record.is_empty() => {
                return Ok(None);
            }
            other => other?,
        };
        let head = u32::from_be_bytes(head);
        let length = (head & 0x7fff_ffff) as usize;
        if record.len() + length > MAX_RECORD || (length == 0 && head >> 31 == 0) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a record is too large"));
        }
        let start = record.len();
        record.resize(start + length, 0);
        stream.read_exact(&mut record[start..]).await?;
        if head >> 31 == 1 {
            return Ok(Some(record));
        }
    }
}
