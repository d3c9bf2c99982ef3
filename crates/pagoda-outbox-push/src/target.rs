//! Where files are pushed to, as a user writes it. Pure.
//!
//! | target | how |
//! |---|---|
//! | `http://HOST:PORT/BASE/`, `https://…/` | PUT of each file below the base |
//! | `https://HOST/…{path}…?QUERY` | PUT to this address, with the file's path for `{path}`; the query may be a signature |
//! | `s3://BUCKET/PREFIX?endpoint=URL&region=REGION&style=path` | S3, signed with version 4 |
//! | `tcp://HOST:PORT` | a connection for each file |
//!
//! A query is a secret often enough, so a target that has one comes from a file and not from the command line.

mod http;
mod s3;

use url::{ParseError, Url};

pub use self::http::PutTarget;
pub use self::s3::S3Target;
use crate::address::Address;

/// Where the text was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Where other users of the host can read it.
    CommandLine,
    /// In a file that only its owner may read ([`read_secret`](crate::read_secret)).
    File,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    Put(PutTarget),
    S3(S3Target),
    Tcp(TcpTarget),
}

/// A receiver of plain connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpTarget {
    pub(crate) address: Address,
}

/// Why a text is no target, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    #[error("say how to send: begin with http://, https://, s3:// or tcp://")]
    NoScheme,
    #[error("{scheme}:// is not known: use http://, https://, s3:// or tcp://")]
    UnknownScheme { scheme: String },
    #[error("the target has a blank, a control character or a backslash: write it as % and two digits")]
    BadCharacter,
    #[error("the target is no address: {what}")]
    NoAddress { what: ParseError },
    #[error("the target names no host")]
    NoHost,
    #[error("user and password do not belong into the target: put them into a file of mode 0600")]
    HasPassword,
    #[error("the target has a part behind #, which no server sees: leave it out, or write it as %23")]
    HasFragment,
    #[error(
        "what is behind ? may be a secret, and a command line can be read by all: put the target into a file of mode 0600"
    )]
    QueryOnCommandLine,
    #[error("say with {{path}} where in the address the file's path belongs")]
    NoPlaceholder,
    #[error("{{path}} may stand once, behind the host")]
    BadPlaceholder,
    #[error("files are put below the target: let it end with /")]
    NoSlash,
    #[error("tcp:// needs a port: tcp://HOST:PORT")]
    NoPort,
    #[error("tcp:// has no paths: write tcp://HOST:PORT")]
    TcpPath,
    #[error("{bucket} is no bucket: a name has 3 to 63 of a-z, 0-9, dot and hyphen")]
    BadBucket { bucket: String },
    #[error("a part of the prefix is empty, a dot or two dots")]
    BadPrefix,
    #[error("s3:// needs a region or an endpoint: add ?region=REGION or ?endpoint=URL")]
    NoRegion,
    #[error("{region} is no region: a name has a-z, 0-9 and hyphen")]
    BadRegion { region: String },
    #[error("the endpoint is no http:// or https:// address of a host alone")]
    BadEndpoint,
    #[error("{style} is no style: say style=path or style=host")]
    BadStyle { style: String },
    #[error("s3:// knows endpoint, region and style, each once, and not {name}")]
    UnknownOption { name: String },
}

impl Target {
    /// # Errors
    /// It is none.
    pub fn parse(text: &str, origin: Origin) -> Result<Target, TargetError> {
        if text.contains(|c: char| c.is_whitespace() || c.is_control() || c == '\\') {
            return Err(TargetError::BadCharacter);
        }
        let (scheme, rest) = text.split_once("://").ok_or(TargetError::NoScheme)?;
        // Browsers take "http:///a" for a host of that name.
        if rest.starts_with('/') {
            return Err(TargetError::NoHost);
        }
        match scheme.to_ascii_lowercase().as_str() {
            "http" | "https" => PutTarget::parse(text, origin).map(Target::Put),
            "s3" => S3Target::parse(text).map(Target::S3),
            "tcp" => TcpTarget::parse(text).map(Target::Tcp),
            "" => Err(TargetError::NoScheme),
            _ => Err(TargetError::UnknownScheme { scheme: scheme.chars().take(20).collect() }),
        }
    }

    /// Without what may be secret.
    pub fn shown(&self) -> String {
        match self {
            Target::Put(put) => put.shown(),
            Target::S3(s3) => s3.shown(),
            Target::Tcp(tcp) => format!("tcp://{}", tcp.address),
        }
    }
}

impl TcpTarget {
    fn parse(text: &str) -> Result<TcpTarget, TargetError> {
        let url = address(text)?;
        if !matches!(url.path(), "" | "/") || url.query().is_some() {
            return Err(TargetError::TcpPath);
        }
        let port = url.port().filter(|port| *port != 0).ok_or(TargetError::NoPort)?;
        let host = url.host_str().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        Ok(TcpTarget { address: Address { host, port } })
    }
}

/// An address with a host, and without what none of them may have.
fn address(text: &str) -> Result<Url, TargetError> {
    let url = Url::parse(text).map_err(|what| match what {
        ParseError::EmptyHost => TargetError::NoHost,
        what => TargetError::NoAddress { what },
    })?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(TargetError::HasPassword);
    }
    if url.fragment().is_some() {
        return Err(TargetError::HasFragment);
    }
    if url.host_str().is_none_or(str::is_empty) {
        return Err(TargetError::NoHost);
    }
    Ok(url)
}

#[cfg(test)]
mod tests;
