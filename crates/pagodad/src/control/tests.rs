//! The routes as clients see them, on a registry without VMs.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::JoinHandle;

use pagoda_abi::Token;
use pagoda_api::{Client, SnapshotList, SnapshotName, SnapshotStage, VmKind, VmSpec};
use pagoda_image::{ImageId, Stage};
use tokio::sync::oneshot;

use super::*;
use crate::config::{Config, LargeFolios};
use crate::images::Which;
use crate::images::tests::{make, manifest};
use crate::record::Record;
use crate::registry::HostFacts;

struct Daemon {
    dir: PathBuf,
    metrics: std::net::SocketAddr,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<Result<()>>,
}

/// A registry without VMs, and its directory.
fn registry(name: &str) -> (PathBuf, Arc<Registry>) {
    let dir = std::env::temp_dir().join(format!("pagodad-control-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(dir.join("swap")).unwrap();
    let config = Config {
        state_dir: dir.clone(),
        swap_dir: dir.join("swap"),
        pool_dir: dir.join("pool"),
        socket: dir.join("pagoda.sock"),
        attach_socket: dir.join("attach.sock"),
        group: None,
        metrics: None,
        shim: dir.join("shim.so"),
        tune_host: false,
        large_folios: LargeFolios::Off,
        page_sharing: false,
        clone_sharing: false,
        page_in: crate::config::PageIn::default(),
        replacement: crate::config::Replacement::default(),
        busy_poll: pagoda_pager::poll::BUSY_POLL_DEFAULT,
        compressed: None,
        snapshots: crate::config::SnapshotsConfig::below(&dir),
        hosts: crate::config::HostsConfig::below(&dir),
        moves: crate::config::MovesConfig::default(),
        outbox_period: crate::outboxes::PERIOD_DEFAULT,
        file: None,
        policy: crate::config::PolicyConfig::default(),
    };
    let (notices, _) = std::sync::mpsc::channel();
    let host = HostFacts { direct: false, protect: true, permission: "device".into(), limits: Vec::new() };
    (dir, Arc::new(Registry::new(config, host, notices).unwrap()))
}

impl Daemon {
    fn start(name: &str) -> Self {
        let (dir, registry) = registry(name);
        let control = bind_control(&registry.config.socket).unwrap();
        let metrics = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = metrics.local_addr().unwrap();
        metrics.set_nonblocking(true).unwrap();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let metrics = async { TcpListener::from_std(metrics).unwrap() };
            runtime.block_on(serve(registry, control, Some(metrics), async { drop(stopped.await) }))
        });
        Self { dir, metrics: address, stop, thread }
    }

    fn client(&self) -> Client {
        Client::new(self.dir.join("pagoda.sock"))
    }

    fn raw(&self, request: &str) -> String {
        exchange(UnixStream::connect(self.dir.join("pagoda.sock")).unwrap(), request)
    }

    fn tcp(&self, request: &str) -> String {
        exchange(TcpStream::connect(self.metrics).unwrap(), request)
    }

    fn stop(self) {
        self.stop.send(()).unwrap();
        self.thread.join().unwrap().unwrap();
        std::fs::remove_dir_all(self.dir).unwrap();
    }
}

fn exchange(mut stream: impl Read + Write, request: &str) -> String {
    // The daemon may refuse and close before it has read everything.
    let _ = stream.write_all(request.as_bytes());
    let mut reply = Vec::new();
    let _ = stream.read_to_end(&mut reply);
    String::from_utf8(reply).unwrap()
}

fn request(first: &str, body: &str) -> String {
    format!("{first} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

#[test]
fn the_routes_of_an_empty_daemon() {
    let daemon = Daemon::start("routes");
    let client = daemon.client();
    assert_eq!(client.version().unwrap().api, API_VERSION);
    assert_eq!(client.host().unwrap().vms, 0);
    assert_eq!(client.vms().unwrap(), VmList::default());
    client.health().unwrap();
    let gone = |code: Option<ErrorCode>| assert_eq!(code, Some(ErrorCode::NoSuchVm));
    gone(client.vm("web1").unwrap_err().code());
    gone(client.explain("web1").unwrap_err().code());
    gone(client.cont("web1").unwrap_err().code());
    gone(client.patch("web1", &VmPatch { dram: Some(1 << 30), ..VmPatch::default() }).unwrap_err().code());
    gone(client.delete("web1").unwrap_err().code());
    let bad = CreateVm {
        name: "web1".into(),
        memory: vec![1],
        kind: VmKind::Plain,
        spec: VmSpec::default(),
        launch: None,
        outbox: None,
    };
    assert_eq!(client.create(&bad).unwrap_err().code(), Some(ErrorCode::BadRequest));
    assert!(client.metrics().unwrap().ends_with("# EOF\n"));
    daemon.stop();
}

#[test]
fn what_makes_no_sense_gets_a_json_error() {
    let daemon = Daemon::start("errors");
    let check = |request: String, status: &str, expected: &str| {
        let reply = daemon.raw(&request);
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{reply}");
        let body = reply.split_once("\r\n\r\n").unwrap().1;
        let error: ApiError = serde_json::from_str(body).unwrap();
        assert!(error.message.contains(expected), "{}", error.message);
    };
    check(request("GET /v2/vms", ""), "404", "no request GET /v2/vms");
    check(request("PUT /v1/vms", ""), "404", "no request PUT /v1/vms");
    check(request("POST /v1/vms", "{\"nam"), "400", "not the JSON expected");
    check(request("POST /v1/vms", "{}"), "400", "missing field `name`");
    check(request("PATCH /v1/vms/a", "{\"drma\":1}"), "400", "unknown field `drma`");
    check(request("GET /v1/vms/%ff", ""), "400", "name of the VM");
    check(request("POST /v1/vms", &"x".repeat(BODY_BYTES_MAX + 1)), "400", "may have 65536 bytes");
    daemon.stop();
}

#[test]
fn tcp_has_the_metrics_alone() {
    let daemon = Daemon::start("tcp");
    let scraped = daemon.tcp(&request("GET /metrics", ""));
    assert!(scraped.starts_with("HTTP/1.1 200 ") && scraped.contains("application/openmetrics-text"), "{scraped}");
    assert!(scraped.ends_with("# EOF\n"));
    assert!(daemon.tcp(&request("GET /", "")).ends_with("the metrics are at /metrics\n"));
    for first in ["GET /v1/vms", "POST /v1/vms", "POST /metrics", "DELETE /v1/vms/a"] {
        assert!(daemon.tcp(&request(first, "")).starts_with("HTTP/1.1 404 "), "{first}");
    }
    daemon.stop();
}

#[test]
fn a_peer_that_says_nothing_delays_the_end_by_no_more_than_the_limit() {
    let daemon = Daemon::start("silent");
    let mut silent = UnixStream::connect(daemon.dir.join("pagoda.sock")).unwrap();
    silent.write_all(b"GET /v1/ver").unwrap();
    daemon.client().version().unwrap();
    daemon.stop();
}

#[test]
fn members_of_the_group_may_start_vms_and_no_more() {
    let check = |method: Method, path: &str, allowed: bool| {
        assert!(Peer::Owner.may(&method, path));
        assert_eq!(Peer::Member.may(&method, path), allowed, "{method} {path}");
    };
    check(Method::GET, "/v1/version", true);
    check(Method::POST, "/v1/vms", true);
    check(Method::DELETE, "/v1/vms/web1", true);
    check(Method::GET, "/v1/vms", false);
    check(Method::GET, "/v1/vms/web1", false);
    check(Method::PATCH, "/v1/vms/web1", false);
    check(Method::POST, "/v1/vms/web1/cont", false);
    check(Method::GET, "/metrics", false);
    check(Method::GET, "/v1/host", false);
    // What a snapshot has in it is other people's memory.
    for path in ["/v1/snapshots", "/v1/snapshots/web1/one", "/v1/snapshots/web1/one/launch"] {
        check(Method::GET, path, false);
    }
    check(Method::DELETE, "/v1/snapshots/web1/one", false);
    check(Method::DELETE, "/v1/snapshots/0123456789abcdef0123456789abcdef", false);
    check(Method::POST, "/v1/snapshots/web1/one/verify", false);
    check(Method::POST, "/v1/vms/web1/snapshots", false);
    check(Method::POST, "/v1/restores", false);
    assert_eq!(Peer::of(0), Peer::Owner);
    assert_eq!(Peer::of(rustix::process::geteuid().as_raw()), Peer::Owner);
    assert_eq!(Peer::of(u32::MAX - 1), Peer::Member);
}

#[test]
fn a_launch_specification_names_its_caller() {
    let launch = Launch { program: "/q".into(), uid: 0, gid: 0, ..Launch::default() };
    let vm = |launch: Option<Launch>| CreateVm {
        name: "web1".into(),
        memory: vec![1],
        kind: VmKind::Qemu,
        spec: VmSpec::default(),
        launch,
        outbox: None,
    };
    let signed = |ids| Caller { peer: Peer::Member, ids }.sign(vm(Some(launch.clone()))).launch;
    assert_eq!(signed(Some((1000, 100))), Some(Launch { uid: 1000, gid: 100, ..launch.clone() }));
    assert_eq!(signed(None), None, "nobody knows whose it would be");
    assert_eq!(Caller { peer: Peer::Owner, ids: Some((0, 0)) }.sign(vm(None)).launch, None);
}

#[test]
fn a_host_that_is_drained_takes_no_new_vms() {
    let daemon = Daemon::start("drained");
    let client = daemon.client();
    let switch = |on| client.patch_host(&HostPatch { draining: Some(on), ..HostPatch::default() }).unwrap();
    let policy = client.host().unwrap().policy;
    let drained = switch(true);
    assert!(drained.draining && drained.policy == policy, "{drained:?}");
    let new = CreateVm {
        name: "web1".into(),
        memory: vec![64 << 20],
        kind: VmKind::Plain,
        spec: VmSpec::default(),
        launch: None,
        outbox: None,
    };
    let refused = client.create(&new).unwrap_err();
    assert!(refused.code() == Some(ErrorCode::Refused) && refused.to_string().contains("drain"), "{refused}");
    assert!(!switch(false).draining && !client.host().unwrap().draining);
    daemon.stop();
}

#[test]
fn the_policy_answers_and_is_changed_whole_or_not_at_all() {
    let daemon = Daemon::start("policy");
    let client = daemon.client();
    let before = client.host().unwrap().policy;
    assert!(before.pool_bytes > 0 && before.state == "high" && before.idle_tax == 750, "{before:?}");
    let patch = HostPatch { pool: Some(1 << 30), idle_tax: Some(1000), ..HostPatch::default() };
    assert_eq!(client.patch_host(&patch).unwrap_err().code(), Some(ErrorCode::BadRequest));
    assert_eq!(client.host().unwrap().policy, before);
    let after = client.patch_host(&HostPatch { idle_tax: Some(0), ..patch }).unwrap().policy;
    assert_eq!((after.pool_bytes, after.idle_tax), (1 << 30, 0));

    let ask = |memory_bytes, min| client.admit(&AdmitRequest { memory_bytes, dram: None, min });
    assert!(ask(256 << 20, 64 << 20).unwrap().admitted);
    let refused = ask(2 << 30, 1 << 30).unwrap();
    assert!(!refused.admitted && refused.missing.contains("of memory are missing"), "{refused:?}");
    assert_eq!(ask(256 << 20, 512 << 20).unwrap_err().code(), Some(ErrorCode::BadRequest));
    assert_eq!(client.mrc("web1").unwrap_err().code(), Some(ErrorCode::NoSuchVm));
    assert_eq!(client.what_if("web1", &WhatIfRequest::default()).unwrap_err().code(), Some(ErrorCode::NoSuchVm));
    daemon.stop();
}

#[test]
fn snapshots_are_listed_verified_and_removed() {
    let daemon = Daemon::start("snapshots");
    let client = daemon.client();
    assert_eq!(client.snapshots().unwrap(), SnapshotList::default());
    let store = pagoda_image::Store::open(&daemon.dir.join("images")).unwrap();
    make(&store, manifest(1, "web 1", "one"), Stage::Filled);
    make(&store, manifest(2, "db", "two"), Stage::Begun);
    make(&store, manifest(3, "db", "torn"), Stage::Filled);
    let torn = daemon.dir.join("images").join(pagoda_image::ImageId(3).to_string()).join("manifest");
    std::fs::write(torn, "torn").unwrap();

    let list = client.snapshots().unwrap();
    assert_eq!((list.snapshots.len(), list.unreadable.len()), (2, 1));
    let name = SnapshotName::new("web 1", "one");
    assert_eq!(client.snapshot(&name).unwrap(), list.snapshots[1]);
    assert_eq!(client.snapshot_launch(&name).unwrap().launch.words, ["-m", "2M"]);
    let report = std::iter::repeat_with(|| client.verify_snapshot(&name).unwrap()).find(|report| report.is_done);
    assert_eq!(report.unwrap().damaged, 0);
    let metrics = client.metrics().unwrap();
    assert!(metrics.contains("pagoda_host_snapshots{stage=\"damaged\"} 1\n"), "{metrics}");

    let code = |error: pagoda_api::ClientError| error.code();
    let begun = SnapshotName::new("db", "two");
    assert_eq!(code(client.snapshot_launch(&begun).unwrap_err()), Some(ErrorCode::Refused));
    assert_eq!(code(client.verify_snapshot(&begun).unwrap_err()), Some(ErrorCode::Refused));
    // What cannot be read may refer to it.
    assert_eq!(code(client.remove_snapshot(&name).unwrap_err()), Some(ErrorCode::Refused));
    client.remove_image(&list.unreadable[0].id).unwrap();
    client.remove_snapshot(&name).unwrap();
    assert_eq!(code(client.remove_snapshot(&name).unwrap_err()), Some(ErrorCode::NoSuchSnapshot));
    assert_eq!(code(client.remove_image("one").unwrap_err()), Some(ErrorCode::BadRequest));
    assert_eq!(client.snapshots().unwrap().snapshots.len(), 1, "one without its VM is removed as any other");
    client.remove_snapshot(&begun).unwrap();
    assert!(daemon.raw(&request("GET /v1/snapshots/a%2Fb/one", "")).starts_with("HTTP/1.1 400 "));
    daemon.stop();
}

#[test]
fn a_snapshot_that_its_vm_still_fills_stays() {
    let (dir, registry) = registry("filling");
    std::fs::create_dir_all(dir.join("vms")).unwrap();
    let record = Record::new("db", Token([7; 16]), VmKind::Qemu, &[4 << 20], VmSpec::default());
    registry.records.write(&Record { image: Some(ImageId(2)), ..record }).unwrap();
    registry.load().unwrap();
    let store = pagoda_image::Store::open(&dir.join("images")).unwrap();
    make(&store, manifest(1, "db", "filled"), Stage::Filled);
    make(&store, manifest(2, "db", "begun"), Stage::Begun);
    make(&store, manifest(3, "gone", "begun"), Stage::Begun);
    let remove = |vm: &str, name: &str| crate::snapshots::remove(&registry, &Which::Named(SnapshotName::new(vm, name)));
    let error = remove("db", "begun").unwrap_err();
    assert!(error.code == ErrorCode::WrongState && error.message.contains("still holds memory"), "{error:?}");
    remove("db", "filled").unwrap();
    let orphan = registry.images.get(&SnapshotName::new("gone", "begun")).unwrap();
    assert_eq!(orphan.stage, SnapshotStage::Lost, "nobody fills it: {:?}", orphan.why);
    remove("gone", "begun").unwrap();
    assert_eq!(registry.images.list().unwrap().snapshots.len(), 1);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn metrics_are_served_as_soon_as_the_port_is_free() {
    let (dir, registry) = registry("port");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let listening = tokio::spawn(listen_for_scrapers(Arc::clone(&registry), address));
        while registry.parts.problems().is_empty() {
            tokio::task::yield_now().await;
        }
        let problems = registry.health().problems;
        assert!(
            problems.iter().any(|line| line.contains("--metrics off") && line.contains(&address.to_string())),
            "{problems:?}"
        );
        drop(taken);
        assert_eq!(listening.await.unwrap().local_addr().unwrap(), address);
        assert_eq!(registry.parts.problems(), [""; 0]);
    });
    std::fs::remove_dir_all(dir).unwrap();
}
