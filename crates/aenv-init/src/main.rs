//! The first process in a guest: modules, disks, network, then envd.
//!
//! The kernel starts it from our initramfs. It loads the virtio modules that lie beside it, mounts the root disk and grows
//! its filesystem to the disk, brings the network up, enters the image and keeps envd running there. envd's binary stays in
//! the initramfs: it is started through a descriptor that was opened before the image became the root, and no path of
//! the image leads to it.
//!
//! It never touches the image's own files beyond making the mount points that are missing, and reads nothing secret: what
//! is on the kernel's command line can be read by everyone in the guest.

mod cmdline;
mod modules;
mod mounts;
mod network;
mod resize;
mod supervise;
mod sysctl;

use std::{fmt, fs::File};

/// A step that could not be done; ends the boot with one line on the console.
#[derive(Debug)]
pub struct Fatal(String);

impl Fatal {
    /// What was being done, and why it failed.
    pub fn new(doing: impl fmt::Display, cause: impl fmt::Display) -> Self {
        Self(format!("{doing}: {cause}"))
    }
}

impl fmt::Display for Fatal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One line on the console, under the name that the host's log shows.
pub fn say(line: impl fmt::Display) {
    use std::io::Write;
    // A console that cannot be written to is no reason to stop a boot.
    let _ = writeln!(std::io::stderr(), "aenv-init: {line}");
}

fn main() {
    if std::process::id() != 1 {
        say("this is the first process of a guest; it does nothing anywhere else");
        std::process::exit(2);
    }
    if let Err(fatal) = run() {
        say(format_args!("FATAL {fatal}"));
    }
    supervise::power_off();
}

fn run() -> Result<(), Fatal> {
    mounts::early()?;
    let options = cmdline::read()?;
    modules::load_all()?;
    mounts::root_disk(&options.root)?;
    if let Err(fatal) = resize::grow(&options.root, mounts::NEW_ROOT) {
        say(format_args!("the root filesystem keeps its size: {fatal}"));
    }
    network::up(options.net.as_ref())?;
    sysctl::apply();
    let envd = File::open("/envd").map_err(|e| Fatal::new("open /envd of the initramfs", e))?;
    mounts::enter_image()?;
    supervise::keep_running(&envd)
}
