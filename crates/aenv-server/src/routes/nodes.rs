//! `GET /nodes`, `GET /nodes/{id}`: this node.

use std::sync::atomic::Ordering;

use aenv_api::{
    ApiError, DiskMetrics, ErrorBody, MachineInfo, Node, NodeEngine, NodeExport, NodeMemory, NodeMetrics,
    NodeStatus,
};
use aenv_blockd::{Export, ExportKind};
use aenv_orchestrator::{SandboxState, SandboxView, meminfo};
use aenv_types::EngineStamp;
use axum::{Json, Router, extract::State, routing::get};
use parking_lot::Mutex;

use crate::{
    extract::PathText,
    failure::Failure,
    keys::{Caller, Role},
    node,
    state::AppState,
};

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new().route("/nodes", get(list)).route("/nodes/{id}", get(show))
}

/// All nodes: this one.
#[utoipa::path(get, path = "/nodes", tag = "nodes", responses((status = 200, body = [Node]), (status = 401, body = ErrorBody)))]
async fn list(State(state): State<AppState>, caller: Caller) -> Json<Vec<Node>> {
    Json(vec![describe(&state, &caller)])
}

/// One node.
#[utoipa::path(
    get, path = "/nodes/{id}", tag = "nodes", params(("id" = String, Path)),
    responses((status = 200, body = Node), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn show(
    State(state): State<AppState>,
    caller: Caller,
    PathText(id): PathText,
) -> Result<Json<Node>, Failure> {
    let node = describe(&state, &caller);
    if node.id == id {
        return Ok(Json(node));
    }
    Err(ApiError::not_found("there is no such node; GET /nodes lists them")
        .with_code("node_not_found")
        .into())
}

/// What teams do on the node is the operator's to see; another key sees only what its own team does.
fn describe(state: &AppState, caller: &Caller) -> Node {
    let operator = caller.role == Role::Operator;
    let counted = |count: u64| if operator { count } else { 0 };
    let running: Vec<SandboxView> = state
        .orchestrator
        .list((!operator).then_some(&caller.team))
        .into_iter()
        .filter(|view| view.state == SandboxState::Running)
        .collect();
    let promised = state.orchestrator.memory();
    let memory = meminfo();
    let value = |name: &str| memory.iter().find(|(n, _)| n == name).map_or(0, |(_, kib)| *kib);
    let version = env!("CARGO_PKG_VERSION").to_owned();
    Node {
        commit: version.clone(),
        version,
        id: node_id(state),
        service_instance_id: state.instance.to_string(),
        cluster_id: state.config.node_identity.cluster_id.clone().unwrap_or_else(|| "local".to_owned()),
        machine_info: machine_info(&read("/proc/cpuinfo")),
        engine: engine(state.orchestrator.engine()),
        export: export(&state.export),
        memory: NodeMemory {
            promised_bytes: counted(promised.promised_mib << 20),
            limit_bytes: promised.limit_mib << 20,
            overcommit: promised.overcommit,
            reserve_bytes: promised.reserve_mib << 20,
            given_back_bytes: counted(promised.given_back_mib << 20),
        },
        status: NodeStatus::Ready,
        status_changed_at: state.started_at,
        sandbox_count: u32::try_from(running.len()).unwrap_or(u32::MAX),
        metrics: NodeMetrics {
            allocated_cpu: running.iter().map(|view| view.shape.vcpus).sum(),
            cpu_percent: state.cpu.percent(&read("/proc/stat")),
            cpu_count: std::thread::available_parallelism()
                .map_or(1, |n| u32::try_from(n.get()).unwrap_or(1)),
            allocated_memory_bytes: running.iter().map(|view| view.shape.memory_bytes()).sum(),
            memory_used_bytes: value("MemTotal").saturating_sub(value("MemAvailable")) * 1024,
            memory_total_bytes: value("MemTotal") * 1024,
            huge_pages_total: value("HugePages_Total"),
            huge_pages_used: value("HugePages_Total").saturating_sub(value("HugePages_Free")),
            disks: disk(state.home.path()).into_iter().collect(),
        },
        create_successes: counted(state.counts.created.load(Ordering::Relaxed)),
        create_fails: counted(state.counts.failed.load(Ordering::Relaxed)),
        sandbox_starting_count: if operator { state.counts.starting.load(Ordering::Relaxed) } else { 0 },
    }
}

fn engine(stamp: &EngineStamp) -> NodeEngine {
    NodeEngine {
        name: stamp.kind.as_str().to_owned(),
        version: stamp.version.clone(),
        virtualization: stamp.virtualization.as_str().to_owned(),
    }
}

fn export(export: &Export) -> NodeExport {
    let kind = match export.kind {
        ExportKind::Fuse => "fuse",
        ExportKind::Ublk => "ublk",
    };
    NodeExport { kind: kind.to_owned(), why: export.why.clone() }
}

/// The configured id, or the host's name.
pub fn node_id(state: &AppState) -> String {
    node::name(&state.config)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn machine_info(cpuinfo: &str) -> MachineInfo {
    let field = |wanted: &str| {
        let found =
            cpuinfo.lines().filter_map(|line| line.split_once(':')).find(|(name, _)| name.trim() == wanted);
        found.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    MachineInfo {
        cpu_family: field("cpu family"),
        cpu_model: field("model"),
        cpu_model_name: field("model name"),
        cpu_architecture: std::env::consts::ARCH.to_owned(),
    }
}

fn disk(path: &std::path::Path) -> Option<DiskMetrics> {
    let stat = nix::sys::statvfs::statvfs(path).ok()?;
    let unit = stat.fragment_size();
    let (mount_point, device, filesystem_type) = mount_of(path, &read("/proc/self/mounts"))?;
    Some(DiskMetrics {
        mount_point,
        device,
        filesystem_type,
        used_bytes: stat.blocks().saturating_sub(stat.blocks_free()) * unit,
        total_bytes: stat.blocks() * unit,
    })
}

fn mount_of(path: &std::path::Path, mounts: &str) -> Option<(String, String, String)> {
    let line = |line: &str| {
        let mut words = line.split(' ');
        let (device, point, kind) = (words.next()?, words.next()?, words.next()?);
        path.starts_with(point).then(|| (point.to_owned(), device.to_owned(), kind.to_owned()))
    };
    mounts.lines().filter_map(line).max_by_key(|(point, ..)| point.len())
}

/// How busy the cores were between two looks.
#[derive(Debug, Default)]
pub struct CpuClock {
    last: Mutex<Option<(u64, u64)>>,
}

impl CpuClock {
    /// Percent since the last call (since boot, at the first), from the text of `/proc/stat`.
    pub fn percent(&self, stat: &str) -> u32 {
        let numbers =
            |line: &str| line.split_whitespace().skip(1).filter_map(|n| n.parse().ok()).collect::<Vec<u64>>();
        let Some(ticks) = stat.lines().next().map(numbers).filter(|ticks| ticks.len() >= 5) else { return 0 };
        let all: u64 = ticks.iter().take(8).sum();
        let idle = ticks[3] + ticks[4];
        let (all_before, idle_before) = self.last.lock().replace((all, idle)).unwrap_or((0, 0));
        let (all, idle) = (all.saturating_sub(all_before), idle.saturating_sub(idle_before));
        let busy = all.saturating_sub(idle) * 100;
        u32::try_from(busy.checked_div(all).unwrap_or(0)).unwrap_or(100).min(100)
    }
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(list, show))]
pub struct Doc;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_is_a_difference() {
        let clock = CpuClock::default();
        assert_eq!(clock.percent("cpu  50 0 0 50 0 0 0 0 0 0\n"), 50);
        assert_eq!(clock.percent("cpu  60 0 0 130 0 0 0 0 0 0\n"), 11);
        assert_eq!(clock.percent(""), 0);
    }

    #[test]
    fn the_nearest_mount_is_the_disk() {
        let mounts = "a / ext4 rw 0 0\nb /var ext4 rw 0 0\nc /variant xfs rw 0 0\n";
        let (point, device, _) = mount_of(std::path::Path::new("/var/lib/aenv"), mounts).unwrap();
        assert_eq!((point.as_str(), device.as_str()), ("/var", "b"));
    }
}
