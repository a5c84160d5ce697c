//! `filesystem.Filesystem` on the wire.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its fixtures too")]

mod support;

use std::{fs, os::unix::fs::symlink, path::Path, time::Duration};

use serde_json::{Value, json};
use support::{Envd, Envelope, basic};

const WATCH: &str = "filesystem.Filesystem/WatchDir";

fn call(envd: &Envd, method: &str, body: Value) -> (u16, Value) {
    envd.call(&format!("filesystem.Filesystem/{method}"), body)
}

fn refused(answer: (u16, Value), status: u16, code: &str) -> String {
    assert_eq!((answer.0, answer.1["code"].as_str().unwrap_or_default()), (status, code), "{}", answer.1);
    answer.1["message"].as_str().unwrap().to_owned()
}

#[test]
fn entries_look_as_clients_expect() {
    let envd = Envd::start();
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    fs::write(root.join("f"), "four").unwrap();
    symlink("f", root.join("link")).unwrap();
    let entry = call(&envd, "Stat", json!({"path": root.join("f"), "someNewField": true})).1["entry"].clone();
    assert_eq!(entry["name"], "f");
    assert_eq!(entry["type"], "FILE_TYPE_FILE");
    assert_eq!(entry["size"], "4");
    assert_eq!(entry["mode"], 0o644);
    assert_eq!(entry["permissions"], "-rw-r--r--");
    assert_eq!((&entry["owner"], &entry["group"]), (&json!("root"), &json!("root")));
    let time = entry["modifiedTime"].as_str().unwrap();
    assert!(chrono::DateTime::parse_from_rfc3339(time).is_ok(), "{time}");
    let link = call(&envd, "Stat", json!({"path": root.join("link")})).1["entry"].clone();
    assert_eq!(
        (link["symlinkTarget"].as_str(), link["type"].as_str()),
        (root.join("f").to_str(), Some("FILE_TYPE_FILE"))
    );
    let directory = call(&envd, "Stat", json!({"path": root})).1["entry"].clone();
    assert_eq!(directory["type"], "FILE_TYPE_DIRECTORY");
    let home = call(&envd, "Stat", json!({"path": ""})).1["entry"]["path"].clone();
    assert_eq!(home, "/root");
}

#[test]
fn operations_and_their_refusals() {
    let envd = Envd::start();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();

    let made = envd.call_with(
        "filesystem.Filesystem/MakeDir",
        &[("authorization", &basic("daemon"))],
        json!({"path": path("a/b")}),
    );
    assert_eq!((made.0, &made.1["entry"]["owner"]), (200, &json!("daemon")));
    assert_eq!(made.1["entry"]["mode"], 0o755);
    let again = call(&envd, "MakeDir", json!({"path": path("a/b")}));
    assert_eq!(refused(again, 409, "already_exists"), format!("directory already exists: {}", path("a/b")));
    fs::write(path("a/f"), "").unwrap();
    let file = call(&envd, "MakeDir", json!({"path": path("a/f")}));
    assert_eq!(
        refused(file, 400, "invalid_argument"),
        format!("path already exists but it is not a directory: {}", path("a/f"))
    );

    let names = |depth: Value| {
        let listed = call(&envd, "ListDir", json!({"path": folder.path(), "depth": depth})).1;
        let entries = listed["entries"].as_array().unwrap().clone();
        entries.iter().map(|entry| entry["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(json!(0)), ["a"]);
    assert_eq!(names(json!(3)), ["a", "b", "f"]);
    let missing = call(&envd, "ListDir", json!({"path": path("none")}));
    assert_eq!(refused(missing, 404, "not_found"), format!("directory not found: {}", path("none")));
    let file = call(&envd, "ListDir", json!({"path": path("a/f")}));
    assert_eq!(refused(file, 400, "invalid_argument"), format!("path is not a directory: {}", path("a/f")));

    let moved = call(&envd, "Move", json!({"source": path("a/f"), "destination": path("c/d/g")}));
    assert_eq!((moved.0, moved.1["entry"]["path"].as_str().unwrap()), (200, path("c/d/g").as_str()));
    let missing = call(&envd, "Move", json!({"source": path("a/f"), "destination": path("x")}));
    assert_eq!(refused(missing, 404, "not_found"), format!("source file not found: {}", path("a/f")));

    assert_eq!(call(&envd, "Remove", json!({"path": path("c")})), (200, json!({})));
    assert_eq!(call(&envd, "Remove", json!({"path": path("c")})), (200, json!({})));
    let gone = call(&envd, "Stat", json!({"path": path("c")}));
    assert_eq!(refused(gone, 404, "not_found"), format!("file not found: {}", path("c")));
    let other = call(&envd, "Stat", json!({"path": "~bob/x"}));
    refused(other, 400, "invalid_argument");
    let user = envd.call_with(
        "filesystem.Filesystem/Stat",
        &[("authorization", &basic("root123"))],
        json!({"path": "/"}),
    );
    assert_eq!(refused(user, 401, "unauthenticated"), "invalid username: 'root123'");
}

struct Events(support::Stream);

impl Events {
    fn start(envd: &Envd, path: &Path, more: Value) -> Self {
        let mut body = json!({"path": path});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let mut stream = envd.stream(WATCH, &[], body);
        assert_eq!(stream.message(), json!({"start": {}}));
        Self(stream)
    }

    fn next(&mut self) -> Value {
        self.0.message()["filesystem"].clone()
    }

    fn until(&mut self, name: &str, kind: &str) -> Value {
        loop {
            let event = self.next();
            if event["name"] == name && event["type"] == format!("EVENT_TYPE_{kind}") {
                return event;
            }
        }
    }
}

#[test]
fn a_new_file_is_three_events() {
    let envd = Envd::start();
    let folder = tempfile::tempdir().unwrap();
    let mut events = Events::start(&envd, folder.path(), json!({}));
    let target = |name: &str| format!("/files?path={}", folder.path().join(name).display());
    let octets = [("content-type", "application/octet-stream")];
    envd.post(&target("f"), &octets, b"hello");
    envd.post(&target("f"), &octets, b"again");
    envd.post(&target("end"), &octets, b"x");
    let mut seen = Vec::new();
    loop {
        let event = events.next();
        if event["name"] == "end" {
            break;
        }
        assert_eq!((event["name"].as_str(), event.get("entry")), (Some("f"), None));
        seen.push(event["type"].as_str().unwrap().trim_start_matches("EVENT_TYPE_").to_owned());
    }
    assert_eq!(seen[..3], ["CREATE", "CHMOD", "WRITE"]);
    assert!(!seen[3..].is_empty() && seen[3..].iter().all(|kind| kind == "WRITE"), "{seen:?}");
}

#[test]
fn trees_are_watched_with_entries() {
    let envd = Envd::start();
    let folder = tempfile::tempdir().unwrap();
    let mut events = Events::start(&envd, folder.path(), json!({"recursive": true, "includeEntry": true}));
    fs::create_dir(folder.path().join("nested")).unwrap();
    events.until("nested", "CREATE");
    fs::write(folder.path().join("nested/file"), "four").unwrap();
    let event = events.until("nested/file", "WRITE");
    assert_eq!(event["entry"]["size"], "4");
    fs::remove_file(folder.path().join("nested/file")).unwrap();
    assert_eq!(events.until("nested/file", "REMOVE").get("entry"), None);
}

#[test]
fn watches_are_refused_and_polled() {
    let envd = Envd::start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("f");
    fs::write(&file, "").unwrap();
    let refusal = |path: &Path| match envd.stream(WATCH, &[], json!({"path": path})).next() {
        Envelope::End(end) => (
            end["error"]["code"].as_str().unwrap().to_owned(),
            end["error"]["message"].as_str().unwrap().to_owned(),
        ),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        refusal(&file),
        ("invalid_argument".to_owned(), format!("path {} not a directory", file.display()))
    );
    let none = folder.path().join("none");
    let (code, message) = refusal(&none);
    assert_eq!(code, "not_found");
    assert!(message.starts_with(&format!("path {} not found: ", none.display())), "{message}");

    let created = call(&envd, "CreateWatcher", json!({"path": folder.path()}));
    let id = created.1["watcherId"].as_str().unwrap().to_owned();
    assert_eq!(call(&envd, "GetWatcherEvents", json!({"watcherId": id})), (200, json!({})));
    fs::write(&file, "x").unwrap();
    let events = loop {
        let (_, events) = call(&envd, "GetWatcherEvents", json!({"watcher_id": id}));
        match events.get("events") {
            Some(events) => break events.clone(),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    assert_eq!(events[0], json!({"name": "f", "type": "EVENT_TYPE_WRITE"}));
    assert_eq!(call(&envd, "RemoveWatcher", json!({"watcherId": id})), (200, json!({})));
    let gone = call(&envd, "GetWatcherEvents", json!({"watcherId": id}));
    assert_eq!(refused(gone, 404, "not_found"), format!("watcher with id {id} not found"));
}
