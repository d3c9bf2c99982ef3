//! The client against small servers that run in threads of this process.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread::JoinHandle;

use pagoda_api::{
    Client, ClientError, CreateSnapshot, CreateVm, ErrorCode, RestoreRequest, SnapshotName, VmKind, VmPatch, VmSpec,
    VmState,
};

/// A directory that goes when the test ends.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pagoda-api-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn socket(&self) -> PathBuf {
        self.0.join("s")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Answers one request with `reply` and returns what was asked: the first line and the body.
fn serve_once(listener: UnixListener, reply: String) -> JoinHandle<(String, String)> {
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut input = BufReader::new(&stream);
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
        (&stream).write_all(reply.as_bytes()).unwrap();
        (first.trim().to_owned(), String::from_utf8(body).unwrap())
    })
}

fn reply(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Runs `call` against a server that says `reply`; returns its result and what was asked.
fn against<T>(name: &str, reply: String, call: impl FnOnce(&Client) -> T) -> (T, (String, String)) {
    let scratch = Scratch::new(name);
    let listener = UnixListener::bind(scratch.socket()).unwrap();
    let server = serve_once(listener, reply);
    let result = call(&Client::new(scratch.socket()));
    (result, server.join().unwrap())
}

const VM: &str = r#"{"name":"web1","kind":"qemu","state":{"kind":"running"},
    "memory_bytes":4294967296,"dram_limit_bytes":1073741824,"resident_bytes":1,
    "swapped_bytes":2,"zero_bytes":3,"swap_used_bytes":4,"armed":true,"huge":false,
    "counters":{"swap_in_bytes_total":9},"of_a_newer_daemon":true}"#;

#[test]
fn a_vm_is_read_and_unknown_fields_are_ignored() {
    let (vm, (line, _)) = against("vm", reply("200 OK", VM), |c| c.vm("web1"));
    let vm = vm.unwrap();
    assert_eq!(line, "GET /v1/vms/web1 HTTP/1.1");
    assert_eq!((vm.state, vm.memory_bytes, vm.pid), (VmState::Running, 4 << 30, None));
    assert_eq!(vm.counters["swap_in_bytes_total"], 9);
}

#[test]
fn a_chunked_list_is_read() {
    let body = format!("{{\"vms\":[{VM}]}}");
    let (first, second) = body.split_at(10);
    let chunked = format!(
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\n\r\n",
        first.len(),
        second.len()
    );
    let (list, _) = against("list", chunked, Client::vms);
    assert_eq!(list.unwrap().vms.len(), 1);
}

#[test]
fn requests_carry_their_bodies() {
    let created = r#"{"name":"web1","token":"00","attach_socket":"/a","shim":"/s.so"}"#;
    let request = CreateVm {
        name: "web1".into(),
        memory: vec![2 << 20],
        kind: VmKind::Plain,
        spec: VmSpec { reserve_swap: true, remote: Some(pagoda_api::RemoteRequest { copies: 2 }), ..VmSpec::default() },
        launch: None,
        outbox: None,
    };
    let (vm, (line, body)) = against("create", reply("201 Created", created), |c| c.create(&request));
    assert_eq!(vm.unwrap().shim, PathBuf::from("/s.so"));
    assert_eq!(line, "POST /v1/vms HTTP/1.1");
    assert_eq!(serde_json::from_str::<CreateVm>(&body).unwrap(), request);

    let patch = VmPatch { dram: Some(1 << 30), ..VmPatch::default() };
    let (vm, (line, body)) = against("patch", reply("200 OK", VM), |c| c.patch("web1", &patch));
    vm.unwrap();
    assert_eq!((line.as_str(), body.as_str()), ("PATCH /v1/vms/web1 HTTP/1.1", "{\"dram\":1073741824}"));

    let gone = "HTTP/1.1 204 No Content\r\n\r\n".to_owned();
    let (result, (line, _)) = against("delete", gone, |c| c.delete("web1"));
    result.unwrap();
    assert_eq!(line, "DELETE /v1/vms/web1 HTTP/1.1");
}

#[test]
fn the_daemons_error_and_hint_come_through() {
    let body = r#"{"code":"no_such_vm","message":"no VM is named web1","hint":"see `pagoda ls`"}"#;
    let (result, _) = against("missing", reply("404 Not Found", body), |c| c.vm("web1"));
    let error = result.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::NoSuchVm));
    assert_eq!(error.to_string(), "no VM is named web1\nsee `pagoda ls`");

    let (result, _) = against("html", reply("502 Bad", "<html>"), |c| c.vm("web1"));
    assert!(result.unwrap_err().to_string().contains("HTTP status 502"));
}

#[test]
fn nobody_listens() {
    let scratch = Scratch::new("nobody");
    let error = Client::new(scratch.socket()).vms().unwrap_err();
    assert!(error.is_unreachable());
    let said = error.to_string();
    assert!(said.contains("systemctl start pagodad") && said.contains("PAGODA_SOCKET"), "{said}");

    // A socket left by a daemon that died.
    drop(UnixListener::bind(scratch.socket()).unwrap());
    assert!(matches!(Client::new(scratch.socket()).vms().unwrap_err(), ClientError::NotRunning { .. }));

    let long = scratch.0.join("x".repeat(200));
    assert!(matches!(Client::new(long).vms().unwrap_err(), ClientError::BadPath { .. }));
}

#[test]
fn a_peer_that_is_no_daemon() {
    let (result, _) = against("smtp", "220 mail\r\n".into(), Client::vms);
    assert!(matches!(result.unwrap_err(), ClientError::Protocol { .. }));
    let (result, _) = against("cut", "HTTP/1.1 200 OK\r\nContent-Le".into(), Client::vms);
    assert!(matches!(result.unwrap_err(), ClientError::Protocol { .. }));
    let (result, _) = against("shape", reply("200 OK", "[]"), Client::vms);
    assert!(matches!(result.unwrap_err(), ClientError::Reply { .. }));
}

#[test]
fn bad_names_never_reach_the_wire() {
    let client = Client::new("/nonexistent");
    assert!(matches!(client.vm("../host").unwrap_err(), ClientError::BadName(_)));
}

const SNAPSHOT: &str = r#"{"id":"01","vm":"web 1","name":"one","taken_unix_ms":5,"stage":"filled","memory_bytes":9,
    "own_bytes":8,"state_bytes":7,"running":true,"qemu":{"version":"10.0.2","machine":"pc-q35-10.0"},"uid":1,"gid":2,
    "of_a_newer_daemon":true}"#;

#[test]
fn snapshots_are_asked_for_by_both_names() {
    let name = SnapshotName::new("web 1", "one");
    let (snapshot, (line, _)) = against("snapshot", reply("200 OK", SNAPSHOT), |c| c.snapshot(&name));
    assert_eq!(
        (snapshot.unwrap().full_name(), line.as_str()),
        (name.clone(), "GET /v1/snapshots/web%201/one HTTP/1.1")
    );
    let list = format!("{{\"snapshots\":[{SNAPSHOT}]}}");
    let (list, (line, _)) = against("snapshots", reply("200 OK", &list), Client::snapshots);
    assert_eq!((list.unwrap().snapshots.len(), line.as_str()), (1, "GET /v1/snapshots HTTP/1.1"));
    let launch = r#"{"launch":{"program":"/q","words":["-S"],"cwd":"/","uid":1,"gid":2},"memory":[2097152],"spec":{},
        "qemu":{"version":"10.0.2","machine":"pc"}}"#;
    let (launch, (line, _)) = against("launch", reply("200 OK", launch), |c| c.snapshot_launch(&name));
    assert_eq!(
        (launch.unwrap().memory, line.as_str()),
        (vec![2 << 20], "GET /v1/snapshots/web%201/one/launch HTTP/1.1")
    );
    let (report, (line, body)) = against(
        "verify",
        reply(
            "200 OK",
            "{\"is_done\":false,\"checked_bytes\":1,\"memory_bytes\":2,\
        \"good_pages\":0,\"zero_pages\":0,\"damaged\":0}",
        ),
        |c| c.verify_snapshot(&name),
    );
    assert!(!report.unwrap().is_done);
    assert_eq!((line.as_str(), body.as_str()), ("POST /v1/snapshots/web%201/one/verify HTTP/1.1", "{}"));
    let gone = || "HTTP/1.1 204 No Content\r\n\r\n".to_owned();
    let (_, (line, _)) = against("rm", gone(), |c| c.remove_snapshot(&name).unwrap());
    assert_eq!(line, "DELETE /v1/snapshots/web%201/one HTTP/1.1");
    let (_, (line, _)) = against("rm-image", gone(), |c| c.remove_image("01").unwrap());
    assert_eq!(line, "DELETE /v1/snapshots/01 HTTP/1.1");
}

#[test]
fn a_snapshot_is_taken_and_restored() {
    let request = CreateSnapshot { name: Some("one".into()), ..CreateSnapshot::default() };
    let (_, (line, body)) = against("take", reply("200 OK", SNAPSHOT), |c| c.take_snapshot("web 1", &request).unwrap());
    assert_eq!(line, "POST /v1/vms/web%201/snapshots HTTP/1.1");
    assert_eq!(body, r#"{"name":"one","wait_durable":false}"#);
    let request = RestoreRequest {
        from: SnapshotName::new("web1", "one"),
        as_name: Some("web2".into()),
        dram: Some(1 << 30),
        force: false,
        replace: false,
    };
    let created = r#"{"name":"web2","token":"00","attach_socket":"/a","shim":"/s.so"}"#;
    let (vm, (line, body)) = against("restore", reply("200 OK", created), |c| c.restore(&request));
    assert_eq!((vm.unwrap().name.as_str(), line.as_str()), ("web2", "POST /v1/restores HTTP/1.1"));
    assert_eq!(serde_json::from_str::<RestoreRequest>(&body).unwrap(), request);
    let refused = r#"{"code":"refused","message":"its disks have changed"}"#;
    let (error, _) = against("refused", reply("409 Conflict", refused), |c| c.restore(&request));
    assert_eq!(error.unwrap_err().code(), Some(ErrorCode::Refused));

    // Nobody is asked for what cannot be.
    let nobody = Client::new("/nonexistent/s");
    let bad = |error: ClientError| assert!(matches!(error, ClientError::BadName(_)), "{error}");
    bad(nobody.take_snapshot("a/b", &CreateSnapshot::default()).unwrap_err());
    bad(nobody
        .take_snapshot("a", &CreateSnapshot { name: Some("..".into()), ..CreateSnapshot::default() })
        .unwrap_err());
    bad(nobody.snapshot(&SnapshotName::new("a", "b/c")).unwrap_err());
    bad(nobody.restore(&RestoreRequest { as_name: Some(String::new()), ..request }).unwrap_err());
}
