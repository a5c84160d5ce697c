//! A file of the manifest, in the folder where it belongs.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use aenv_types::Digest;
use reqwest::Client;
use thiserror::Error;

use crate::{
    manifest::Pinned,
    transfer::{self, Patience, TransferError},
};

const CONNECT_WAIT: Duration = Duration::from_secs(15);
/// A connection from which nothing comes for so long is broken.
const SILENCE: Duration = Duration::from_secs(30);
const PATIENCE: Patience =
    Patience { attempts: 4, pause: Duration::from_secs(1), whole: Duration::from_secs(3600) };
/// One process at a time writes to a folder.
const LOCK: &str = ".fetch.lock";

/// Why a file is not there.
#[derive(Debug, Error)]
pub enum FetchError {
    /// No place has it.
    #[error(
        "{file} could not be fetched: {reasons}. Without a network, put it into a folder and name that (--from)"
    )]
    Unreachable {
        /// The file.
        file: String,
        /// Each place, and what was wrong with it.
        reasons: String,
    },
    /// The folder for nodes without a network does not have it.
    #[error("{folder} has no file {file}, which the manifest names")]
    NotInFolder {
        /// The folder.
        folder: PathBuf,
        /// The file.
        file: String,
    },
    /// It is not what the manifest says.
    #[error(
        "{file} from {place} is not what the manifest names and was not kept: {found} instead of {expected}"
    )]
    Digest {
        /// The file.
        file: String,
        /// Where it came from.
        place: String,
        /// What it should be.
        expected: Digest,
        /// What it is.
        found: Digest,
    },
    /// Another process is at it.
    #[error("another process fetches files into {0}: wait for it")]
    Busy(PathBuf),
    /// There is no HTTP client.
    #[error("nothing can be fetched by HTTP: {0}")]
    Client(#[source] reqwest::Error),
    /// The disk.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

fn refused(path: &Path) -> impl FnOnce(io::Error) -> FetchError {
    move |source| FetchError::Io { path: path.to_owned(), source }
}

/// Gets files into one folder.
#[derive(Clone, Debug)]
pub struct Fetcher {
    folder: PathBuf,
    from: Option<PathBuf>,
    patience: Patience,
}

impl Fetcher {
    /// Into `folder`, which is there. `from`: a folder that has the files; nothing is asked of the network then.
    pub fn new(folder: &Path, from: Option<&Path>) -> Self {
        Self { folder: folder.to_owned(), from: from.map(Path::to_owned), patience: PATIENCE }
    }

    /// With another pause between attempts.
    pub fn with_pause(mut self, pause: Duration) -> Self {
        self.patience.pause = pause;
        self
    }

    /// Returns where the file is, with the digest that it should have. `say` is told what is done.
    pub async fn get(&self, wanted: &Pinned, say: &(dyn Fn(&str) + Sync)) -> Result<PathBuf, FetchError> {
        let _lock = self.lock()?;
        let target = self.folder.join(&wanted.file);
        match digest_of(&target).await {
            Ok(digest) if digest == wanted.sha256 => {
                say(&format!("{} is there", wanted.file));
                return Ok(target);
            }
            Ok(_) => {
                say(&format!("{} is there and is not what the manifest names: it is replaced", wanted.file));
                fs::remove_file(&target).map_err(refused(&target))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(refused(&target)(error)),
        }
        let part = self.folder.join(format!("{}.part", wanted.file));
        match &self.from {
            Some(from) => {
                let source = from.join(&wanted.file);
                say(&format!("copying {}", source.display()));
                copy(&source, &part, wanted, from)?;
                keep_if_right(&part, wanted, &source.display().to_string()).await?;
            }
            None => self.fetch(wanted, &part, say).await?,
        }
        aenv_durable::publish(&part, &target).map_err(refused(&target))?;
        say(&format!("{} has the digest that the manifest names", wanted.file));
        Ok(target)
    }

    fn lock(&self) -> Result<File, FetchError> {
        let path = self.folder.join(LOCK);
        let file = File::options().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(refused(&path))?;
        // It goes when the file is closed.
        match file.try_lock() {
            Ok(()) => Ok(file),
            Err(TryLockError::WouldBlock) => Err(FetchError::Busy(self.folder.clone())),
            Err(TryLockError::Error(error)) => Err(refused(&path)(error)),
        }
    }

    async fn fetch(
        &self,
        wanted: &Pinned,
        part: &Path,
        say: &(dyn Fn(&str) + Sync),
    ) -> Result<(), FetchError> {
        let client = Client::builder()
            .user_agent(concat!("aenv/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_WAIT)
            .read_timeout(SILENCE)
            // A range is one of the file's bytes.
            .no_gzip()
            .build()
            .map_err(FetchError::Client)?;
        let mut reasons = Vec::new();
        for url in &wanted.urls {
            loop {
                let begun = transfer::length(part);
                match begun {
                    0 => say(&format!("fetching {url}")),
                    _ => say(&format!("fetching {url} from byte {begun} on")),
                }
                match self.transfer(&client, url, wanted, part, say).await {
                    Ok(()) => return Ok(()),
                    // What was begun may have been of another file. It is removed, so that this happens once.
                    Err(Stop::Failed(FetchError::Digest { .. })) if begun > 0 => say(&format!(
                        "what an earlier run left of {} does not fit: fetching it whole",
                        wanted.file
                    )),
                    Err(Stop::Failed(error)) => return Err(error),
                    Err(Stop::Next(reason)) => {
                        reasons.push(format!("{url}: {reason}"));
                        break;
                    }
                }
            }
        }
        let reasons =
            if reasons.is_empty() { "the manifest has no URL".to_owned() } else { reasons.join("; ") };
        Err(FetchError::Unreachable { file: wanted.file.clone(), reasons })
    }

    async fn transfer(
        &self,
        client: &Client,
        url: &str,
        wanted: &Pinned,
        part: &Path,
        say: &(dyn Fn(&str) + Sync),
    ) -> Result<(), Stop> {
        match transfer::run(client, url, part, self.patience, say).await {
            Ok(()) => keep_if_right(part, wanted, url).await.map_err(Stop::Failed),
            Err(TransferError::Disk(error)) => Err(Stop::Failed(refused(part)(error))),
            Err(error) => {
                if matches!(error, TransferError::TooLarge) {
                    fs::remove_file(part).map_err(refused(part)).map_err(Stop::Failed)?;
                }
                Err(Stop::Next(error.to_string()))
            }
        }
    }
}

/// Why one place did not give the file.
enum Stop {
    /// Another one may.
    Next(String),
    /// It ends here.
    Failed(FetchError),
}

fn copy(source: &Path, part: &Path, wanted: &Pinned, folder: &Path) -> Result<(), FetchError> {
    match fs::copy(source, part) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(FetchError::NotInFolder { folder: folder.to_owned(), file: wanted.file.clone() })
        }
        Err(error) => Err(refused(source)(error)),
    }
}

/// Removes what is not right.
async fn keep_if_right(part: &Path, wanted: &Pinned, place: &str) -> Result<(), FetchError> {
    let found = digest_of(part).await.map_err(refused(part))?;
    if found == wanted.sha256 {
        return Ok(());
    }
    fs::remove_file(part).map_err(refused(part))?;
    Err(FetchError::Digest {
        file: wanted.file.clone(),
        place: place.to_owned(),
        expected: wanted.sha256,
        found,
    })
}

async fn digest_of(path: &Path) -> io::Result<Digest> {
    let path = path.to_owned();
    let read = tokio::task::spawn_blocking(move || Ok(Digest::of_reader(File::open(path)?)?.0));
    read.await.map_err(io::Error::other)?
}
