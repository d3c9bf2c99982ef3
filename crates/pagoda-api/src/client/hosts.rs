//! The client asks about other hosts here, and says which of them are trusted.

use super::{Client, ClientError};
use crate::types::{HostList, HostPing, TrustedHost, check_host_name};

impl Client {
    /// This host's key, and the hosts that it trusts.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn hosts(&self) -> Result<HostList, ClientError> {
        self.get("/v1/hosts")
    }

    /// Trusts a host.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn trust(&self, host: &TrustedHost) -> Result<HostList, ClientError> {
        self.send("POST", "/v1/hosts", host)
    }

    /// Trusts a host no more.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn untrust(&self, name: &str) -> Result<(), ClientError> {
        self.exchange("DELETE", &path(name, "")?, None).map(drop)
    }

    /// Asks a host what it has free, and how fast the way to it is.
    ///
    /// # Errors
    /// The daemon's answer, or that there is none.
    pub fn ping(&self, name: &str) -> Result<HostPing, ClientError> {
        self.send("POST", &path(name, "/ping")?, &())
    }
}

fn path(name: &str, rest: &str) -> Result<String, ClientError> {
    check_host_name(name).map_err(ClientError::BadName)?;
    Ok(format!("/v1/hosts/{name}{rest}"))
}
