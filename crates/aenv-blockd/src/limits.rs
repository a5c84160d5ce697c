//! What a process may have of the host.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// As many open files as the host allows; what stands in the way is logged.
pub fn raise_open_files() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}
