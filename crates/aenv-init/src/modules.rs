//! Kernel modules, in the order that the host worked out when it made the initramfs.

use std::{ffi::CString, fs, fs::File};

use nix::{
    errno::Errno,
    kmod::{ModuleInitFlags, finit_module},
};

use crate::Fatal;

/// Loads every file that `/modules/order` names, one a line.
pub fn load_all() -> Result<(), Fatal> {
    let order = fs::read_to_string("/modules/order").map_err(|e| Fatal::new("read /modules/order", e))?;
    for name in order.lines() {
        let path = format!("/modules/{name}");
        let file = File::open(&path).map_err(|e| Fatal::new(format_args!("open {path}"), e))?;
        let parameters = CString::default();
        match finit_module(&file, &parameters, ModuleInitFlags::empty()) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(Fatal::new(format_args!("load the module {name}"), errno)),
        }
        drop(file);
        // Loaded code lives in kernel memory; the file would only stay in every memory image.
        fs::remove_file(&path).map_err(|e| Fatal::new(format_args!("remove {path}"), e))?;
    }
    Ok(())
}
