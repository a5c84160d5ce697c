//! A build's log: lines of JSON in a file, so that it survives the server and is never held whole in memory.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use chrono::{DateTime, Utc};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::TemplateError;

/// One entry of a build's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildLog {
    /// When.
    pub timestamp: DateTime<Utc>,
    /// How serious.
    pub level: LogLevel,
    /// The text, without escape sequences.
    pub message: String,
    /// The step that it belongs to: `base`, `1`, `2`, ..., `finalize`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
}

/// How serious an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// For those who look closely.
    Debug,
    /// What happens.
    Info,
    /// What may be wrong.
    Warn,
    /// What is wrong.
    Error,
}

/// Longest message of one entry; the rest of a longer line becomes further entries.
const MESSAGE_BYTES: usize = 8 << 10;
/// Bytes of one build's log; what comes after is dropped, and a last entry says so.
const LOG_BYTES: u64 = 16 << 20;

/// An append-only log file with an index of its lines. Cheap to clone.
#[derive(Clone)]
pub(crate) struct LogFile {
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    path: PathBuf,
    file: File,
    /// Where each entry begins.
    starts: Vec<u64>,
    end: u64,
}

impl LogFile {
    /// Opens a log, new or left by an earlier server; a torn last line is cut off.
    pub(crate) fn open(path: &Path) -> Result<Self, TemplateError> {
        let context = || format!("build log {}", path.display());
        let file = OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .open(path)
            .map_err(TemplateError::io(context()))?;
        let (mut starts, mut end) = (Vec::new(), 0);
        let mut reader = BufReader::new(&file);
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = reader.read_until(b'\n', &mut line).map_err(TemplateError::io(context()))?;
            if read == 0 || line.last() != Some(&b'\n') {
                break;
            }
            starts.push(end);
            end += read as u64;
        }
        file.set_len(end).map_err(TemplateError::io(context()))?;
        Ok(Self { inner: Arc::new(Mutex::new(Inner { path: path.to_owned(), file, starts, end })) })
    }

    /// Appends a message, one entry for each line. A log that cannot be written does not fail the build.
    pub(crate) fn push(&self, level: LogLevel, step: Option<&str>, text: &str) {
        for line in clean(text).lines() {
            for piece in pieces(line) {
                self.append(&BuildLog {
                    timestamp: Utc::now(),
                    level,
                    message: piece.to_owned(),
                    step: step.map(str::to_owned),
                });
            }
        }
    }

    fn append(&self, entry: &BuildLog) {
        let mut inner = self.inner.lock();
        if inner.end > LOG_BYTES {
            return;
        }
        let mut line = serde_json::to_vec(entry).expect("a log entry has only strings");
        line.push(b'\n');
        if inner.end + line.len() as u64 > LOG_BYTES {
            line = serde_json::to_vec(&BuildLog {
                level: LogLevel::Warn,
                message: format!("the log has reached {} MiB; what follows is not kept", LOG_BYTES >> 20),
                ..entry.clone()
            })
            .expect("a log entry has only strings");
            line.resize((LOG_BYTES - inner.end) as usize + 1, b' ');
            line.push(b'\n');
        }
        match inner.file.write_all(&line) {
            Ok(()) => {
                let start = inner.end;
                inner.starts.push(start);
                inner.end += line.len() as u64;
            }
            Err(error) => {
                tracing::warn!(path = %inner.path.display(), %error, "a build's log cannot be written")
            }
        }
    }

    /// Up to `limit` entries from number `offset` on; none beyond the end.
    pub(crate) fn read(&self, offset: usize, limit: usize) -> Result<Vec<BuildLog>, TemplateError> {
        let inner = self.inner.lock();
        let Some(&start) = inner.starts.get(offset) else { return Ok(Vec::new()) };
        let end = inner.starts.get(offset.saturating_add(limit)).copied().unwrap_or(inner.end);
        let context = || format!("build log {}", inner.path.display());
        let mut file = File::open(&inner.path).map_err(TemplateError::io(context()))?;
        file.seek(SeekFrom::Start(start)).map_err(TemplateError::io(context()))?;
        drop(inner);
        let lines = BufReader::new(file.take(end - start)).lines();
        Ok(lines.map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok()).collect())
    }
}

/// Without terminal escape sequences and control characters, which a guest may print to fool a reader.
fn clean(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\u{1b}' => {
                if chars.next_if_eq(&'[').is_some() {
                    while chars.next().is_some_and(|c| !('\u{40}'..='\u{7e}').contains(&c)) {}
                }
            }
            '\n' | '\t' => out.push(c),
            c if c.is_control() => {}
            c => out.push(c),
        }
    }
    out
}

fn pieces(line: &str) -> impl Iterator<Item = &str> {
    let mut rest = line;
    let mut first = true;
    std::iter::from_fn(move || {
        if rest.is_empty() && !first {
            return None;
        }
        first = false;
        let mut cut = rest.len().min(MESSAGE_BYTES);
        while !rest.is_char_boundary(cut) {
            cut -= 1;
        }
        let (piece, after) = rest.split_at(cut);
        rest = after;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_by_offset_and_survive() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.jsonl");
        let log = LogFile::open(&path).unwrap();
        for number in 0..250 {
            log.push(LogLevel::Info, Some("1"), &format!("line {number}"));
        }
        assert_eq!(log.read(0, 100).unwrap().len(), 100);
        assert_eq!(log.read(200, 100).unwrap().len(), 50);
        assert_eq!(log.read(200, 100).unwrap()[0].message, "line 200");
        assert!(log.read(250, 100).unwrap().is_empty());
        assert!(log.read(usize::MAX, 100).unwrap().is_empty());

        std::fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"torn").unwrap();
        let again = LogFile::open(&path).unwrap();
        assert!(again.read(250, 1).unwrap().is_empty());
        again.push(LogLevel::Error, None, "after");
        assert_eq!(again.read(250, 1).unwrap()[0].message, "after");
    }

    #[test]
    fn escapes_are_removed_and_long_lines_split() {
        assert_eq!(clean("\u{1b}[31mred\u{1b}[0m\r\n\u{7}x"), "red\nx");
        let long = "é".repeat(MESSAGE_BYTES);
        assert_eq!(pieces(&long).map(str::len).sum::<usize>(), long.len());
        assert!(pieces(&long).all(|piece| piece.len() <= MESSAGE_BYTES));
    }
}
