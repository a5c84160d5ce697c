//! Compiles the two `.proto` files with a compiler written in Rust, so that a fresh machine needs no `protoc`.

use std::{env, error::Error, fs, path::PathBuf};

const FILES: [&str; 2] = ["process.proto", "filesystem.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    for file in FILES {
        println!("cargo:rerun-if-changed=proto/{file}");
    }
    let descriptors = PathBuf::from(env::var("OUT_DIR")?).join("descriptors.bin");
    let set = protox::Compiler::new(["proto"])?
        .include_imports(true)
        .include_source_info(true)
        .open_files(FILES)?
        .encode_file_descriptor_set();
    fs::write(&descriptors, set)?;
    connectrpc_build::Config::new()
        .descriptor_set(&descriptors)
        .files(&FILES)
        // It would name the descriptors, which this script has just written: cargo would run it again each time, and build everything
        // above it anew.
        .emit_rerun_directives(false)
        .emit_register_fn(false)
        .include_file("_connectrpc.rs")
        .compile()?;
    Ok(())
}
