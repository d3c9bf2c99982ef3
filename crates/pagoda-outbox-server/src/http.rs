//! HTTP/1.1 for those who have the VM's token.
//!
//! `GET /NAME/PATH` sends a file, also while the guest writes it: then its length is not known, and the reply is in chunks
//! that end with the file. If the writer disappears, the reply is cut short so that the client sees it. A finished file has a
//! length, an ETag and ranges. `GET` of a directory lists it. `GET /status` has figures.

mod body;
mod connection;
mod folios;
mod index;
mod pacing;
mod piece;
mod range;
mod reply;
mod site;
mod stream;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use percent_encoding::percent_decode_str;
use tokio::runtime::Runtime;

use self::connection::Connections;
pub use self::folios::Folios;
pub use self::pacing::{Pacer, Rate};
pub use self::site::Site;
use self::site::{not_found, unanswered};
use self::stream::{Bounded, Peer};

/// Path of the figures.
const STATUS: &str = "/status";
/// How often it is looked whether the kernel may give out large folios.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What serves, with the socket that clients connect to. Made while the process may still make sockets: tokio wants a pair of them.
pub fn runtime(listener: &TcpListener) -> Result<Runtime> {
    listener.set_nonblocking(true).context("prepare the listening socket")?;
    tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().context("start tokio")
}

/// Serves until the process that has the files is gone. `vmm_gone` is called when QEMU is.
pub fn serve(runtime: &Runtime, site: Arc<Site>, listener: TcpListener, vmm_gone: impl Fn()) -> Result<()> {
    // The setting may have changed since another process looked.
    site.folios.look();
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener).context("take over the listening socket")?;
        let connections = Connections::new(Arc::clone(&site.files), site.client_rate);
        tokio::spawn(connections.clone().watch());
        tokio::spawn(look(Arc::clone(&site)));
        let files = Arc::clone(&site.files);
        let router = Router::new().fallback(answer).with_state(site).into_make_service_with_connect_info::<Peer>();
        tokio::select! {
            served = axum::serve(Bounded::new(listener, connections), router) => served.context("serve clients"),
            heard = files.listen(vmm_gone) => heard.context("hear the process that serves"),
        }
    })
}

async fn look(site: Arc<Site>) {
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        site.folios.look();
    }
}

fn is_known(headers: &HeaderMap, token: &str) -> bool {
    let given = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let Some(given) = given.and_then(|value| value.strip_prefix(b"Bearer ")) else { return false };
    // All of it is compared, so that the time says nothing about how much was right.
    let differences = given.iter().zip(token.as_bytes()).fold(0, |all, (one, other)| all | (one ^ other));
    given.len() == token.len() && differences == 0
}

async fn answer(State(site): State<Arc<Site>>, ConnectInfo(peer): ConnectInfo<Peer>, request: Request) -> Response {
    if !is_known(request.headers(), &site.token) {
        // Who has no token gets one answer and keeps no connection.
        let challenge = [(header::WWW_AUTHENTICATE, "Bearer"), (header::CONNECTION, "close")];
        return (StatusCode::UNAUTHORIZED, challenge, "give the VM's token: Authorization: Bearer TOKEN\n")
            .into_response();
    }
    peer.0.note_request();
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let allowed = [(header::ALLOW, "GET, HEAD")];
        return (StatusCode::METHOD_NOT_ALLOWED, allowed, "files are read here\n").into_response();
    }
    let path = request.uri().path();
    if path == STATUS {
        return index::status(&site.files);
    }
    let mut segments = path.split('/').skip(1).map(|segment| percent_decode_str(segment).collect::<Vec<u8>>());
    if segments.next().as_deref() != Some(site.name.as_bytes()) {
        return not_found();
    }
    // A path may end with a slash; elsewhere an empty name is none that a file has.
    let mut names: Vec<Vec<u8>> = segments.collect();
    if names.last().is_some_and(Vec::is_empty) {
        names.pop();
    }
    match site.files.find(names.iter().map(Vec::as_slice)) {
        Err(_) => unanswered(),
        Ok(None) => not_found(),
        Ok(Some(found)) if found.kind == pagoda_outbox::Kind::Directory => {
            index::listing(&site, &names, found.ino, request.headers())
        }
        Ok(Some(found)) => reply::file(&site, &peer.0, &request, &found),
    }
}
