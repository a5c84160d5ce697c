//! The command line.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand};

use crate::output::Format;

/// Environments for AI agents: microVMs that are created, paused, resumed and forked in milliseconds.
#[derive(Parser)]
#[command(name = "aenv", version, propagate_version = true)]
pub(crate) struct Args {
    /// Table or JSON; a table on a terminal and JSON in a pipe unless given.
    #[arg(long, global = true, value_enum)]
    pub(crate) output: Option<Format>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Log in to a server, or see who you are.
    #[command(subcommand)]
    Auth(Auth),
    /// Make a template from an OCI image.
    Pull(Pull),
    /// Build a template from a Dockerfile.
    Build(Build),
    /// List, show and delete templates.
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Start a sandbox from a template or a snapshot (or, with --cold, from an image).
    #[command(visible_alias = "create")]
    Start(Start),
    /// Open a terminal in a sandbox.
    #[command(visible_alias = "cn")]
    Connect(Connect),
    /// Run a command in a sandbox; its output, its exit code.
    Exec(Exec),
    /// Copy a file or folder into a sandbox (`-`: standard input).
    Upload(Upload),
    /// Copy a file or folder out of a sandbox (`-`: standard output).
    Download(Download),
    /// Pause a sandbox; a paused one is left as it is.
    Pause(Id),
    /// Resume a paused sandbox.
    Resume(Resume),
    /// Move a sandbox's deadline to so many seconds from now.
    Timeout(Timeout),
    /// Fork a running sandbox into copies that go their own ways.
    Fork(Fork),
    /// Create, list and delete snapshots.
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Let a sandbox go on from an earlier snapshot of itself.
    Rollback(Rollback),
    /// List sandboxes.
    #[command(visible_alias = "ls")]
    List(List),
    /// Show one sandbox.
    Info(Id),
    /// Delete sandboxes.
    #[command(visible_alias = "rm")]
    Delete(Delete),
    /// Show what a sandbox did.
    Logs(Logs),
    /// Show what a sandbox uses.
    Metrics(Id),
    /// Create, list, show and delete volumes: folders that sandboxes share.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Replace what a running sandbox may reach.
    Network(Network),
    /// List and show nodes.
    #[command(subcommand)]
    Node(NodeCommand),
    /// Create, list and revoke API keys.
    #[command(subcommand)]
    Key(KeyCommand),
    /// Convert images so that nodes read only what they need of them, and publish them.
    #[command(subcommand)]
    Image(ImageCommand),
    /// Look after the repository of templates and snapshots (with the server's first key).
    #[command(subcommand)]
    Repo(RepoCommand),
    /// Measure create, resume, pause, fork and command round trip, beside the bare engine.
    Bench(Bench),
    /// Run the main job in front of you, with the time of each step.
    Demo(Demo),
    /// Say what this host can do, what is missing, and how to mend it.
    Doctor(Doctor),
    /// Print a completion script.
    Completion {
        /// Which shell.
        shell: clap_complete::Shell,
    },
}

#[derive(Subcommand)]
pub(crate) enum Auth {
    /// Store a server and a key in ~/.config/aenv/credentials.
    Login {
        /// The server.
        #[arg(long, default_value = "http://127.0.0.1:8000")]
        url: String,
        /// The key; read from standard input when absent, so that it is in no process list.
        #[arg(long)]
        key: Option<String>,
    },
    /// Forget them.
    Logout,
    /// Show the server, and whether it takes the key.
    Status,
}

#[derive(ClapArgs)]
pub(crate) struct Machine {
    /// vCPUs: 1 or an even number.
    #[arg(long)]
    pub(crate) cpu: Option<u32>,
    /// Memory in MiB, even.
    #[arg(long)]
    pub(crate) memory: Option<u32>,
}

#[derive(ClapArgs)]
pub(crate) struct Pull {
    /// `registry/name:tag[@digest]`, `oci:DIR[:tag]`, `oci-archive:FILE` or `docker-archive:FILE`.
    pub(crate) image: String,
    /// Name of the template; the image's own name when absent.
    #[arg(long)]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) machine: Machine,
    /// Started before the checkpoint is taken, and running in it.
    #[arg(long)]
    pub(crate) start_cmd: Option<String>,
    /// Tried until it exits with 0; then the checkpoint is taken.
    #[arg(long)]
    pub(crate) ready_cmd: Option<String>,
    /// Ready when something listens on this port.
    #[arg(long, conflicts_with = "ready_cmd")]
    pub(crate) probe: Option<u16>,
    /// Do not wait for the build.
    #[arg(short, long)]
    pub(crate) detach: bool,
}

#[derive(ClapArgs)]
pub(crate) struct Build {
    /// A Dockerfile, or the folder that holds one.
    pub(crate) path: PathBuf,
    /// Name of the template, with a tag if wanted.
    #[arg(long)]
    pub(crate) name: String,
    /// Folder that COPY takes from; the Dockerfile's own when absent.
    #[arg(long)]
    pub(crate) context: Option<PathBuf>,
    /// Stage to build; the last one when absent.
    #[arg(long)]
    pub(crate) target: Option<String>,
    /// KEY=VALUE for an ARG.
    #[arg(long = "build-arg")]
    pub(crate) build_args: Vec<String>,
    #[command(flatten)]
    pub(crate) machine: Machine,
    /// Started before the checkpoint is taken; the Dockerfile's ENTRYPOINT and CMD are not started by themselves.
    #[arg(long)]
    pub(crate) start_cmd: Option<String>,
    /// Tried until it exits with 0.
    #[arg(long)]
    pub(crate) ready_cmd: Option<String>,
    /// Use no cached step.
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Subcommand)]
pub(crate) enum TemplateCommand {
    /// List templates.
    #[command(visible_alias = "ls")]
    List,
    /// Show a template and its builds.
    Show {
        /// Id or name.
        template: String,
    },
    /// Follow the newest build of a template.
    Watch {
        /// Id or name.
        template: String,
    },
    /// Delete a template.
    #[command(visible_alias = "rm")]
    Delete {
        /// Id or name.
        template: String,
    },
}

#[derive(ClapArgs)]
pub(crate) struct Start {
    /// Template, snapshot, or (with --cold) image.
    pub(crate) target: String,
    /// Boot straight from an OCI image.
    #[arg(long)]
    pub(crate) cold: bool,
    /// Seconds until it is paused or killed.
    #[arg(long)]
    pub(crate) timeout: Option<u64>,
    #[command(flatten)]
    pub(crate) machine: Machine,
    /// Size of the root disk in MiB (with --cold).
    #[arg(long)]
    pub(crate) disk_size_mb: Option<u32>,
    /// KEY=VALUE for every process in it.
    #[arg(short, long)]
    pub(crate) env: Vec<String>,
    /// KEY=VALUE to find it by.
    #[arg(long)]
    pub(crate) metadata: Vec<String>,
    /// NAME:PATH of a volume to mount.
    #[arg(long)]
    pub(crate) volume: Vec<String>,
    /// Its file and process API asks for a token (the default).
    #[arg(long, overrides_with = "insecure")]
    pub(crate) secure: bool,
    /// Its file and process API asks for no token.
    #[arg(long, hide = true)]
    pub(crate) insecure: bool,
    /// Do not open a terminal in it; only print it.
    #[arg(short, long)]
    pub(crate) detach: bool,
}

#[derive(ClapArgs)]
pub(crate) struct Id {
    /// The sandbox.
    pub(crate) id: String,
}

#[derive(ClapArgs)]
pub(crate) struct Connect {
    /// The sandbox; a paused one is resumed.
    pub(crate) id: String,
    /// User.
    #[arg(long)]
    pub(crate) user: Option<String>,
}

#[derive(ClapArgs)]
pub(crate) struct Exec {
    /// The sandbox.
    pub(crate) id: String,
    /// User.
    #[arg(long)]
    pub(crate) user: Option<String>,
    /// Folder.
    #[arg(long)]
    pub(crate) cwd: Option<String>,
    /// KEY=VALUE.
    #[arg(short, long)]
    pub(crate) env: Vec<String>,
    /// Seconds until it is killed.
    #[arg(long)]
    pub(crate) timeout: Option<u64>,
    /// Pass standard input on.
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// In a terminal.
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// The command and its arguments.
    #[arg(last = true, required = true)]
    pub(crate) command: Vec<String>,
}

#[derive(ClapArgs)]
pub(crate) struct Upload {
    /// The sandbox.
    pub(crate) id: String,
    /// File, folder or `-`.
    pub(crate) source: PathBuf,
    /// Path in the sandbox.
    pub(crate) destination: String,
    /// Owner.
    #[arg(long)]
    pub(crate) user: Option<String>,
}

#[derive(ClapArgs)]
pub(crate) struct Download {
    /// The sandbox.
    pub(crate) id: String,
    /// Path in the sandbox.
    pub(crate) source: String,
    /// File, folder or `-`.
    pub(crate) destination: PathBuf,
    /// As whom.
    #[arg(long)]
    pub(crate) user: Option<String>,
}

#[derive(ClapArgs)]
pub(crate) struct Resume {
    /// The sandbox.
    pub(crate) id: String,
    /// Seconds until it is paused or killed again.
    #[arg(long)]
    pub(crate) timeout: Option<u64>,
}

#[derive(ClapArgs)]
pub(crate) struct Timeout {
    /// The sandbox.
    pub(crate) id: String,
    /// Seconds from now.
    pub(crate) seconds: u64,
}

#[derive(ClapArgs)]
pub(crate) struct Fork {
    /// The sandbox.
    pub(crate) id: String,
    /// How many copies.
    #[arg(long, default_value_t = 1)]
    pub(crate) count: u32,
    /// Seconds until each is paused or killed.
    #[arg(long)]
    pub(crate) timeout: Option<u64>,
}

#[derive(Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Snapshot a sandbox, which goes on.
    Create {
        /// The sandbox.
        id: String,
        /// Name of the snapshot.
        #[arg(long)]
        name: Option<String>,
    },
    /// List snapshots.
    #[command(visible_alias = "ls")]
    List {
        /// Only those of this sandbox.
        #[arg(long)]
        sandbox: Option<String>,
    },
    /// Delete a snapshot.
    #[command(visible_alias = "rm")]
    Delete {
        /// The snapshot.
        snapshot: String,
    },
}

#[derive(ClapArgs)]
pub(crate) struct Rollback {
    /// The sandbox.
    pub(crate) id: String,
    /// A snapshot of it.
    pub(crate) snapshot: String,
}

#[derive(ClapArgs)]
pub(crate) struct List {
    /// running, paused or both with a comma.
    #[arg(long)]
    pub(crate) state: Option<String>,
    /// KEY=VALUE that it must have.
    #[arg(long)]
    pub(crate) metadata: Vec<String>,
}

#[derive(ClapArgs)]
#[group(required = true, multiple = true)]
pub(crate) struct Delete {
    /// The sandboxes.
    pub(crate) ids: Vec<String>,
    /// Every sandbox that has this KEY=VALUE.
    #[arg(long)]
    pub(crate) metadata: Vec<String>,
    /// Every sandbox.
    #[arg(long)]
    pub(crate) all: bool,
}

#[derive(ClapArgs)]
pub(crate) struct Logs {
    /// The sandbox.
    pub(crate) id: String,
    /// Go on as they come.
    #[arg(short, long)]
    pub(crate) follow: bool,
}

#[derive(ClapArgs)]
pub(crate) struct Network {
    /// The sandbox.
    pub(crate) id: String,
    /// Address, range or domain that it may reach.
    #[arg(long)]
    pub(crate) allow: Vec<String>,
    /// Address or range that it may not reach.
    #[arg(long)]
    pub(crate) deny: Vec<String>,
    /// Nothing at all.
    #[arg(long)]
    pub(crate) no_internet: bool,
}

#[derive(Subcommand)]
pub(crate) enum NodeCommand {
    /// List nodes.
    #[command(visible_alias = "ls")]
    List,
    /// Show a node.
    Show {
        /// The node.
        id: String,
    },
}

#[derive(Subcommand)]
pub(crate) enum VolumeCommand {
    /// Make an empty volume.
    Create {
        /// Its name.
        name: String,
    },
    /// List volumes.
    #[command(visible_alias = "ls")]
    List,
    /// Show a volume and the token of its content.
    Show {
        /// Its name or id.
        volume: String,
    },
    /// Delete volumes and all that is in them.
    #[command(visible_alias = "rm")]
    Delete {
        /// Names or ids.
        #[arg(required = true)]
        volumes: Vec<String>,
    },
}

#[derive(Subcommand)]
pub(crate) enum KeyCommand {
    /// Make a key; it is shown once.
    Create {
        /// What it is for.
        name: String,
        /// Its team; your own when absent.
        #[arg(long)]
        team: Option<String>,
        #[command(flatten)]
        limits: KeyLimits,
    },
    /// List keys.
    #[command(visible_alias = "ls")]
    List,
    /// Revoke a key.
    Revoke {
        /// Its id.
        id: String,
    },
}

/// What is absent has the server's own limit, if it has one.
#[derive(ClapArgs)]
pub(crate) struct KeyLimits {
    /// Sandboxes that the team may have running.
    #[arg(long)]
    pub(crate) max_running: Option<u32>,
    /// Longest timeout of a sandbox, in seconds.
    #[arg(long)]
    pub(crate) max_timeout: Option<u32>,
    /// Memory of the team's running sandboxes, in MiB.
    #[arg(long)]
    pub(crate) max_memory: Option<u32>,
    /// Sandboxes of the team that may be starting at the same time.
    #[arg(long)]
    pub(crate) max_starting: Option<u32>,
    /// Calls of the API in a second.
    #[arg(long)]
    pub(crate) max_requests: Option<u32>,
    /// Templates of the team.
    #[arg(long)]
    pub(crate) max_templates: Option<u32>,
    /// Snapshots of the team.
    #[arg(long)]
    pub(crate) max_snapshots: Option<u32>,
    /// What templates and snapshots of the team may take, in MiB.
    #[arg(long)]
    pub(crate) max_repository: Option<u32>,
}

#[derive(Subcommand)]
pub(crate) enum ImageCommand {
    /// Convert an image to overlaybd format and publish the result. What is there already is not sent again.
    Convert {
        /// `registry/name:tag[@digest]`, or a file of the server's: `oci:DIR[:tag]`, `oci-archive:FILE`, `docker-archive:FILE`.
        image: String,
        /// `registry/name:tag`, or a folder of the server's: `oci:DIR[:tag]`.
        target: String,
        /// How layers are compressed: lz4 is read faster, zstd is smaller.
        #[arg(long, value_enum, default_value = "lz4")]
        compression: Compression,
        #[command(flatten)]
        login: TargetLogin,
    },
    /// Publish a converted image of an OCI layout on the server (with the server's first key).
    Push {
        /// `oci:DIR[:tag]`.
        image: String,
        /// `registry/name:tag`, or another folder.
        target: String,
        #[command(flatten)]
        login: TargetLogin,
    },
}

#[derive(Clone, Copy, clap::ValueEnum)]
pub(crate) enum Compression {
    Lz4,
    Zstd,
}

#[derive(ClapArgs)]
pub(crate) struct TargetLogin {
    /// User of the target's registry. Without one, the server's first key uses what docker on the server has for the registry.
    #[arg(long, requires = "password_stdin")]
    pub(crate) username: Option<String>,
    /// Read the password from stdin.
    #[arg(long, requires = "username")]
    pub(crate) password_stdin: bool,
}

#[derive(Subcommand)]
pub(crate) enum RepoCommand {
    /// Remove what no template and no snapshot needs.
    Gc {
        /// Only say what would go.
        #[arg(long)]
        dry_run: bool,
        /// Keep what is younger than so many seconds; the server's own setting when absent.
        #[arg(long)]
        grace: Option<u64>,
    },
    /// Find what is missing, damaged or unneeded, and what each takes with it. Ends with 1 when there is damage.
    Fsck {
        /// Read every byte.
        #[arg(long)]
        deep: bool,
    },
    /// Show what it holds, and for whom.
    Du,
}

/// `aenv bench [OPTIONS]` is the suite `verbs`; with a suite, options come after it.
#[derive(ClapArgs)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Bench {
    #[command(subcommand)]
    pub(crate) suite: Option<Suite>,
    /// Repetitions.
    #[arg(short, default_value_t = 20, value_parser = at_least_one())]
    pub(crate) n: u32,
    /// Template.
    #[arg(long, global = true, default_value = "base")]
    pub(crate) template: String,
    /// The server's binary, which measures the bare engine; beside `aenv` or in PATH when absent.
    #[arg(long, global = true)]
    pub(crate) server_binary: Option<PathBuf>,
    /// Also write the report as one self-contained page.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

/// What `bench` measures.
#[derive(Debug, PartialEq, Eq, Subcommand)]
pub(crate) enum Suite {
    /// Create, command, pause, resume, snapshot, and fork (the default).
    Verbs {
        /// Repetitions.
        #[arg(short, default_value_t = 20, value_parser = at_least_one())]
        n: u32,
        /// Children of a fork.
        #[arg(long, default_value_t = VERBS_CHILDREN, value_parser = clap::value_parser!(u32).range(1..=100))]
        children: u32,
    },
    /// Create, pause, resume and snapshot with 0 to 1024 MiB of changed memory.
    Sizes {
        /// Repetitions of each size.
        #[arg(short, default_value_t = 5, value_parser = at_least_one())]
        n: u32,
        /// The sizes, as a list with commas.
        #[arg(long, value_delimiter = ',', default_values_t = [0, 16, 64, 256, 1024], value_parser = clap::value_parser!(u32).range(..=65536))]
        mib: Vec<u32>,
    },
    /// Forks into 1, 4, 16 and 64 children.
    Forks {
        /// Repetitions of each.
        #[arg(short, default_value_t = 5, value_parser = at_least_one())]
        n: u32,
        /// How many children, as a list with commas.
        #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64], value_parser = clap::value_parser!(u32).range(1..=100))]
        children: Vec<u32>,
    },
    /// Snapshot after snapshot of one sandbox, with the same change in between.
    Repeat {
        /// Snapshots.
        #[arg(short, default_value_t = 20, value_parser = at_least_one())]
        n: u32,
    },
    /// Round trips to one sandbox, one after the other.
    Commands {
        /// Round trips.
        #[arg(short, default_value_t = 100, value_parser = at_least_one())]
        n: u32,
    },
    /// Memory and CPU of idle sandboxes (on the server's machine only).
    Density {
        /// Sandboxes.
        #[arg(short, default_value_t = 16, value_parser = at_least_one())]
        n: u32,
        /// How long CPU is measured, in seconds.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
        seconds: u64,
    },
    /// Many creates at once.
    Burst {
        /// Creates.
        #[arg(short, default_value_t = 32, value_parser = at_least_one())]
        n: u32,
        /// How long an answer may take, in seconds.
        #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
        seconds: u64,
    },
    /// Many agents at once: create, commands with time to think, fork, kill.
    Mixed {
        /// Agents.
        #[arg(short, default_value_t = 4, value_parser = at_least_one())]
        n: u32,
        /// After so many seconds an agent begins no further life.
        #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
        seconds: u64,
    },
    /// Show reports that were kept as JSON; with --html, write them as one page.
    Render {
        /// The reports.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// As Markdown.
        #[arg(long)]
        markdown: bool,
    },
}

/// Children of a fork in the suite `verbs`, unless it is told otherwise.
pub(crate) const VERBS_CHILDREN: u32 = 16;

fn at_least_one() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

#[derive(ClapArgs)]
pub(crate) struct Demo {
    /// Template.
    #[arg(long, default_value = "base")]
    pub(crate) template: String,
    /// Children of the fork.
    #[arg(long, default_value_t = 16)]
    pub(crate) children: u32,
}

#[derive(ClapArgs)]
pub(crate) struct Doctor {
    /// The server's binary; beside `aenv` or in PATH when absent.
    #[arg(long)]
    pub(crate) server_binary: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bench(words: &[&str]) -> Result<Bench, clap::Error> {
        match Args::try_parse_from(["aenv", "bench"].iter().chain(words))?.command {
            Command::Bench(bench) => Ok(bench),
            _ => panic!("another command"),
        }
    }

    #[test]
    fn the_command_line_is_sound() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn suites_have_their_own_repetitions() {
        let plain = bench(&["-n", "3", "--html", "a.html"]).unwrap();
        assert_eq!((plain.suite, plain.n, plain.html), (None, 3, Some("a.html".into())));
        let mixed = bench(&["mixed", "-n", "2", "--seconds", "5", "--template", "other"]).unwrap();
        assert_eq!(mixed.suite, Some(Suite::Mixed { n: 2, seconds: 5 }));
        assert_eq!(mixed.template, "other");
        assert_eq!(
            bench(&["forks"]).unwrap().suite,
            Some(Suite::Forks { n: 5, children: vec![1, 4, 16, 64] })
        );
        let render = bench(&["render", "a.json", "b.json", "--html", "c.html"]).unwrap();
        assert_eq!(render.html, Some("c.html".into()));
    }

    #[test]
    fn what_would_measure_nothing_is_refused() {
        for words in [
            &["-n", "0"][..],
            &["burst", "-n", "0"],
            &["forks", "--children", "1,101"],
            &["mixed", "--seconds", "0"],
            &["-n", "3", "forks"],
            &["nothing"],
            &["render"],
        ] {
            assert!(bench(words).is_err(), "{words:?}");
        }
    }
}
