//! Fetching, against an HTTP server that does as it is told.
#![allow(clippy::unwrap_used, missing_docs)]

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use aenv_artifacts::{FetchError, Fetcher, Pinned};
use aenv_types::Digest;

/// What the server does with one request; the last one is done again and again.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// All that is asked for.
    Serve,
    /// The same, by a server that knows no ranges.
    Whole,
    /// So many bytes of what it announces, then an end.
    Cut(usize),
    /// This status and nothing else.
    Status(u16),
}

struct Server {
    url: String,
    /// `Range` of each request.
    asked: Arc<Mutex<Vec<Option<usize>>>>,
}

impl Server {
    fn start(content: &[u8], acts: &[Act]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/file", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (seen, content, acts) = (Arc::clone(&asked), content.to_vec(), acts.to_vec());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let number = seen.lock().unwrap().len();
                let act = acts[number.min(acts.len() - 1)];
                // A client that goes away is no fault of the server.
                let _ = answer(stream.unwrap(), &content, act, &seen);
            }
        });
        Self { url, asked }
    }

    fn asked(&self) -> Vec<Option<usize>> {
        self.asked.lock().unwrap().clone()
    }
}

fn answer(
    mut stream: TcpStream,
    content: &[u8],
    act: Act,
    seen: &Mutex<Vec<Option<usize>>>,
) -> std::io::Result<()> {
    let mut from = None;
    for line in BufReader::new(stream.try_clone()?).lines() {
        let line = line?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(range) = line.strip_prefix("range: bytes=") {
            from = range.trim_end_matches('-').parse::<usize>().ok();
        }
    }
    seen.lock().unwrap().push(from);
    let start = if matches!(act, Act::Whole) { 0 } else { from.unwrap_or(0) };
    let status = match (act, from) {
        (Act::Status(status), _) => status,
        (Act::Whole, _) | (_, None) => 200,
        (_, Some(from)) if from >= content.len() => 416,
        _ => 206,
    };
    let body = if matches!(status, 200 | 206) { &content[start..] } else { &[] };
    write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n", body.len())?;
    if status == 206 {
        write!(stream, "Content-Range: bytes {start}-{}/{}\r\n", content.len() - 1, content.len())?;
    }
    stream.write_all(b"\r\n")?;
    let sent = if let Act::Cut(most) = act { most.min(body.len()) } else { body.len() };
    stream.write_all(&body[..sent])
}

/// Bytes in which no place is like another.
fn content() -> Vec<u8> {
    (0..40_000_u32).flat_map(|n| (n.wrapping_mul(2_654_435_761)).to_le_bytes()).collect()
}

fn wanted(urls: &[&str]) -> Pinned {
    Pinned {
        version: "1".to_owned(),
        file: "file-1".to_owned(),
        sha256: Digest::of(&content()),
        urls: urls.iter().map(|url| (*url).to_owned()).collect(),
    }
}

fn fetcher(folder: &Path, from: Option<&Path>) -> Fetcher {
    Fetcher::new(folder, from).with_pause(Duration::ZERO)
}

async fn get(folder: &Path, from: Option<&Path>, wanted: &Pinned) -> (Result<(), FetchError>, Vec<String>) {
    let said = Mutex::new(Vec::new());
    let result = fetcher(folder, from).get(wanted, &|text| said.lock().unwrap().push(text.to_owned())).await;
    let got = result.map(|path| assert_eq!(fs::read(path).unwrap(), content()));
    (got, said.into_inner().unwrap())
}

fn files(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| !name.starts_with('.')).collect();
    names.sort();
    names
}

#[tokio::test]
async fn a_file_is_fetched_once() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&content(), &[Act::Serve]);
    get(folder.path(), None, &wanted(&[&server.url])).await.0.unwrap();
    let (got, said) = get(folder.path(), None, &wanted(&[&server.url])).await;
    got.unwrap();
    assert_eq!(said, ["file-1 is there"]);
    assert_eq!(server.asked(), [None]);
    assert_eq!(files(folder.path()), ["file-1"]);

    // One that was damaged since is not taken for it.
    fs::write(folder.path().join("file-1"), "other").unwrap();
    let (got, said) = get(folder.path(), None, &wanted(&[&server.url])).await;
    got.unwrap();
    assert!(said[0].contains("replaced"), "{said:?}");
    assert_eq!(server.asked(), [None, None]);
}

#[tokio::test]
async fn a_transfer_that_breaks_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&content(), &[Act::Cut(100_000), Act::Status(503), Act::Cut(0), Act::Serve]);
    let (got, said) = get(folder.path(), None, &wanted(&[&server.url])).await;
    got.unwrap();
    assert_eq!(server.asked(), [None, Some(100_000), Some(100_000), Some(100_000)]);
    assert!(said.iter().any(|line| line.contains("100000 bytes there")), "{said:?}");
    assert_eq!(files(folder.path()), ["file-1"]);
}

#[tokio::test]
async fn what_an_earlier_run_began_is_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let part = folder.path().join("file-1.part");
    fs::write(&part, &content()[..70_000]).unwrap();
    let server = Server::start(&content(), &[Act::Serve]);
    get(folder.path(), None, &wanted(&[&server.url])).await.0.unwrap();
    assert_eq!(server.asked(), [Some(70_000)]);

    // All of it, but for its name.
    fs::rename(folder.path().join("file-1"), &part).unwrap();
    get(folder.path(), None, &wanted(&[&server.url])).await.0.unwrap();
    assert_eq!(server.asked()[1..], [Some(160_000)]);

    // Of something else: it is fetched whole.
    fs::remove_file(folder.path().join("file-1")).unwrap();
    fs::write(&part, [7; 1000]).unwrap();
    get(folder.path(), None, &wanted(&[&server.url])).await.0.unwrap();
    assert_eq!(server.asked()[2..], [Some(1000), None]);

    // From a server that does not go on in the middle.
    fs::remove_file(folder.path().join("file-1")).unwrap();
    fs::write(&part, &content()[..70_000]).unwrap();
    let server = Server::start(&content(), &[Act::Whole]);
    get(folder.path(), None, &wanted(&[&server.url])).await.0.unwrap();
    assert_eq!(server.asked(), [Some(70_000)]);
}

#[tokio::test]
async fn a_file_with_another_digest_is_refused_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let mut other = content();
    other[5] ^= 1;
    let (liar, honest) = (Server::start(&other, &[Act::Serve]), Server::start(&content(), &[Act::Serve]));
    let (got, _) = get(folder.path(), None, &wanted(&[&liar.url, &honest.url])).await;
    let error = got.unwrap_err();
    assert!(matches!(&error, FetchError::Digest { found, .. } if *found == Digest::of(&other)), "{error}");
    assert!(error.to_string().contains(&liar.url), "{error}");
    assert!(honest.asked().is_empty(), "a lie is told of, not passed over");
    assert!(files(folder.path()).is_empty());
}

#[tokio::test]
async fn another_place_is_asked_when_one_does_not_have_it() {
    let folder = tempfile::tempdir().unwrap();
    let without = Server::start(&content(), &[Act::Status(404)]);
    let broken = Server::start(&content(), &[Act::Status(503)]);
    let (got, _) = get(folder.path(), None, &wanted(&[&without.url, &broken.url])).await;
    let error = got.unwrap_err().to_string();
    assert!(error.contains("404") && error.contains("503") && error.contains("--from"), "{error}");
    assert_eq!((without.asked().len(), broken.asked().len()), (1, 4));
    // Nobody listens there.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let server = Server::start(&content(), &[Act::Serve]);
    let urls = [format!("http://{closed}/"), server.url];
    get(folder.path(), None, &wanted(&[&urls[0], &urls[1]])).await.0.unwrap();
}

#[tokio::test]
async fn a_folder_stands_for_the_network() {
    let (folder, from) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::start(&content(), &[Act::Serve]);
    let wanted = wanted(&[&server.url]);
    let (got, _) = get(folder.path(), Some(from.path()), &wanted).await;
    assert!(matches!(got, Err(FetchError::NotInFolder { .. })));
    fs::write(from.path().join("file-1"), "another").unwrap();
    let (got, _) = get(folder.path(), Some(from.path()), &wanted).await;
    assert!(matches!(got, Err(FetchError::Digest { .. })));
    assert!(from.path().join("file-1").exists() && files(folder.path()).is_empty());
    fs::write(from.path().join("file-1"), content()).unwrap();
    get(folder.path(), Some(from.path()), &wanted).await.0.unwrap();
    assert!(server.asked().is_empty());
}

#[tokio::test]
async fn two_at_once_do_not_mix() {
    let folder = tempfile::tempdir().unwrap();
    let lock = fs::File::create(folder.path().join(".fetch.lock")).unwrap();
    lock.lock().unwrap();
    let (got, _) = get(folder.path(), None, &wanted(&[])).await;
    assert!(matches!(got, Err(FetchError::Busy(_))));
    drop(lock);
    let (got, _) = get(folder.path(), None, &wanted(&[])).await;
    assert!(got.unwrap_err().to_string().contains("no URL"));
}
