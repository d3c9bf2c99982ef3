use std::path::PathBuf;
use std::time::Duration;

use crate::error::EtcdError;
use crate::values;

/// Members of a cluster that a client is told of; etcd's own advice is 3 to 7.
const ENDPOINTS_MAX: usize = 16;
/// An election takes one second by etcd's defaults, a slow disk as long.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a command tries: two elections and a request.
const PATIENCE: Duration = Duration::from_secs(10);

/// PEM files for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of who may have signed etcd's.
    pub ca: PathBuf,
    /// This node's certificate and private key, where etcd asks for them.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Where etcd is, and which pool is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdConfig {
    /// `host:port` of each member; all of one cluster.
    pub endpoints: Vec<String>,
    /// Part of every key: several pools can share an etcd.
    pub pool: String,
    /// Said of an owner to others.
    pub host: String,
    pub secure: bool,
    pub tls: Option<TlsFiles>,
    /// After this, a request counts as lost and goes to the next member.
    pub request_timeout: Duration,
    /// After this, a call ends with the error of its last try.
    pub patience: Duration,
}

impl EtcdConfig {
    /// Reads `etcd://HOST:PORT[,HOST:PORT...]/POOL`; `etcds://` is with TLS.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str, host: &str) -> Result<EtcdConfig, EtcdError> {
        let fail = |what| EtcdError::Address { text: text.to_owned(), what };
        let (secure, rest) = match (text.strip_prefix("etcd://"), text.strip_prefix("etcds://")) {
            (Some(rest), _) => (false, rest),
            (_, Some(rest)) => (true, rest),
            _ => return Err(fail("it begins with neither")),
        };
        let (endpoints, pool) = rest.split_once('/').ok_or(fail("the pool's name is missing"))?;
        values::check_name(pool).map_err(|_| fail("a pool's name is 1 to 64 of a-z, 0-9, '-', '_', '.'"))?;
        values::check_name(host).map_err(|what| EtcdError::Invalid { what: format!("host name {host}: {what}") })?;
        let endpoints: Vec<String> = endpoints.split(',').map(str::to_owned).collect();
        if endpoints.len() > ENDPOINTS_MAX {
            return Err(fail("more than 16 endpoints"));
        }
        if !endpoints.iter().all(|endpoint| is_endpoint(endpoint)) {
            return Err(fail("an endpoint is a host and a port"));
        }
        let tls = None;
        let (request_timeout, patience) = (REQUEST_TIMEOUT, PATIENCE);
        let (pool, host) = (pool.to_owned(), host.to_owned());
        Ok(EtcdConfig { endpoints, pool, host, secure, tls, request_timeout, patience })
    }
}

fn is_endpoint(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let named = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
    let host =
        bare.map_or_else(|| !host.is_empty() && host.chars().all(named), |v6| v6.parse::<std::net::Ipv6Addr>().is_ok());
    host && port.parse::<u16>().is_ok_and(|port| port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_or_refused() {
        let good = EtcdConfig::parse("etcd://a.example:2379,[fd00::1]:2379,10.0.0.1:1/lab", "h1").unwrap();
        assert_eq!((good.endpoints.len(), good.pool.as_str(), good.secure), (3, "lab", false));
        assert!(EtcdConfig::parse("etcds://a:2379/lab", "h1").unwrap().secure);
        for bad in [
            "http://a:1/lab",
            "etcd://a:1",
            "etcd://a:1/",
            "etcd://a:1/La",
            "etcd:///lab",
            "etcd://a/lab",
            "etcd://a:0/lab",
            "etcd://a:70000/lab",
            "etcd://a:1,/lab",
            "etcd://u@a:1/lab",
            "etcd://[a]:1/lab",
            "etcd://a:1/lab/x",
        ] {
            assert!(matches!(EtcdConfig::parse(bad, "h1"), Err(EtcdError::Address { .. })), "{bad}");
        }
        assert!(matches!(EtcdConfig::parse("etcd://a:1/lab", "Host!"), Err(EtcdError::Invalid { .. })));
        let many = format!("etcd://{}/lab", vec!["a:1"; ENDPOINTS_MAX + 1].join(","));
        assert!(EtcdConfig::parse(&many, "h1").is_err());
    }
}
