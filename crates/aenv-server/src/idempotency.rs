//! `Idempotency-Key` on create: the same key never makes two sandboxes, restarts included.

use std::{collections::HashMap, sync::Arc, time::Duration};

use aenv_api::ApiError;
use aenv_types::TeamId;
use chrono::Utc;
use http::{HeaderMap, StatusCode};
use parking_lot::Mutex;
use rusqlite::OptionalExtension;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::db::Db;

/// How long a key is remembered.
const RETENTION_SECS: i64 = 24 * 3600;

/// How long a repeat waits for the first request with its key.
const JOIN: Duration = Duration::from_secs(120);

type Slot = (TeamId, String);

/// Keys that were seen. Cheap to clone.
#[derive(Clone)]
pub struct Idempotency {
    db: Db,
    under_way: Arc<Mutex<HashMap<Slot, watch::Receiver<()>>>>,
}

/// What to do with a request.
pub enum Verdict {
    /// It is the first: do it and tell [`Ticket::finish`].
    Go(Ticket),
    /// It was done before: this was the answer.
    Repeat(serde_json::Value),
}

/// The right to do a request once.
pub struct Ticket {
    owner: Idempotency,
    slot: Slot,
    _running: watch::Sender<()>,
}

/// The key that a request carries; 400 when it is none.
pub fn key_of(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let text = value.to_str().unwrap_or_default();
    let fits = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    if text.is_empty() || text.len() > 255 || !text.bytes().all(fits) {
        return Err(ApiError::bad_request("Idempotency-Key has 1 to 255 letters, digits, - or _"));
    }
    Ok(Some(text.to_owned()))
}

/// What makes two requests the same.
pub fn fingerprint(request: &impl serde::Serialize) -> [u8; 32] {
    Sha256::digest(serde_json::to_vec(request).unwrap_or_default()).into()
}

impl Idempotency {
    /// Over the server's database.
    pub fn new(db: Db) -> Self {
        Self { db, under_way: Arc::default() }
    }

    /// Whether a request is to be done. A repeat of one that is under way waits for it.
    pub async fn begin(&self, team: &TeamId, key: &str, print: [u8; 32]) -> Result<Verdict, ApiError> {
        let slot = (team.clone(), key.to_owned());
        let deadline = tokio::time::Instant::now() + JOIN;
        loop {
            let (running, receiver) = watch::channel(());
            let first = {
                let mut under_way = self.under_way.lock();
                let existing = under_way.get(&slot).filter(|r| r.has_changed().is_ok()).cloned();
                if existing.is_none() {
                    under_way.insert(slot.clone(), receiver);
                }
                existing
            };
            let Some(mut first) = first else {
                let ticket = Ticket { owner: self.clone(), slot: slot.clone(), _running: running };
                return self.claim(ticket, print).await;
            };
            let ended = tokio::time::timeout_at(deadline, first.changed()).await;
            if ended.is_err() {
                return Err(ApiError::conflict(
                    "a request with this Idempotency-Key is still under way; ask again",
                )
                .with_code("idempotency_in_progress"));
            }
        }
    }

    async fn claim(&self, ticket: Ticket, print: [u8; 32]) -> Result<Verdict, ApiError> {
        let (team, key) = (ticket.slot.0.to_string(), ticket.slot.1.clone());
        let known = self.db.run(move |c| claim(c, &team, &key, &print)).await?;
        match known {
            None => Ok(Verdict::Go(ticket)),
            Some((seen, _)) if seen != print => Err(ApiError::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                "this Idempotency-Key was used with another request; use a fresh key",
            )
            .with_code("idempotency_request_mismatch")),
            Some((_, Some(answer))) => serde_json::from_str(&answer)
                .map(Verdict::Repeat)
                .map_err(|_| ApiError::internal("the answer that was given before cannot be read")),
            Some((_, None)) => Err(ApiError::conflict(
                "the server was stopped during the first request with this Idempotency-Key; list your sandboxes to see whether it was done, then use a fresh key",
            )
            .with_code("idempotency_outcome_unknown")),
        }
    }
}

impl Ticket {
    /// The request was done (`Some`), or it failed and may be tried again with the same key (`None`).
    pub async fn finish(self, answer: Option<&serde_json::Value>) -> Result<(), ApiError> {
        let (team, key) = (self.slot.0.to_string(), self.slot.1.clone());
        let answer = answer.map(ToString::to_string);
        let work = move |c: &mut rusqlite::Connection| match answer {
            Some(answer) => c.execute(
                "UPDATE idempotency SET answer = ?3 WHERE team = ?1 AND key = ?2",
                (team, key, answer),
            ),
            None => c.execute("DELETE FROM idempotency WHERE team = ?1 AND key = ?2", (team, key)),
        };
        self.owner.db.run(work).await.map(drop)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.owner.under_way.lock().remove(&self.slot);
    }
}

type Known = ([u8; 32], Option<String>);

fn claim(
    connection: &mut rusqlite::Connection,
    team: &str,
    key: &str,
    print: &[u8; 32],
) -> rusqlite::Result<Option<Known>> {
    let now = Utc::now().timestamp();
    let transaction = connection.transaction()?;
    transaction.execute("DELETE FROM idempotency WHERE created_at < ?1", [now - RETENTION_SECS])?;
    let known = transaction
        .query_row(
            "SELECT fingerprint, answer FROM idempotency WHERE team = ?1 AND key = ?2",
            (team, key),
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
        .optional()?;
    if known.is_none() {
        transaction.execute(
            "INSERT INTO idempotency (team, key, fingerprint, created_at) VALUES (?1, ?2, ?3, ?4)",
            (team, key, print.as_slice(), now),
        )?;
    }
    transaction.commit()?;
    Ok(known)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    async fn go(all: &Idempotency, key: &str, print: u8) -> Result<Option<serde_json::Value>, ApiError> {
        match all.begin(&TeamId::default_team(), key, [print; 32]).await? {
            Verdict::Go(ticket) => {
                ticket.finish(Some(&json!({"id": key}))).await?;
                Ok(None)
            }
            Verdict::Repeat(answer) => Ok(Some(answer)),
        }
    }

    #[tokio::test]
    async fn a_repeat_gets_the_first_answer() {
        let (_dir, db) = crate::db::temporary();
        let all = Idempotency::new(db.clone());
        assert_eq!(go(&all, "a", 1).await.unwrap(), None);
        assert_eq!(go(&all, "a", 1).await.unwrap(), Some(json!({"id": "a"})));
        assert_eq!(
            go(&Idempotency::new(db), "a", 1).await.unwrap(),
            Some(json!({"id": "a"})),
            "after a restart"
        );
        assert_eq!(go(&all, "a", 2).await.unwrap_err().error_code, Some("idempotency_request_mismatch"));
        assert_eq!(go(&all, "b", 2).await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_failed_request_may_be_tried_again() {
        let (_dir, db) = crate::db::temporary();
        let all = Idempotency::new(db);
        let Verdict::Go(ticket) = all.begin(&TeamId::default_team(), "a", [1; 32]).await.unwrap() else {
            panic!()
        };
        ticket.finish(None).await.unwrap();
        assert_eq!(go(&all, "a", 1).await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_repeat_joins_one_that_is_under_way() {
        let (_dir, db) = crate::db::temporary();
        let all = Idempotency::new(db);
        let Verdict::Go(ticket) = all.begin(&TeamId::default_team(), "a", [1; 32]).await.unwrap() else {
            panic!()
        };
        let (other, joined) = (all.clone(), Arc::new(Mutex::new(false)));
        let seen = joined.clone();
        let second = tokio::spawn(async move {
            let answer = go(&other, "a", 1).await.unwrap();
            *seen.lock() = true;
            answer
        });
        tokio::task::yield_now().await;
        assert!(!*joined.lock());
        ticket.finish(Some(&json!(7))).await.unwrap();
        assert_eq!(second.await.unwrap(), Some(json!(7)));
    }

    #[tokio::test]
    async fn a_crash_in_between_is_told() {
        let (_dir, db) = crate::db::temporary();
        let all = Idempotency::new(db);
        drop(all.begin(&TeamId::default_team(), "a", [1; 32]).await.unwrap());
        assert_eq!(go(&all, "a", 1).await.unwrap_err().error_code, Some("idempotency_outcome_unknown"));
    }
}
