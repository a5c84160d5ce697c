//! Random reads from exports, by FUSE and, where the kernel has it, by ublk, beside the same reads from a loop device over a plain
//! file.
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

use aenv_blockd::{DiskExport, ExportChoice, Exports, MemoryExport, launch};
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
    fs::create_dir_all(&folder)?;
    let (layer, plain) = (folder.join("layer"), folder.join("plain"));
    fill(&layer, &plain)?;
    let mut measured = by_loop(&plain);
    for choice in [ExportChoice::Fuse, ExportChoice::Ublk] {
        if measured.is_ok() && (choice == ExportChoice::Fuse || Path::new("/dev/ublk-control").exists()) {
            measured = by_blockd(&folder.join(choice.to_string()), &binary, choice, &layer).await;
        }
    }
    fs::remove_dir_all(&folder)?;
    measured
}

/// The same bytes as a layer and as a file.
fn fill(layer: &Path, plain: &Path) -> Result<(), Failure> {
    let mut writer = LayerWriter::create(layer, SIZE)?;
    let mut file = File::create(plain)?;
    for offset in (0..SIZE).step_by(1 << 20) {
        let block: Vec<u8> = (0..1u64 << 17).flat_map(|word| (word ^ offset).to_le_bytes()).collect();
        writer.append(offset, &block)?;
        file.write_all(&block)?;
    }
    writer.finish()?;
    file.sync_all()?;
    Ok(())
}

fn by_loop(plain: &Path) -> Result<(), Failure> {
    let output = Command::new("losetup").args(["--find", "--show", "--read-only"]).arg(plain).output()?;
    let device = String::from_utf8(output.stdout)?.trim().to_owned();
    let measured = report("loop", Path::new(&device));
    Command::new("losetup").args(["-d", &device]).status()?;
    measured
}

async fn by_blockd(folder: &Path, binary: &Path, choice: ExportChoice, layer: &Path) -> Result<(), Failure> {
    let home = Home::new(folder.join("home"), folder.join("run"));
    fs::create_dir_all(home.layers())?;
    fs::create_dir_all(home.runtime())?;
    let client = launch(&home, binary, choice).await?;
    let pid = client.pid().await?;
    let measured = measure(&client, choice, layer).await;
    client.close_disk("bench").await?;
    drop(client);
    kill(Pid::from_raw(pid as i32), Signal::SIGTERM)?;
    // Ours again once it has ended.
    File::open(home.runtime().join("blockd.pid"))?.lock()?;
    measured
}

async fn measure(client: &impl Exports, choice: ExportChoice, layer: &Path) -> Result<(), Failure> {
    let layers = vec![layer.to_owned()];
    let export = DiskExport { name: "bench".into(), size: SIZE, layers: layers.clone(), upper: None };
    report(&choice.to_string(), &client.open_disk(export).await?)?;
    if choice == ExportChoice::Ublk {
        return Ok(());
    }
    let image = MemoryExport { holder: "bench".into(), size: SIZE, layers, group: None };
    let file = File::open(client.open_memory(image).await?)?;
    for pass in ["cold", "warm"] {
        let began = Instant::now();
        let mut buf = vec![0; 1 << 20];
        for offset in (0..SIZE).step_by(buf.len()) {
            file.read_exact_at(&mut buf, offset)?;
        }
        let rate = SIZE as f64 / began.elapsed().as_secs_f64() / f64::from(1 << 20);
        writeln!(std::io::stdout(), "memory image, {pass} in order: {rate:.0} MiB/s")?;
    }
    Ok(())
}

/// 4 KiB random O_DIRECT reads, all cached.
fn report(name: &str, path: &Path) -> Result<(), Failure> {
    random_reads(path, 1)?;
    for threads in [1, 4] {
        let rate = random_reads(path, threads)?;
        writeln!(std::io::stdout(), "{name}, {threads} threads of {READS} reads of 4 KiB: {rate:.0}/s")?;
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
