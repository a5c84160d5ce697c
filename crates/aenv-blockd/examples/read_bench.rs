//! Random reads from an export, beside the same reads from a loop device over a plain file.
//!
//! `read_bench BLOCKD [FOLDER]` as root, where BLOCKD is the `aenv-blockd` to measure.

use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Instant,
};

use aenv_blockd::{DiskExport, Exports, MemoryExport, launch};
use aenv_layer::LayerWriter;
use aenv_types::Home;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

const SIZE: u64 = 256 << 20;
const READS: u64 = 20_000;

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args_os().skip(1);
    let binary = PathBuf::from(arguments.next().ok_or("which aenv-blockd?")?);
    let parent = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let folder = parent.join(format!("read-bench-{}", std::process::id()));
    let home = Home::new(folder.join("home"), folder.join("run"));
    fs::create_dir_all(home.layers())?;
    fs::create_dir_all(home.runtime())?;
    let client = launch(&home, &binary).await?;
    let pid = client.pid().await?;
    let measured = measure(&client, &folder).await;
    drop(client);
    kill(Pid::from_raw(pid as i32), Signal::SIGTERM)?;
    // Ours again once it has ended.
    File::open(home.runtime().join("blockd.pid"))?.lock()?;
    fs::remove_dir_all(&folder)?;
    measured
}

async fn measure(client: &impl Exports, folder: &Path) -> Result<(), Failure> {
    let mut out = std::io::stdout();
    let (layer, plain) = (folder.join("layer"), folder.join("plain"));
    let mut writer = LayerWriter::create(&layer, SIZE)?;
    let mut file = File::create(&plain)?;
    for offset in (0..SIZE).step_by(1 << 20) {
        let block: Vec<u8> = (0..1u64 << 17).flat_map(|word| (word ^ offset).to_le_bytes()).collect();
        writer.append(offset, &block)?;
        file.write_all(&block)?;
    }
    writer.finish()?;
    file.sync_all()?;

    let export = DiskExport { name: "bench".into(), size: SIZE, layers: vec![layer.clone()], upper: None };
    let disk = client.open_disk(export).await?;
    let output = Command::new("losetup").args(["--find", "--show", "--read-only"]).arg(&plain).output()?;
    let device = String::from_utf8(output.stdout)?.trim().to_owned();
    writeln!(out, "4 KiB random O_DIRECT reads, {READS} for each thread, all cached")?;
    for threads in [1, 4] {
        let fuse = random_reads(&disk, threads)?;
        let floor = random_reads(Path::new(&device), threads)?;
        writeln!(out, "{threads} threads: export {fuse:.0}/s, loop {floor:.0}/s, ratio {:.2}", fuse / floor)?;
    }
    Command::new("losetup").args(["-d", &device]).status()?;

    let image = MemoryExport { holder: "bench".into(), size: SIZE, layers: vec![layer] };
    let file = File::open(client.open_memory(image).await?)?;
    for pass in ["cold", "warm"] {
        let began = Instant::now();
        let mut buf = vec![0; 1 << 20];
        for offset in (0..SIZE).step_by(buf.len()) {
            file.read_exact_at(&mut buf, offset)?;
        }
        let rate = SIZE as f64 / began.elapsed().as_secs_f64() / f64::from(1 << 20);
        writeln!(out, "memory image, {pass} in order: {rate:.0} MiB/s")?;
    }
    Ok(())
}

fn random_reads(path: &Path, threads: u64) -> Result<f64, Failure> {
    let file = Arc::new(OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?);
    let began = Instant::now();
    std::thread::scope(|scope| -> Result<(), Failure> {
        let readers: Vec<_> = (0..threads)
            .map(|thread| {
                let file = Arc::clone(&file);
                scope.spawn(move || -> std::io::Result<()> {
                    let mut space = vec![0u8; 8192];
                    let aligned = space.as_ptr().align_offset(4096);
                    let buf = &mut space[aligned..aligned + 4096];
                    let mut state = thread + 1;
                    for _ in 0..READS {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        file.read_exact_at(buf, (state >> 33) % (SIZE / 4096) * 4096)?;
                    }
                    Ok(())
                })
            })
            .collect();
        for reader in readers {
            reader.join().map_err(|_| "a reader panicked")??;
        }
        Ok(())
    })?;
    Ok((threads * READS) as f64 / began.elapsed().as_secs_f64())
}
