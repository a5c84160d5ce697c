//! Mounts: the initramfs's own, the root disk, and what every Linux program expects in the image.
//!
//! `/run` and `/tmp` stay the image's own folders, as with containers: images keep things in them (`/run/postgresql`), and
//! they count as disk, not as memory.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    unistd::{chdir, chroot},
};

use crate::{Fatal, say};

/// Where the root disk is mounted until it becomes the root.
pub const NEW_ROOT: &str = "/newroot";

const NODE_WAIT: Duration = Duration::from_secs(10);

/// A filesystem of the kernel's own that goes into the image.
struct Mount {
    target: &'static str,
    kind: &'static str,
    flags: MsFlags,
    data: &'static str,
    required: bool,
}

const NO_EXEC: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC).union(MsFlags::MS_NODEV);

const IN_IMAGE: &[Mount] = &[
    Mount { target: "proc", kind: "proc", flags: NO_EXEC, data: "", required: true },
    Mount { target: "sys", kind: "sysfs", flags: NO_EXEC, data: "", required: true },
    Mount { target: "dev", kind: "devtmpfs", flags: MsFlags::MS_NOSUID, data: "mode=755", required: true },
    Mount {
        target: "dev/pts",
        kind: "devpts",
        flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC),
        data: "mode=620,gid=5,ptmxmode=666",
        required: true,
    },
    Mount {
        target: "dev/shm",
        kind: "tmpfs",
        flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV),
        data: "mode=1777",
        required: true,
    },
    Mount { target: "dev/mqueue", kind: "mqueue", flags: NO_EXEC, data: "", required: false },
    Mount { target: "sys/fs/cgroup", kind: "cgroup2", flags: NO_EXEC, data: "nsdelegate", required: false },
];

/// `/proc`, `/sys` and `/dev` of the initramfs.
pub fn early() -> Result<(), Fatal> {
    for (target, kind) in [("/proc", "proc"), ("/sys", "sysfs"), ("/dev", "devtmpfs")] {
        make_folder(Path::new(target), 0o755)?;
        match mount(Some(kind), target, Some(kind), MsFlags::empty(), None::<&str>) {
            // The kernel may have mounted devtmpfs itself.
            Ok(()) | Err(Errno::EBUSY) => {}
            Err(errno) => return Err(Fatal::new(format_args!("mount {target}"), errno)),
        }
    }
    Ok(())
}

/// Waits for the root disk's node and mounts it.
pub fn root_disk(device: &str) -> Result<(), Fatal> {
    let deadline = Instant::now() + NODE_WAIT;
    while !Path::new(device).exists() {
        if Instant::now() > deadline {
            let found = fs::read_dir("/sys/block").into_iter().flatten().flatten();
            let names: Vec<_> = found.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
            return Err(Fatal::new(
                format_args!("find the root disk {device}"),
                format_args!("it did not appear within {} s; disks: {names:?}", NODE_WAIT.as_secs()),
            ));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    make_folder(Path::new(NEW_ROOT), 0o755)?;
    // noinit_itable: a background thread that zeroes inode tables would only fill the disk's upper layer.
    let mounted = mount(Some(device), NEW_ROOT, Some("ext4"), MsFlags::MS_RELATIME, Some("noinit_itable"));
    match mounted {
        Ok(()) => Ok(()),
        Err(Errno::EROFS | Errno::EACCES) => {
            say(format_args!("{device} is read-only: the root filesystem is, too"));
            mount(Some(device), NEW_ROOT, Some("ext4"), MsFlags::MS_RDONLY, Some("noload"))
                .map_err(|errno| Fatal::new(format_args!("mount {device} as ext4, read-only"), errno))
        }
        Err(errno) => Err(Fatal::new(
            format_args!("mount {device} as ext4"),
            format_args!("{errno}; is there an ext4 filesystem on the root disk?"),
        )),
    }
}

/// Mounts what belongs into the image and makes it the root of this process.
pub fn enter_image() -> Result<(), Fatal> {
    let root = Path::new(NEW_ROOT);
    for (folder, mode) in [("etc", 0o755), ("run", 0o755), ("tmp", 0o1777), ("root", 0o700)] {
        if let Err(fatal) = make_folder(&root.join(folder), mode) {
            say(format_args!("the image has no /{folder} and it cannot be made: {fatal}"));
        }
    }
    for entry in IN_IMAGE {
        let target = root.join(entry.target);
        let done = make_folder(&target, 0o755).and_then(|()| {
            let data = (!entry.data.is_empty()).then_some(entry.data);
            mount(Some(entry.kind), &target, Some(entry.kind), entry.flags, data)
                .map_err(|errno| Fatal::new(format_args!("mount /{}", entry.target), errno))
        });
        match done {
            Err(fatal) if entry.required => return Err(fatal),
            Err(fatal) => say(format_args!("{fatal}; going on without it")),
            Ok(()) => {}
        }
    }
    device_links(root);
    chdir(NEW_ROOT).map_err(|errno| Fatal::new("enter the image", errno))?;
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>)
        .map_err(|errno| Fatal::new("make the image the root", errno))?;
    chroot(".").map_err(|errno| Fatal::new("make the image the root", errno))?;
    chdir("/").map_err(|errno| Fatal::new("make the image the root", errno))
}

/// Links that udev would make.
fn device_links(root: &Path) {
    let links = [
        ("dev/fd", "/proc/self/fd"),
        ("dev/stdin", "/proc/self/fd/0"),
        ("dev/stdout", "/proc/self/fd/1"),
        ("dev/stderr", "/proc/self/fd/2"),
        ("dev/core", "/proc/kcore"),
    ];
    for (link, target) in links {
        if let Err(error) = std::os::unix::fs::symlink(target, root.join(link))
            && error.kind() != std::io::ErrorKind::AlreadyExists
        {
            say(format_args!("make /{link}: {error}"));
        }
    }
}

/// Makes a folder with this mode unless something is there; a link in the image is not followed out of it.
fn make_folder(path: &Path, mode: u32) -> Result<(), Fatal> {
    let made = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => return Ok(()),
        Ok(_) => Err(std::io::Error::other("it is not a folder")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            fs::create_dir(path).and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)))
        }
        Err(error) => Err(error),
    };
    made.map_err(|e| Fatal::new(format_args!("make the folder {}", path.display()), e))
}
