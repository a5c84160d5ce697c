//! A password for Amazon's registry (ECR). It lasts twelve hours, and is given out for an access key.
//!
//! `GetAuthorizationToken` of the Amazon ECR API reference, signed with Signature Version 4.

use std::time::Duration;

use aenv_store::SourceError;
use base64::Engine as _;
use bytes::Bytes;
use http::{StatusCode, header};
use object_store::{
    aws::{AwsAuthorizer, AwsCredential},
    client::{HttpRequest, HttpRequestBody},
};
use reqwest::{Client, redirect};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    Bounds, Credentials,
    bounds::Failure,
    registry::{body, send, short},
};

const SERVICE: &str = "ecr";
const OPERATION: &str = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken";
/// Bytes that an answer may have.
const LONGEST_ANSWER: usize = 64 << 10;
/// What AWS calls it when somebody asks too often. The status is 400 then, as for a wrong key.
const TOO_OFTEN: [&str; 3] = ["ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded"];

/// An access key of an AWS account, for the registry of one region.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AwsKey {
    access_key_id: String,
    secret_access_key: String,
    region: String,
}

/// A key that AWS cannot have given out, or a region that it cannot have.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum InvalidAwsKey {
    /// The key's id.
    #[error("an AWS access key id has letters and digits only")]
    Id,
    /// The secret.
    #[error("an AWS secret access key is not empty and has no spaces")]
    Secret,
    /// The region.
    #[error("{0:?} is no AWS region, such as eu-central-1")]
    Region(String),
}

impl AwsKey {
    /// A key whose parts can be sent: the region becomes a part of a host name, the id of a header.
    pub fn new(
        access_key_id: String,
        secret_access_key: String,
        region: String,
    ) -> Result<Self, InvalidAwsKey> {
        let id_fits = (1..=128).contains(&access_key_id.len())
            && access_key_id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if !id_fits {
            return Err(InvalidAwsKey::Id);
        }
        if secret_access_key.is_empty() || !secret_access_key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(InvalidAwsKey::Secret);
        }
        let region_fits = (1..=40).contains(&region.len())
            && region.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
        if !region_fits {
            return Err(InvalidAwsKey::Region(short(&region)));
        }
        Ok(Self { access_key_id, secret_access_key, region })
    }

    /// User and password for the registry, from where AWS has them, or from where `AWS_ENDPOINT_URL_ECR` or `AWS_ENDPOINT_URL` says.
    pub async fn login(&self) -> Result<Credentials, SourceError> {
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let endpoint = set("AWS_ENDPOINT_URL_ECR").or_else(|| set("AWS_ENDPOINT_URL"));
        self.login_at(&endpoint.unwrap_or_else(|| self.endpoint()), Bounds::default()).await
    }

    fn endpoint(&self) -> String {
        let region = &self.region;
        let domain = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
        format!("https://api.ecr.{region}.{domain}")
    }

    /// The same at a place of the caller's.
    pub async fn login_at(&self, endpoint: &str, bounds: Bounds) -> Result<Credentials, SourceError> {
        let context = format!("a login for ECR from {endpoint}");
        let remote = |message: String| SourceError::Remote { context: context.clone(), message };
        let client =
            Client::builder().redirect(redirect::Policy::none()).connect_timeout(Duration::from_secs(5));
        let client = client.build().map_err(|error| remote(error.to_string()))?;
        let request = bounds.attempts(&context, || self.ask(&client, endpoint));
        tokio::time::timeout(bounds.read, request)
            .await
            .map_err(|_| SourceError::TimedOut { context: context.clone(), after: bounds.read })?
    }

    /// One attempt. Its signature has the time in it.
    async fn ask(&self, client: &Client, endpoint: &str) -> Result<Credentials, Failure> {
        const BODY: &str = "{}";
        let request = http::Request::post(endpoint)
            .header(header::CONTENT_TYPE, "application/x-amz-json-1.1")
            .header("x-amz-target", OPERATION)
            .body(HttpRequestBody::from(BODY.to_owned()));
        let mut request: HttpRequest = request.map_err(|error| Failure::Final(error.to_string()))?;
        let credential = AwsCredential {
            key_id: self.access_key_id.clone(),
            secret_key: self.secret_access_key.clone(),
            token: None,
        };
        AwsAuthorizer::new(&credential, SERVICE, &self.region)
            .try_authorize(&mut request, None)
            .map_err(|error| Failure::Final(error.to_string()))?;
        let headers = request.headers().clone();
        let response = send(client.post(endpoint).headers(headers).body(BODY)).await?;
        let status = response.status();
        let bytes = body(response, LONGEST_ANSWER).await?;
        if status.is_success() {
            return credentials(&bytes)
                .ok_or_else(|| Failure::Final("the answer has no login in it".to_owned()));
        }
        Err(refusal(status, &bytes))
    }
}

impl std::fmt::Debug for AwsKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AwsKey").field("region", &self.region).finish_non_exhaustive()
    }
}

/// The login in an answer: base64 of `AWS:<password>`.
fn credentials(answer: &Bytes) -> Option<Credentials> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Answer {
        authorization_data: Vec<Data>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Data {
        authorization_token: String,
    }
    let answer: Answer = serde_json::from_slice(answer).ok()?;
    let token = &answer.authorization_data.first()?.authorization_token;
    let decoded = base64::engine::general_purpose::STANDARD.decode(token).ok()?;
    let text = String::from_utf8(decoded).ok()?;
    let (user, password) = text.split_once(':')?;
    (!password.is_empty()).then(|| Credentials { user: user.to_owned(), password: password.to_owned() })
}

/// Why there is no login. An error of AWS's is `{"__type": "<prefix>#<name>", "message": ...}`.
fn refusal(status: StatusCode, answer: &Bytes) -> Failure {
    #[derive(Default, Deserialize)]
    struct Answer {
        #[serde(default, rename = "__type")]
        kind: String,
        #[serde(default, alias = "Message")]
        message: String,
    }
    let Answer { kind, message } = serde_json::from_slice(answer).unwrap_or_default();
    let kind = kind.rsplit('#').next().unwrap_or_default();
    let passing =
        status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS || TOO_OFTEN.contains(&kind);
    if passing {
        return Failure::Passing(format!("AWS answered with {status} {}", short(kind)), None);
    }
    if !status.is_client_error() {
        return Failure::Final(format!("AWS answered with {status}"));
    }
    Failure::Denied(format!("AWS refuses the access key ({status}): {} {}", short(kind), short(&message)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &str, secret: &str, region: &str) -> Result<AwsKey, InvalidAwsKey> {
        AwsKey::new(id.to_owned(), secret.to_owned(), region.to_owned())
    }

    #[test]
    fn what_cannot_be_sent_is_refused() {
        assert_eq!(key("AKIA\r\n", "s", "eu-central-1"), Err(InvalidAwsKey::Id));
        assert_eq!(key("", "s", "eu-central-1"), Err(InvalidAwsKey::Id));
        assert_eq!(key("AKIA", "", "eu-central-1"), Err(InvalidAwsKey::Secret));
        for region in ["", "eu.evil.example/", "EU", "a@b", "a:1", &"a".repeat(41)] {
            assert!(matches!(key("AKIA", "s", region), Err(InvalidAwsKey::Region(_))), "{region}");
        }
        assert!(!format!("{:?}", key("AKIA", "hush", "eu-central-1").unwrap()).contains("hush"));
    }

    #[test]
    fn each_region_is_asked_at_its_own_place() {
        let endpoint = |region| key("AKIA", "s", region).unwrap().endpoint();
        assert_eq!(endpoint("eu-central-1"), "https://api.ecr.eu-central-1.amazonaws.com");
        assert_eq!(endpoint("cn-north-1"), "https://api.ecr.cn-north-1.amazonaws.com.cn");
    }
}
