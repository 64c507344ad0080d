//! `served_model`: what the server says it serves.

use std::time::Duration;

use bytes::Bytes;
use hyper::{Method, StatusCode};
use tokio::task::LocalSet;

use super::{
    HttpLoadError,
    client::Client,
    exchange::{message_of, read_some},
    record::Failure,
    runtime,
    target::Target,
};

/// How long the question may take.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A list of models is at most this long.
const MAX_BYTES: usize = 8 << 20;

/// The first model of `/v1/models`.
///
/// # Errors
/// No server, or one that names no model.
pub fn served_model(base_url: &str, api_key: Option<&str>) -> Result<String, HttpLoadError> {
    let client = Client::new(Target::parse(base_url)?, api_key).ok_or(HttpLoadError::Header)?;
    let unreachable = |failure| HttpLoadError::Unreachable { base_url: base_url.to_owned(), failure };
    let problem = |problem| HttpLoadError::Models { base_url: base_url.to_owned(), problem };
    let ask = async {
        let (response, _connection) = client.send(Method::GET, "/v1/models", Bytes::new()).await?;
        let status = response.status();
        Ok((status, read_some(&mut response.into_body(), MAX_BYTES).await))
    };
    let (status, body) = LocalSet::new()
        .block_on(&runtime()?, async { tokio::time::timeout(TIMEOUT, ask).await })
        .unwrap_or(Err(Failure::Timeout { timeout: TIMEOUT }))
        .map_err(unreachable)?;
    if status != StatusCode::OK {
        return Err(problem(format!("HTTP status {}: {}", status.as_u16(), message_of(&body))));
    }
    let answer: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    match answer["data"][0]["id"].as_str() {
        Some(name) => Ok(name.to_owned()),
        None => Err(problem(format!("no model in the answer {}", message_of(&body)))),
    }
}
