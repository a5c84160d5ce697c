use super::*;
use crate::{sandbox::Launched, tests::record};

fn note(sandbox: &SandboxId, key: &str) -> Note {
    Note { sandbox: sandbox.clone(), key: key.into(), generation: 3, value: "1".into() }
}

#[tokio::test]
async fn what_was_committed_is_there_when_it_is_opened_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal.db");
    let (first, second) = (record(), record());
    {
        let (journal, contents) = Journal::open(&path).unwrap();
        assert!(contents.records.is_empty());
        let notes = [note(&first.id, "vm"), note(&second.id, "vm"), note(&second.id, "slot")];
        journal.commit(notes.map(Change::Note).into(), Survives::Crash).await.unwrap();
        journal.put(&first, Survives::PowerLoss).await.unwrap();
        journal.put(&second, Survives::PowerLoss).await.unwrap();
        journal.commit(vec![Change::Remove(first.id.clone())], Survives::PowerLoss).await.unwrap();
        let forget = Change::Forget { sandbox: second.id.clone(), key: "slot".into() };
        journal.commit(vec![forget], Survives::Crash).await.unwrap();
    }
    let (_, contents) = Journal::open(&path).unwrap();
    assert_eq!(contents.records, std::slice::from_ref(&second));
    assert_eq!(contents.notes, [note(&second.id, "vm")]);
}

#[tokio::test]
async fn many_writers_share_commits_and_lose_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal.db");
    let (journal, _) = Journal::open(&path).unwrap();
    let records: Vec<_> = (0..200).map(|_| record()).collect();
    let writes = records.iter().map(|record| journal.put(record, Survives::PowerLoss));
    for written in futures::future::join_all(writes).await {
        written.unwrap();
    }
    assert_eq!(Journal::open(&path).unwrap().1.records.len(), 200);
}

#[test]
fn a_record_of_before_captures_were_counted_from_each_other_is_read() {
    let launched = Launched { cold: true, memory: Vec::new(), captured: None, disks: Vec::new() };
    let record = Record { launched: Some(launched), ..record() };
    let mut value = serde_json::to_value(&record).unwrap();
    value["launched"].as_object_mut().unwrap().remove("captured").unwrap();
    assert_eq!(serde_json::from_value::<Record>(value).unwrap(), record);
}

#[test]
fn a_newer_journal_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal.db");
    drop(Journal::open(&path).unwrap());
    let connection = rusqlite::Connection::open(&path).unwrap();
    connection.pragma_update(None, "user_version", 99).unwrap();
    drop(connection);
    assert!(matches!(Journal::open(&path), Err(JournalError::Newer { found: 99, .. })));
}

#[test]
fn a_file_that_is_no_journal_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal.db");
    std::fs::write(&path, "this is not a database, but it is long enough to be taken for one".repeat(20))
        .unwrap();
    assert!(matches!(Journal::open(&path), Err(JournalError::Sqlite(_))));
}
