//! The mount protocol (RFC 1813, appendix I): a path becomes the handle of a volume's root.

use std::os::fd::AsFd;

use super::{
    rpc::Accepted,
    server::Server,
    xdr::{Reader, Writer},
};
use crate::sys;

/// Its program and version.
pub(super) const PROGRAM: u32 = 100_005;
pub(super) const VERSION: u32 = 3;

const NO_ENTRY: u32 = 2;
const SERVER_FAULT: u32 = 10006;
const AUTH_UNIX: u32 = 1;

pub(super) fn answer(
    server: &Server,
    procedure: u32,
    arguments: &mut Reader<'_>,
    out: &mut Writer,
) -> Result<(), Accepted> {
    match procedure {
        // Nothing; unmount one; unmount all. Nobody keeps account of mounts here.
        0 | 3 | 4 => {}
        1 => {
            let path = arguments.opaque(1024).map_err(|_| Accepted::Garbage)?;
            match root(server, path) {
                Ok(handle) => {
                    out.u32(0);
                    out.opaque(&handle);
                    out.u32(1);
                    out.u32(AUTH_UNIX);
                }
                Err(status) => out.u32(status),
            }
        }
        // Mounts, exports: an empty list.
        2 | 5 => out.flag(false),
        _ => return Err(Accepted::NoProcedure),
    }
    Ok(())
}

fn root(server: &Server, path: &[u8]) -> Result<Vec<u8>, u32> {
    let named = |id: &str| id.as_bytes() == path.strip_prefix(b"/").unwrap_or(path);
    let volume = server.volumes().iter().find(|volume| named(volume.id().as_str())).ok_or(NO_ENTRY)?;
    let handle = sys::handle_of(volume.root().as_fd()).map_err(|error| {
        tracing::error!(volume = %volume.id(), %error, "a volume's root has no handle");
        SERVER_FAULT
    })?;
    Ok(volume.seal(&handle))
}
