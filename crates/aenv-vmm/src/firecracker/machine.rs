//! The machine: which requests make it. Everything that a vm state depends on is here: devices, their order and their paths.

use aenv_net::guest::{ADDRESS, GATEWAY, MAC, PREFIX, TAP};
use serde_json::{Value, json};

use super::{
    api::Call,
    root::{INITRAMFS, KERNEL, MEMORY, STATE, drive, inside},
};
use crate::BootSpec;

/// The release that has free-page reporting in its balloon.
const REPORTING: (u32, u32) = (1, 14);

/// What is said to work: above, memory would be in a third piece.
pub(crate) const MOST_MEMORY_MIB: u32 = 65_536;
pub(crate) const MOST_VCPUS: u32 = 32;
/// Interrupts that are left for disks by balloon, entropy device, network, and what ACPI needs.
pub(crate) const MOST_DRIVES: usize = 12;

/// What makes the machine of a cold boot, and starts it.
pub(crate) fn boot(spec: &BootSpec, version: (u32, u32), cpu: Option<&Value>) -> Vec<Call> {
    let shape = spec.vm.shape;
    let mut calls = vec![Call::put(
        "/machine-config",
        json!({ "vcpu_count": shape.vcpus, "mem_size_mib": shape.memory_mib, "smt": false, "track_dirty_pages": false }),
    )];
    // After the machine: its configuration would put the CPU back.
    calls.extend(cpu.map(|template| Call::put("/cpu-config", template.clone())));
    calls.push(Call::put(
        "/boot-source",
        json!({
            "kernel_image_path": inside(KERNEL),
            "initrd_path": inside(INITRAMFS),
            "boot_args": kernel_arguments(&spec.cmdline),
        }),
    ));
    for (index, disk) in spec.vm.drives.iter().enumerate() {
        let id = format!("disk{index}");
        calls.push(Call::put(
            format!("/drives/{id}"),
            json!({
                "drive_id": id, "path_on_host": inside(&drive(index)), "is_read_only": disk.read_only,
                // The initramfs mounts the root disk: the kernel is told of none.
                "is_root_device": false,
                // A flush of the guest reaches the host's file.
                "cache_type": "Writeback", "io_engine": "Sync",
            }),
        ));
    }
    let mac = MAC.map(|byte| format!("{byte:02x}")).join(":");
    calls.push(Call::put(
        "/network-interfaces/eth0",
        json!({ "iface_id": "eth0", "guest_mac": mac, "host_dev_name": TAP }),
    ));
    let mut balloon = json!({ "amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": 0 });
    if version >= REPORTING {
        balloon["free_page_reporting"] = true.into();
    }
    calls.push(Call::put("/balloon", balloon));
    calls.push(Call::put("/entropy", json!({})));
    calls.push(Call::put("/actions", json!({ "action_type": "InstanceStart" })));
    calls
}

/// What loads a vm state. Memory is a private mapping of the image. The vCPUs stand.
pub(crate) fn load() -> Call {
    Call::put(
        "/snapshot/load",
        json!({
            "snapshot_path": inside(STATE),
            "mem_backend": { "backend_type": "File", "backend_path": inside(MEMORY) },
            "resume_vm": false,
        }),
    )
}

fn kernel_arguments(added: &str) -> String {
    // Firecracker has no power button: a guest that resets itself ends it. Its keyboard controller is there for that alone.
    let mut line = format!(
        "console=ttyS0 quiet loglevel=1 8250.nr_uarts=1 cryptomgr.notests reboot=k panic=-1 pci=off i8042.noaux i8042.nomux \
         i8042.dumbkbd net.ifnames=0 aenv.off=reset aenv.net={ADDRESS}/{PREFIX},{GATEWAY}"
    );
    if !added.is_empty() {
        line.push(' ');
        line += added;
    }
    line
}
