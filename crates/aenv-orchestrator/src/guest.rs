//! The guest's agent, as production has it: envd.

use std::{path::PathBuf, sync::Arc, time::Duration};

use aenv_envd_api::{EnvdClient, EnvdError, InitRequest, RunRequest};
use aenv_types::{Dial, Token};
use async_trait::async_trait;

use crate::{
    MetricSample,
    seams::{AgentError, GuestAgent},
};

/// Bound of loading kernel modules; under pure emulation it takes a second.
const MODULES: Duration = Duration::from_secs(20);

/// What a login shell begins with, without what could have effects: it reads no start files (`-p`), because a template's may do
/// anything.
const WARM_UP: [&str; 3] = ["-p", "-c", r#"test "$(/usr/bin/id -u)" -ge 0"#];

/// envd over its HTTP client.
pub(crate) struct Envd {
    /// Kernel modules for network filesystems, which a guest is given when it needs them.
    pub modules: Option<PathBuf>,
}

impl Envd {
    async fn load_modules(&self, client: &EnvdClient) -> Result<(), AgentError> {
        let refused = |message: &str| AgentError::Refused(message.to_owned());
        let Some(path) = &self.modules else {
            return Err(refused(
                "this server has no kernel modules for volumes; run `aenv-server setup` again",
            ));
        };
        let read = tokio::fs::read(path).await;
        let modules = read.map_err(|error| refused(&format!("{}: {error}", path.display())))?;
        client.load_modules(modules, MODULES).await.map_err(agent_error)
    }
}

#[async_trait]
impl GuestAgent for Envd {
    async fn init(
        &self,
        dial: Arc<dyn Dial>,
        request: &InitRequest,
        bound: Duration,
    ) -> Result<(), AgentError> {
        // envd knows the host by its address; the token that it holds may be another sandbox's.
        let client = EnvdClient::new(dial, None);
        match client.init(request, bound).await {
            // Its kernel has not got what the volumes need, yet.
            Err(EnvdError::Refused { status, .. }) if status.as_u16() == 424 => {
                self.load_modules(&client).await?;
                client.init(request, bound).await.map_err(agent_error)
            }
            answered => answered.map_err(agent_error),
        }
    }

    async fn warm_up(
        &self,
        dial: Arc<dyn Dial>,
        request: &InitRequest,
        bound: Duration,
    ) -> Result<(), AgentError> {
        let client = EnvdClient::new(dial, request.access_token.clone().map(Token::from));
        client.init_without_clock(request, bound).await.map_err(agent_error)?;
        let shell = RunRequest {
            cmd: "/bin/bash".into(),
            args: WARM_UP.map(String::from).to_vec(),
            timeout: Some(bound),
            ..RunRequest::default()
        };
        match client.run(shell, |_| {}).await {
            // Such as an image without this shell.
            Ok(_) | Err(EnvdError::Rpc { .. }) => Ok(()),
            Err(error) => Err(agent_error(error)),
        }
    }

    async fn sync(
        &self,
        dial: Arc<dyn Dial>,
        token: Option<&Token>,
        bound: Duration,
    ) -> Result<(), AgentError> {
        let sync = RunRequest {
            cmd: "sync".into(),
            user: Some("root".into()),
            cwd: Some("/".into()),
            timeout: Some(bound),
            ..RunRequest::default()
        };
        let client = EnvdClient::new(dial, token.cloned());
        let ended = tokio::time::timeout(bound, client.run(sync, |_| {})).await;
        let silent = |_| AgentError::Silent(format!("no answer within {} s", bound.as_secs()));
        let status = ended.map_err(silent)?.map_err(agent_error)?;
        if status.is_success() {
            return Ok(());
        }
        Err(AgentError::Refused(format!("the command ended with {}", status.status)))
    }

    async fn metrics(
        &self,
        dial: Arc<dyn Dial>,
        token: Option<&Token>,
        bound: Duration,
    ) -> Result<MetricSample, AgentError> {
        let asked = async { EnvdClient::new(dial, token.cloned()).metrics().await };
        let found = match tokio::time::timeout(bound, asked).await {
            Ok(answer) => answer.map_err(agent_error)?,
            Err(_) => return Err(AgentError::Silent(format!("no answer within {} s", bound.as_secs()))),
        };
        Ok(MetricSample {
            at: chrono::Utc::now(),
            cpu_count: found.cpu_count,
            cpu_used_pct: found.cpu_used_pct,
            mem_used: found.mem_used,
            mem_total: found.mem_total,
            mem_cache: found.mem_cache,
            disk_used: found.disk_used,
            disk_total: found.disk_total,
        })
    }
}

fn agent_error(error: EnvdError) -> AgentError {
    match error {
        EnvdError::Refused { .. } | EnvdError::Rpc { .. } | EnvdError::NoVolumes => {
            AgentError::Refused(error.to_string())
        }
        error => AgentError::Silent(error.to_string()),
    }
}
