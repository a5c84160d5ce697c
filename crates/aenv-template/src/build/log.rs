//! A build's log: lines of JSON in a file, so that it survives the server and is never held whole in memory.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Write},
    os::unix::fs::FileExt,
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

/// In which order entries are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogOrder {
    /// As they were written.
    OldestFirst,
    /// The other way round.
    NewestFirst,
}

/// Which part of a log is asked for.
#[derive(Clone, Copy, Debug)]
pub struct LogQuery {
    /// Only entries that are at least this serious. Everything below counts those.
    pub level: LogLevel,
    /// Only entries from this time on, or back from it, in ms since 1970.
    pub from_ms: Option<i64>,
    /// In which order.
    pub order: LogOrder,
    /// So many are left out first.
    pub offset: usize,
    /// At most so many.
    pub limit: usize,
}

impl LogQuery {
    fn wants(&self, place: &Place) -> bool {
        let in_time = self.from_ms.is_none_or(|from| match self.order {
            LogOrder::OldestFirst => place.at_ms >= from,
            LogOrder::NewestFirst => place.at_ms <= from,
        });
        in_time && place.level >= self.level
    }
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
    entries: Vec<Place>,
    end: u64,
}

/// Where an entry is, and what it is found by.
#[derive(Clone, Copy)]
struct Place {
    start: u64,
    bytes: u32,
    level: LogLevel,
    at_ms: i64,
}

impl Place {
    fn of(entry: &BuildLog, start: u64, line: &[u8]) -> Self {
        let bytes = u32::try_from(line.len()).expect("a message has a limit");
        Self { start, bytes, level: entry.level, at_ms: entry.timestamp.timestamp_millis() }
    }
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
        let (mut entries, mut end) = (Vec::new(), 0);
        let mut reader = BufReader::new(&file);
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = reader.read_until(b'\n', &mut line).map_err(TemplateError::io(context()))?;
            if read == 0 || line.last() != Some(&b'\n') {
                break;
            }
            if let Ok(entry) = serde_json::from_slice(&line) {
                entries.push(Place::of(&entry, end, &line));
            }
            end += read as u64;
        }
        file.set_len(end).map_err(TemplateError::io(context()))?;
        Ok(Self { inner: Arc::new(Mutex::new(Inner { path: path.to_owned(), file, entries, end })) })
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
                let place = Place::of(entry, inner.end, &line);
                inner.entries.push(place);
                inner.end += line.len() as u64;
            }
            Err(error) => {
                tracing::warn!(path = %inner.path.display(), %error, "a build's log cannot be written")
            }
        }
    }

    /// The entries that are asked for; none beyond the end.
    pub(crate) fn read(&self, query: &LogQuery) -> Result<Vec<BuildLog>, TemplateError> {
        let (places, file, context) = {
            let inner = self.inner.lock();
            let context = format!("build log {}", inner.path.display());
            let file = inner.file.try_clone().map_err(TemplateError::io(context.clone()))?;
            let wanted = inner.entries.iter().filter(|place| query.wants(place));
            let places: Vec<Place> = match query.order {
                LogOrder::OldestFirst => wanted.skip(query.offset).take(query.limit).copied().collect(),
                LogOrder::NewestFirst => wanted.rev().skip(query.offset).take(query.limit).copied().collect(),
            };
            (places, file, context)
        };
        let mut line = Vec::new();
        let mut found = Vec::with_capacity(places.len());
        for place in places {
            line.resize(place.bytes as usize, 0);
            file.read_exact_at(&mut line, place.start).map_err(TemplateError::io(context.clone()))?;
            found.extend(serde_json::from_slice::<BuildLog>(&line).ok());
        }
        Ok(found)
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

    const ALL: LogQuery = LogQuery {
        level: LogLevel::Debug,
        from_ms: None,
        order: LogOrder::OldestFirst,
        offset: 0,
        limit: 100,
    };

    #[test]
    fn entries_are_read_by_offset_and_survive() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.jsonl");
        let log = LogFile::open(&path).unwrap();
        for number in 0..250 {
            log.push(LogLevel::Info, Some("1"), &format!("line {number}"));
        }
        let read = |log: &LogFile, offset| log.read(&LogQuery { offset, ..ALL }).unwrap();
        assert_eq!(read(&log, 0).len(), 100);
        assert_eq!(read(&log, 200).len(), 50);
        assert_eq!(read(&log, 200)[0].message, "line 200");
        assert!(read(&log, 250).is_empty());
        assert!(read(&log, usize::MAX).is_empty());

        std::fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"torn").unwrap();
        let again = LogFile::open(&path).unwrap();
        assert!(read(&again, 250).is_empty());
        again.push(LogLevel::Error, None, "after");
        assert_eq!(read(&again, 250)[0].message, "after");
    }

    #[test]
    fn entries_are_found_by_level_and_time_in_either_order() {
        let dir = tempfile::tempdir().unwrap();
        let log = LogFile::open(&dir.path().join("log.jsonl")).unwrap();
        for (level, text) in [
            (LogLevel::Info, "one"),
            (LogLevel::Warn, "two"),
            (LogLevel::Debug, "three"),
            (LogLevel::Error, "four"),
        ] {
            log.push(level, None, text);
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        let read = |query: LogQuery| {
            log.read(&query).unwrap().into_iter().map(|entry| entry.message).collect::<Vec<_>>()
        };
        let serious = LogQuery { level: LogLevel::Warn, ..ALL };
        assert_eq!(read(serious), ["two", "four"]);
        // A client goes on from as many as it has got.
        assert_eq!(read(LogQuery { offset: 1, ..serious }), ["four"]);
        let newest = LogQuery { order: LogOrder::NewestFirst, limit: 2, ..ALL };
        assert_eq!(read(newest), ["four", "three"]);
        let second = log.read(&ALL).unwrap()[1].timestamp.timestamp_millis();
        assert_eq!(read(LogQuery { from_ms: Some(second), ..ALL }), ["two", "three", "four"]);
        assert_eq!(read(LogQuery { from_ms: Some(second), ..newest }), ["two", "one"]);
    }

    #[test]
    fn escapes_are_removed_and_long_lines_split() {
        assert_eq!(clean("\u{1b}[31mred\u{1b}[0m\r\n\u{7}x"), "red\nx");
        let long = "é".repeat(MESSAGE_BYTES);
        assert_eq!(pieces(&long).map(str::len).sum::<usize>(), long.len());
        assert!(pieces(&long).all(|piece| piece.len() <= MESSAGE_BYTES));
    }
}
