//! A store with one object, which answers requests for ranges of it as S3 does: after a while, or not at all.

use std::{
    io::{self, BufRead, BufReader, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::Context;

/// How long a silent store holds a connection.
const SILENCE: Duration = Duration::from_secs(600);

/// A store with one object, on a port of 127.0.0.1. It ends with the process.
#[derive(Clone)]
pub struct RangeStore {
    port: u16,
    served: Arc<Served>,
}

struct Served {
    object: Vec<u8>,
    latency: Duration,
    silent: AtomicBool,
    requests: AtomicU64,
    sent: AtomicU64,
}

impl RangeStore {
    /// Begins to serve `object`, under every name. Each answer begins after `latency`.
    pub fn start(object: Vec<u8>, latency: Duration) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let served = Arc::new(Served {
            object,
            latency,
            silent: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        });
        let shared = Arc::clone(&served);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let served = Arc::clone(&shared);
                // A client that goes away in the middle of an answer is no concern of the store's.
                thread::spawn(move || served.serve(stream));
            }
        });
        Ok(Self { port, served })
    }

    /// Its URL.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// From now on it takes requests and answers none.
    pub fn fall_silent(&self) {
        self.served.silent.store(true, Ordering::SeqCst);
    }

    /// It answers again, on new connections.
    pub fn speak_again(&self) {
        self.served.silent.store(false, Ordering::SeqCst);
    }

    /// Requests that were answered.
    pub fn requests(&self) -> u64 {
        self.served.requests.load(Ordering::SeqCst)
    }

    /// Bytes of the object that were asked for.
    pub fn sent(&self) -> u64 {
        self.served.sent.load(Ordering::SeqCst)
    }
}

impl Served {
    fn serve(&self, mut stream: TcpStream) -> anyhow::Result<()> {
        stream.set_nodelay(true)?;
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        while let Some(first) = lines.next() {
            first?;
            let headers: io::Result<Vec<String>> =
                lines.by_ref().take_while(|line| line.as_ref().is_ok_and(|line| !line.is_empty())).collect();
            if self.silent.load(Ordering::SeqCst) {
                thread::sleep(SILENCE);
                return Ok(());
            }
            let range = headers?
                .iter()
                .find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
            let range = range.context("a request without a range")?;
            let (from, to) = range.split_once('-').context("a range without its end")?;
            let (from, to): (usize, usize) = (from.parse()?, to.parse()?);
            let body = self.object.get(from..=to.min(self.object.len() - 1)).context("beyond the end")?;
            self.requests.fetch_add(1, Ordering::SeqCst);
            self.sent.fetch_add(body.len() as u64, Ordering::SeqCst);
            thread::sleep(self.latency);
            let head = format!(
                "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {from}-{}/{}\r\n\
                 ETag: \"x\"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n",
                body.len(),
                from + body.len() - 1,
                self.object.len()
            );
            stream.write_all(head.as_bytes())?;
            stream.write_all(body)?;
        }
        Ok(())
    }
}
