//! The audit log: who asked for which change of what, one line of JSON each, in `<home>/logs/audit.log`.
//!
//! Lines are written before the answer goes out, so that none is lost when the server dies. They hold ids, never keys, bodies or
//! queries. A file that has grown to 16 MiB is set aside; eight of them are kept.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use aenv_api::{REQUEST_ID_HEADER, SANDBOX_ID_HEADER};
use axum::{
    extract::{Request, State},
    middleware::Next,
    response::Response,
};
use chrono::{DateTime, SecondsFormat, Utc};
use http::{Method, StatusCode};
use parking_lot::Mutex;
use serde::Serialize;

use crate::keys::Caller;

/// Bytes after which a file is set aside.
const LIMIT: u64 = 16 << 20;
/// Files that are kept beside the one that is written.
const KEPT: u32 = 8;
/// A path is cut off after so many characters.
const LONGEST_PATH: usize = 300;

/// One line.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Entry<'a> {
    at: String,
    request: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    team: Option<&'a str>,
    /// Id of the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    method: &'a str,
    path: &'a str,
    status: u16,
    /// Id of what was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    made: Option<&'a str>,
}

/// Set on an answer: the id of what a request made.
#[derive(Clone, Debug)]
pub struct Made(pub String);

/// The log. Cheap to clone.
#[derive(Clone)]
pub struct Audit {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    limit: u64,
    open: Mutex<Option<Open>>,
}

struct Open {
    file: File,
    size: u64,
}

impl Audit {
    /// Opens the log of a home.
    pub fn open(home: &Path) -> io::Result<Self> {
        let folder = home.join("logs");
        fs::create_dir_all(&folder)?;
        Self::with_limit(&folder.join("audit.log"), LIMIT)
    }

    fn with_limit(path: &Path, limit: u64) -> io::Result<Self> {
        let open = Mutex::new(Some(open(path)?));
        Ok(Self { inner: Arc::new(Inner { path: path.to_owned(), limit, open }) })
    }

    fn write(&self, entry: &Entry<'_>) {
        if let Err(error) = self.inner.write(entry) {
            tracing::error!(%error, path = %self.inner.path.display(), "the audit log cannot be written");
        }
    }
}

impl Inner {
    fn write(&self, entry: &Entry<'_>) -> io::Result<()> {
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        let mut open_now = self.open.lock();
        if open_now.as_ref().is_some_and(|open| open.size >= self.limit) {
            *open_now = None;
            self.set_aside()?;
        }
        let log = match &mut *open_now {
            Some(log) => log,
            // It could not be opened the last time.
            empty => empty.insert(open(&self.path)?),
        };
        log.file.write_all(&line)?;
        log.size += line.len() as u64;
        Ok(())
    }

    /// `audit.log` becomes `audit.log.1`, that `.2`, and so on; the last one goes.
    fn set_aside(&self) -> io::Result<()> {
        let numbered = |n: u32| {
            let mut name = self.path.clone().into_os_string();
            name.push(format!(".{n}"));
            PathBuf::from(name)
        };
        for n in (1..KEPT).rev() {
            rename(&numbered(n), &numbered(n + 1))?;
        }
        rename(&self.path, &numbered(1))
    }
}

fn open(path: &Path) -> io::Result<Open> {
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
    let size = file.metadata()?.len();
    Ok(Open { file, size })
}

fn rename(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Notes every change that is asked for, and every refusal of a key. Inside of it a handler's answer may say what was [`Made`].
pub async fn note(State(audit): State<Audit>, request: Request, next: Next) -> Response {
    let method = request.method().clone();
    let path: String = request.uri().path().chars().take(LONGEST_PATH).collect();
    let id = request.headers().get(REQUEST_ID_HEADER).and_then(|id| id.to_str().ok()).map(str::to_owned);
    let response = next.run(request).await;
    let status = response.status();
    let refused = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
    if !refused && matches!(method, Method::GET | Method::HEAD | Method::OPTIONS) {
        return response;
    }
    let caller = response.extensions().get::<Caller>();
    let made = response.extensions().get::<Made>().map(|made| made.0.as_str());
    let sandbox = response.headers().get(SANDBOX_ID_HEADER).and_then(|id| id.to_str().ok());
    audit.write(&Entry {
        at: stamp(Utc::now()),
        request: id.as_deref().unwrap_or("-"),
        team: caller.map(|caller| caller.team.as_str()),
        key: caller.map(|caller| caller.key_id.as_str()),
        method: method.as_str(),
        path: &path,
        status: status.as_u16(),
        made: made.or(sandbox),
    });
    response
}

fn stamp(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Millis, true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn entry(path: &str) -> Entry<'_> {
        Entry {
            at: stamp(Utc::now()),
            request: "r",
            team: Some("default"),
            key: Some("first"),
            method: "POST",
            path,
            status: 201,
            made: None,
        }
    }

    #[test]
    fn files_are_the_owners_and_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let audit = Audit::with_limit(&path, 1000).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        for n in 0..200 {
            audit.write(&entry(&format!("/number/{n:03}")));
        }
        let files: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()).collect();
        assert_eq!(files.len(), 9, "one that is written, eight that are kept");
        for file in &files {
            assert!(fs::metadata(file).unwrap().len() < 1200);
            let text = fs::read_to_string(file).unwrap();
            assert!(text.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()));
        }
        assert!(fs::read_to_string(&path).unwrap().contains("/number/199"));
        // Another server goes on where this one ended.
        drop(audit);
        let before = fs::metadata(&path).unwrap().len();
        Audit::with_limit(&path, u64::MAX).unwrap().write(&entry("/again"));
        assert!(fs::metadata(&path).unwrap().len() > before);
    }
}
