//! Contents of files, up and down, as streams.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use http::{HeaderValue, Method, header};
use http_body_util::{BodyExt as _, BodyStream, StreamBody};
use hyper::body::{Frame, Incoming};

use super::{EnvdClient, EnvdError, full};

/// A file on its way from the guest.
pub struct Download {
    /// Its size in bytes where the guest knows it (it does not for files like those of `/proc`).
    pub size: Option<u64>,
    body: BodyStream<Incoming>,
}

impl Stream for Download {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            return match futures::ready!(self.body.poll_next_unpin(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => Poll::Ready(Some(Ok(data))),
                    Err(_trailers) => continue,
                },
                Some(Err(error)) => Poll::Ready(Some(Err(io::Error::other(error)))),
                None => Poll::Ready(None),
            };
        }
    }
}

impl EnvdClient {
    /// Writes what `contents` gives to `path` in the guest (relative paths: from the user's home). Missing folders are made,
    /// a file that exists is replaced; the file belongs to `user` (`None`: the default user).
    pub async fn upload<S>(&self, path: &str, user: Option<&str>, contents: S) -> Result<(), EnvdError>
    where
        S: Stream<Item = io::Result<Bytes>> + Send + 'static,
    {
        let body = StreamBody::new(contents.map_ok(Frame::data)).boxed_unsync();
        let mut request = self.request(Method::POST, &files_url(path, user), body)?;
        request
            .headers_mut()
            .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        self.send(request).await.map(drop)
    }

    /// Reads `path` in the guest, following links.
    pub async fn download(&self, path: &str, user: Option<&str>) -> Result<Download, EnvdError> {
        let request = self.request(Method::GET, &files_url(path, user), full(Vec::new()))?;
        let answer = self.send(request).await?;
        let size =
            answer.headers().get(header::CONTENT_LENGTH).and_then(|size| size.to_str().ok()?.parse().ok());
        Ok(Download { size, body: BodyStream::new(answer.into_body()) })
    }
}

fn files_url(path: &str, user: Option<&str>) -> String {
    let mut url = format!("/files?path={}", query_value(path));
    if let Some(user) = user {
        url.push_str("&username=");
        url.push_str(&query_value(user));
    }
    url
}

/// Percent-encodes everything but RFC 3986's unreserved characters and `/`.
fn query_value(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_encoded() {
        assert_eq!(files_url("/a b/ü+&", Some("root")), "/files?path=/a%20b/%C3%BC%2B%26&username=root");
    }
}
