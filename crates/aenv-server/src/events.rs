//! What sandboxes did, for `/logs`: a bounded log for each sandbox, in the server's database.
//!
//! Writers never wait: events go through a queue to one thread that writes them in batches. A full queue drops events and
//! says how many. A log outlives its sandbox by a day.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use aenv_api::{ApiError, LogLevel, LogsDirection, SandboxLogEntry};
use aenv_types::{SandboxId, TeamId};
use chrono::{DateTime, Utc};
use tokio::sync::{mpsc, oneshot};

use crate::db::Db;

/// Events that may wait to be written.
const QUEUE: usize = 4096;

/// Events that are kept for each sandbox.
const KEPT: i64 = 2000;

/// How long a log is kept after its last event.
const RETENTION: Duration = Duration::from_secs(24 * 3600);

/// Something that a sandbox did.
#[derive(Clone, Debug)]
pub struct Event {
    /// Which sandbox.
    pub sandbox: SandboxId,
    /// Whose.
    pub team: TeamId,
    /// When.
    pub at: DateTime<Utc>,
    /// How much it matters.
    pub level: LogLevel,
    /// What.
    pub message: String,
    /// More about it.
    pub fields: BTreeMap<String, String>,
}

impl Event {
    /// An ordinary one, now.
    pub fn info(team: &TeamId, sandbox: &SandboxId, message: impl Into<String>) -> Self {
        Self {
            sandbox: sandbox.clone(),
            team: team.clone(),
            at: Utc::now(),
            level: LogLevel::Info,
            message: message.into(),
            fields: BTreeMap::new(),
        }
    }

    /// The same, of another importance.
    pub fn at_level(self, level: LogLevel) -> Self {
        Self { level, ..self }
    }

    /// The same, with more about it.
    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.fields.insert(name.to_owned(), value.to_string());
        self
    }
}

enum Job {
    Write(Box<Event>),
    Flush(oneshot::Sender<()>),
}

/// Which part of a log is asked for.
#[derive(Clone, Debug)]
pub struct LogQuery {
    /// Only events at or after (forward) or at or before (backward) this time, in ms since 1970.
    pub cursor_ms: Option<i64>,
    /// In which order.
    pub direction: LogsDirection,
    /// At most so many.
    pub limit: i64,
    /// Only events of at least this importance.
    pub level: LogLevel,
    /// Only events whose message or fields contain this.
    pub search: Option<String>,
}

/// The logs. Cheap to clone.
#[derive(Clone)]
pub struct Events {
    queue: mpsc::Sender<Job>,
    dropped: Arc<AtomicU64>,
    db: Db,
}

impl Events {
    /// Starts the writer, which ends when the last clone is dropped.
    pub fn start(db: Db) -> Self {
        let (queue, jobs) = mpsc::channel(QUEUE);
        let writer = db.clone();
        std::thread::Builder::new()
            .name("events".to_owned())
            .spawn(move || write_all(&writer, jobs))
            .map_or_else(|error| tracing::error!(%error, "the event writer did not start"), drop);
        Self { queue, dropped: Arc::default(), db }
    }

    /// Notes an event. Never waits.
    pub fn push(&self, event: Event) {
        tracing::debug!(sandbox = %event.sandbox, "{}", event.message);
        if self.queue.try_send(Job::Write(Box::new(event))).is_err() {
            let so_far = self.dropped.fetch_add(1, Ordering::Relaxed);
            if so_far.is_power_of_two() || so_far == 0 {
                tracing::warn!(dropped = so_far + 1, "events are dropped: the database does not keep up");
            }
        }
    }

    /// Reads a log. `None`: there is none of this sandbox in this team.
    pub async fn read(
        &self,
        team: &TeamId,
        sandbox: &SandboxId,
        query: LogQuery,
    ) -> Result<Option<Vec<SandboxLogEntry>>, ApiError> {
        let (done, written) = oneshot::channel();
        if self.queue.send(Job::Flush(done)).await.is_ok() {
            let _ = tokio::time::timeout(Duration::from_secs(1), written).await;
        }
        let (team, sandbox) = (team.to_string(), sandbox.to_string());
        self.db.run(move |c| select(c, &team, &sandbox, &query)).await
    }
}

fn write_all(db: &Db, mut jobs: mpsc::Receiver<Job>) {
    let mut since_trim = 0;
    let mut batch = Vec::new();
    while jobs.blocking_recv_many(&mut batch, 256) > 0 {
        let mut flushed = Vec::new();
        let mut events = Vec::new();
        for job in batch.drain(..) {
            match job {
                Job::Write(event) => events.push(event),
                Job::Flush(done) => flushed.push(done),
            }
        }
        since_trim += events.len();
        let trim = since_trim >= 1000;
        if trim {
            since_trim = 0;
        }
        if let Err(error) = db.with(|c| insert(c, &events, trim)) {
            tracing::error!(%error, lost = events.len(), "events could not be written");
        }
        for done in flushed {
            let _ = done.send(());
        }
    }
}

fn insert(connection: &mut rusqlite::Connection, events: &[Box<Event>], trim: bool) -> rusqlite::Result<()> {
    if events.is_empty() {
        return Ok(());
    }
    let transaction = connection.transaction()?;
    {
        let mut statement = transaction.prepare_cached(
            "INSERT INTO events (sandbox, team, at_ms, level, message, fields) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )?;
        for event in events {
            let fields = serde_json::to_string(&event.fields).unwrap_or_else(|_| "{}".to_owned());
            statement.execute((
                event.sandbox.as_str(),
                event.team.as_str(),
                event.at.timestamp_millis(),
                event.level as i64,
                &event.message,
                fields,
            ))?;
        }
    }
    if trim {
        let oldest = Utc::now().timestamp_millis() - i64::try_from(RETENTION.as_millis()).unwrap_or(i64::MAX);
        transaction.execute(
            "DELETE FROM events WHERE sandbox IN
                 (SELECT sandbox FROM events GROUP BY sandbox HAVING max(at_ms) < ?1)",
            [oldest],
        )?;
        transaction.execute(
            "DELETE FROM events WHERE id IN (SELECT id FROM
                 (SELECT id, row_number() OVER (PARTITION BY sandbox ORDER BY id DESC) AS place FROM events)
             WHERE place > ?1)",
            [KEPT],
        )?;
    }
    transaction.commit()
}

fn select(
    connection: &mut rusqlite::Connection,
    team: &str,
    sandbox: &str,
    query: &LogQuery,
) -> rusqlite::Result<Option<Vec<SandboxLogEntry>>> {
    let known: bool = connection.query_row(
        "SELECT EXISTS (SELECT 1 FROM events WHERE sandbox = ?1 AND team = ?2)",
        (sandbox, team),
        |row| row.get(0),
    )?;
    if !known {
        return Ok(None);
    }
    let (compare, order) = match query.direction {
        LogsDirection::Forward => (">=", "ASC"),
        LogsDirection::Backward => ("<=", "DESC"),
    };
    let text = format!(
        "SELECT at_ms, level, message, fields FROM events
         WHERE sandbox = ?1 AND team = ?2 AND level >= ?3 AND (?4 IS NULL OR at_ms {compare} ?4)
           AND (?5 IS NULL OR instr(message || fields, ?5) > 0)
         ORDER BY at_ms {order}, id {order} LIMIT ?6"
    );
    let mut statement = connection.prepare_cached(&text)?;
    let search = query.search.as_deref();
    let rows = statement.query_map(
        (sandbox, team, query.level as i64, query.cursor_ms, search, query.limit),
        |row| {
            let fields: String = row.get(3)?;
            Ok(SandboxLogEntry {
                timestamp: DateTime::from_timestamp_millis(row.get(0)?).unwrap_or_default(),
                level: match row.get::<_, i64>(1)? {
                    0 => LogLevel::Debug,
                    1 => LogLevel::Info,
                    2 => LogLevel::Warn,
                    _ => LogLevel::Error,
                },
                message: row.get(2)?,
                fields: serde_json::from_str(&fields).unwrap_or_default(),
            })
        },
    )?;
    rows.collect::<rusqlite::Result<Vec<_>>>().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> LogQuery {
        LogQuery {
            cursor_ms: None,
            direction: LogsDirection::Forward,
            limit: 100,
            level: LogLevel::Debug,
            search: None,
        }
    }

    #[tokio::test]
    async fn what_was_noted_is_read_back() {
        let (_dir, db) = crate::db::temporary();
        let events = Events::start(db);
        let (team, id) = (TeamId::default_team(), SandboxId::random());
        events.push(Event::info(&team, &id, "created").with("template", "base"));
        events.push(Event::info(&team, &id, "it hurts").at_level(LogLevel::Error));
        let messages = |entries: Option<Vec<SandboxLogEntry>>| {
            entries.unwrap().into_iter().map(|e| e.message).collect::<Vec<_>>()
        };
        let read = |query| events.read(&team, &id, query);
        assert_eq!(messages(read(all()).await.unwrap()), ["created", "it hurts"]);
        let backward = LogQuery { direction: LogsDirection::Backward, limit: 1, ..all() };
        assert_eq!(messages(read(backward).await.unwrap()), ["it hurts"]);
        let errors = LogQuery { level: LogLevel::Warn, ..all() };
        assert_eq!(messages(read(errors).await.unwrap()), ["it hurts"]);
        let search = LogQuery { search: Some("base".into()), ..all() };
        assert_eq!(messages(read(search).await.unwrap()), ["created"]);
        let other: TeamId = "other".parse().unwrap();
        assert_eq!(events.read(&other, &id, all()).await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_log_is_bounded() {
        let (_dir, db) = crate::db::temporary();
        let (team, id) = (TeamId::default_team(), SandboxId::random());
        let many: Vec<_> =
            (0..KEPT + 50).map(|n| Box::new(Event::info(&team, &id, format!("{n}")))).collect();
        db.with(|c| insert(c, &many, true)).unwrap();
        let count: i64 = db.with(|c| c.query_row("SELECT count(*) FROM events", [], |r| r.get(0))).unwrap();
        assert_eq!(count, KEPT);
    }
}
