//! How often, and when last, a sandbox was created from each template on this node.

use std::collections::HashMap;

use chrono::{DateTime, Utc};

use crate::db::Db;

/// Counts of one template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spawned {
    /// Sandboxes.
    pub count: u64,
    /// When the last one was created.
    pub last: Option<DateTime<Utc>>,
}

/// The counts. Cheap to clone.
#[derive(Clone)]
pub struct Spawns {
    db: Db,
}

impl Spawns {
    /// Over the server's database.
    pub fn new(db: Db) -> Self {
        Self { db }
    }

    /// Counts one more sandbox of a template. A count that cannot be written is lost, and said in the log.
    pub async fn add(&self, template: &str) {
        let (template, now) = (template.to_owned(), Utc::now().timestamp_millis());
        let added = self
            .db
            .run(move |connection| {
                connection.execute(
                    "INSERT INTO spawns (template, count, last_ms) VALUES (?1, 1, ?2)
                     ON CONFLICT (template) DO UPDATE SET count = count + 1, last_ms = ?2",
                    (template, now),
                )
            })
            .await;
        if let Err(error) = added {
            tracing::warn!(%error, "a create is not counted");
        }
    }

    /// All counts, by template id.
    pub async fn all(&self) -> Result<HashMap<String, Spawned>, aenv_api::ApiError> {
        self.db
            .run(|connection| {
                let mut statement = connection.prepare("SELECT template, count, last_ms FROM spawns")?;
                let rows = statement.query_map([], |row| {
                    let count: i64 = row.get(1)?;
                    let last = DateTime::from_timestamp_millis(row.get(2)?);
                    Ok((row.get(0)?, Spawned { count: u64::try_from(count).unwrap_or(0), last }))
                })?;
                rows.collect()
            })
            .await
    }
}
