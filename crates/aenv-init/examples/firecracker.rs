//! A stand-in for Firecracker in tests of its engine: it speaks the API on the socket that it is told, does with memory and state
//! what Firecracker does with them, and prints each request in one line, `METHOD path body`, on its standard output. Whether
//! the requests are right is the tests' to judge.
//!
//! It is static, as a process in a root of its own has to be. What it does otherwise than well stands at the end of its own file,
//! after a line `#script`, one order a line:
//!
//! ```text
//! version <text>              what --version says
//! silent                      never listens
//! refuse <METHOD path> <why>  answers 400
//! hang <METHOD path>          never answers
//! die <METHOD path>           ends without an answer
//! ```
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

static STATE: Mutex<&str> = Mutex::new("Not started");
static BALLOON: AtomicUsize = AtomicUsize::new(0);
const MIB: usize = 1 << 20;

struct Script(Vec<String>);

impl Script {
    fn read() -> Self {
        let own = fs::read(std::env::args().next().unwrap()).unwrap();
        let mark = b"\n#script\n";
        let at = own.windows(mark.len()).rposition(|window| window == mark);
        let text = at.map(|at| String::from_utf8_lossy(&own[at + mark.len()..]).into_owned());
        Self(text.unwrap_or_default().lines().map(str::to_owned).collect())
    }

    /// What follows an order.
    fn told(&self, order: &str) -> Option<&str> {
        self.0.iter().find_map(|line| line.strip_prefix(order))
    }
}

fn main() {
    let script = Script::read();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments == ["--version"] {
        println!("Firecracker v{}\n", script.told("version ").unwrap_or("1.16.1"));
        return;
    }
    let socket = arguments.windows(2).find(|pair| pair[0] == "--api-sock").unwrap()[1].clone();
    if script.told("silent").is_some() {
        std::thread::sleep(std::time::Duration::from_secs(3600));
    }
    for stream in UnixListener::bind(socket).unwrap().incoming() {
        serve(&script, &stream.unwrap());
    }
}

fn serve(script: &Script, stream: &UnixStream) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut first = String::new();
        if reader.read_line(&mut first).unwrap_or(0) == 0 {
            return;
        }
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let Some((name, value)) = line.split_once(':') else { break };
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let call = first.rsplit_once(' ').unwrap().0;
        let body = String::from_utf8(body).unwrap();
        println!("{call} {body}");
        let (status, text) = match answer(script, call, &body) {
            Ok(text) => (if text.is_empty() { "204 No Content" } else { "200 OK" }, text),
            Err(why) => ("400 Bad Request", format!("{{\"fault_message\":\"{why}\"}}")),
        };
        let head = format!("HTTP/1.1 {status}\r\nServer: double\r\nContent-Length: {}\r\n\r\n", text.len());
        let mut out = stream;
        if out.write_all((head + &text).as_bytes()).is_err() {
            return;
        }
    }
}

fn answer(script: &Script, call: &str, body: &str) -> Result<String, String> {
    if let Some(why) = script.told(&format!("refuse {call} ")) {
        return Err(why.to_owned());
    }
    if script.told(&format!("hang {call}")).is_some() {
        std::thread::sleep(std::time::Duration::from_secs(3600));
    }
    if script.told(&format!("die {call}")).is_some() {
        eprintln!("the double dies as it was told");
        std::process::exit(7);
    }
    let mut state = STATE.lock().unwrap();
    match call {
        "GET /balloon" => {
            let amount = BALLOON.load(Ordering::Relaxed);
            return Ok(format!("{{\"amount_mib\":{amount},\"deflate_on_oom\":true}}"));
        }
        "PATCH /balloon" => BALLOON.store(number(body, "amount_mib"), Ordering::Relaxed),
        "GET /" => return Ok(format!("{{\"id\":\"double\",\"state\":\"{}\"}}", *state)),
        "PUT /machine-config" => {
            let mib: usize = number(body, "mem_size_mib");
            map(mib * MIB, libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1);
        }
        "PUT /actions" => *state = "Running",
        "PUT /snapshot/load" => {
            fs::read(text(body, "snapshot_path")).map_err(|e| format!("state: {e}"))?;
            let memory = File::open(text(body, "backend_path")).map_err(|e| format!("memory: {e}"))?;
            let len = memory.metadata().unwrap().len() as usize;
            map(len, libc::MAP_NORESERVE, memory.as_raw_fd());
            *state = "Paused";
        }
        "PATCH /vm" => *state = if body.contains("Paused") { "Paused" } else { "Running" },
        "PUT /snapshot/create" => {
            if *state != "Paused" {
                return Err("save/restore of running VM".to_owned());
            }
            fs::write(text(body, "snapshot_path"), [7; 5000]).map_err(|e| format!("state: {e}"))?;
            let memory =
                File::options().write(true).create(true).truncate(false).open(text(body, "mem_file_path"));
            let sized = memory.and_then(|file| file.set_len(1 << 20));
            sized.map_err(|e| format!("Cannot perform truncate on the memory backing file: {e}"))?;
        }
        _ => {}
    }
    Ok(String::new())
}

fn map(len: usize, flags: libc::c_int, fd: libc::c_int) {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new private mapping anywhere; nobody uses it.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_PRIVATE | flags, fd, 0) };
    assert_ne!(at, libc::MAP_FAILED);
}

/// The value of a text in flat JSON that holds no escapes, as the engine's own does not.
fn text<'a>(body: &'a str, key: &str) -> &'a str {
    let after = body.split_once(&format!("\"{key}\":\"")).unwrap().1;
    after.split_once('"').unwrap().0
}

fn number(body: &str, key: &str) -> usize {
    let after = body.split_once(&format!("\"{key}\":")).unwrap().1;
    let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}
