//! The serial console: a socket or a pipe that the server reads into a log of bounded size.
//!
//! A VMM could write a file itself, but a guest that prints for ever would fill the host's disk whenever no server is there to
//! cut it. With a socket or a pipe, what nobody reads is dropped by the VMM, the guest does not notice, and a restarted server
//! connects again: what was printed in between is lost, which is the price.

use std::{fs, io, path::PathBuf, time::Duration};

use tokio::{
    fs::File,
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
};

/// The log is two files of this size: the current one, and the one before (`<name>.1`).
const HALF: u64 = 512 << 10;
/// A VMM's own messages are few; a guest that provokes many must not fill the disk with them.
const OWN_LOG_LIMIT: u64 = 256 << 10;
const OWN_LOG_CHECK: Duration = Duration::from_secs(30);

/// Reads until the VMM closes the console.
pub(crate) fn follow(stream: impl AsyncRead + Unpin + Send + 'static, log: PathBuf, own_log: PathBuf) {
    tokio::spawn(async move {
        if let Err(error) = copy(stream, &log, &own_log).await {
            tracing::warn!(%error, log = %log.display(), "the serial log ends here");
        }
    });
}

async fn copy(mut stream: impl AsyncRead + Unpin, log: &PathBuf, own_log: &PathBuf) -> io::Result<()> {
    let mut file = open(log).await?;
    let mut size = file.metadata().await?.len();
    let mut buffer = vec![0; 4096];
    let mut check = tokio::time::interval(OWN_LOG_CHECK);
    loop {
        let count = tokio::select! {
            count = stream.read(&mut buffer) => count?,
            _ = check.tick() => {
                cut(own_log);
                continue;
            }
        };
        if count == 0 {
            return file.flush().await;
        }
        if size >= HALF {
            let mut before = log.clone().into_os_string();
            before.push(".1");
            tokio::fs::rename(log, before).await?;
            file = open(log).await?;
            size = 0;
        }
        file.write_all(&buffer[..count]).await?;
        file.flush().await?;
        size += count as u64;
    }
}

async fn open(log: &PathBuf) -> io::Result<File> {
    File::options().create(true).append(true).open(log).await
}

fn cut(log: &PathBuf) {
    if fs::metadata(log).is_ok_and(|meta| meta.len() > OWN_LOG_LIMIT) {
        let emptied = fs::File::options().write(true).open(log).and_then(|file| file.set_len(0));
        if let Err(error) = emptied {
            tracing::warn!(%error, log = %log.display(), "the log of a VMM cannot be cut");
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn a_chatty_guest_fills_no_disk_and_its_last_words_stay() {
        let folder = tempfile::tempdir().unwrap();
        let (log, own) = (folder.path().join("serial.log"), folder.path().join("qemu.log"));
        fs::write(&own, vec![b'x'; OWN_LOG_LIMIT as usize + 1]).unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let writer = tokio::spawn(async move {
            for _ in 0..4096 {
                theirs.write_all(&[b'a'; 1024]).await.unwrap();
            }
            theirs.write_all(b"the end").await.unwrap();
        });
        copy(ours, &log, &own).await.unwrap();
        writer.await.unwrap();
        let total: u64 =
            fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
        assert!(total <= 2 * (HALF + 4096), "{total}");
        assert!(fs::read_to_string(&log).unwrap().ends_with("the end"));
        assert_eq!(fs::metadata(&own).unwrap().len(), 0);
    }
}
