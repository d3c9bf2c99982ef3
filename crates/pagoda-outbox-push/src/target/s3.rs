//! Targets in buckets of S3: `s3://BUCKET/PREFIX?…`.

use rusty_s3::{Bucket, UrlStyle};
use url::Url;

use super::{TargetError, address};

/// What most servers take as their region that have none.
const REGION_DEFAULT: &str = "us-east-1";
const REGION_BYTES_MAX: usize = 64;

/// A bucket, and where in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3Target {
    pub(crate) bucket: Bucket,
    /// Ends with a slash unless it is empty.
    pub(crate) prefix: String,
}

impl S3Target {
    pub(super) fn parse(text: &str) -> Result<S3Target, TargetError> {
        let url = address(text)?;
        let bucket = url.host_str().unwrap_or_default().to_owned();
        if url.port().is_some() || !is_bucket(&bucket) {
            return Err(TargetError::BadBucket { bucket: bucket.chars().take(80).collect() });
        }
        let prefix = prefix(url.path())?;
        let (mut endpoint, mut region, mut style) = (None, None, None);
        for (name, value) in url.query_pairs() {
            let place = match &*name {
                "endpoint" => &mut endpoint,
                "region" => &mut region,
                "style" => &mut style,
                _ => return Err(TargetError::UnknownOption { name: name.chars().take(20).collect() }),
            };
            if place.replace(value.into_owned()).is_some() {
                return Err(TargetError::UnknownOption { name: format!("a second {name}") });
            }
        }
        if endpoint.is_none() && region.is_none() {
            return Err(TargetError::NoRegion);
        }
        let region = region.unwrap_or_else(|| REGION_DEFAULT.to_owned());
        if !is_region(&region) {
            return Err(TargetError::BadRegion { region: region.chars().take(80).collect() });
        }
        // A name with dots is none that a certificate for all buckets has. Servers of others know the style with paths for sure.
        let style_default = if endpoint.is_some() || bucket.contains('.') { "path" } else { "host" };
        let style = match style.as_deref().unwrap_or(style_default) {
            "path" => UrlStyle::Path,
            "host" => UrlStyle::VirtualHost,
            style => return Err(TargetError::BadStyle { style: style.chars().take(20).collect() }),
        };
        let endpoint = endpoint.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com"));
        let endpoint = endpoint_of(&endpoint, style)?;
        let bucket = Bucket::new(endpoint, style, bucket, region).map_err(|_| TargetError::BadEndpoint)?;
        Ok(S3Target { bucket, prefix })
    }

    pub(super) fn shown(&self) -> String {
        format!("s3://{}/{} at {}", self.bucket.name(), self.prefix, self.bucket.base_url())
    }
}

fn endpoint_of(text: &str, style: UrlStyle) -> Result<Url, TargetError> {
    let url = address(text).map_err(|_| TargetError::BadEndpoint)?;
    let is_host_alone = url.path() == "/" && url.query().is_none();
    // A bucket cannot stand before a number.
    let has_name = url.domain().is_some();
    if !matches!(url.scheme(), "http" | "https") || !is_host_alone || !(matches!(style, UrlStyle::Path) || has_name) {
        return Err(TargetError::BadEndpoint);
    }
    Ok(url)
}

fn prefix(path: &str) -> Result<String, TargetError> {
    let path = path.trim_start_matches('/').trim_end_matches('/');
    if path.is_empty() {
        return Ok(String::new());
    }
    let decoded = percent_encoding::percent_decode_str(path).decode_utf8().map_err(|_| TargetError::BadPrefix)?;
    let is_bad = |part: &str| matches!(part, "" | "." | "..") || part.chars().any(char::is_control);
    if decoded.split('/').any(is_bad) {
        return Err(TargetError::BadPrefix);
    }
    Ok(format!("{decoded}/"))
}

fn is_bucket(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = name.as_bytes();
    (3..=63).contains(&bytes.len())
        && bytes.iter().all(|byte| is_plain(*byte) || matches!(byte, b'.' | b'-'))
        && bytes.first().is_some_and(|byte| is_plain(*byte))
        && bytes.last().is_some_and(|byte| is_plain(*byte))
        && !name.contains("..")
}

fn is_region(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !name.is_empty() && name.len() <= REGION_BYTES_MAX && name.bytes().all(is_plain)
}
