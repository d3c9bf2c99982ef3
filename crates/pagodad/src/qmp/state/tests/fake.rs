//! A QEMU of a few lines: it has a run state, capabilities and one migration, and misbehaves as it is told.

use std::collections::BTreeSet;
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{Result, bail};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use serde_json::{Value, json};

use crate::qmp::Monitor;
use crate::qmp::state::Gate;
use crate::qmp::tests::Dir;

/// What it sends as its state.
pub const STATE: &[u8] = b"QEVM and what its devices held";

/// How the fake QEMU misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// It does not misbehave.
    Well,
    /// A device cannot be saved: the migration fails in the middle of the stream.
    Fails,
    /// The stream never comes to an end.
    Endless,
    /// Nothing comes, and not the end either.
    Nothing,
    /// What comes is no state.
    Nonsense,
    /// This command is never answered.
    Silent(&'static str),
    /// This command is refused.
    Refuses(&'static str),
    /// This command is answered when the test says so ([`Model::goes_on`]).
    Waits(&'static str),
    /// The stream ends, and the migration fails after that.
    FailsLate,
}

#[derive(Debug)]
pub struct Model {
    pub way: Way,
    pub status: String,
    pub on: BTreeSet<String>,
    pub migration: &'static str,
    pub commands: Vec<String>,
    pub shared: bool,
    /// Pages of RAM in its last migration; it has 100.
    pub sent_pages: u64,
    pub more: Value,
    pub goes_on: bool,
    end: Option<UnixStream>,
}

/// The shim's gate; QEMU looks at it.
#[derive(Clone, Debug, Default)]
pub struct FakeGate {
    pub is_open: Arc<AtomicBool>,
    pub opened: Arc<AtomicUsize>,
    pub is_stuck: Arc<AtomicBool>,
}

impl Gate for FakeGate {
    fn open(&self) -> Result<()> {
        if self.is_stuck.load(Ordering::SeqCst) {
            bail!("the agent is away");
        }
        self.opened.fetch_add(1, Ordering::SeqCst);
        self.is_open.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn shut(&self) {
        self.is_open.store(false, Ordering::SeqCst);
    }
}

pub struct Fake {
    pub monitor: Monitor,
    pub gate: FakeGate,
    pub model: Arc<Mutex<Model>>,
    client: Arc<Mutex<Option<UnixStream>>>,
    dir: Dir,
}

impl Fake {
    pub fn new(way: Way) -> Fake {
        let dir = Dir::new();
        let path = dir.0.join("qmp");
        let listener = UnixListener::bind(&path).expect("bind");
        let model = Model {
            way,
            status: "running".to_owned(),
            on: BTreeSet::new(),
            migration: "none",
            commands: Vec::new(),
            shared: true,
            sent_pages: 20,
            more: json!({}),
            goes_on: false,
            end: None,
        };
        let (model, gate, client) = (Arc::new(Mutex::new(model)), FakeGate::default(), Arc::new(Mutex::new(None)));
        let (served, looked_at, now) = (Arc::clone(&model), gate.clone(), Arc::clone(&client));
        // It ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.expect("accept");
                *now.lock().unwrap() = Some(stream.try_clone().expect("clone"));
                serve(&served, &looked_at, &stream);
            }
        });
        Fake { monitor: Monitor::new(&path), gate, model, client, dir }
    }

    /// The path of the fake's monitor socket.
    pub fn path(&self) -> PathBuf {
        self.dir.0.join("qmp")
    }

    pub fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap()
    }

    /// Says something without being asked, to who is connected.
    pub fn say(&self, line: &str) {
        let client = self.client.lock().unwrap();
        writeln!(client.as_ref().expect("somebody is connected"), "{line}").expect("write");
    }

    pub fn capabilities(&self) -> Vec<String> {
        self.model().on.iter().cloned().collect()
    }
}

fn serve(model: &Arc<Mutex<Model>>, gate: &FakeGate, mut stream: &UnixStream) {
    if writeln!(stream, r#"{{"QMP": {{}}}}"#).is_err() {
        return;
    }
    let (mut text, mut fd) = (Vec::new(), None);
    while receive(stream, &mut text, &mut fd) {
        while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = text.drain(..=end).collect();
            let request: Value = serde_json::from_slice(&line).expect("JSON");
            let command = request["execute"].as_str().expect("a command").to_owned();
            model.lock().unwrap().commands.push(command.clone());
            let waits = |model: &Model| !model.goes_on && matches!(model.way, Way::Waits(one) if one == command);
            while waits(&model.lock().unwrap()) {
                std::thread::yield_now();
            }
            for line in answer(model, gate, &command, &request["arguments"], &mut fd) {
                if writeln!(stream, "{line}").is_err() {
                    return;
                }
            }
        }
    }
}

/// More of what the client says; `false`: it is gone.
fn receive(stream: &UnixStream, text: &mut Vec<u8>, fd: &mut Option<OwnedFd>) -> bool {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [IoSliceMut::new(&mut bytes)];
    let Ok(message) = rustix::net::recvmsg(stream, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC) else {
        return false;
    };
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = part {
            *fd = fds.next();
        }
    }
    text.extend_from_slice(&bytes[..message.bytes]);
    message.bytes > 0
}

fn event(name: &str, microseconds: u64, data: &Value) -> String {
    let timestamp = json!({ "seconds": 1_700_000_000, "microseconds": microseconds });
    json!({ "event": name, "timestamp": timestamp, "data": data }).to_string()
}

fn migration(status: &str) -> String {
    event("MIGRATION", 0, &json!({ "status": status }))
}

fn done(value: &Value) -> String {
    json!({ "return": value }).to_string()
}

fn refused(desc: &str) -> Vec<String> {
    vec![json!({ "error": { "class": "GenericError", "desc": desc } }).to_string()]
}

fn answer(
    shared: &Arc<Mutex<Model>>,
    gate: &FakeGate,
    command: &str,
    arguments: &Value,
    fd: &mut Option<OwnedFd>,
) -> Vec<String> {
    let mut model = shared.lock().unwrap();
    match model.way {
        Way::Silent(silent) if silent == command => return Vec::new(),
        Way::Refuses(one) if one == command => return refused("no"),
        _ => {}
    }
    match command {
        "query-status" => vec![done(&json!({ "status": model.status }))],
        "query-memdev" => vec![done(&json!([{ "id": "pc.ram", "share": model.shared }]))],
        "query-migrate" if model.migration == "none" => vec![done(&model.more)],
        "query-migrate" => {
            let ram = json!({ "normal": model.sent_pages, "duplicate": 5, "page-size": 4096 });
            vec![done(&json!({ "status": model.migration, "ram": ram }))]
        }
        "query-memory-size-summary" => vec![done(&json!({ "base-memory": 100 * 4096 }))],
        "query-migrate-parameters" => vec![done(&model.more)],
        "query-migrate-capabilities" => {
            let all = ["events", "late-block-activate", "x-ignore-shared", "xbzrle"]
                .map(|name| json!({ "capability": name, "state": model.on.contains(name) }));
            vec![done(&json!(all))]
        }
        "migrate-set-capabilities" => {
            let one = &arguments["capabilities"][0];
            let name = one["capability"].as_str().expect("a name");
            if name == "x-ignore-shared" && !gate.is_open.load(Ordering::SeqCst) {
                return refused("Parameter 'capability' does not accept value 'x-ignore-shared'");
            }
            if one["state"] == true {
                model.on.insert(name.to_owned());
            } else {
                model.on.remove(name);
            }
            vec![done(&json!({}))]
        }
        "getfd" => {
            model.end = Some(UnixStream::from(fd.take().expect("a descriptor")));
            vec![done(&json!({}))]
        }
        "closefd" if model.end.take().is_none() => refused("File descriptor named 'x' not found"),
        "migrate" => begin(&mut model, shared),
        "migrate_cancel" => {
            if model.migration == "active" {
                model.migration = "cancelled";
            }
            vec![migration("cancelled"), done(&json!({}))]
        }
        "stop" if model.status == "running" => {
            model.status = "paused".to_owned();
            vec![event("STOP", 2000, &json!({})), done(&json!({}))]
        }
        "cont" => {
            model.status = "running".to_owned();
            vec![event("RESUME", 9000, &json!({})), done(&json!({}))]
        }
        _ => vec![done(&json!({}))],
    }
}

fn begin(model: &mut Model, shared: &Arc<Mutex<Model>>) -> Vec<String> {
    let mut end = model.end.take().expect("a descriptor was given");
    let began = vec![done(&json!({})), migration("setup"), migration("active")];
    model.migration = "active";
    match model.way {
        Way::Fails => {
            end.write_all(&STATE[..10]).expect("write");
            model.migration = "failed";
            [began, vec![migration("failed")]].concat()
        }
        Way::FailsLate => {
            end.write_all(STATE).expect("write");
            model.migration = "failed";
            began
        }
        Way::Endless => {
            let model = Arc::clone(shared);
            std::thread::spawn(move || {
                while end.write_all(&[0; 4096]).is_ok() {}
                // Its other end is closed.
                let mut model = model.lock().unwrap();
                if model.migration == "active" {
                    model.migration = "failed";
                }
            });
            began
        }
        Way::Nothing => {
            model.end = Some(end);
            began
        }
        way => {
            let state = if way == Way::Nonsense { &STATE[1..] } else { STATE };
            end.write_all(state).expect("write");
            let stopped = if model.status == "running" { vec![event("STOP", 2000, &json!({}))] } else { vec![] };
            model.status = "postmigrate".to_owned();
            model.migration = "completed";
            [began, stopped, vec![migration("completed")]].concat()
        }
    }
}
