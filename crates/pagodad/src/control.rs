//! The control API over HTTP: routes to calls of the registry, and nothing else.
//!
//! One thread runs all connections. What the registry does may wait for an engine or a disk, so
//! it runs on the runtime's blocking threads and a slow VM holds up only who asked for it. The control
//! socket is for the daemon's own user and root; with `--group` its members may start VMs and no more. TCP has
//! the metrics alone. Guests notice nothing when this ends: their faults go elsewhere.

mod hosts;
mod listener;
mod moves;
mod outboxes;
mod reply;
mod sampling;
mod snapshots;
mod socket;
mod systemd;
mod transfers;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::body::Bytes;
use axum::extract::connect_info::Connected;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{ConnectInfo, DefaultBodyLimit, Path, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use axum::serve::IncomingStream;
use pagoda_api::{
    API_VERSION, AdmitReply, AdmitRequest, ApiError, CreateVm, CreatedVm, ErrorCode, Explain, Health, HostInfo,
    HostPatch, Launch, Mrc, Version, VmInfo, VmList, VmPatch, VmSpec, WhatIfReply, WhatIfRequest,
};
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use self::listener::{Bounded, REQUEST_MAX, SCRAPE_PAUSE};
use self::reply::{BODY_BYTES_MAX, Refusal, Reply, Shared, ask, parse, vm_name};
pub use self::socket::{bind_control, open_to_group};
use crate::metrics::{self, ProcessInfo};
use crate::parts;
use crate::registry::Registry;
use crate::snapshots as procedures;

/// How long requests under way may take to end at shutdown; VMs wait meanwhile.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(1);
/// How long those may take that wait for a disk or for QEMU. What is not done by then is cut off, as a kill would do: each of them
/// leaves whole what it works on, and the next daemon ends what has to be ended.
const WORK_WAIT: Duration = Duration::from_secs(5);

/// Serves the control socket and the metrics until SIGTERM or SIGINT. Everything else of the daemon has to work by now, for
/// systemd is told that it does.
///
/// # Errors
/// The control socket cannot be used.
pub fn run(registry: &Arc<Registry>, control: std::os::unix::net::UnixListener) -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the control thread")?;
    let served = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("wait for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("wait for SIGINT")?;
        let shutdown = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("asked to end; VMs wait for the next daemon");
            systemd::stopping();
        };
        let hangups = signal(SignalKind::hangup()).context("wait for SIGHUP")?;
        tokio::spawn(reload(hangups, Arc::clone(registry)));
        systemd::ready("serving VMs");
        let metrics = registry.config.metrics.map(|address| listen_for_scrapers(Arc::clone(registry), address));
        serve(Arc::clone(registry), control, metrics, shutdown).await
    });
    runtime.shutdown_timeout(WORK_WAIT);
    served
}

/// Tells systemd that VMs are served.
pub fn say_ready(status: &str) {
    systemd::ready(status);
}

/// Reads the configuration again at each SIGHUP.
async fn reload(mut hangups: Signal, registry: Arc<Registry>) {
    while hangups.recv().await.is_some() {
        let registry = Arc::clone(&registry);
        // It says by itself how it went.
        let _ = tokio::task::spawn_blocking(move || registry.reload()).await;
    }
}

/// Listens on TCP as soon as the address can be had: it may be taken, or not be of this host yet.
async fn listen_for_scrapers(registry: Arc<Registry>, address: SocketAddr) -> TcpListener {
    const PART: &str = "metrics";
    let mut pauses = parts::pauses();
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                registry.parts.works(PART);
                return listener;
            }
            Err(error) => registry.parts.failed(
                PART,
                &format!(
                    "cannot be served on {address} ({error}); tried again. Another address: --metrics, or --metrics off"
                ),
            ),
        }
        tokio::time::sleep(pauses.next().unwrap_or_default()).await;
    }
}

/// Serves the control socket, and the metrics once they have a listener, until `shutdown`.
///
/// # Errors
/// The control socket cannot be used.
pub async fn serve(
    registry: Arc<Registry>,
    control: std::os::unix::net::UnixListener,
    metrics: Option<impl Future<Output = TcpListener>>,
    shutdown: impl Future<Output = ()>,
) -> Result<()> {
    let (stop, stopped) = watch::channel(());
    // The sender's end is the signal.
    let until_stop = |mut stopped: watch::Receiver<()>| async move { while stopped.changed().await.is_ok() {} };

    control.set_nonblocking(true).context("prepare the control socket")?;
    let control = Bounded::new(UnixListener::from_std(control).context("serve the control socket")?, REQUEST_MAX);
    let router = control_router(Arc::clone(&registry)).into_make_service_with_connect_info::<Caller>();
    let control = axum::serve(control, router).with_graceful_shutdown(until_stop(stopped.clone()));

    let metrics = async {
        if let Some(listener) = metrics {
            let listener = Bounded::new(listener.await, SCRAPE_PAUSE);
            let served = axum::serve(listener, metrics_router(Arc::clone(&registry)));
            if let Err(error) = served.with_graceful_shutdown(until_stop(stopped)).await {
                registry.parts.failed("metrics", &error.to_string());
            }
        }
        // Their end is not the end of the daemon.
        std::future::pending::<()>().await;
    };

    let servers = async {
        tokio::select! {
            ended = async { control.await } => ended,
            () = metrics => Ok(()),
        }
    };
    tokio::pin!(servers);
    tokio::select! {
        ended = &mut servers => ended.context("serve the control API"),
        () = shutdown => {
            drop(stop);
            // Who is cut off asks the next daemon.
            let _ = tokio::time::timeout(SHUTDOWN_WAIT, servers).await;
            Ok(())
        }
    }
}

fn control_router(registry: Arc<Registry>) -> Router {
    Router::new()
        .route("/v1/version", get(version))
        .route("/v1/health", get(health))
        .route("/v1/host", get(host).patch(patch_host))
        .route("/v1/admit", post(admit))
        .route("/v1/vms", get(list).post(create))
        .route("/v1/vms/{name}", get(info).patch(patch).delete(delete))
        .route("/v1/vms/{name}/cont", post(cont))
        .route("/v1/vms/{name}/explain", get(explain))
        .route("/v1/vms/{name}/mrc", get(mrc))
        .route("/v1/vms/{name}/whatif", post(what_if))
        .merge(sampling::routes())
        .merge(snapshots::routes())
        .merge(hosts::routes())
        .merge(moves::routes())
        .merge(outboxes::routes())
        .route("/metrics", get(scrape))
        .fallback(no_such_route)
        .method_not_allowed_fallback(no_such_route)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(middleware::from_fn(check_peer))
        .with_state(registry)
}

fn metrics_router(registry: Arc<Registry>) -> Router {
    Router::new()
        .route("/", get(async || "pagodad: the metrics are at /metrics\n"))
        .route("/metrics", get(scrape))
        .fallback(no_such_route)
        .method_not_allowed_fallback(no_such_route)
        .with_state(registry)
}

async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION").into(), api: API_VERSION })
}

async fn health(State(registry): Shared) -> Reply<Health> {
    ask(registry, |registry| Ok(registry.health())).await
}

async fn host(State(registry): Shared) -> Reply<HostInfo> {
    ask(registry, |registry| Ok(registry.host())).await
}

async fn patch_host(State(registry): Shared, body: Result<Bytes, BytesRejection>) -> Reply<HostInfo> {
    let patch: HostPatch = parse(body)?;
    ask(registry, move |registry| registry.patch_host(&patch)).await
}

async fn admit(State(registry): Shared, body: Result<Bytes, BytesRejection>) -> Reply<AdmitReply> {
    let request: AdmitRequest = parse(body)?;
    ask(registry, move |registry| registry.would_admit(&request)).await
}

async fn mrc(State(registry): Shared, name: Result<Path<String>, PathRejection>) -> Reply<Mrc> {
    let name = vm_name(name)?;
    ask(registry, move |registry| registry.mrc(&name)).await
}

async fn what_if(
    State(registry): Shared,
    name: Result<Path<String>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Reply<WhatIfReply> {
    let name = vm_name(name)?;
    let request: WhatIfRequest = parse(body)?;
    ask(registry, move |registry| registry.what_if(&name, &request)).await
}

async fn list(State(registry): Shared) -> Reply<VmList> {
    ask(registry, |registry| Ok(VmList { vms: registry.list(), crashed: procedures::crashed(registry) })).await
}

async fn create(
    State(registry): Shared,
    ConnectInfo(caller): ConnectInfo<Caller>,
    body: Result<Bytes, BytesRejection>,
) -> Reply<CreatedVm> {
    let vm = caller.sign(parse(body)?);
    ask(registry, |registry| registry.create(vm)).await
}

async fn info(State(registry): Shared, name: Result<Path<String>, PathRejection>) -> Reply<VmInfo> {
    let name = vm_name(name)?;
    ask(registry, move |registry| registry.get(&name)).await
}

async fn patch(
    State(registry): Shared,
    name: Result<Path<String>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Reply<VmInfo> {
    let name = vm_name(name)?;
    let patch: VmPatch = parse(body)?;
    ask(registry, move |registry| registry.patch(&name, &patch)).await
}

async fn delete(State(registry): Shared, name: Result<Path<String>, PathRejection>) -> Result<StatusCode, Refusal> {
    let name = vm_name(name)?;
    let _: Json<()> = ask(registry, move |registry| registry.delete(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn cont(State(registry): Shared, name: Result<Path<String>, PathRejection>) -> Reply<VmInfo> {
    let name = vm_name(name)?;
    ask(registry, move |registry| registry.cont(&name)).await
}

async fn explain(State(registry): Shared, name: Result<Path<String>, PathRejection>) -> Reply<Explain> {
    let name = vm_name(name)?;
    ask(registry, move |registry| registry.explain(&name)).await
}

async fn scrape(State(registry): Shared) -> Result<Response, Refusal> {
    let render = |registry: &Arc<Registry>| Ok(metrics::render(registry.list(), registry.host(), ProcessInfo::now()));
    let Json(text) = ask(registry, render).await?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

async fn no_such_route(method: Method, uri: Uri) -> Refusal {
    Refusal(ApiError {
        code: ErrorCode::NoSuchRoute,
        message: format!("there is no request {method} {}", uri.path()),
        hint: Some(format!("this is pagodad {}, API version {API_VERSION}", env!("CARGO_PKG_VERSION"))),
    })
}

/// Who is at the other end of the control socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Peer {
    /// Root or the daemon's own user.
    Owner,
    /// Anybody else whom the mode of the socket lets in, which is the members of `--group`.
    Member,
}

/// The process that made a connection, by the kernel's word.
#[derive(Debug, Clone, Copy)]
struct Caller {
    peer: Peer,
    /// Its user and group, where the kernel says.
    ids: Option<(u32, u32)>,
}

impl Connected<IncomingStream<'_, Bounded<UnixListener>>> for Caller {
    fn connect_info(stream: IncomingStream<'_, Bounded<UnixListener>>) -> Self {
        let ids = stream.io().stream().peer_cred().ok().map(|cred| (cred.uid(), cred.gid()));
        Self { peer: ids.map_or(Peer::Member, |(uid, _)| Peer::of(uid)), ids }
    }
}

impl Caller {
    /// Nobody has a VM started again as another user than it was: a launch specification names its caller, whatever it said. And
    /// nobody has snapshots taken and removed by making a VM, which members of the group may: `pagoda vm autosnapshot` does that.
    fn sign(self, vm: CreateVm) -> CreateVm {
        let launch = vm.launch.zip(self.ids).map(|(launch, (uid, gid))| Launch { uid, gid, ..launch });
        let spec = VmSpec { autosnapshot: None, ..vm.spec };
        CreateVm { launch, spec, ..vm }
    }
}

impl Peer {
    fn of(uid: u32) -> Self {
        const ROOT: u32 = 0;
        let own = rustix::process::geteuid().as_raw();
        if uid == ROOT || uid == own { Self::Owner } else { Self::Member }
    }

    /// A member needs no more to become a VM than `POST`, and `DELETE` if it fails in between: the registry refuses to
    /// delete what runs.
    fn may(self, method: &Method, path: &str) -> bool {
        let below_vms = path.strip_prefix("/v1/vms");
        match self {
            Self::Owner => true,
            Self::Member if method == Method::GET => path == "/v1/version",
            Self::Member if method == Method::POST => below_vms == Some(""),
            Self::Member => method == Method::DELETE && below_vms.is_some_and(|rest| rest.starts_with('/')),
        }
    }
}

async fn check_peer(ConnectInfo(caller): ConnectInfo<Caller>, request: Request, next: Next) -> Response {
    if caller.peer.may(request.method(), request.uri().path()) {
        return next.run(request).await;
    }
    Refusal(ApiError {
        code: ErrorCode::Unsupported,
        message: format!("{} {} is for root and the daemon's own user", request.method(), request.uri().path()),
        hint: Some("members of the daemon's --group may only start VMs: use sudo".into()),
    })
    .into_response()
}

#[cfg(test)]
mod tests;
