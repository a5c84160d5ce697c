//! Secrets in the values of header rules: who has them, and what a request gets.

use aenv_types::{EgressPolicy, SECRET_PLACEHOLDER, TeamId, Token};
use async_trait::async_trait;
use http::{HeaderMap, HeaderName, HeaderValue};
use thiserror::Error;

use crate::HostName;

/// Why the headers of a request could not be made. The text is for the guest: it tells nothing of the secret.
#[derive(Debug, Error)]
#[error("a secret that the rules for this host name cannot be used")]
pub(crate) struct SecretError;

/// Where secrets are.
#[async_trait]
pub trait SecretSource: Send + Sync {
    /// A text in which each `${e2b.secrets.<name>}` has become the current value of the team's secret; `None` when one of them is not
    /// to be had, which the source has logged.
    async fn fill(&self, team: &TeamId, text: &str) -> Option<Token>;
}

/// The headers that a request to this host is given, with the values that secrets have now.
pub(crate) async fn headers(
    policy: &EgressPolicy,
    host: &HostName,
    secrets: &dyn SecretSource,
) -> Result<HeaderMap, SecretError> {
    let mut headers = HeaderMap::new();
    for (name, value) in policy.headers_for(host.as_str()).unwrap_or_default() {
        let filled;
        let value = if value.contains(SECRET_PLACEHOLDER) {
            let team = policy.team.as_ref().ok_or(SecretError)?;
            filled = secrets.fill(team, value).await.ok_or(SecretError)?;
            filled.expose()
        } else {
            value
        };
        let name: HeaderName = name.parse().map_err(|_| SecretError)?;
        // A secret may hold anything: one that is no header's value is not sent.
        let mut value = HeaderValue::from_str(value).map_err(|_| SecretError)?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use aenv_types::HeaderRule;

    use super::*;

    struct Known;

    #[async_trait]
    impl SecretSource for Known {
        async fn fill(&self, team: &TeamId, text: &str) -> Option<Token> {
            let known = team.to_string() == "red" && !text.contains("unknown");
            known.then(|| {
                text.replace("${e2b.secrets.key}", "value").replace("${e2b.secrets.odd}", "a\nb").into()
            })
        }
    }

    async fn made(value: &str, team: Option<&str>) -> Result<Option<String>, SecretError> {
        let headers: std::collections::BTreeMap<_, _> =
            [("x-key".to_owned(), value.to_owned().into()), ("x-plain".to_owned(), "1".to_owned().into())]
                .into();
        let policy = EgressPolicy {
            rules: vec![HeaderRule { host: "a.test".into(), headers }],
            team: team.map(|team| team.parse().unwrap()),
            ..EgressPolicy::default()
        };
        let made = super::headers(&policy, &"a.test".parse().unwrap(), &Known).await?;
        assert_eq!(made["x-plain"], "1");
        assert!(made["x-key"].is_sensitive());
        Ok(made["x-key"].to_str().ok().map(str::to_owned))
    }

    #[tokio::test]
    async fn secrets_become_values_or_the_request_is_not_made() {
        assert_eq!(
            made("Bearer ${e2b.secrets.key}!", Some("red")).await.unwrap().as_deref(),
            Some("Bearer value!")
        );
        assert_eq!(made("plain", None).await.unwrap().as_deref(), Some("plain"));
        for (value, team) in [
            ("${e2b.secrets.unknown}", Some("red")),
            ("${e2b.secrets.key}", Some("blue")),
            ("${e2b.secrets.key}", None),
            ("${e2b.secrets.odd}", Some("red")),
        ] {
            assert!(made(value, team).await.is_err(), "{value} of {team:?}");
        }
    }
}
