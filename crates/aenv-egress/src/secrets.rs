//! Secrets in the values of header rules: who has them, and what a request gets.

use aenv_types::{EgressPolicy, TeamId, Token, ValuePart, value_parts};
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
    /// The current value of a team's secret; `None` when it is not to be had, which the source has logged.
    async fn value(&self, team: &TeamId, name: &str) -> Option<Token>;
}

/// The headers that a request to this host is given, with the values that secrets have now.
pub(crate) async fn headers(
    policy: &EgressPolicy,
    host: &HostName,
    secrets: &dyn SecretSource,
) -> Result<HeaderMap, SecretError> {
    let mut headers = HeaderMap::new();
    for (name, value) in policy.headers_for(host.as_str()).unwrap_or_default() {
        let mut filled = String::new();
        for part in value_parts(value).map_err(|_| SecretError)? {
            match part {
                ValuePart::Text(text) => filled.push_str(text),
                ValuePart::Secret(name) => {
                    let team = policy.team.as_ref().ok_or(SecretError)?;
                    filled.push_str(secrets.value(team, name).await.ok_or(SecretError)?.expose());
                }
            }
        }
        let name: HeaderName = name.parse().map_err(|_| SecretError)?;
        // A secret may hold anything: one that is no header's value is not sent.
        let mut value = HeaderValue::from_str(&filled).map_err(|_| SecretError)?;
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
        async fn value(&self, team: &TeamId, name: &str) -> Option<Token> {
            let value = match name {
                "key" => "value",
                "odd" => "a\nb",
                _ => return None,
            };
            (team.to_string() == "red").then(|| value.to_owned().into())
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
            ("${e2b.secrets.key", Some("red")),
        ] {
            assert!(made(value, team).await.is_err(), "{value} of {team:?}");
        }
    }
}
