//! Documents of the catalog as the API shows them.

use aenv_api as wire;
use aenv_envd_api::ENVD_VERSION;
use aenv_template::{Build, BuildLog, BuildStatus, LogLevel, Template};
use aenv_types::TeamId;

use crate::{convert::shown_time, spawns::Spawned};

pub(super) fn status(status: BuildStatus) -> wire::TemplateBuildStatus {
    match status {
        BuildStatus::Waiting => wire::TemplateBuildStatus::Waiting,
        BuildStatus::Building => wire::TemplateBuildStatus::Building,
        BuildStatus::Ready => wire::TemplateBuildStatus::Ready,
        BuildStatus::Error => wire::TemplateBuildStatus::Error,
    }
}

pub(super) fn names(team: &TeamId, template: &Template) -> Vec<String> {
    template.names.iter().map(|name| format!("{team}/{name}")).collect()
}

/// `None` for a template that nobody has asked a build for.
pub(super) fn template(team: &TeamId, template: &Template, spawned: Spawned) -> Option<wire::Template> {
    let build = template.latest()?;
    Some(wire::Template {
        template_id: template.id.to_string(),
        build_id: build.id.to_string(),
        cpu_count: build.shape.vcpus,
        memory_mb: build.shape.memory_mib,
        disk_size_mb: build.shape.disk_mib,
        public: template.public,
        aliases: template.names.iter().map(ToString::to_string).collect(),
        names: names(team, template),
        created_at: shown_time(template.created_at),
        updated_at: shown_time(template.updated_at),
        created_by: None,
        last_spawned_at: spawned.last.map(shown_time),
        spawn_count: spawned.count,
        build_count: template.builds.len(),
        envd_version: ENVD_VERSION.to_owned(),
        build_status: status(build.status),
    })
}

pub(super) fn build(build: &Build) -> wire::TemplateBuild {
    wire::TemplateBuild {
        build_id: build.id.to_string(),
        status: status(build.status),
        created_at: shown_time(build.created_at),
        updated_at: shown_time(build.updated_at),
        finished_at: build.finished_at.map(shown_time),
        cpu_count: build.shape.vcpus,
        memory_mb: build.shape.memory_mib,
        disk_size_mb: build.shape.disk_mib,
        envd_version: ENVD_VERSION.to_owned(),
    }
}

pub(super) fn level(level: LogLevel) -> wire::LogLevel {
    match level {
        LogLevel::Debug => wire::LogLevel::Debug,
        LogLevel::Info => wire::LogLevel::Info,
        LogLevel::Warn => wire::LogLevel::Warn,
        LogLevel::Error => wire::LogLevel::Error,
    }
}

/// The other way round: the least level that is asked for.
pub(super) fn least(level: wire::LogLevel) -> LogLevel {
    match level {
        wire::LogLevel::Debug => LogLevel::Debug,
        wire::LogLevel::Info => LogLevel::Info,
        wire::LogLevel::Warn => LogLevel::Warn,
        wire::LogLevel::Error => LogLevel::Error,
    }
}

pub(super) fn log(entry: BuildLog) -> wire::BuildLogEntry {
    wire::BuildLogEntry {
        timestamp: shown_time(entry.timestamp),
        message: entry.message,
        level: level(entry.level),
        step: entry.step,
    }
}
