//! The peer: QEMU alone, whose memory is a private mapping of a file that has the source's.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use testkit::qmp::Qmp;
use testkit::undo::{Guard, Undo, start_ticks_of};

use super::{MEMORY_MIB, WORK_MIB};
use crate::Setup;
use crate::balloon::guest::{Guest, Port, QEMU, Shape, Start, machine_words};
use crate::snapshot::append;

/// The page cache of this is memory, and nothing is written to a disk.
const SHARED_MEMORY: &str = "/dev/shm";
const NAME: &str = "bench-bare";
/// Starts at a time. With more than the CPUs have to do at once all take as long.
const AT_A_TIME: usize = 4;

/// The source's memory and the state of its devices.
pub struct Template {
    /// Sockets, and the state.
    dir: PathBuf,
    memory: PathBuf,
    words: Vec<String>,
    _memory: Guard,
    _dir: Guard,
}

impl Template {
    /// # Errors
    /// The source does not boot, or does not save its state.
    pub fn make(setup: &Setup, start: &Start<'_>) -> Result<Template> {
        let dir = setup.dir.join(NAME);
        let memory = PathBuf::from(SHARED_MEMORY).join(format!("{NAME}-{}", std::process::id()));
        let remove_dir = Guard::new(Undo::Directory { path: dir.clone() })?;
        let remove_memory = Guard::new(Undo::File { path: memory.clone() })?;
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        let monitor = dir.join("source.qmp");
        let append = append(WORK_MIB);
        let memory_words = |share: &str| {
            let object =
                format!("memory-backend-file,id=pc.ram,size={MEMORY_MIB}M,mem-path={},share={share}", memory.display());
            ["-object".to_owned(), object, "-machine".to_owned(), "memory-backend=pc.ram".to_owned()]
        };
        let mut more = memory_words("on").to_vec();
        more.extend(["-qmp".to_owned(), format!("unix:{},server=on,wait=off", monitor.display())]);
        let shape = Shape { name: NAME, memory_mib: MEMORY_MIB, append: &append, more: &more, ..Shape::default() };
        let mut source = Guest::boot_alone(&dir, &shape, start)?;
        source.command(&format!("fill {WORK_MIB}"))?;
        let mut qmp = Qmp::connect(&monitor)?;
        qmp.execute("stop", json!({}))?;
        leave_memory_out(&mut qmp)?;
        qmp.execute("migrate", json!({ "uri": format!("exec:cat > {}", dir.join("state").display()) }))?;
        wait_for(&mut qmp, "completed")?;
        qmp.execute("quit", json!({}))?;
        drop(source);
        let mut words =
            machine_words(&Shape { name: NAME, memory_mib: MEMORY_MIB, append: &append, ..Shape::default() }, start);
        words.extend(memory_words("off"));
        words.extend(["-incoming", "defer"].map(str::to_owned));
        Ok(Template { dir, memory, words, _memory: remove_memory, _dir: remove_dir })
    }

    /// What the file takes of memory.
    ///
    /// # Errors
    /// It has gone.
    pub fn bytes(&self) -> Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(fs::metadata(&self.memory).context("look at the source's memory")?.blocks() * 512)
    }
}

/// One of its guests. Killed when dropped.
pub struct Bare<'a> {
    template: &'a Template,
    number: usize,
    child: Child,
    _kill: Guard,
}

impl<'a> Bare<'a> {
    /// Starts one, and returns when its guest goes on.
    ///
    /// # Errors
    /// QEMU does not start, or refuses the state.
    pub fn start(template: &'a Template, number: usize) -> Result<Bare<'a>> {
        let monitor = template.dir.join(format!("{number}.qmp"));
        for left in [&monitor, &template.dir.join(format!("{number}.control"))] {
            let _ = fs::remove_file(left);
        }
        let mut command = Command::new(QEMU);
        command.args(&template.words).args(["-serial", "null", "-serial"]);
        command.arg(format!("unix:{}/{number}.control,server=on,wait=off", template.dir.display()));
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", monitor.display()));
        let state = fs::File::open(template.dir.join("state")).context("open the state")?;
        command.stdin(state).stdout(Stdio::null()).stderr(Stdio::inherit());
        // It would end with the thread that starts it; the guard kills it.
        let child = command.spawn().context("start QEMU")?;
        let kill = Guard::new(Undo::Process { pid: child.id(), start_ticks: start_ticks_of(child.id()).unwrap_or(0) })?;
        let bare = Bare { template, number, child, _kill: kill };
        let mut qmp = Qmp::connect(&monitor)?;
        leave_memory_out(&mut qmp)?;
        // Its standard input: without another process between.
        qmp.execute("migrate-incoming", json!({ "uri": "fd:0" }))?;
        wait_for(&mut qmp, "completed")?;
        qmp.execute("cont", json!({}))?;
        qmp.wait_event(|event| event["event"] == "RESUME")?;
        Ok(bare)
    }

    /// Starts many, several at a time.
    ///
    /// # Errors
    /// One of them does not start.
    pub fn start_many(template: &'a Template, count: usize) -> Result<Vec<Bare<'a>>> {
        let next = AtomicUsize::new(0);
        let starter = || -> Result<Vec<Bare<'a>>> {
            let mut started = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    return Ok(started);
                }
                started.push(Bare::start(template, number)?);
            }
        };
        std::thread::scope(|scope| {
            let starters: Vec<_> = (0..AT_A_TIME).map(|_| scope.spawn(starter)).collect();
            let mut all = Vec::new();
            for one in starters {
                match one.join() {
                    Ok(started) => all.extend(started?),
                    Err(_) => bail!("a thread that starts QEMU has panicked"),
                }
            }
            Ok(all)
        })
    }

    /// Pages that its guest has written: the anonymous ones of the mapping.
    ///
    /// # Errors
    /// QEMU has gone, or has no such mapping.
    pub fn private_bytes(&self) -> Result<u64> {
        let path = format!("/proc/{}/smaps", self.child.id());
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let memory = self.template.memory.display().to_string();
        let mut bytes = 0;
        let mut is_memory = false;
        for line in text.lines() {
            // The first line of a mapping begins with its addresses, all others with a word and a colon.
            if line.split(' ').next().is_some_and(|word| word.contains('-')) {
                is_memory = line.ends_with(&memory);
            } else if let Some(size) = line.strip_prefix("Anonymous:").filter(|_| is_memory) {
                let kib = size.trim().trim_end_matches(" kB");
                bytes += kib.parse::<u64>().with_context(|| format!("read {line:?}"))? << 10;
            }
        }
        Ok(bytes)
    }

    /// Has its guest verify its memory, if wanted, and ends it.
    ///
    /// # Errors
    /// A page is wrong.
    pub fn end(mut self, verify: bool) -> Result<()> {
        if verify {
            let socket = self.template.dir.join(format!("{}.control", self.number));
            let stream = std::os::unix::net::UnixStream::connect(&socket).context("connect to a guest")?;
            Port::of(stream)?.command("verify").context("the peer's guest has what its source had")?;
        }
        self.child.kill().context("kill QEMU")?;
        self.child.wait().context("wait for QEMU")?;
        Ok(())
    }
}

impl Drop for Bare<'_> {
    fn drop(&mut self) {
        // It may have ended; either way it has to be reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn leave_memory_out(qmp: &mut Qmp) -> Result<()> {
    let capability = json!({ "capability": "x-ignore-shared", "state": true });
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": [capability] }))?;
    Ok(())
}

fn wait_for(qmp: &mut Qmp, status: &str) -> Result<()> {
    loop {
        let answer: Value = qmp.execute("query-migrate", json!({}))?;
        match answer["status"].as_str() {
            Some(found) if found == status => return Ok(()),
            Some("failed" | "cancelled") => bail!("the state cannot be saved or loaded: {answer}"),
            _ => std::thread::sleep(std::time::Duration::from_millis(1)),
        }
    }
}
