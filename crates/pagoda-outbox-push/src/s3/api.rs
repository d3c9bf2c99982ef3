//! The requests of S3 that a push needs. `rusty-s3` signs them and knows their XML; bytes go by our own client.

use std::future::Future;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hyper::header::{CONTENT_LENGTH, ETAG, HeaderName, HeaderValue};
use hyper::{Method, StatusCode};
use rusty_s3::actions::{
    AbortMultipartUpload, CompleteMultipartUpload, CreateMultipartUpload, HeadObject, ListParts, PutObject, UploadPart,
};
use rusty_s3::{Bucket, Credentials, S3Action};
use url::Url;

use crate::body::PushBody;
use crate::failure::{Failure, Trouble, words};
use crate::http::{Ask, Http, Reply};
use crate::parts::Upload;
use crate::pump::Fed;
use crate::secret::S3Keys;

/// How long a signature is good for. It is made for each request, and looked at when the request begins.
const SIGNED_FOR: Duration = Duration::from_secs(3600);
const CONTENT_MD5: &str = "content-md5";
/// Pages of a list of parts, each of up to 1,000.
const PAGES_MAX: usize = 20;

/// Why a request was not carried out.
#[derive(Debug)]
pub enum Refused {
    /// The server does not know the upload.
    NoSuchUpload,
    Other(Trouble),
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Refused {
        Refused::Other(failure.into())
    }
}

impl From<Refused> for Trouble {
    fn from(refused: Refused) -> Trouble {
        match refused {
            Refused::NoSuchUpload => Failure::UploadLost.into(),
            Refused::Other(trouble) => trouble,
        }
    }
}

/// What there is under the key.
#[derive(Debug)]
pub struct Object {
    pub bytes: u64,
    pub etag: String,
}

/// One key of a bucket.
#[derive(Debug)]
pub struct Api {
    http: Http,
    bucket: Bucket,
    credentials: Credentials,
    key: String,
}

impl Api {
    pub fn new(http: Http, bucket: Bucket, keys: &S3Keys, key: String) -> Api {
        let credentials = match &keys.token {
            None => Credentials::new(keys.id.clone(), keys.secret.clone()),
            Some(token) => Credentials::new_with_token(keys.id.clone(), keys.secret.clone(), token.clone()),
        };
        Api { http, bucket, credentials, key }
    }

    pub fn key(&self) -> &str {
        &self.key
    }

    /// Puts the whole object, which `feed` gives `body` meanwhile.
    pub async fn put(
        &mut self,
        md5: [u8; 16],
        body: PushBody,
        feed: impl Future<Output = Result<Fed, Trouble>>,
    ) -> Result<(), Trouble> {
        let mut action = PutObject::new(&self.bucket, Some(&self.credentials), &self.key);
        let md5 = BASE64_STANDARD.encode(md5);
        action.headers_mut().insert(CONTENT_MD5, md5.clone());
        let url = action.sign(SIGNED_FOR);
        self.send(&url, &md5, body, feed).await?;
        Ok(())
    }

    /// Puts a part, and gives its ETag.
    pub async fn put_part(
        &mut self,
        id: &str,
        number: u16,
        md5: [u8; 16],
        body: PushBody,
        feed: impl Future<Output = Result<Fed, Trouble>>,
    ) -> Result<String, Refused> {
        let mut action = UploadPart::new(&self.bucket, Some(&self.credentials), &self.key, number, id);
        let md5 = BASE64_STANDARD.encode(md5);
        action.headers_mut().insert(CONTENT_MD5, md5.clone());
        let url = action.sign(SIGNED_FOR);
        let reply = self.send(&url, &md5, body, feed).await?;
        let etag = reply.header(ETAG).filter(|etag| !etag.is_empty());
        Ok(etag.ok_or_else(|| bad("a part without an ETag"))?.to_owned())
    }

    async fn send(
        &mut self,
        url: &Url,
        md5: &str,
        body: PushBody,
        feed: impl Future<Output = Result<Fed, Trouble>>,
    ) -> Result<Reply, Refused> {
        let md5 = HeaderValue::from_str(md5).map_err(|_| bad("an MD5 that is no header"))?;
        let headers = vec![(HeaderName::from_static(CONTENT_MD5), md5)];
        let ask = Ask { method: Method::PUT, url, headers };
        check(self.http.exchange(ask, body, feed).await.map_err(Refused::Other)?)
    }

    /// Begins an upload, and gives its id.
    pub async fn create(&mut self) -> Result<String, Trouble> {
        let url = CreateMultipartUpload::new(&self.bucket, Some(&self.credentials), &self.key).sign(SIGNED_FOR);
        let reply = check(self.ask(Method::POST, &url, "").await?)?;
        let id = tag(&reply.body, "UploadId").filter(|id| !id.is_empty());
        Ok(id.ok_or_else(|| bad("an upload without an id"))?)
    }

    /// Makes the object of the parts.
    pub async fn complete(&mut self, upload: &Upload) -> Result<(), Refused> {
        let (id, etags) = (upload.id(), upload.etags());
        let action = CompleteMultipartUpload::new(&self.bucket, Some(&self.credentials), &self.key, id, etags);
        let url = action.sign(SIGNED_FOR);
        let body = action.body();
        let reply = check(self.ask(Method::POST, &url, body).await?)?;
        // It answers 200 before it begins, and the body says how it ended.
        if tag(&reply.body, "Code").as_deref() == Some("NoSuchUpload") {
            return Err(Refused::NoSuchUpload);
        }
        if is_completion(&reply.body) { Ok(()) } else { Err(bad(&words(&reply.body)).into()) }
    }

    /// Adds to `upload` the parts that the server has.
    pub async fn list(&mut self, upload: &mut Upload) -> Result<(), Refused> {
        let mut marker = None;
        for _ in 0..PAGES_MAX {
            let id = upload.id().to_owned();
            let mut action = ListParts::new(&self.bucket, Some(&self.credentials), &self.key, &id);
            if let Some(marker) = marker {
                action.set_part_number_marker(marker);
            }
            let url = action.sign(SIGNED_FOR);
            let reply = check(self.ask(Method::GET, &url, "").await?)?;
            let list = PartList::parse(&reply.body).ok_or_else(|| bad(&words(&reply.body)))?;
            let has_all = list.parts.into_iter().all(|part| upload.add_listed(part.number, part.etag, part.bytes));
            marker = list.next;
            if !has_all || marker.is_none() {
                return Ok(());
            }
        }
        Err(bad("a list of parts without an end").into())
    }

    /// What there is under the key, if there is anything.
    pub async fn look(&mut self) -> Result<Option<Object>, Failure> {
        let url = HeadObject::new(&self.bucket, Some(&self.credentials), &self.key).sign(SIGNED_FOR);
        let reply = self.ask(Method::HEAD, &url, "").await?;
        if reply.status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        if !reply.is_done() {
            return Err(reply.refusal());
        }
        let bytes = reply.header(CONTENT_LENGTH).and_then(|bytes| bytes.parse().ok());
        let etag = reply.header(ETAG).unwrap_or_default().to_owned();
        Ok(Some(Object { bytes: bytes.ok_or_else(|| bad("an object without a length"))?, etag }))
    }

    /// Removes an upload and its parts.
    pub async fn abort(&mut self, id: &str) -> Result<(), Failure> {
        let url = AbortMultipartUpload::new(&self.bucket, Some(&self.credentials), &self.key, id).sign(SIGNED_FOR);
        match check(self.ask(Method::DELETE, &url, "").await?) {
            Ok(_) | Err(Refused::NoSuchUpload) => Ok(()),
            Err(Refused::Other(Trouble::Again(failure))) => Err(failure),
            Err(Refused::Other(Trouble::Never(cause))) => unreachable!("no file is read for this: {cause}"),
        }
    }

    async fn ask(&mut self, method: Method, url: &Url, body: impl Into<String>) -> Result<Reply, Failure> {
        self.http.ask(Ask { method, url, headers: Vec::new() }, PushBody::whole(body.into())).await
    }
}

fn bad(what: &str) -> Failure {
    Failure::BadReply { what: what.to_owned() }
}

/// `CompleteMultipartUploadResult` with the ETag of the object. Some servers call it a response.
fn is_completion(body: &[u8]) -> bool {
    let is_result = String::from_utf8_lossy(body).contains("<CompleteMultipartUploadRes");
    is_result && tag(body, "ETag").is_some() && tag(body, "Code").is_none()
}

/// A reply of success, or why it is none.
fn check(reply: Reply) -> Result<Reply, Refused> {
    if reply.is_done() {
        return Ok(reply);
    }
    let code = tag(&reply.body, "Code").unwrap_or_default();
    if code == "NoSuchUpload" {
        return Err(Refused::NoSuchUpload);
    }
    Err(match (reply.refusal(), tag(&reply.body, "Message")) {
        (Failure::Refused { status, retry_after, .. }, Some(message)) => {
            let said = words(format!("{code}: {message}").as_bytes());
            Failure::Refused { status, words: said, retry_after }
        }
        (failure, _) => failure,
    }
    .into())
}

/// A page of the parts that a server has. Servers differ in the root's name and its namespace, so neither is looked at.
#[derive(Debug, PartialEq, Eq)]
struct PartList {
    parts: Vec<ListedPart>,
    /// Behind which part the next page begins, if there is one.
    next: Option<u16>,
}

#[derive(Debug, PartialEq, Eq)]
struct ListedPart {
    number: u16,
    etag: String,
    bytes: u64,
}

impl PartList {
    fn parse(body: &[u8]) -> Option<PartList> {
        let text = std::str::from_utf8(body).ok()?;
        if !text.contains("<ListParts") {
            return None;
        }
        let parts: Option<Vec<ListedPart>> = text.split("<Part>").skip(1).map(ListedPart::parse).collect();
        let is_truncated = tag(body, "IsTruncated").as_deref() == Some("true");
        let next = tag(body, "NextPartNumberMarker").filter(|_| is_truncated);
        Some(PartList { parts: parts?, next: next.map(|next| next.parse()).transpose().ok()? })
    }
}

impl ListedPart {
    fn parse(text: &str) -> Option<ListedPart> {
        let (inside, _) = text.split_once("</Part>")?;
        let tag = |name| tag(inside.as_bytes(), name);
        let (number, bytes) = (tag("PartNumber")?.parse().ok()?, tag("Size")?.parse().ok()?);
        Some(ListedPart { number, etag: tag("ETag")?, bytes })
    }
}

/// What the first element of this name holds. It has no others in it.
fn tag(body: &[u8], name: &str) -> Option<String> {
    let text = String::from_utf8_lossy(body);
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (inside, _) = rest.split_once(&format!("</{name}>"))?;
    let inside = inside.replace("&quot;", "\"").replace("&#34;", "\"").replace("&lt;", "<").replace("&gt;", ">");
    // Last, so that nothing is replaced twice.
    Some(inside.replace("&amp;", "&").trim().to_owned())
}

#[cfg(test)]
mod tests {
    use hyper::HeaderMap;

    use super::*;

    fn reply(status: u16, body: &str) -> Reply {
        let status = StatusCode::from_u16(status).unwrap();
        Reply { status, headers: HeaderMap::new(), body: body.as_bytes().to_vec(), sent: None }
    }

    #[test]
    fn a_completion_has_an_etag() {
        for (body, expected) in [
            (
                "<?xml?>\n<CompleteMultipartUploadResult xmlns=\"x\"><ETag>\"a-2\"</ETag></CompleteMultipartUploadResult>",
                true,
            ),
            ("<CompleteMultipartUploadResult></CompleteMultipartUploadResult>", false),
            ("<Error><Code>InternalError</Code><Message>m</Message></Error>", false),
            ("  \n", false),
        ] {
            assert_eq!(is_completion(body.as_bytes()), expected, "{body}");
        }
    }

    #[test]
    fn lists_of_parts() {
        let part = |number: u16, etag: &str| {
            format!("<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag><Size>{}</Size></Part>", 5 << 20)
        };
        let head = "<ListPartsResult xmlns=\"x\"><MaxParts>2</MaxParts><NextPartNumberMarker>2</NextPartNumberMarker>";
        let list = |truncated: bool, parts: &str| {
            let text = format!("{head}<IsTruncated>{truncated}</IsTruncated>{parts}</ListPartsResult>");
            PartList::parse(text.as_bytes())
        };
        let parts = format!("{}{}", part(1, "&quot;a&quot;"), part(2, "\"b\""));
        let listed = |number, etag: &str| ListedPart { number, etag: etag.to_owned(), bytes: 5 << 20 };
        let all = || vec![listed(1, "\"a\""), listed(2, "\"b\"")];
        assert_eq!(list(true, &parts), Some(PartList { parts: all(), next: Some(2) }));
        assert_eq!(list(false, &parts), Some(PartList { parts: all(), next: None }));
        assert_eq!(list(false, ""), Some(PartList { parts: Vec::new(), next: None }));
        assert_eq!(list(false, "<Part><PartNumber>1</PartNumber></Part>"), None);
        assert_eq!(list(false, &part(1, "a").replace("5242880", "-1")), None);
        assert_eq!(PartList::parse(b"<Error></Error>"), None);
    }

    #[test]
    fn what_a_server_refuses_is_said() {
        let body = "<?xml version=\"1.0\"?><Error><Code>NoSuchBucket</Code><Message>It is\nnot there</Message></Error>";
        let Err(Refused::Other(Trouble::Again(failure))) = check(reply(404, body)) else { panic!() };
        assert_eq!(failure.to_string(), "the server said 404: NoSuchBucket: It is not there");
        let Err(Refused::Other(Trouble::Again(failure))) = check(reply(503, "slow")) else { panic!() };
        assert_eq!(failure.to_string(), "the server said 503: slow");
        let lost = reply(404, "<Error><Code>NoSuchUpload</Code></Error>");
        assert!(matches!(check(lost), Err(Refused::NoSuchUpload)));
        assert!(check(reply(204, "")).is_ok() && check(reply(202, "")).is_err());
    }
}
