//! A stand-in for envd in engine tests: one line in, one line out, on port 49983.
//!
//! ```text
//! ping            -> pong <number of requests so far>
//! boot            -> <boot id>
//! fill <MiB> <s>  -> ok            touches that much memory with a pattern grown from the seed
//! check <s>       -> same | changed <offset>
//! file <text>     -> ok            writes and syncs /agent.txt
//! cat             -> <text of /agent.txt>
//! size            -> <MiB of the root filesystem>
//! mounts          -> <mount points, space separated>
//! envd            -> "not found" if no path leads to this program
//! zombies         -> <number of zombies>, after an orphan was made and left
//! churn           -> ok            writes and syncs a growing number for ever
//! churned         -> ok | bad <in memory> <on disk> <in memory>
//! off             -> powers the guest off through init
//! ```
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::{
    fs,
    io::{BufRead, BufReader, Seek, SeekFrom, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

static REQUESTS: AtomicU64 = AtomicU64::new(0);
/// The number that is on the disk for certain.
static CHURNED: AtomicU64 = AtomicU64::new(0);
const CHURN: &str = "/churn.bin";
static MEMORY: Mutex<Vec<u64>> = Mutex::new(Vec::new());

fn main() {
    let listener = TcpListener::bind("0.0.0.0:49983").unwrap();
    println!("agent: listening");
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || serve(&stream));
    }
}

fn serve(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { return };
        let answer = answer(&line).replace('\n', " ");
        let mut out = stream;
        if out.write_all(format!("{answer}\n").as_bytes()).is_err() {
            return;
        }
    }
}

fn answer(line: &str) -> String {
    let count = REQUESTS.fetch_add(1, Ordering::SeqCst) + 1;
    let mut words = line.split(' ');
    match words.next().unwrap_or_default() {
        "ping" => format!("pong {count}"),
        "boot" => fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned(),
        "fill" => {
            let mib: usize = words.next().unwrap().parse().unwrap();
            let seed: u64 = words.next().unwrap().parse().unwrap();
            *MEMORY.lock().unwrap() = (0..(mib << 17) as u64).map(|i| pattern(seed, i)).collect();
            "ok".to_owned()
        }
        "check" => {
            let seed: u64 = words.next().unwrap().parse().unwrap();
            let memory = MEMORY.lock().unwrap();
            match memory.iter().enumerate().find(|(i, word)| **word != pattern(seed, *i as u64)) {
                Some((at, _)) => format!("changed {}", at * 8),
                None => "same".to_owned(),
            }
        }
        "file" => {
            let mut file = fs::File::create("/agent.txt").unwrap();
            file.write_all(&line.as_bytes()[5..]).unwrap();
            file.sync_all().unwrap();
            "ok".to_owned()
        }
        "cat" => fs::read_to_string("/agent.txt").unwrap_or_else(|e| e.to_string()),
        "size" => {
            // SAFETY: statvfs fills the struct that it is given; all zeroes are a valid value.
            let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
            // SAFETY: the path is a C string and `stat` is live.
            unsafe { libc::statvfs(c"/".as_ptr(), &raw mut stat) };
            ((stat.f_blocks * stat.f_frsize) >> 20).to_string()
        }
        "mounts" => {
            let table = fs::read_to_string("/proc/self/mounts").unwrap();
            table.lines().filter_map(|l| l.split(' ').nth(1)).collect::<Vec<_>>().join(" ")
        }
        "envd" => match fs::metadata("/envd") {
            Ok(_) => "found".to_owned(),
            Err(error) => format!("not found: {error}"),
        },
        "zombies" => zombies().to_string(),
        "churn" => {
            std::thread::spawn(churn);
            while CHURNED.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            "ok".to_owned()
        }
        "churned" => {
            let before = CHURNED.load(Ordering::SeqCst);
            // What the disk has, and not what the cache has of it.
            fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
            let bytes = fs::read(CHURN).unwrap();
            let on_disk = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            let after = CHURNED.load(Ordering::SeqCst);
            match before <= on_disk && on_disk <= after + 1 {
                true => "ok".to_owned(),
                false => format!("bad {before} {on_disk} {after}"),
            }
        }
        "off" => {
            // SAFETY: kill has no memory effects.
            unsafe { libc::kill(1, libc::SIGTERM) };
            "ok".to_owned()
        }
        other => format!("what is {other:?}?"),
    }
}

fn pattern(seed: u64, index: u64) -> u64 {
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(index.wrapping_mul(0xbf58_476d_1ce4_e5b9))
}

/// Leaves a grandchild whose parent is gone; init has to take it. Counts zombies once it has ended.
fn zombies() -> usize {
    let mut pipe = [0; 2];
    // SAFETY: plain system calls; the children call nothing but `fork` and `_exit`.
    unsafe {
        libc::pipe(pipe.as_mut_ptr());
        let child = libc::fork();
        if child == 0 {
            if libc::fork() == 0 {
                libc::_exit(0);
            }
            libc::_exit(0);
        }
        libc::close(pipe[1]);
        libc::waitpid(child, std::ptr::null_mut(), 0);
        // The pipe's last writer is the grandchild: end of file means that it has ended.
        let mut byte = 0_u8;
        libc::read(pipe[0], (&raw mut byte).cast(), 1);
        libc::close(pipe[0]);
    }
    let state = |stat: String| stat.rsplit(')').next().map(|rest| rest.trim_start().starts_with('Z'));
    let count = || {
        let folders = fs::read_dir("/proc").unwrap().flatten();
        folders
            .filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok().and_then(state))
            .filter(|zombie| *zombie)
            .count()
    };
    (0..100).find(|_| count() == 0).map_or_else(count, |_| 0)
}

fn churn() {
    let mut file = fs::File::create(CHURN).unwrap();
    for number in 1u64.. {
        file.seek(SeekFrom::Start(0)).unwrap();
        file.write_all(&number.to_le_bytes().repeat(512)).unwrap();
        file.sync_all().unwrap();
        CHURNED.store(number, Ordering::SeqCst);
    }
}
