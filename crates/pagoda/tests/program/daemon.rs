//! A daemon small enough to live in a thread: it makes VMs of memfds and remembers what it was asked.

use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use pagoda_api::{CloneRequest, CreateVm, RestoreRequest, VmKind, VmSpec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};

pub const TOKEN: &str = "30313233343536373839616263646566";

/// The one VM that `ls`, `vm show` and `top` see.
pub const VM: &str = r#"{"name":"web1","kind":"qemu","state":{"kind":"running"},"memory_bytes":4294967296,
    "dram_limit_bytes":1073741824,"resident_bytes":1073741824,"swapped_bytes":1610612736,
    "zero_bytes":1610612736,"swap_used_bytes":1610612736,"armed":true,"huge":false,"pid":42,
    "counters":{"faults_minor":7,"pages_in":9}}"#;

/// The host of that VM, as the control API shows it.
const HOST: &str = r#"{"version":"0.1.0","hostname":"host1","kernel":"6.18.0","memory_total_bytes":8589934592,
    "memory_available_bytes":4294967296,"state_dir":"/run/pagoda","swap_dir":"/var/lib/pagoda/swap",
    "swap_free_bytes":8589934592,"uffd_permission":"root","large_folios":"2M","vms":1,
    "policy":{"pool_bytes":6442450944,"pool_now_bytes":6442450944,"used_bytes":1073741824,"free_bytes":5368709120,
    "idle_tax":750,"thresholds":[60,40,20,10],"state":"high","state_since_s":7,"reserved_bytes":0,
    "swap_reserved_bytes":3221225472}}"#;

pub struct FakeDaemon {
    pub dir: PathBuf,
    asked: Arc<Mutex<Vec<(String, String)>>>,
    attach: Arc<OwnedFd>,
}

impl FakeDaemon {
    pub fn start(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("pagoda-cli-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        // An empty library: the dynamic linker says so on standard error and goes on.
        // It has the name by which the command knows that QEMU may be told that RAM is shared.
        std::fs::write(dir.join("shim.so"), "\0strcmp\0").unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let attach = attach_listener(&dir);
        let daemon = Self { dir, asked: Arc::clone(&asked), attach: Arc::clone(&attach) };
        let control = UnixListener::bind(daemon.socket()).unwrap();
        let dir = daemon.dir.clone();
        // The threads end with the test's process.
        std::thread::spawn(move || {
            for stream in control.incoming() {
                let request = read_request(stream.as_ref().unwrap());
                let line = request.0.clone();
                asked.lock().unwrap().push(request.clone());
                let (status, body) = answer(&line, &request.1, &dir, &attach);
                let length = body.len();
                let reply = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{body}");
                stream.unwrap().write_all(reply.as_bytes()).unwrap();
            }
        });
        daemon
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("control")
    }

    /// First line and body of each request so far.
    pub fn asked(&self) -> Vec<(String, String)> {
        self.asked.lock().unwrap().clone()
    }

    pub fn created(&self) -> Option<CreateVm> {
        let asked = self.asked();
        let (_, body) = asked.iter().find(|(line, _)| line == "POST /v1/vms")?;
        Some(serde_json::from_str(body).unwrap())
    }

    pub fn pagoda(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagoda"));
        command.args(words).env("PAGODA_SOCKET", self.socket());
        command
    }

    /// Answers one Fetch for a VM that is there already.
    pub fn hand_over(&self, vm: CreateVm) {
        hand_over(vm, Arc::clone(&self.attach));
    }
}

fn attach_listener(dir: &std::path::Path) -> Arc<OwnedFd> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(dir.join("attach")).unwrap()).unwrap();
    rustix::net::listen(&socket, 4).unwrap();
    Arc::new(socket)
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn read_request(stream: &UnixStream) -> (String, String) {
    let mut input = BufReader::new(stream);
    let (mut first, mut length) = (String::new(), 0);
    input.read_line(&mut first).unwrap();
    loop {
        let mut line = String::new();
        input.read_line(&mut line).unwrap();
        if line == "\r\n" {
            break;
        }
        if let Some(value) = line.strip_prefix("Content-Length: ") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    input.read_exact(&mut body).unwrap();
    (first.trim().trim_end_matches(" HTTP/1.1").to_owned(), String::from_utf8(body).unwrap())
}

fn answer(line: &str, body: &str, dir: &std::path::Path, attach: &Arc<OwnedFd>) -> (&'static str, String) {
    match line {
        "GET /v1/vms" => ("200 OK", format!("{{\"vms\":[{VM}]}}")),
        "GET /v1/vms/web1" | "PATCH /v1/vms/web1" => ("200 OK", VM.into()),
        "GET /v1/vms/web1/explain" => {
            ("200 OK", r#"{"lines":[{"term":"dram","value":"1G","reason":"--dram 1G"}]}"#.into())
        }
        "GET /v1/host" | "PATCH /v1/host" => ("200 OK", HOST.into()),
        "GET /v1/health" => ("200 OK", r#"{"ok":true}"#.into()),
        "GET /v1/vms/web1/mrc" => {
            let points = r#"[{"dram_bytes":0,"miss_ratio":1.0},{"dram_bytes":4294967296,"miss_ratio":0.0}]"#;
            let curve = format!(
                "{{\"accesses\":100,\"memory_bytes\":4294967296,\"target_bytes\":1073741824,\"points\":{points}}}"
            );
            ("200 OK", curve)
        }
        "POST /v1/vms/web1/whatif" => (
            "200 OK",
            r#"{"target_bytes":[1073741824,2147483648],"page_ins_per_s":12.5,"page_ins_per_s_then":3.0,
                "miss_ratio":[0.75,0.5]}"#
                .into(),
        ),
        // There is room for a guarantee of 1 GiB.
        "POST /v1/admit" => {
            let asked: serde_json::Value = serde_json::from_str(body).unwrap();
            let fits = asked["min"].as_u64().unwrap() <= 1 << 30;
            let reply = serde_json::json!({
                "admitted": fits, "memory_needed_bytes": asked["min"], "memory_free_bytes": 1_u64 << 30,
                "swap_needed_bytes": 0, "swap_free_bytes": 0, "missing": if fits { "" } else { "1 GiB of the pool" }
            });
            ("200 OK", reply.to_string())
        }
        "POST /v1/vms" => {
            let vm: CreateVm = serde_json::from_str(body).unwrap();
            if vm.name == "taken" {
                let error = r#"{"code":"name_taken","message":"a VM named taken exists","hint":"choose another name"}"#;
                return ("409 Conflict", error.into());
            }
            if vm.name == "large" {
                let error = r#"{"code":"no_room","message":"1 GiB is missing","hint":"lower --min"}"#;
                return ("507 Insufficient Storage", error.into());
            }
            hand_over(vm.clone(), Arc::clone(attach));
            ("201 Created", created(&vm.name, dir))
        }
        "POST /v1/restores" => restore(body, dir, attach),
        "POST /v1/clones" => clones(body, dir, attach),
        "GET /v1/vms/web1/launch" => snapshots("GET /v1/snapshots/web1/bare/launch", body, dir),
        _ if line.starts_with("GET /v1/vms/job") => clone_of(line, dir),
        _ if line.contains("/snapshots") => snapshots(line, body, dir),
        _ if line.starts_with("DELETE ") => ("204 No Content", String::new()),
        _ => {
            ("404 Not Found", r#"{"code":"no_such_vm","message":"no VM of that name","hint":"see `pagoda ls`"}"#.into())
        }
    }
}

fn created(name: &str, dir: &std::path::Path) -> String {
    let (attach, shim) = (dir.join("attach"), dir.join("shim.so"));
    serde_json::json!({ "name": name, "token": TOKEN, "attach_socket": attach, "shim": shim }).to_string()
}

/// The snapshots of `web1`: `one`, `bare`, which has no network card, and `other`, whose QEMU was another user's, and `less`, whose memory was less.
fn snapshots(line: &str, body: &str, dir: &std::path::Path) -> (&'static str, String) {
    let snapshot = |stage: &str| {
        serde_json::json!({
            "id": "01", "vm": "web1", "name": "one", "taken_unix_ms": 1_795_881_600_000_u64, "stage": stage,
            "memory_bytes": 1_u64 << 30, "own_bytes": 3_u64 << 28, "state_bytes": 1_u64 << 20, "pause_us": 12_345,
            "running": true, "qemu": { "version": "10.0.2", "machine": "pc-q35-10.0" }, "uid": 0, "gid": 0
        })
    };
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let launch_of = |memory: u64, uid: u32, more: &[&str]| {
        let words = [&["-M", "q35", "-m", "1G", "-name", "web1"], more].concat();
        let launch = serde_json::json!({
            "program": dir.join("qemu-system-x86_64"), "words": words, "cwd": "/", "uid": uid, "gid": gid
        });
        let qemu = serde_json::json!({ "version": "10.0.2", "machine": "pc-q35-10.0" });
        let spec = serde_json::json!({ "dram": 1_u64 << 29 });
        serde_json::json!({ "launch": launch, "memory": [memory], "spec": spec, "qemu": qemu }).to_string()
    };
    let launch = |memory: u64, uid: u32| launch_of(memory, uid, &[]);
    match line {
        "GET /v1/snapshots" => ("200 OK", serde_json::json!({ "snapshots": [snapshot("filled")] }).to_string()),
        "GET /v1/snapshots/web1/one"
        | "GET /v1/snapshots/web1/bare"
        | "GET /v1/snapshots/web1/other"
        | "GET /v1/snapshots/web1/less" => ("200 OK", snapshot("durable").to_string()),
        "GET /v1/snapshots/web1/one/launch" => ("200 OK", launch(1 << 30, uid)),
        _ if line.starts_with("GET /v1/snapshots/web1/clone-") && !line.ends_with("/launch") => {
            ("200 OK", snapshot("filled").to_string())
        }
        _ if line == "GET /v1/snapshots/web1/bare/launch" || line.starts_with("GET /v1/snapshots/web1/clone-") => {
            ("200 OK", launch_of(1 << 30, uid, &["-nodefaults", "-serial", "unix:/run/web1.serial,server=on,wait=off"]))
        }
        "GET /v1/snapshots/web1/other/launch" => ("200 OK", launch(1 << 30, uid + 7)),
        "GET /v1/snapshots/web1/less/launch" => ("200 OK", launch(1 << 29, uid)),
        "POST /v1/vms/web1/snapshots" if body.contains("\"name\":\"clone-") => {
            let name: serde_json::Value = serde_json::from_str(body).unwrap();
            let mut taken = snapshot("begun");
            taken["name"] = name["name"].clone();
            ("200 OK", taken.to_string())
        }
        "POST /v1/vms/web1/snapshots" if !body.contains("\"disks\":false") => {
            let error = r#"{"code":"refused","message":"web1 writes to disks","hint":"say --disks or --no-disks"}"#;
            ("409 Conflict", error.into())
        }
        "POST /v1/vms/web1/snapshots" => ("200 OK", snapshot("begun").to_string()),
        "POST /v1/snapshots/web1/one/verify" => {
            let report = r#"{"is_done":true,"checked_bytes":1073741824,"memory_bytes":1073741824,"good_pages":5,
                "zero_pages":7,"damaged":1,"damages":[{"file":"pages","page":9,"offset_bytes":4096,"what":"x"}]}"#;
            ("200 OK", report.into())
        }
        _ if line.starts_with("DELETE ") => ("204 No Content", String::new()),
        _ => ("404 Not Found", r#"{"code":"no_such_snapshot","message":"no snapshot of that name"}"#.into()),
    }
}

/// Makes any VM but `changed`, which is refused, and `broken`, which is given up.
fn restore(body: &str, dir: &std::path::Path, attach: &Arc<OwnedFd>) -> (&'static str, String) {
    let request: RestoreRequest = serde_json::from_str(body).unwrap();
    let name = request.vm_name().to_owned();
    match name.as_str() {
        "changed" => ("409 Conflict", r#"{"code":"refused","message":"disk0 has changed","hint":"--force"}"#.into()),
        "broken" => ("409 Conflict", r#"{"code":"given_up","message":"QEMU does not answer"}"#.into()),
        _ => {
            let vm = CreateVm {
                name,
                memory: vec![1 << 30],
                kind: VmKind::Qemu,
                spec: VmSpec::default(),
                launch: None,
                outbox: None,
            };
            let reply = created(&vm.name, dir);
            hand_over(vm, Arc::clone(attach));
            ("200 OK", reply)
        }
    }
}

/// Makes all, but for want of room if one is called `large`.
fn clones(body: &str, dir: &std::path::Path, attach: &Arc<OwnedFd>) -> (&'static str, String) {
    let request: CloneRequest = serde_json::from_str(body).unwrap();
    if request.clones.iter().any(|clone| clone.name.starts_with("large")) {
        let error = r#"{"code":"no_room","message":"none of 2 clones was made: large-2: 1 GiB is missing"}"#;
        return ("507 Insufficient Storage", error.into());
    }
    let made = request.clones.iter().map(|clone| {
        let (name, spec) = (clone.name.clone(), VmSpec::default());
        hand_over(
            CreateVm { name, memory: vec![1 << 30], kind: VmKind::Qemu, spec, launch: None, outbox: None },
            Arc::clone(attach),
        );
        created(&clone.name, dir)
    });
    ("200 OK", format!("{{\"vms\":[{}]}}", made.collect::<Vec<_>>().join(",")))
}

/// A clone runs as soon as its process has written its number into a file.
fn clone_of(line: &str, dir: &std::path::Path) -> (&'static str, String) {
    let name = line.strip_prefix("GET /v1/vms/").unwrap();
    let pid =
        std::fs::read_to_string(dir.join(format!("{name}.pid"))).ok().and_then(|pid| pid.trim().parse::<u32>().ok());
    let mut vm: serde_json::Value = serde_json::from_str(VM).unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as u64;
    vm["name"] = name.into();
    vm["pid"] = pid.into();
    vm["loading"] = pid.is_none().into();
    vm["resumed_unix_us"] = now.into();
    ("200 OK", vm.to_string())
}

/// Answers one Fetch, for QEMU with a listening socket.
fn hand_over(vm: CreateVm, attach: Arc<OwnedFd>) {
    std::thread::spawn(move || {
        let peer = rustix::net::accept(&*attach).unwrap();
        let mut bytes = [0; 64];
        let (mut data, mut none) = ([IoSliceMut::new(&mut bytes)], RecvAncillaryBuffer::default());
        rustix::net::recvmsg(&peer, &mut data, &mut none, RecvFlags::empty()).unwrap();

        let mut files = Vec::new();
        let monitor = vm.kind == VmKind::Qemu;
        if monitor {
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
            // Bound to a name that the kernel chooses.
            rustix::net::bind(&socket, &SocketAddrUnix::new_unnamed()).unwrap();
            rustix::net::listen(&socket, 1).unwrap();
            files.push(socket);
        }
        let fds: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if monitor {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let lens = pagoda_abi::attach::List::default();
        let packet = pagoda_abi::attach::Packet::Fetched { monitor, lens }.encode();
        rustix::net::sendmsg(&peer, &[IoSlice::new(packet.as_bytes())], &mut control, SendFlags::NOSIGNAL).unwrap();
    });
}
