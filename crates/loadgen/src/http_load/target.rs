//! `Target`: the server that is measured, from its address.

use hyper::Uri;
use thiserror::Error;

/// An address that cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum TargetError {
    /// TLS.
    #[error("https is not supported: give the server's http address instead of {url:?}")]
    Https {
        /// Given.
        url: String,
    },
    /// No address of a server.
    #[error("the base URL must be of the form http://HOST:PORT, got {url:?}")]
    Form {
        /// Given.
        url: String,
    },
}

/// Where requests go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Target {
    /// Name or address, without the brackets of an IPv6 one.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Both, for the `Host` header.
    pub authority: String,
    /// What comes before the endpoint; no slash at its end.
    pub path: String,
}

impl Target {
    /// Read `http://host:port/path`.
    ///
    /// # Errors
    /// Anything else; https by name.
    pub fn parse(base_url: &str) -> Result<Self, TargetError> {
        let form = || TargetError::Form { url: base_url.to_owned() };
        let uri: Uri = base_url.parse().map_err(|_| form())?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(TargetError::Https { url: base_url.to_owned() }),
            _ => return Err(form()),
        }
        let authority = uri.authority().ok_or_else(form)?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || uri.query().is_some() || authority.as_str().contains('@') {
            return Err(form());
        }
        let port = &authority.as_str()[authority.host().len()..];
        if !port.is_empty() && authority.port_u16().is_none() {
            return Err(form());
        }
        Ok(Self {
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(80),
            authority: authority.as_str().to_owned(),
            path: uri.path().trim_end_matches('/').to_owned(),
        })
    }
}
