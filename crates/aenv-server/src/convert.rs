//! From what the orchestrator shows to what is on the wire.

use aenv_api as wire;
use aenv_orchestrator::{
    ChildResult, MetricSample, OnTimeout, PauseMode, Publication, SandboxState, SandboxView,
};
use aenv_template::Snapshot;
use chrono::{DateTime, SubsecRound, Utc};

use crate::failure::sandbox_error;

/// The clients' parsers keep microseconds; so that what they send back is the same time, no more is shown.
pub fn shown_time(at: DateTime<Utc>) -> DateTime<Utc> {
    at.trunc_subsecs(6)
}

/// As create, connect, resume and fork answer it.
pub fn sandbox(view: &SandboxView) -> wire::Sandbox {
    wire::Sandbox {
        template_id: view.template.to_string(),
        sandbox_id: view.id.to_string(),
        client_id: wire::CLIENT_ID.to_owned(),
        envd_version: view.envd_version.clone(),
        alias: view.alias.clone(),
        envd_access_token: view.envd_token.as_ref().map(|token| token.expose().to_owned()),
        traffic_access_token: view.traffic_token.as_ref().map(|token| token.expose().to_owned()),
        domain: None,
    }
}

/// As a list shows it.
pub fn listed(view: &SandboxView) -> wire::ListedSandbox {
    wire::ListedSandbox {
        template_id: view.template.to_string(),
        sandbox_id: view.id.to_string(),
        client_id: wire::CLIENT_ID.to_owned(),
        started_at: shown_time(view.started_at),
        end_at: shown_time(view.end_at),
        cpu_count: view.shape.vcpus,
        memory_mb: view.shape.memory_mib,
        disk_size_mb: view.shape.disk_mib,
        state: match view.state {
            SandboxState::Running => wire::SandboxState::Running,
            SandboxState::Paused => wire::SandboxState::Paused,
        },
        envd_version: view.envd_version.clone(),
        alias: view.alias.clone(),
        metadata: view.metadata.clone(),
        envd_unresponsive_at_pause: view.unresponsive_at_pause.then_some(true),
        volume_mounts: view.volumes.iter().map(mounted).collect(),
        publication: view.publication.map(|publication| match publication {
            Publication::Pending => wire::Publication::Pending,
            Publication::Published => wire::Publication::Published,
            Publication::Stays => wire::Publication::Stays,
        }),
    }
}

fn mounted(mount: &aenv_volume::VolumeMount) -> wire::VolumeMount {
    wire::VolumeMount { name: mount.name.to_string(), path: mount.path.to_string() }
}

/// All there is to know.
pub fn detail(view: &SandboxView) -> wire::SandboxDetail {
    let network = (!view.network.is_null()).then(|| view.network.clone());
    wire::SandboxDetail {
        listed: listed(view),
        envd_access_token: view.envd_token.as_ref().map(|token| token.expose().to_owned()),
        allow_internet_access: view.allow_internet_access,
        mcp: (!view.mcp.is_null()).then(|| view.mcp.clone()),
        domain: None,
        network,
        lifecycle: Some(wire::Lifecycle {
            auto_resume: view.lifecycle.auto_resume,
            on_timeout: match view.lifecycle.on_timeout {
                OnTimeout::Pause => wire::OnTimeout::Pause,
                OnTimeout::Kill => wire::OnTimeout::Kill,
            },
        }),
        pause_mode: Some(match view.lifecycle.pause_mode {
            PauseMode::Full => wire::PauseMode::Full,
            PauseMode::Filesystem => wire::PauseMode::Filesystem,
        }),
    }
}

/// One child of a fork or a batch.
pub fn child(result: ChildResult) -> wire::ForkResult {
    match result {
        Ok(view) => wire::ForkResult { sandbox: Some(sandbox(&view)), error: None },
        Err(error) => wire::ForkResult { sandbox: None, error: Some(sandbox_error(error).body()) },
    }
}

/// A snapshot.
pub fn snapshot(snapshot: &Snapshot) -> wire::SnapshotInfo {
    wire::SnapshotInfo {
        snapshot_id: snapshot.id.clone(),
        names: snapshot.names.clone(),
        cpu_count: snapshot.shape.vcpus,
        memory_mb: snapshot.shape.memory_mib,
        disk_size_mb: snapshot.shape.disk_mib,
        created_at: shown_time(snapshot.created_at),
        parent: snapshot.parent.as_ref().map(ToString::to_string),
        sandbox_id: Some(snapshot.sandbox.to_string()),
    }
}

/// A metric sample.
pub fn metric(sample: &MetricSample) -> wire::SandboxMetric {
    wire::SandboxMetric {
        timestamp: shown_time(sample.at),
        timestamp_unix: sample.at.timestamp(),
        cpu_count: sample.cpu_count,
        cpu_used_pct: sample.cpu_used_pct,
        mem_used: sample.mem_used,
        mem_total: sample.mem_total,
        mem_cache: sample.mem_cache,
        disk_used: sample.disk_used,
        disk_total: sample.disk_total,
    }
}

#[cfg(test)]
pub(crate) fn sample_view(id: &str) -> SandboxView {
    use aenv_orchestrator::Lifecycle;
    use aenv_types::{CheckpointId, MachineShape, TeamId, TemplateId};
    SandboxView {
        id: id.parse().unwrap(),
        team: TeamId::default_team(),
        template: TemplateId::random(),
        alias: Some("base".into()),
        state: SandboxState::Running,
        started_at: Utc::now(),
        end_at: Utc::now(),
        shape: MachineShape::DEFAULT,
        metadata: std::collections::BTreeMap::default(),
        envd_token: Some(aenv_types::Token::from("secret".to_owned())),
        traffic_token: None,
        lifecycle: Lifecycle { on_timeout: OnTimeout::Kill, pause_mode: PauseMode::Full, auto_resume: false },
        network: serde_json::Value::Null,
        allow_internet_access: None,
        mcp: serde_json::Value::Null,
        envd_version: "0.6.13".into(),
        unresponsive_at_pause: false,
        checkpoint: CheckpointId::random(),
        volumes: Vec::new(),
        timings: aenv_orchestrator::Timings::default(),
        publication: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_that_the_clients_require_is_there() {
        let json = serde_json::to_value(detail(&sample_view("iabc"))).unwrap();
        for field in [
            "templateID",
            "sandboxID",
            "clientID",
            "startedAt",
            "endAt",
            "envdVersion",
            "cpuCount",
            "memoryMB",
            "diskSizeMB",
            "state",
            "metadata",
            "envdAccessToken",
            "allowInternetAccess",
            "lifecycle",
            "pauseMode",
        ] {
            assert!(json.get(field).is_some(), "{field} is missing in {json}");
        }
        assert_eq!(json["lifecycle"], serde_json::json!({"autoResume": false, "onTimeout": "kill"}));
        let json = serde_json::to_value(sandbox(&sample_view("iabc"))).unwrap();
        assert!(json["domain"].is_null() && json["trafficAccessToken"].is_null());
    }
}
