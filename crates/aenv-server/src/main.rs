//! The process `aenv-server`.

#![forbid(unsafe_code)]

use std::{io::IsTerminal, path::PathBuf, process::ExitCode};

use aenv_server::{
    artifacts::{self, Setup},
    config::{Config, ConfigError, Loaded, Sources, load},
    doctor, floor, serve,
};
use clap::{Args, Parser, Subcommand};

/// HTTP API, data-plane proxy and orchestrator of AgentENV.
#[derive(Parser)]
#[command(name = "aenv-server", version)]
struct Cli {
    #[command(flatten)]
    settings: SettingsArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

/// Where the configuration comes from.
#[derive(Args)]
struct SettingsArgs {
    /// Configuration file [default: $AENV_CONFIG_PATH, or /etc/aenv/config.toml if it exists].
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Sets one key, such as `--set pool.low_watermark=4`. May be repeated.
    #[arg(long, global = true, value_name = "KEY=VALUE", value_parser = pair)]
    set: Vec<(String, String)>,
    /// The same as `--set api_addr=...`.
    #[arg(long, global = true, value_name = "ADDR:PORT")]
    listen: Option<String>,
    /// The same as `--set home_path=...`.
    #[arg(long, global = true, value_name = "DIR")]
    home: Option<String>,
    /// The same as `--set runtime_path=...`.
    #[arg(long, global = true, value_name = "DIR")]
    runtime: Option<String>,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the server (the default).
    Serve,
    /// Gets the guest kernel, and Firecracker where it can run, and packs the initramfs.
    Setup {
        /// A kernel package (.deb, or a folder it was unpacked into) instead of the manifest's.
        #[arg(long, value_name = "PATH")]
        kernel_package: Option<PathBuf>,
        /// Folder of the static aenv-init and aenv-envd.
        #[arg(long, value_name = "DIR")]
        guest: Option<PathBuf>,
        /// Folder with the manifest's files; nothing is asked of the network.
        #[arg(long, value_name = "DIR")]
        from: Option<PathBuf>,
        /// Another manifest than the server's own.
        #[arg(long, value_name = "FILE")]
        manifest: Option<PathBuf>,
    },
    /// Says what this host can do, what is missing, and how to mend it.
    Doctor {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Measures what the bare engine takes on this host, as `aenv bench` compares with.
    Floor {
        /// As JSON.
        #[arg(long)]
        json: bool,
        /// Template whose checkpoint is launched.
        #[arg(long, default_value = "base")]
        template: String,
        /// Repetitions.
        #[arg(short, default_value_t = 20)]
        n: usize,
        /// MiB of the writes that a pause is compared with, as a list with commas.
        #[arg(long, value_delimiter = ',', default_value = "32")]
        write_mib: Vec<u32>,
    },
    /// Shows or checks the configuration.
    #[command(subcommand)]
    Config(ConfigCommand),
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Says whether the configuration can be used.
    Check,
    /// Prints every key with its value and where that came from.
    Print,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("it has the form KEY=VALUE")?;
    Ok((key.trim().to_owned(), value.to_owned()))
}

impl SettingsArgs {
    fn load(self) -> Result<Loaded, ConfigError> {
        let mut flags = self.set;
        let named = [("api_addr", self.listen), ("home_path", self.home), ("runtime_path", self.runtime)];
        flags.extend(named.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
        let environment =
            std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
        load::load(&Sources { file: self.config, environment: environment.collect(), flags })
    }
}

#[allow(clippy::print_stdout, reason = "these commands print")]
fn main() -> ExitCode {
    let cli = Cli::parse();
    let loaded = match cli.settings.load() {
        Ok(loaded) => loaded,
        Err(error) => {
            eprintln!("aenv-server: {error}");
            return ExitCode::from(2);
        }
    };
    match cli.command {
        None | Some(Command::Serve) => {
            log(&loaded.config);
            for name in &loaded.unknown_variables {
                tracing::warn!("${name} looks like a setting but is none");
            }
            finish(block_on(serve::run(loaded.config)))
        }
        Some(Command::Setup { kernel_package, guest, from, manifest }) => {
            let setup = Setup { kernel_package, guest, from, manifest };
            let say = |text: &str| println!("setup: {text}");
            finish(block_on(async { Ok(artifacts::make(&loaded.config, &setup, &say).await.map(drop)?) }))
        }
        Some(Command::Doctor { json }) => {
            let findings = match block_on(async { Ok(doctor::examine(&loaded.config).await) }) {
                Ok(findings) => findings,
                Err(error) => return finish(Err(error)),
            };
            match json {
                true => println!("{}", serde_json::to_string_pretty(&findings).expect("findings are JSON")),
                false => print!("{}", doctor::text(&findings)),
            }
            let missing = findings.iter().any(|finding| finding.verdict == doctor::Verdict::Missing);
            ExitCode::from(u8::from(missing))
        }
        Some(Command::Floor { json, template, n, write_mib }) => {
            let measured = block_on(floor::measure(&loaded.config, &template, n, &write_mib));
            finish(measured.map(|measured| match json {
                true => println!("{measured}"),
                false => println!("{}", serde_json::to_string_pretty(&measured).expect("a value is JSON")),
            }))
        }
        Some(Command::Config(ConfigCommand::Check)) => {
            for name in &loaded.unknown_variables {
                eprintln!("warning: ${name} looks like a setting but is none");
            }
            println!("the configuration is good");
            ExitCode::SUCCESS
        }
        Some(Command::Config(ConfigCommand::Print)) => {
            print!("{}", loaded.print());
            ExitCode::SUCCESS
        }
    }
}

fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(work)
}

fn finish(outcome: anyhow::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("aenv-server: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The log goes to standard error.
fn log(config: &Config) {
    let filter = tracing_subscriber::EnvFilter::try_new(&config.log.filter);
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match config.log.format.as_str() {
        "json" => lines.json().init(),
        "pretty" => lines.pretty().init(),
        _ => lines.compact().init(),
    }
}
