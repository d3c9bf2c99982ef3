//! Connections to a server: how they are made, and by which certificates a server is known.

use std::fmt::Debug;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::address::Address;
use crate::failure::Failure;

/// A connection that is not there by then failed.
const CONNECT_MAX: Duration = Duration::from_secs(10);

pub type Dialling<'a> = Pin<Box<dyn Future<Output = io::Result<TcpStream>> + Send + 'a>>;

/// Makes TCP connections. A process that may not connect has another do it.
pub trait Dial: Debug + Send + Sync {
    /// `host` is a name or an address, IPv6 without brackets.
    fn dial<'a>(&'a self, host: &'a str, port: u16) -> Dialling<'a>;
}

/// Looks up names and connects by itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct Direct;

impl Dial for Direct {
    fn dial<'a>(&'a self, host: &'a str, port: u16) -> Dialling<'a> {
        Box::pin(TcpStream::connect((host, port)))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TrustError {
    #[error("the certificates are no PEM: {what}")]
    NotPem { what: String },
    #[error("there is no certificate that can be used among them")]
    None,
    #[error("TLS cannot be set up: {what}")]
    Unusable { what: String },
}

/// The certificates of the authorities that vouch for servers.
#[derive(Debug, Clone)]
pub struct Trust {
    config: Arc<ClientConfig>,
}

impl Trust {
    /// By certificates in PEM, as Debian has them in `/etc/ssl/certs/ca-certificates.crt`. Those that cannot be used are left out.
    ///
    /// # Errors
    /// There is none.
    pub fn from_pem(pem: &[u8]) -> Result<Trust, TrustError> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem) {
            let certificate = certificate.map_err(|error| TrustError::NotPem { what: error.to_string() })?;
            // A bundle may have one that is out of use, as others do.
            let _ = roots.add(certificate);
        }
        if roots.is_empty() {
            return Err(TrustError::None);
        }
        let unusable = |error: rustls::Error| TrustError::Unusable { what: error.to_string() };
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Trust { config: Arc::new(config) })
    }
}

/// A connection of either kind.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

pub async fn connect(dialer: &dyn Dial, address: &Address) -> Result<TcpStream, Failure> {
    let failed = |what: String| Failure::Connect { address: address.to_string(), what };
    let stream = timeout(CONNECT_MAX, dialer.dial(&address.host, address.port)).await;
    let stream = stream.map_err(|_| failed(format!("no answer for {} s", CONNECT_MAX.as_secs())))?;
    let stream = stream.map_err(|error| failed(error.to_string()))?;
    // The last piece of a request does not wait for another one.
    stream.set_nodelay(true).map_err(|error| failed(error.to_string()))?;
    Ok(stream)
}

pub async fn secure(stream: TcpStream, trust: &Trust, address: &Address) -> Result<impl Stream + use<>, Failure> {
    let failed = |what: String| Failure::Tls { address: address.to_string(), what };
    let name = ServerName::try_from(address.host.clone()).map_err(|error| failed(error.to_string()))?;
    let handshake = TlsConnector::from(Arc::clone(&trust.config)).connect(name, stream);
    let stream = timeout(CONNECT_MAX, handshake).await;
    let stream = stream.map_err(|_| failed(format!("no answer for {} s", CONNECT_MAX.as_secs())))?;
    stream.map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_are_needed() {
        assert_eq!(Trust::from_pem(b"").unwrap_err(), TrustError::None);
        let garbage = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert_eq!(Trust::from_pem(garbage).unwrap_err(), TrustError::None);
        let half = b"-----BEGIN CERTIFICATE-----\nAAAA\n";
        assert!(matches!(Trust::from_pem(half).unwrap_err(), TrustError::NotPem { .. }));
    }
}
