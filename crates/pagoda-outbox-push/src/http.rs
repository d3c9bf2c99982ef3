//! HTTP/1.1 with one server, one connection at a time, which is used again as long as both sides keep it.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONTENT_LENGTH, HOST, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::select;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use url::{Host, Position, Url};

use crate::address::Address;
use crate::body::PushBody;
use crate::dial::{Dial, Stream, Trust, connect, secure};
use crate::failure::{Failure, Trouble, words};
use crate::pump::{Fed, STALL_MAX};

/// A server that has all of a request and says nothing for so long is given up. To put the parts of a large upload together takes some
/// servers minutes.
const REPLY_MAX: Duration = Duration::from_secs(300);
/// What is read of a reply. A list of 1,000 parts has a third of it.
const REPLY_BYTES_MAX: usize = 1 << 20;
/// A longer pause that a server asks for is taken as this one.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);

/// What a server said.
#[derive(Debug)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
    /// Where in the file the request's body ended; `None` if the server answered before it had all of it.
    pub sent: Option<u64>,
}

impl Reply {
    /// Whether the server has done it. Others of the statuses 2xx say less: that it will (202), or that something else is in the body (207).
    pub fn is_done(&self) -> bool {
        matches!(self.status, StatusCode::OK | StatusCode::CREATED | StatusCode::NO_CONTENT)
    }

    /// Why the server did not do it.
    pub fn refusal(&self) -> Failure {
        let seconds = self.headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
        let retry_after = seconds.map(|seconds| Duration::from_secs(seconds).min(RETRY_AFTER_MAX));
        Failure::Refused { status: self.status.as_u16(), words: words(&self.body), retry_after }
    }

    pub fn header(&self, name: HeaderName) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// A request as far as it is the same for all bodies. Its address may be a secret.
pub struct Ask<'a> {
    pub method: Method,
    pub url: &'a Url,
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

#[derive(Debug)]
struct Live {
    sender: SendRequest<PushBody>,
    connection: JoinHandle<()>,
    /// Of the connection's server.
    address: Address,
    is_tls: bool,
}

impl Drop for Live {
    /// Also in the middle of a request: then the server sees that it is cut short.
    fn drop(&mut self) {
        self.connection.abort();
    }
}

#[derive(Debug)]
pub struct Http {
    dialer: Arc<dyn Dial>,
    trust: Option<Trust>,
    idle: Option<Live>,
}

impl Http {
    /// Without `trust` there is no TLS.
    pub fn new(dialer: Arc<dyn Dial>, trust: Option<Trust>) -> Http {
        Http { dialer, trust, idle: None }
    }

    /// A request whose body is there.
    pub async fn ask(&mut self, ask: Ask<'_>, body: PushBody) -> Result<Reply, Failure> {
        let reply = self.exchange(ask, body, std::future::ready(Ok(Fed::All { end: 0 }))).await;
        reply.map_err(|trouble| match trouble {
            Trouble::Again(failure) => failure,
            Trouble::Never(cause) => unreachable!("no file is read for this body: {cause}"),
        })
    }

    /// A request whose body comes from `feed` meanwhile.
    ///
    /// # Errors
    /// There is no whole reply, or it is one of success to a request that was not whole.
    pub async fn exchange(
        &mut self,
        ask: Ask<'_>,
        body: PushBody,
        feed: impl Future<Output = Result<Fed, Trouble>>,
    ) -> Result<Reply, Trouble> {
        let request = request(ask.method, ask.url, ask.headers, body)?;
        let (address, is_tls) = address(ask.url)?;
        let mut live = self.connection(address, is_tls).await?;
        let mut feed = pin!(feed);
        let (response, fed) = {
            let mut response = pin!(live.sender.send_request(request));
            // The feed first: what it gave last is given before the server can have said anything to it.
            let early = select! {
                biased;
                fed = &mut feed => Err(fed?),
                response = &mut response => Ok(response),
            };
            match early {
                Ok(response) => (response, None),
                Err(fed) => {
                    let response = timeout(REPLY_MAX, response).await;
                    (response.map_err(|_| Failure::Stalled { limit: REPLY_MAX })?, Some(fed))
                }
            }
        };
        let response = response.map_err(|error| lost(&error))?;
        let mut reply = read(response).await?;
        match fed {
            Some(Fed::All { end }) => {
                reply.sent = Some(end);
                self.idle = Some(live);
                Ok(reply)
            }
            _ if reply.status.is_success() => Err(Failure::Early { status: reply.status.as_u16() }.into()),
            _ => Ok(reply),
        }
    }

    /// The connection of before if there is one, or another.
    async fn connection(&mut self, address: Address, is_tls: bool) -> Result<Live, Failure> {
        if let Some(mut live) = self.idle.take().filter(|live| live.address == address && live.is_tls == is_tls)
            && live.sender.ready().await.is_ok()
        {
            return Ok(live);
        }
        let stream = connect(&*self.dialer, &address).await?;
        let (sender, connection) = match (&self.trust, is_tls) {
            (_, false) => begin(stream).await?,
            (Some(trust), true) => begin(secure(stream, trust, &address).await?).await?,
            (None, true) => {
                let what = "no certificates of authorities were given".to_owned();
                return Err(Failure::Tls { address: address.to_string(), what });
            }
        };
        Ok(Live { sender, connection, address, is_tls })
    }
}

async fn begin(stream: impl Stream + 'static) -> Result<(SendRequest<PushBody>, JoinHandle<()>), Failure> {
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|error| lost(&error))?;
    // Its end is seen by the request that needs it.
    let connection = tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok((sender, connection))
}

fn lost(error: &hyper::Error) -> Failure {
    let why = std::error::Error::source(error).map_or_else(String::new, |source| format!(": {source}"));
    Failure::Lost { what: format!("{error}{why}") }
}

fn address(url: &Url) -> Result<(Address, bool), Failure> {
    let host = match url.host() {
        Some(Host::Domain(name)) => name.to_owned(),
        Some(Host::Ipv4(address)) => address.to_string(),
        Some(Host::Ipv6(address)) => address.to_string(),
        None => return Err(Failure::BadAddress),
    };
    let is_tls = url.scheme() == "https";
    Ok((Address { host, port: url.port().unwrap_or(if is_tls { 443 } else { 80 }) }, is_tls))
}

fn request(
    method: Method,
    url: &Url,
    headers: Vec<(HeaderName, HeaderValue)>,
    body: PushBody,
) -> Result<Request<PushBody>, Failure> {
    let target: Uri = url[Position::BeforePath..Position::AfterQuery].parse().map_err(|_| Failure::BadAddress)?;
    let host = &url[Position::BeforeHost..Position::AfterPort];
    let host = HeaderValue::from_str(host).map_err(|_| Failure::BadAddress)?;
    let has_body = method == Method::PUT || method == Method::POST;
    let length = body.size_hint().exact();
    let mut request = Request::new(body);
    *request.method_mut() = method;
    *request.uri_mut() = target;
    request.headers_mut().extend(headers);
    request.headers_mut().insert(HOST, host);
    if let Some(length) = length.filter(|_| has_body) {
        request.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
    Ok(request)
}

async fn read(response: Response<Incoming>) -> Result<Reply, Failure> {
    let (head, mut incoming) = response.into_parts();
    let mut body = Vec::new();
    loop {
        let next = timeout(STALL_MAX, poll_fn(|context| Pin::new(&mut incoming).poll_frame(context))).await;
        let Some(frame) = next.map_err(|_| Failure::Stalled { limit: STALL_MAX })? else {
            return Ok(Reply { status: head.status, headers: head.headers, body, sent: None });
        };
        let Ok(data) = frame.map_err(|error| lost(&error))?.into_data() else { continue };
        if data.len() > REPLY_BYTES_MAX - body.len() {
            return Err(Failure::BadReply { what: format!("it has more than {REPLY_BYTES_MAX} bytes") });
        }
        body.extend_from_slice(&data);
    }
}
