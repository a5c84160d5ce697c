//! QEMU's command line. Everything that a checkpoint's vm state depends on is here: machine, CPU, and the order of devices.
//!
//! The process starts with `-preconfig`: it comes up to the point before the machine is built, and waits. Memory, disks and the
//! tap are then given over QMP, and `x-exit-preconfig` builds the machine. So a process can be started before it is
//! known for whom, and cold and warm starts are one way.

use std::{os::fd::RawFd, path::Path};

use aenv_types::{MachineShape, Virtualization};
use serde_json::{Value, json};

use super::tsc;
use crate::{BootSpec, Drive, jail::FIRMWARE};

/// What distinguishes processes that wait for work.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    pub(crate) vcpus: u32,
    pub(crate) memory_mib: u32,
    pub(crate) drives: usize,
}

impl Form {
    pub(crate) fn of(shape: MachineShape, drives: &[Drive]) -> Self {
        Self { vcpus: shape.vcpus, memory_mib: shape.memory_mib, drives: drives.len() }
    }
}

/// QOM path of guest memory, and ids that the devices below refer to.
const RAM: &str = "ram";
pub(crate) const NETDEV: &str = "n0";

/// Since which releases `-run-with` takes the place of `-chroot` and of `-runas`.
const RUN_WITH_CHROOT: (u32, u32) = (8, 1);
const RUN_WITH_USER: (u32, u32) = (9, 1);

fn drive_id(index: usize) -> String {
    format!("d{index}")
}

/// How the process is to be started.
pub(crate) struct CommandLine<'a> {
    pub(crate) form: &'a Form,
    pub(crate) virtualization: Virtualization,
    pub(crate) cpu: &'a str,
    pub(crate) qmp: RawFd,
    pub(crate) console: RawFd,
    /// A cold boot; otherwise it waits for a vm state. With the paths by which the process finds kernel and initramfs.
    pub(crate) boot: Option<&'a BootSpec>,
    pub(crate) confined: Option<Confined<'a>>,
}

/// Where the process goes, and who it becomes, before it takes its first command.
pub(crate) struct Confined<'a> {
    pub(crate) root: &'a Path,
    pub(crate) uid: u32,
    /// QEMU's own version, major and minor.
    pub(crate) version: (u32, u32),
}

impl Confined<'_> {
    fn arguments(&self) -> Vec<String> {
        let Self { root, uid, version } = self;
        let root = root.display().to_string();
        let user = format!("{uid}:{uid}");
        let mut line = vec!["-L".to_owned(), FIRMWARE.to_owned()];
        let mut run_with = Vec::new();
        if *version >= RUN_WITH_CHROOT {
            run_with.push(format!("chroot={}", root.replace(',', ",,")));
        } else {
            line.extend(["-chroot".to_owned(), root]);
        }
        if *version >= RUN_WITH_USER {
            run_with.push(format!("user={user}"));
        } else {
            line.extend(["-runas".to_owned(), user]);
        }
        if !run_with.is_empty() {
            line.extend(["-run-with".to_owned(), run_with.join(",")]);
        }
        line
    }
}

impl CommandLine<'_> {
    pub(crate) fn arguments(&self) -> Vec<String> {
        let Form { vcpus, memory_mib, drives } = self.form;
        let accelerator = match self.virtualization {
            Virtualization::Kvm | Virtualization::Pvm => "kvm".to_owned(),
            // The default translation buffer grows to 1 GiB for each VM; 32 MiB is as fast.
            Virtualization::Tcg => {
                format!("tcg,thread={},tb-size=32", if *vcpus > 1 { "multi" } else { "single" })
            }
        };
        let mac = aenv_net::guest::MAC.map(|byte| format!("{byte:02x}")).join(":");
        let mut line = vec![
            "-preconfig".to_owned(),
            "-nodefaults".to_owned(),
            "-no-user-config".to_owned(),
            "-no-reboot".to_owned(),
            "-display".to_owned(),
            "none".to_owned(),
            "-sandbox".to_owned(),
            // That filter kills a process that gives rights up as well: one in the jail has none to gain, by no_new_privs.
            match self.confined {
                Some(_) => "on,obsolete=deny,spawn=deny,resourcecontrol=deny".to_owned(),
                None => "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny".to_owned(),
            },
        ];
        let mut option = |name: &str, value: String| line.extend([name.to_owned(), value]);
        option(
            "-machine",
            "microvm,acpi=on,pit=on,pic=on,rtc=on,isa-serial=on,suppress-vmdesc=on".to_owned(),
        );
        option("-accel", accelerator);
        option("-cpu", self.cpu.to_owned());
        option("-smp", vcpus.to_string());
        option("-m", format!("{memory_mib}M"));
        option("-global", "migration.send-configuration=off".to_owned());
        option("-chardev", format!("socket,id=qmp,fd={},server=on,wait=off", self.qmp));
        option("-mon", "chardev=qmp,mode=control".to_owned());
        // Accepted while it waits for its machine: nothing that the kernel prints is lost.
        option("-chardev", format!("socket,id=console,fd={},server=on,wait=off", self.console));
        option("-serial", "chardev:console".to_owned());
        // The host's generator by system call: there is no /dev in the jail.
        option("-object", "rng-builtin,id=rng0".to_owned());
        option("-device", "virtio-rng-device,rng=rng0,id=rng".to_owned());
        option(
            "-device",
            "virtio-balloon-device,id=balloon,free-page-reporting=on,deflate-on-oom=on".to_owned(),
        );
        option("-device", format!("virtio-net-device,netdev={NETDEV},id=net,mac={mac}"));
        for index in 0..*drives {
            let drive = drive_id(index);
            option(
                "-device",
                format!("virtio-blk-device,drive={drive},id=disk{index},werror=report,rerror=report"),
            );
        }
        match self.boot {
            None => option("-incoming", "defer".to_owned()),
            Some(boot) => {
                option("-kernel", boot.kernel.display().to_string());
                option("-initrd", boot.initramfs.display().to_string());
                option("-append", self.kernel_arguments(&boot.cmdline));
            }
        }
        line.extend(self.confined.iter().flat_map(Confined::arguments));
        line
    }

    fn kernel_arguments(&self, added: &str) -> String {
        use aenv_net::guest::{ADDRESS, GATEWAY, PREFIX};
        let mut line = format!(
            "console=ttyS0 quiet loglevel=1 8250.nr_uarts=1 cryptomgr.notests reboot=t panic=-1 net.ifnames=0 \
             aenv.net={ADDRESS}/{PREFIX},{GATEWAY}"
        );
        if self.virtualization == Virtualization::Tcg {
            // Hardware-reduced ACPI has no timer to calibrate the TSC with, and emulation no paravirtual clock; emulation's
            // TSC is the host's. Mitigations only cost there: the translator is not the CPU that they are for.
            let khz = tsc::host_khz();
            line += &format!(" mitigations=off nokaslr no_timer_check tsc_early_khz={khz} tsc=reliable");
        }
        if !added.is_empty() {
            line.push(' ');
            line += added;
        }
        line
    }
}

/// A QMP command with its arguments.
pub(crate) type Command = (&'static str, Value);

/// Gives memory, disks and network to a waiting process, and lets it build the machine. `tap` is the tap's number *in that
/// process*.
pub(crate) fn furnish(
    form: &Form,
    ram: &Path,
    drives: &[Drive],
    host_device: &[bool],
    tap: RawFd,
) -> Vec<Command> {
    let mut commands = vec![
        (
            "object-add",
            json!({
                "qom-type": "memory-backend-file", "id": RAM, "mem-path": ram,
                "size": u64::from(form.memory_mib) << 20,
                // Private: what the guest changes is copied, and siblings share the rest.
                "share": false, "prealloc": false, "merge": false, "dump": false,
            }),
        ),
        (
            "qom-set",
            json!({ "path": "/machine", "property": "memory-backend", "value": format!("/objects/{RAM}") }),
        ),
    ];
    for (index, (drive, is_device)) in drives.iter().zip(host_device).enumerate() {
        // A block device would be cached twice without O_DIRECT; a file in blockd's mount decides for itself.
        let cache = json!({ "direct": is_device, "no-flush": false });
        commands.push((
            "blockdev-add",
            json!({
                "driver": "raw", "node-name": drive_id(index), "read-only": drive.read_only,
                "discard": "unmap", "cache": cache,
                "file": {
                    "driver": if *is_device { "host_device" } else { "file" },
                    "filename": drive.path, "read-only": drive.read_only,
                    "aio": "threads", "locking": "off", "discard": "unmap", "cache": cache,
                },
            }),
        ));
    }
    commands.push(("netdev_add", json!({ "type": "tap", "id": NETDEV, "fd": tap.to_string() })));
    commands.push(("x-exit-preconfig", json!({})));
    commands
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(vcpus: u32, drives: usize, boot: Option<&BootSpec>) -> String {
        let form = Form { vcpus, memory_mib: 256, drives };
        let line = CommandLine {
            form: &form,
            virtualization: Virtualization::Tcg,
            cpu: "max,cx16=off",
            qmp: 7,
            console: 8,
            boot,
            confined: None,
        };
        line.arguments().join(" ")
    }

    #[test]
    fn devices_come_in_the_order_that_checkpoints_depend_on() {
        let text = line(2, 2, None);
        let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("{what} is not in {text}"));
        assert!(at("virtio-rng") < at("virtio-balloon"));
        assert!(at("virtio-balloon") < at("virtio-net"));
        assert!(at("virtio-net") < at("drive=d0"));
        assert!(at("drive=d0") < at("drive=d1"));
        assert!(text.contains("thread=multi") && text.contains("-incoming defer"));
        assert!(line(1, 1, None).contains("thread=single"));
    }

    #[test]
    fn each_release_is_confined_by_the_switches_that_it_has() {
        let arguments = |version| {
            let confined = Confined { root: Path::new("/a,b/jail"), uid: 7, version };
            confined.arguments().join(" ")
        };
        assert_eq!(arguments((7, 2)), "-L /firmware -chroot /a,b/jail -runas 7:7");
        assert_eq!(arguments((8, 2)), "-L /firmware -runas 7:7 -run-with chroot=/a,,b/jail");
        assert_eq!(arguments((10, 0)), "-L /firmware -run-with chroot=/a,,b/jail,user=7:7");
    }

    #[test]
    fn commas_in_paths_cannot_become_options() {
        let drive = Drive { path: "/a,readonly=on".into(), read_only: false };
        let form = Form { vcpus: 1, memory_mib: 128, drives: 1 };
        let commands = furnish(&form, Path::new("/ram,share=on"), &[drive], &[false], 9);
        assert_eq!(commands[0].1["mem-path"], "/ram,share=on");
        assert_eq!(commands[0].1["share"], false);
        assert_eq!(commands[2].1["file"]["filename"], "/a,readonly=on");
        assert_eq!(commands.last().map(|c| c.0), Some("x-exit-preconfig"));
    }
}
