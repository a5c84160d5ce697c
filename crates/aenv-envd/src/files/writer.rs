//! Writing one file: on a thread of its own, from a bounded queue.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, chown},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use tokio::{
    sync::mpsc,
    task::{JoinHandle, spawn_blocking},
};

use super::{
    FilesError,
    metadata::{self, Metadata},
};
use crate::users::User;

/// Pieces that wait for the disk.
const QUEUE: usize = 4;
/// Small pieces are written together, so that a small file is one write and its watchers see one.
const BUFFER: usize = 64 << 10;

enum Message {
    Piece(Bytes),
    End,
}

/// Writes a stream to `path`, which belongs to `user` afterwards. Missing folders are made. A file that exists keeps its mode; one that
/// was made for this is removed again when the stream breaks off or the disk is full.
pub async fn write<S>(
    path: PathBuf,
    user: User,
    metadata: Metadata,
    mut contents: S,
) -> Result<(), FilesError>
where
    S: Stream<Item = io::Result<Bytes>> + Unpin,
{
    let (queue, pieces) = mpsc::channel(QUEUE);
    let writing = spawn_blocking(move || write_pieces(&path, &user, &metadata, pieces));
    while let Some(piece) = contents.next().await {
        match piece {
            Ok(piece) => {
                if queue.send(Message::Piece(piece)).await.is_err() {
                    // It has failed and says why below.
                    return joined(writing).await;
                }
            }
            Err(error) => {
                drop(queue);
                let _ = joined(writing).await;
                return Err(FilesError::BrokenOff(error.to_string()));
            }
        }
    }
    // When nobody takes it any more, the error comes from the thread.
    let _ = queue.send(Message::End).await;
    drop(queue);
    joined(writing).await
}

async fn joined(writing: JoinHandle<Result<(), FilesError>>) -> Result<(), FilesError> {
    match writing.await {
        Ok(written) => written,
        Err(error) => Err(FilesError::Io { path: PathBuf::new(), source: io::Error::other(error) }),
    }
}

fn write_pieces(
    path: &Path,
    user: &User,
    metadata: &Metadata,
    mut pieces: mpsc::Receiver<Message>,
) -> Result<(), FilesError> {
    let target = Target::open(path, user)?;
    let written = target.fill(user, metadata, &mut pieces).map_err(|source| FilesError::io(path, source));
    if written.is_err() && target.origin == Origin::Made {
        // The error that matters is the first.
        let _ = fs::remove_file(path);
    }
    written
}

struct Target {
    path: PathBuf,
    file: File,
    origin: Origin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Found,
    Made,
}

impl Target {
    fn open(path: &Path, user: &User) -> Result<Self, FilesError> {
        if let Some(parent) = path.parent() {
            make_folders(parent, user).map_err(|source| FilesError::io(parent, source))?;
        }
        let io = |source| FilesError::io(path, source);
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => return Err(FilesError::Directory(path.to_owned())),
            Ok(found) if found.file_type().is_fifo() || found.file_type().is_socket() => {
                return Err(FilesError::NotRegular(path.to_owned()));
            }
            _ => {}
        }
        // Without O_CREAT first: with it, the kernel keeps even root from others' files in sticky folders such as /tmp.
        let (file, origin) = match OpenOptions::new().write(true).truncate(true).open(path) {
            Ok(file) => (file, Origin::Found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let made = OpenOptions::new().write(true).create(true).truncate(true).mode(0o666).open(path);
                (made.map_err(io)?, Origin::Made)
            }
            Err(error) => return Err(io(error)),
        };
        Ok(Self { path: path.to_owned(), file, origin })
    }

    fn fill(&self, user: &User, metadata: &Metadata, pieces: &mut mpsc::Receiver<Message>) -> io::Result<()> {
        let owner = self.file.metadata()?;
        if self.origin == Origin::Made || owner.uid() != user.uid || owner.gid() != user.gid {
            std::os::unix::fs::fchown(&self.file, Some(user.uid), Some(user.gid))?;
        }
        let mut writer = io::BufWriter::with_capacity(BUFFER, &self.file);
        loop {
            match pieces.blocking_recv() {
                Some(Message::Piece(piece)) => writer.write_all(&piece)?,
                Some(Message::End) => break,
                None => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the upload broke off")),
            }
        }
        writer.flush()?;
        drop(writer);
        match metadata::replace(&self.path, metadata) {
            // A filesystem without attributes is no reason to refuse a file that brings none.
            Err(error) if metadata.is_empty() && error.kind() == io::ErrorKind::Unsupported => Ok(()),
            replaced => replaced,
        }
    }
}

/// Makes a folder and its missing parents; the new ones belong to `user`.
pub fn make_folders(folder: &Path, user: &User) -> io::Result<()> {
    let mut missing = Vec::new();
    let mut present = folder;
    loop {
        match fs::metadata(present) {
            Ok(found) if found.is_dir() => break,
            Ok(_) => {
                return Err(io::Error::new(
                    io::ErrorKind::NotADirectory,
                    format!("{} is no folder", present.display()),
                ));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push(present),
            Err(error) => return Err(error),
        }
        match present.parent() {
            Some(parent) => present = parent,
            None => break,
        }
    }
    for folder in missing.into_iter().rev() {
        match fs::create_dir(folder) {
            Ok(()) => chown(folder, Some(user.uid), Some(user.gid))?,
            // Somebody else was quicker.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
