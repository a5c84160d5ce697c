//! A process whose memory is captured, and an image for it to map.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Write},
    num::NonZeroUsize,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    sync::Arc,
};

use aenv_layer::{Layer, LayerWriter, Stack};
use aenv_memory::Ram;
use aenv_store::BlockDevice;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap};

pub const PAGE: u64 = 4096;
const IMAGE: &str = "AENV_TEST_IMAGE";

/// What a victim does to pages: verb (`fill`, `read`, `drop`, `swap`), first page, number of pages, byte.
pub type Act = (&'static str, u64, u64, u8);

/// A process that maps an image privately and changes pages of it.
pub struct Victim {
    child: Child,
    answers: BufReader<ChildStdout>,
    pub ram: Ram,
    image: Vec<u8>,
    /// What its memory should be now.
    pub expected: Vec<u8>,
}

impl Victim {
    /// One that has done this already.
    pub fn start(image: &Path, acts: &[Act]) -> Self {
        Self::spawn(Command::new(std::env::current_exe().unwrap()), image, acts)
    }

    /// One whose writes can be kept account of.
    pub fn tracked(image: &Path, acts: &[Act]) -> Self {
        let program = std::env::current_exe().unwrap();
        // Built beside the tests, because they depend on the crate.
        let library = program.with_file_name("libaenv_track.so");
        assert!(library.exists());
        let mut command = Command::new(program);
        command.env("LD_PRELOAD", library);
        Self::spawn(command, image, acts)
    }

    fn spawn(mut command: Command, image: &Path, acts: &[Act]) -> Self {
        command.args(["victim::victim", "--exact", "--nocapture", "--ignored"]).env(IMAGE, image);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap());
        let start = answer(&mut answers, "mapped at ").parse().unwrap();
        let image = std::fs::read(image).unwrap();
        let ram = Ram::whole(child.id(), start, image.len() as u64);
        let mut victim = Self { child, answers, ram, expected: image.clone(), image };
        victim.act(acts);
        victim
    }

    /// Lets it do more.
    pub fn act(&mut self, acts: &[Act]) {
        let mut lines = String::new();
        for &(verb, page, count, byte) in acts {
            lines += &format!("{verb} {page} {count} {byte}\n");
            let range = (page * PAGE) as usize..((page + count) * PAGE) as usize;
            match verb {
                "fill" => self.expected[range].fill(byte),
                "drop" => self.expected[range.clone()].copy_from_slice(&self.image[range]),
                _ => {}
            }
        }
        lines += "report\n";
        self.child.stdin.as_mut().unwrap().write_all(lines.as_bytes()).unwrap();
        answer(&mut self.answers, "done");
    }

    /// Its memory as the kernel shows it.
    pub fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.ram.len as usize];
        let memory = File::open(format!("/proc/{}/mem", self.ram.pid)).unwrap();
        memory.read_exact_at(&mut bytes, self.ram.start).unwrap();
        bytes
    }
}

/// What follows `mark` in the next line that has it.
fn answer(lines: &mut impl BufRead, mark: &str) -> String {
    lines.lines().map(Result::unwrap).find_map(|line| Some(line.split_once(mark)?.1.to_owned())).unwrap()
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test of its own: the process that [`Victim`] starts.
#[test]
#[ignore = "started by the other tests"]
fn victim() {
    let Some(image) = std::env::var_os(IMAGE) else { return };
    let file = OpenOptions::new().read(true).write(true).open(image).unwrap();
    let len = NonZeroUsize::new(file.metadata().unwrap().len() as usize).unwrap();
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let start = unsafe { mmap(None, len, access, MapFlags::MAP_PRIVATE, &file, 0) }.unwrap();
    // SAFETY: the mapping lives until the process ends, and nothing else uses it.
    let memory = unsafe { std::slice::from_raw_parts_mut(start.cast::<u8>().as_ptr(), len.get()) };
    say(&format!("mapped at {}", start.as_ptr() as u64));
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let mut words = line.split(' ');
        let verb = words.next().unwrap();
        if verb == "report" {
            say("done");
            continue;
        }
        let mut number = || words.next().unwrap().parse::<usize>().unwrap();
        let (page, count, byte) = (number(), number(), number());
        let part = &mut memory[page * 4096..(page + count) * 4096];
        let at = std::ptr::NonNull::new(part.as_mut_ptr().cast()).unwrap();
        match verb {
            "fill" => part.fill(byte as u8),
            "read" => assert!(part.iter().map(|byte| u64::from(*byte)).sum::<u64>() < u64::MAX),
            // SAFETY: whole pages of our own mapping; they read as the file's again.
            "drop" => unsafe { madvise(at, part.len(), MmapAdvise::MADV_DONTNEED) }.unwrap(),
            // SAFETY: whole pages of our own mapping; they read as before.
            "swap" => unsafe { madvise(at, part.len(), MmapAdvise::MADV_PAGEOUT) }.unwrap(),
            other => panic!("{other}"),
        }
    }
}

fn say(line: &str) {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).unwrap();
}

pub struct Fixture {
    pub folder: tempfile::TempDir,
    pub image: PathBuf,
    pub base: Arc<Layer>,
}

/// An image of `pages` pages, as a file to map and as a layer.
pub fn fixture(pages: u64) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..pages * PAGE).map(|at| (at / PAGE % 250 + 1) as u8).collect();
    let image = folder.path().join("image");
    std::fs::write(&image, &bytes).unwrap();
    let path = folder.path().join("base");
    let mut writer = LayerWriter::create(&path, pages * PAGE).unwrap();
    writer.append(0, &bytes).unwrap();
    writer.finish().unwrap();
    Fixture { base: Arc::new(Layer::open_file(&path).unwrap()), folder, image }
}

impl Fixture {
    /// What a guest sees that is launched from the base and captured layers.
    pub fn launched(&self, layers: &[PathBuf], size: u64) -> Vec<u8> {
        let mut stack = vec![self.base.clone()];
        for layer in layers {
            let layer = Arc::new(Layer::open_file(layer).unwrap());
            assert_eq!(layer.virtual_size(), size);
            stack.push(layer);
        }
        let stack = Stack::new(stack, None, size).unwrap();
        let mut bytes = vec![0; size as usize];
        stack.read_at(&mut bytes, 0).unwrap();
        bytes
    }
}
