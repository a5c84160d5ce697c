//! One file from one URL into a `.part` file, which goes on where it was when a connection broke, in this run or an earlier one.

use std::{
    fs, io,
    path::Path,
    time::{Duration, Instant},
};

use reqwest::{Client, Response, StatusCode, header};
use thiserror::Error;
use tokio::io::AsyncWriteExt;

/// No file of a manifest is larger; bounds what a server can fill a disk with.
const LARGEST: u64 = 1 << 30;

/// How long to try.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Attempts in a row that bring nothing.
    pub(crate) attempts: u32,
    /// Between two of them, and as much longer each time.
    pub(crate) pause: Duration,
    /// In all.
    pub(crate) whole: Duration,
}

/// Why a place does not give the file.
#[derive(Debug, Error)]
pub(crate) enum TransferError {
    #[error("it answers {0}")]
    Status(StatusCode),
    #[error("it sends more than {} MiB", LARGEST >> 20)]
    TooLarge,
    #[error("{0}")]
    Broken(String),
    #[error("it was not there within {0} s")]
    TimedOut(u64),
    /// The disk's fault and not the place's.
    #[error("{0}")]
    Disk(#[from] io::Error),
}

/// How an attempt ended.
enum Attempt {
    Whole,
    Broken(String),
}

/// Brings `part` to its end. Nothing is known of its content then.
pub(crate) async fn run(
    client: &Client,
    url: &str,
    part: &Path,
    patience: Patience,
    say: &(dyn Fn(&str) + Sync),
) -> Result<(), TransferError> {
    let deadline = Instant::now() + patience.whole;
    let mut fruitless = 0;
    loop {
        let before = length(part);
        let left = deadline.saturating_duration_since(Instant::now());
        let why = match tokio::time::timeout(left, attempt(client, url, part)).await {
            Err(_) => return Err(TransferError::TimedOut(patience.whole.as_secs())),
            Ok(Err(error)) => return Err(error),
            Ok(Ok(Attempt::Whole)) => return Ok(()),
            Ok(Ok(Attempt::Broken(why))) => why,
        };
        let now = length(part);
        fruitless = if now > before { 0 } else { fruitless + 1 };
        if fruitless >= patience.attempts {
            return Err(TransferError::Broken(why));
        }
        say(&format!("{why}; trying again, with {now} bytes there"));
        tokio::time::sleep(patience.pause * fruitless).await;
    }
}

pub(crate) fn length(part: &Path) -> u64 {
    fs::metadata(part).map_or(0, |meta| meta.len())
}

async fn attempt(client: &Client, url: &str, part: &Path) -> Result<Attempt, TransferError> {
    let have = length(part);
    let mut request = client.get(url);
    if have > 0 {
        request = request.header(header::RANGE, format!("bytes={have}-"));
    }
    let mut response = match request.send().await {
        Ok(response) => response,
        Err(error) => return Ok(Attempt::Broken(reason(&error))),
    };
    let mut options = tokio::fs::File::options();
    options.create(true);
    let mut size = match response.status() {
        StatusCode::PARTIAL_CONTENT if begins_at(&response) == Some(have) => {
            options.append(true);
            have
        }
        // It knows no ranges, or was not asked for one.
        StatusCode::OK => {
            options.write(true).truncate(true);
            0
        }
        // There is nothing after it: it is whole, or another file.
        StatusCode::RANGE_NOT_SATISFIABLE if have > 0 => return Ok(Attempt::Whole),
        StatusCode::PARTIAL_CONTENT => {
            fs::remove_file(part)?;
            return Ok(Attempt::Broken("it sends another range than was asked for".to_owned()));
        }
        status @ (StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS) => {
            return Ok(Attempt::Broken(format!("it answers {status}")));
        }
        status if status.is_server_error() => return Ok(Attempt::Broken(format!("it answers {status}"))),
        status => return Err(TransferError::Status(status)),
    };
    let mut file = options.open(part).await?;
    let ended = loop {
        match response.chunk().await {
            Ok(Some(bytes)) => {
                size += bytes.len() as u64;
                if size > LARGEST {
                    return Err(TransferError::TooLarge);
                }
                file.write_all(&bytes).await?;
            }
            Ok(None) => break Attempt::Whole,
            Err(error) => break Attempt::Broken(reason(&error)),
        }
    };
    file.flush().await?;
    Ok(ended)
}

/// `bytes 100-199/200`.
fn begins_at(response: &Response) -> Option<u64> {
    let range = response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok()
}

/// An error's own words are about the request; what was wrong is at the end of its sources.
fn reason(error: &reqwest::Error) -> String {
    let mut last: &dyn std::error::Error = error;
    while let Some(next) = last.source() {
        last = next;
    }
    last.to_string()
}
