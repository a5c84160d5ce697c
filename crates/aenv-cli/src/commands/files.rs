//! `upload` and `download`: streams, never whole files in memory.

use std::path::{Path, PathBuf};

use futures::StreamExt;
use http::Method;
use indicatif::ProgressBar;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio_util::io::ReaderStream;

use super::envd_of;
use crate::{
    Outcome,
    args::{Download, Upload},
    client::Client,
    envd::Envd,
    error::CliError,
    output,
};

pub(super) async fn upload(args: Upload) -> Outcome {
    let client = Client::load()?;
    let transfer = Transfer { envd: envd_of(&client, &args.id).await?, user: args.user };
    if args.source == Path::new("-") {
        let bar = output::bytes_bar(None, "stdin");
        let reader = tokio::io::stdin();
        transfer
            .put(&args.destination, reqwest::Body::wrap_stream(counted(ReaderStream::new(reader), &bar)))
            .await?;
        bar.finish_and_clear();
        return Ok(0);
    }
    let meta = std::fs::metadata(&args.source).map_err(CliError::io(args.source.display().to_string()))?;
    if !meta.is_dir() {
        let name = args.source.file_name().and_then(|name| name.to_str()).unwrap_or("file");
        let into = if args.destination.ends_with('/') {
            format!("{}{name}", args.destination)
        } else {
            args.destination
        };
        transfer.put_file(&args.source, &into).await?;
        return Ok(0);
    }
    let base = args.destination.trim_end_matches('/').to_owned();
    transfer.make_folder(&base).await?;
    let mut folders = vec![(args.source.clone(), base)];
    while let Some((local, remote)) = folders.pop() {
        let entries = std::fs::read_dir(&local).map_err(CliError::io(local.display().to_string()))?;
        for entry in entries {
            let entry = entry.map_err(CliError::io(local.display().to_string()))?;
            let name = entry.file_name().into_string();
            let name = name.map_err(|name| CliError::Usage(format!("{name:?} is not UTF-8")))?;
            let target = format!("{remote}/{name}");
            // A link to a file sends the file; a link to a folder is not followed, it may lead in a circle.
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                transfer.make_folder(&target).await?;
                folders.push((entry.path(), target));
            } else if entry.path().is_file() {
                transfer.put_file(&entry.path(), &target).await?;
            } else {
                eprintln!("aenv: {} is left out: neither a file nor a folder", entry.path().display());
            }
        }
    }
    Ok(0)
}

pub(super) async fn download(args: Download) -> Outcome {
    let client = Client::load()?;
    let transfer = Transfer { envd: envd_of(&client, &args.id).await?, user: args.user };
    if args.destination == Path::new("-") {
        transfer.get(&args.source, &mut tokio::io::stdout(), &ProgressBar::hidden()).await?;
        return Ok(0);
    }
    let user = transfer.user.as_deref();
    let entry =
        transfer.envd.call("filesystem.Filesystem/Stat", user, &json!({ "path": args.source })).await?;
    if entry["entry"]["type"] != "FILE_TYPE_DIRECTORY" {
        let name = args.source.rsplit('/').next().unwrap_or("file");
        let into = if args.destination.is_dir() { args.destination.join(name) } else { args.destination };
        transfer.get_file(&args.source, &into).await?;
        return Ok(0);
    }
    let root = entry["entry"]["path"].as_str().unwrap_or(&args.source).to_owned();
    let body = json!({ "path": args.source, "depth": 1000 });
    let listing = transfer.envd.call("filesystem.Filesystem/ListDir", user, &body).await?;
    make_local(&args.destination)?;
    for entry in listing["entries"].as_array().unwrap_or(&Vec::new()) {
        let Some(path) = entry["path"].as_str() else { continue };
        let target = local_target(&args.destination, &root, path)?;
        match entry["type"].as_str() {
            Some("FILE_TYPE_DIRECTORY") => make_local(&target)?,
            Some("FILE_TYPE_FILE") => transfer.get_file(path, &target).await?,
            _ => eprintln!("aenv: {} is left out: neither a file nor a folder", output::plain(path)),
        }
    }
    Ok(0)
}

/// Where an entry of a listing goes. The listing comes from the guest, which may lie: nothing leaves the destination.
fn local_target(destination: &Path, root: &str, path: &str) -> Result<PathBuf, CliError> {
    let relative = path.strip_prefix(root).map(|rest| rest.trim_start_matches('/')).unwrap_or_default();
    let safe = !relative.is_empty()
        && Path::new(relative).components().all(|part| matches!(part, std::path::Component::Normal(_)));
    if !safe {
        return Err(CliError::Sandbox(format!(
            "the sandbox names a path outside of the folder: {}",
            output::plain(path)
        )));
    }
    Ok(destination.join(relative))
}

fn make_local(folder: &Path) -> Result<(), CliError> {
    std::fs::create_dir_all(folder).map_err(CliError::io(folder.display().to_string()))
}

/// Files of one sandbox.
pub(super) struct Transfer {
    pub(super) envd: Envd,
    pub(super) user: Option<String>,
}

impl Transfer {
    fn query(&self, path: &str) -> Vec<(&'static str, String)> {
        let mut query = vec![("path", path.to_owned())];
        query.extend(self.user.clone().map(|user| ("username", user)));
        query
    }

    async fn put(&self, path: &str, body: reqwest::Body) -> Result<(), CliError> {
        let request = self.envd.request(Method::POST, "/files", None).query(&self.query(path));
        let request = request.header("Content-Type", "application/octet-stream").body(body);
        self.envd.send(request).await.map(drop)
    }

    async fn put_file(&self, local: &Path, remote: &str) -> Result<(), CliError> {
        let context = || local.display().to_string();
        let file = tokio::fs::File::open(local).await.map_err(CliError::io(context()))?;
        let size = file.metadata().await.map_err(CliError::io(context()))?.len();
        let bar = output::bytes_bar(Some(size), remote);
        let stream = counted(ReaderStream::with_capacity(file, 256 << 10), &bar);
        self.put(remote, reqwest::Body::wrap_stream(stream)).await?;
        bar.finish_and_clear();
        Ok(())
    }

    async fn make_folder(&self, path: &str) -> Result<(), CliError> {
        let made = self
            .envd
            .call("filesystem.Filesystem/MakeDir", self.user.as_deref(), &json!({ "path": path }))
            .await;
        match made {
            Ok(_) | Err(CliError::Api { status: 409, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Writes a file of the sandbox into `into`.
    pub(super) async fn get(
        &self,
        remote: &str,
        into: &mut (impl tokio::io::AsyncWrite + Unpin),
        bar: &ProgressBar,
    ) -> Result<(), CliError> {
        let request = self.envd.request(Method::GET, "/files", None).query(&self.query(remote));
        let response = self.envd.send(request).await?;
        bar.set_length(response.content_length().unwrap_or(0));
        let expected = response.content_length();
        let mut stream = response.bytes_stream();
        let mut received = 0;
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(|error| CliError::Sandbox(format!("{remote} broke off: {error}")))?;
            into.write_all(&piece).await.map_err(CliError::io("the destination"))?;
            received += piece.len() as u64;
            bar.set_position(received);
        }
        into.flush().await.map_err(CliError::io("the destination"))?;
        match expected {
            Some(expected) if expected != received => {
                Err(CliError::Sandbox(format!("{remote} broke off after {received} of {expected} bytes")))
            }
            _ => Ok(()),
        }
    }

    /// Beside, then renamed: a download that breaks leaves what was there before.
    async fn get_file(&self, remote: &str, local: &Path) -> Result<(), CliError> {
        let context = || local.display().to_string();
        let mut beside = local.as_os_str().to_owned();
        beside.push(".aenv-part");
        let bar = output::bytes_bar(Some(0), remote);
        let mut file = tokio::fs::File::create(&beside).await.map_err(CliError::io(context()))?;
        let got = self.get(remote, &mut file, &bar).await;
        drop(file);
        bar.finish_and_clear();
        if let Err(error) = got {
            // The error that matters is the one above.
            tokio::fs::remove_file(&beside).await.ok();
            return Err(error);
        }
        tokio::fs::rename(&beside, local).await.map_err(CliError::io(context()))
    }
}

fn counted<S, T, E>(stream: S, bar: &ProgressBar) -> impl futures::Stream<Item = Result<T, E>> + use<S, T, E>
where
    S: futures::Stream<Item = Result<T, E>>,
    T: AsRef<[u8]>,
{
    let bar = bar.clone();
    stream.inspect(move |piece| {
        if let Ok(piece) = piece {
            bar.inc(piece.as_ref().len() as u64);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lying_listing_stays_inside() {
        let inside = |path: &str| local_target(Path::new("/tmp/d"), "/home/user/x", path);
        assert_eq!(inside("/home/user/x/a/b").unwrap(), Path::new("/tmp/d/a/b"));
        for bad in ["/home/user/x/../../etc/passwd", "/etc/passwd", "/home/user/x", "/home/user/x//../y"] {
            assert!(inside(bad).is_err(), "{bad} was taken");
        }
    }
}
