//! `GET /files`.

use std::{
    io,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
    time::SystemTime,
};

use axum::{
    body::Body,
    extract::{Query, State},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::Response,
};
use bytes::Bytes;
use futures::{StreamExt as _, stream};
use tokio::{
    fs::File,
    io::{AsyncRead, AsyncReadExt as _, AsyncSeekExt as _},
};
use tokio_util::io::ReaderStream;

use super::{
    FilesError, FilesQuery, Shared,
    compression::{self, Encoding},
    resolve, user_of,
};

/// Read at once.
const PIECE: usize = 256 << 10;
/// Of a file that claims to be empty, as those of `/proc` do, this much is looked at to learn whether it is.
const PROBE: usize = 64 << 10;

/// Answers `GET /files`.
pub async fn download(
    State(guest): State<Shared>,
    Query(query): Query<FilesQuery>,
    headers: HeaderMap,
) -> Result<Response, FilesError> {
    let user = user_of(&guest, &query, &headers)?;
    let path = resolve(&guest, query.path.as_deref().unwrap_or_default(), &user)?;
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let encoding = compression::accepted(text(header::ACCEPT_ENCODING)).ok_or(FilesError::NotAcceptable)?;
    let (file, size, modified) = open(&path).await?;
    let answer = Answer { path, modified };

    if let Some(range) = text(header::RANGE).filter(|_| size > 0).and_then(|range| Range::parse(range, size))
    {
        return match range {
            Range::Part { first, length } => answer.part(file, first, length, size).await,
            Range::Outside => answer.outside(size),
        };
    }
    if size == 0 {
        return answer.of_unknown_size(file).await;
    }
    match encoding {
        Encoding::Identity => answer.whole(file, size),
        Encoding::Gzip => answer.compressed(file),
    }
}

async fn open(path: &Path) -> Result<(File, u64, Option<SystemTime>), FilesError> {
    let found = tokio::fs::metadata(path).await.map_err(|source| FilesError::io(path, source))?;
    if found.is_dir() {
        return Err(FilesError::Directory(path.to_owned()));
    }
    // Opening a pipe waits for its other end, opening a socket fails.
    if found.file_type().is_fifo() || found.file_type().is_socket() {
        return Err(FilesError::NotRegular(path.to_owned()));
    }
    let file = File::open(path).await.map_err(|source| FilesError::io(path, source))?;
    Ok((file, found.len(), found.modified().ok()))
}

struct Answer {
    path: PathBuf,
    modified: Option<SystemTime>,
}

impl Answer {
    fn whole(&self, file: File, size: u64) -> Result<Response, FilesError> {
        self.sized(StatusCode::OK, file.take(size), size, &[])
    }

    async fn part(&self, mut file: File, first: u64, length: u64, size: u64) -> Result<Response, FilesError> {
        let io = |source| FilesError::io(self.path.clone(), source);
        file.seek(io::SeekFrom::Start(first)).await.map_err(io)?;
        let range = format!("bytes {first}-{}/{size}", first + length - 1);
        self.sized(StatusCode::PARTIAL_CONTENT, file.take(length), length, &[(header::CONTENT_RANGE, range)])
    }

    fn outside(&self, size: u64) -> Result<Response, FilesError> {
        let range = format!("bytes */{size}");
        self.build(StatusCode::RANGE_NOT_SATISFIABLE, Body::empty(), &[(header::CONTENT_RANGE, range)])
    }

    fn compressed(&self, file: File) -> Result<Response, FilesError> {
        let body =
            Body::from_stream(Box::pin(compression::deflate(ReaderStream::with_capacity(file, PIECE))));
        self.build(StatusCode::OK, body, &[(header::CONTENT_ENCODING, "gzip".to_owned())])
    }

    /// The size is known when the end comes within the first look; otherwise the body ends when the file does.
    async fn of_unknown_size(&self, mut file: File) -> Result<Response, FilesError> {
        let mut start = Vec::with_capacity(PROBE);
        let read = (&mut file).take(PROBE as u64).read_to_end(&mut start).await;
        let read = read.map_err(|source| FilesError::io(self.path.clone(), source))?;
        if read < PROBE {
            let size = [(header::CONTENT_LENGTH, read.to_string())];
            return self.build(StatusCode::OK, Body::from(start), &size);
        }
        let start = stream::once(async { Ok(Bytes::from(start)) });
        let body = Body::from_stream(start.chain(ReaderStream::with_capacity(file, PIECE)));
        self.build(StatusCode::OK, body, &[])
    }

    fn sized(
        &self,
        status: StatusCode,
        contents: impl AsyncRead + Send + 'static,
        size: u64,
        more: &[(header::HeaderName, String)],
    ) -> Result<Response, FilesError> {
        let body = Body::from_stream(ReaderStream::with_capacity(contents, PIECE));
        let length = (header::CONTENT_LENGTH, size.to_string());
        self.build(status, body, &[&[length], more].concat())
    }

    fn build(
        &self,
        status: StatusCode,
        body: Body,
        more: &[(header::HeaderName, String)],
    ) -> Result<Response, FilesError> {
        let mut answer = Response::builder()
            .status(status)
            .header(header::CONTENT_TYPE, "application/octet-stream")
            .header(header::CONTENT_DISPOSITION, disposition(&self.path))
            .header(header::ACCEPT_RANGES, "bytes")
            .header(header::VARY, "Accept-Encoding");
        if let Some(modified) = self.modified {
            answer = answer.header(header::LAST_MODIFIED, http_date(modified));
        }
        for (name, value) in more {
            answer = answer.header(name, value);
        }
        answer.body(body).map_err(|error| FilesError::Invalid(error.to_string()))
    }
}

/// `inline` with the file's name; what is not plain ASCII in the form of RFC 5987.
fn disposition(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b" !#$&+-.^_`|~()[]@=,'".contains(&byte);
    if name.bytes().all(is_plain) {
        return format!("inline; filename=\"{name}\"");
    }
    let mut encoded = String::new();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    format!("inline; filename*=UTF-8''{encoded}")
}

fn http_date(time: SystemTime) -> String {
    chrono::DateTime::<chrono::Utc>::from(time).format("%a, %d %b %Y %H:%M:%S GMT").to_string()
}

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Range {
    Part { first: u64, length: u64 },
    Outside,
}

impl Range {
    /// One range of a file of `size` bytes, which is not empty. `None` when the header asks for something else, which is then ignored,
    /// as HTTP allows.
    fn parse(header: &str, size: u64) -> Option<Self> {
        let (first, last) = header.strip_prefix("bytes=")?.trim().split_once('-')?;
        let (first, last) = match (first.trim(), last.trim()) {
            ("", suffix) => match suffix.parse::<u64>().ok()? {
                0 => return Some(Self::Outside),
                suffix => (size.saturating_sub(suffix), size - 1),
            },
            (first, "") => (first.parse().ok()?, size - 1),
            (first, last) => (first.parse().ok()?, last.parse::<u64>().ok()?.min(size - 1)),
        };
        if first >= size {
            return Some(Self::Outside);
        }
        (first <= last).then(|| Self::Part { first, length: last - first + 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        let part = |first, length| Some(Range::Part { first, length });
        assert_eq!(Range::parse("bytes=0-0", 10), part(0, 1));
        assert_eq!(Range::parse("bytes=2-", 10), part(2, 8));
        assert_eq!(Range::parse("bytes=-3", 10), part(7, 3));
        assert_eq!(Range::parse("bytes=-30", 10), part(0, 10));
        assert_eq!(Range::parse("bytes=5-99", 10), part(5, 5));
        assert_eq!(Range::parse("bytes=10-", 10), Some(Range::Outside));
        assert_eq!(Range::parse("bytes=-0", 10), Some(Range::Outside));
        for ignored in ["bytes=5-2", "bytes=0-1,3-4", "lines=1-2", "bytes=x-y", "bytes=--"] {
            assert_eq!(Range::parse(ignored, 10), None, "{ignored}");
        }
    }

    #[test]
    fn names_in_headers() {
        assert_eq!(disposition("/a/b c.txt".as_ref()), "inline; filename=\"b c.txt\"");
        assert_eq!(disposition("/a/ü\"\n".as_ref()), "inline; filename*=UTF-8''%C3%BC%22%0A");
    }
}
