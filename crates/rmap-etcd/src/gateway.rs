//! etcd's JSON gateway over HTTP/1.1: requests, replies, which member is asked, and what tells a wrong cluster.
//!
//! The gateway is part of every etcd since 3.4 and on unless it is switched off. It spares a gRPC stack and an async
//! runtime; what is lost is watching, which this crate does not need.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::crypto::aws_lc_rs;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use ureq::Agent;
use ureq::http::StatusCode;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

use crate::config::{EtcdConfig, TlsFiles};
use crate::error::EtcdError;

/// A page of a map is 1,024 entries of some 300 bytes, a third more in base64.
const REPLY_MAX: u64 = 4 << 20;
/// gRPC's codes that say "never like this": invalid argument, not found, exists, denied, precondition, out of range,
/// not implemented, who are you. All others may pass.
const REFUSALS: [u32; 8] = [3, 5, 6, 7, 9, 11, 12, 16];
/// The code of gRPC for "not found"; with the text "lease not found" it means that the lease has ended.
const NOT_FOUND: u32 = 5;

/// A 64-bit number, which the gateway writes as text and leaves out when it is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Number(pub u64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Number, D::Error> {
        let text = String::deserialize(deserializer)?;
        // Signed ones are in the protocol, negative ones mean nothing here.
        text.parse().map(Number).map_err(|_| D::Error::custom("not a number of 64 bits"))
    }
}

/// Bytes, which the gateway writes and reads as base64.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bytes(pub Vec<u8>);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        let text = String::deserialize(deserializer)?;
        STANDARD.decode(text).map(Bytes).map_err(|_| D::Error::custom("not base64"))
    }
}

pub fn base64(bytes: impl AsRef<[u8]>) -> String {
    STANDARD.encode(bytes)
}

#[derive(Debug, Deserialize)]
pub struct Header {
    cluster_id: Number,
    #[serde(default)]
    revision: Number,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub struct KeyValue {
    pub key: Bytes,
    /// Counts the changes since it was created.
    #[serde(default)]
    pub version: Number,
    #[serde(default)]
    pub mod_revision: Number,
    #[serde(default)]
    pub value: Bytes,
}

#[derive(Debug, Default, Deserialize)]
pub struct Found {
    #[serde(default)]
    pub kvs: Vec<KeyValue>,
    #[serde(default)]
    pub more: bool,
}

#[derive(Debug, Deserialize)]
pub struct RangeReply {
    header: Header,
    #[serde(flatten)]
    pub found: Found,
}

#[derive(Debug, Deserialize)]
pub struct OpReply {
    #[serde(default)]
    pub response_range: Option<Found>,
}

#[derive(Debug, Deserialize)]
pub struct TxnReply {
    header: Header,
    #[serde(default)]
    pub succeeded: bool,
    #[serde(default)]
    pub responses: Vec<OpReply>,
}

#[derive(Debug, Deserialize)]
pub struct LeaseReply {
    header: Header,
    #[serde(rename = "ID", default)]
    pub id: Number,
    /// Seconds; 0 if there is no such lease (any more).
    #[serde(rename = "TTL", default)]
    pub ttl: Number,
}

/// The gateway streams renewals, each in an envelope.
#[derive(Debug, Deserialize)]
pub struct RenewReply {
    pub result: LeaseReply,
}

/// What an answer says of the cluster.
pub trait Reply: DeserializeOwned {
    fn header(&self) -> &Header;
    /// Whether it stands in the order of all changes.
    const ORDERED: bool;
}

impl Reply for RangeReply {
    fn header(&self) -> &Header {
        &self.header
    }
    const ORDERED: bool = true;
}

impl Reply for TxnReply {
    fn header(&self) -> &Header {
        &self.header
    }
    const ORDERED: bool = true;
}

impl Reply for LeaseReply {
    fn header(&self) -> &Header {
        &self.header
    }
    const ORDERED: bool = false;
}

impl Reply for RenewReply {
    fn header(&self) -> &Header {
        &self.result.header
    }
    const ORDERED: bool = false;
}

#[derive(Debug, Deserialize)]
struct Complaint {
    #[serde(default)]
    code: u32,
    #[serde(default, alias = "error")]
    message: String,
}

/// The members of a cluster, one of which is asked.
#[derive(Debug)]
pub struct Gateway {
    agent: Agent,
    scheme: &'static str,
    endpoints: Vec<String>,
    turn: usize,
    /// Answers in a row that were not etcd's.
    foreign: usize,
    cluster: Option<u64>,
    /// The greatest that was seen.
    revision: u64,
}

impl Gateway {
    /// # Errors
    /// Files for TLS that cannot be used.
    pub fn new(config: &EtcdConfig) -> Result<Gateway, EtcdError> {
        let tls = match &config.tls {
            Some(files) => tls(files)?,
            None => TlsConfig::builder().unversioned_rustls_crypto_provider(provider()).build(),
        };
        let agent = Agent::config_builder()
            .timeout_global(Some(config.request_timeout))
            .http_status_as_error(false)
            .https_only(config.secure)
            .max_redirects(0)
            // What the environment says of proxies is not meant for this.
            .proxy(None)
            .max_idle_connections(1)
            .max_idle_age(Duration::from_secs(60))
            .tls_config(tls)
            .build()
            .into();
        let scheme = if config.secure { "https" } else { "http" };
        Ok(Gateway {
            agent,
            scheme,
            endpoints: config.endpoints.clone(),
            turn: 0,
            foreign: 0,
            cluster: None,
            revision: 0,
        })
    }

    /// The cluster that has answered.
    pub fn cluster(&self) -> Option<u64> {
        self.cluster
    }

    /// That of the last answer that stands in the order of all changes.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// One request, once. A member that does not answer is not the one that is asked next.
    ///
    /// # Errors
    /// Of transient ones nobody knows whether the request was carried out.
    pub fn call<T: Reply>(&mut self, path: &str, body: &Value) -> Result<T, EtcdError> {
        let endpoint = self.endpoints[self.turn % self.endpoints.len()].clone();
        let reply = self.ask(&endpoint, path, body).and_then(|reply: T| {
            self.check(&endpoint, reply.header(), T::ORDERED)?;
            Ok(reply)
        });
        if reply.is_err() {
            self.turn += 1;
        }
        self.next_may_be_etcd(reply)
    }

    /// Something else than etcd at one endpoint (a proxy's page, a gateway that is off) says nothing about the next one. It
    /// is final when all of them have answered so.
    fn next_may_be_etcd<T>(&mut self, reply: Result<T, EtcdError>) -> Result<T, EtcdError> {
        match reply {
            Err(EtcdError::Nonsense { endpoint, what }) if self.foreign + 1 < self.endpoints.len() => {
                self.foreign += 1;
                Err(EtcdError::Unavailable { endpoint, message: format!("not an answer of etcd's: {what}") })
            }
            reply => {
                self.foreign = 0;
                reply
            }
        }
    }

    fn ask<T: Reply>(&self, endpoint: &str, path: &str, body: &Value) -> Result<T, EtcdError> {
        let lost = |error: ureq::Error| EtcdError::Unreachable { endpoint: endpoint.into(), what: error.to_string() };
        let url = format!("{}://{endpoint}/v3/{path}", self.scheme);
        let request = self.agent.post(&url).header("content-type", "application/json");
        let mut reply = request.send(body.to_string().as_bytes()).map_err(lost)?;
        let bytes = reply.body_mut().with_config().limit(REPLY_MAX).read_to_vec().map_err(lost)?;
        let nonsense = |what: String| EtcdError::Nonsense { endpoint: endpoint.into(), what };
        if reply.status().is_success() {
            return serde_json::from_slice(&bytes).map_err(|error| nonsense(error.to_string()));
        }
        let status = reply.status();
        match serde_json::from_slice::<Complaint>(&bytes) {
            Ok(complaint) => Err(complaint.of(endpoint)),
            // A proxy whose etcd is away, or who has too much to do. What it did with the request nobody knows.
            Err(_) if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                Err(EtcdError::Unavailable { endpoint: endpoint.into(), message: format!("HTTP status {status}") })
            }
            Err(_) => Err(nonsense(format!("HTTP status {status}"))),
        }
    }

    fn check(&mut self, endpoint: &str, header: &Header, ordered: bool) -> Result<(), EtcdError> {
        let (ours, theirs) = (*self.cluster.get_or_insert(header.cluster_id.0), header.cluster_id.0);
        if ours != theirs {
            return Err(EtcdError::OtherCluster { endpoint: endpoint.into(), ours, theirs });
        }
        if ordered {
            if header.revision.0 < self.revision {
                return Err(EtcdError::WentBack { seen: self.revision, now: header.revision.0 });
            }
            self.revision = header.revision.0;
        }
        Ok(())
    }
}

impl Complaint {
    fn of(self, endpoint: &str) -> EtcdError {
        // What a hostile endpoint says is not repeated at any length.
        let message: String = self.message.chars().filter(|c| !c.is_control()).take(200).collect();
        let endpoint = endpoint.to_owned();
        match self.code {
            NOT_FOUND if message.contains("lease not found") => EtcdError::LeaseLost { lease: 0 },
            code if REFUSALS.contains(&code) => EtcdError::Refused { endpoint, message },
            _ => EtcdError::Unavailable { endpoint, message },
        }
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

fn tls(files: &TlsFiles) -> Result<TlsConfig, EtcdError> {
    let roots = RootCerts::new_with_certs(&certificates(&files.ca)?);
    let identity = match &files.identity {
        None => None,
        Some((chain, key)) => {
            let private = PrivateKey::from_pem(&read(key)?).map_err(|error| unusable(key, error.to_string()))?;
            Some(ClientCert::new_with_certs(&certificates(chain)?, private))
        }
    };
    Ok(TlsConfig::builder()
        .unversioned_rustls_crypto_provider(provider())
        .root_certs(roots)
        .client_cert(identity)
        .build())
}

fn certificates(path: &Path) -> Result<Vec<Certificate<'static>>, EtcdError> {
    let mut found = Vec::new();
    for item in parse_pem(&read(path)?) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| unusable(path, error.to_string()))? {
            found.push(certificate);
        }
    }
    if found.is_empty() {
        return Err(unusable(path, "there is no certificate in it".to_owned()));
    }
    Ok(found)
}

fn read(path: &Path) -> Result<Vec<u8>, EtcdError> {
    fs::read(path).map_err(|error| unusable(path, error.to_string()))
}

fn unusable(path: &Path, what: String) -> EtcdError {
    EtcdError::Tls { path: path.to_owned(), what }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gateway() -> Gateway {
        Gateway::new(&EtcdConfig::parse("etcd://a:1,b:1/lab", "h").unwrap()).unwrap()
    }

    fn header(cluster: u64, revision: u64) -> Header {
        Header { cluster_id: Number(cluster), revision: Number(revision) }
    }

    #[test]
    fn another_cluster_and_an_older_one_are_noticed() {
        let mut gateway = gateway();
        assert_eq!(gateway.check("a", &header(1, 10), true), Ok(()));
        assert_eq!(gateway.check("b", &header(1, 10), true), Ok(()));
        // A member that lags may say so in what is not ordered.
        assert_eq!(gateway.check("b", &header(1, 9), false), Ok(()));
        assert_eq!(gateway.check("b", &header(1, 9), true), Err(EtcdError::WentBack { seen: 10, now: 9 }));
        assert!(matches!(gateway.check("b", &header(2, 11), true), Err(EtcdError::OtherCluster { .. })));
    }

    #[test]
    fn complaints_are_told_apart() {
        let of = |text: &str| serde_json::from_str::<Complaint>(text).unwrap().of("a");
        assert!(of(r#"{"message":"etcdserver: no leader","code":14}"#).is_transient());
        assert!(of(r#"{"error":"etcdserver: request timed out","code":2}"#).is_transient());
        assert!(!of(r#"{"message":"unexpected EOF","code":3}"#).is_transient());
        let lost = of(r#"{"message":"etcdserver: requested lease not found","code":5}"#);
        assert_eq!(lost, EtcdError::LeaseLost { lease: 0 });
    }

    #[test]
    fn replies_are_read_or_refused() {
        let reply =
            r#"{"header":{"cluster_id":"7","revision":"3"},"kvs":[{"key":"YQ==","version":"1","value":"Yg=="}]}"#;
        let range: RangeReply = serde_json::from_str(reply).unwrap();
        assert_eq!((range.found.kvs[0].key.0.as_slice(), range.found.kvs[0].version), (&b"a"[..], Number(1)));
        for bad in [
            "{}",
            r#"{"header":{}}"#,
            r#"{"header":{"cluster_id":"-7"}}"#,
            r#"{"header":{"cluster_id":"7"},"kvs":[{"key":"*"}]}"#,
        ] {
            assert!(serde_json::from_str::<RangeReply>(bad).is_err(), "{bad}");
        }
    }
}
