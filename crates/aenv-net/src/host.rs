//! The host's side: forwarding and the instance's own table.

use std::fs;

use crate::{
    NetworkConfig, NetworkError,
    netns::{self, kernel},
    rules,
};

const FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";

/// Prepares the host for slots. Blocks.
pub(crate) fn prepare(config: &NetworkConfig) -> Result<(), NetworkError> {
    netns::prepare_folder().map_err(kernel("preparing /run/netns"))?;
    let step = "switching IPv4 forwarding on";
    // Only where it is off: writing it resets other settings.
    if fs::read_to_string(FORWARD).map_err(kernel(step))?.trim() != "1" {
        fs::write(FORWARD, "1").map_err(kernel(step))?;
    }
    rules::apply("writing the host's rules", &rules::host(config))
}

/// Removes the instance's table. Forwarding stays: others may rely on it. Blocks.
pub(crate) fn clear(config: &NetworkConfig) -> Result<(), NetworkError> {
    rules::apply("removing the host's rules", &rules::no_host(config))
}
