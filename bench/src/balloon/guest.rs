//! A guest that is led by commands on its second serial port.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::VmInfo;
use pagoda_guest::lines::Line;
use pagoda_sys::toy::process;
use testkit::accel::Accelerator;
use testkit::console::{Console, Output};
use testkit::daemon::Daemon;
use testkit::image::Images;
use testkit::undo::{Guard, Undo, start_ticks_of};

pub const QEMU: &str = "qemu-system-x86_64";
/// Longer than any boot or command of a guest that does not hang.
const ANSWER_MAX: Duration = Duration::from_secs(180);
/// Between two looks whether a guest goes on, which is part of what is measured.
const RESUMED_LOOK: Duration = Duration::from_millis(1);

/// What all guests start with.
pub struct Start<'a> {
    pub images: &'a Images,
    pub accelerator: Accelerator,
    /// The disk with the files, if they have any.
    pub disk: Option<&'a Path>,
}

/// What one guest starts with beside that.
#[derive(Default)]
pub struct Shape<'a> {
    pub name: &'a str,
    pub memory_mib: u64,
    /// Memory that is guaranteed to the guest (`--min`), in MiB.
    pub min_mib: u64,
    /// Its disk is slowed down to this.
    pub bytes_per_s: Option<u64>,
    /// More of the kernel's command line.
    pub append: &'a str,
    /// The share group of the guest, if it has one.
    pub group: Option<&'a str>,
    /// More of QEMU's words.
    pub more: &'a [String],
    /// More of the words of `pagoda run`.
    pub run: &'a [&'a str],
}

/// A running QEMU. Killed when dropped.
pub struct Guest {
    child: Child,
    console: Console,
    port: Port,
    _kill: Guard,
}

impl Guest {
    /// Boots a guest under the daemon, up to its first command. It is killed when the thread that did this ends.
    ///
    /// # Errors
    /// It does not boot.
    pub fn boot(daemon: &Daemon, shape: &Shape<'_>, start: &Start<'_>) -> Result<Guest> {
        let mut words = daemon.cli_words()?;
        words.extend(["run", "--name", shape.name, "--min", &format!("{}M", shape.min_mib)].map(str::to_owned));
        words.extend(shape.group.into_iter().flat_map(|group| ["--share-group", group]).map(str::to_owned));
        words.extend(shape.run.iter().map(|word| (*word).to_owned()));
        words.extend(["--", QEMU].map(str::to_owned));
        Self::boot_by(&words, daemon.dir(), shape, start)
    }

    /// The same without Pagoda; its socket is made in `dir`.
    ///
    /// # Errors
    /// It does not boot.
    pub fn boot_alone(dir: &Path, shape: &Shape<'_>, start: &Start<'_>) -> Result<Guest> {
        Self::boot_by(&[QEMU.to_owned()], dir, shape, start)
    }

    /// Becomes the guest of a snapshot, by the words of `pagoda vm restore` or `rollback`. It goes on where it was: before its
    /// next command.
    ///
    /// # Errors
    /// QEMU does not start.
    pub fn restore(daemon: &Daemon, name: &str, words: &[&str]) -> Result<Guest> {
        let all = daemon.cli_words()?;
        let mut command = Command::new(&all[0]);
        command.args(&all[1..]).args(words);
        let socket = socket_of(daemon.dir(), name);
        // Of the guest before, so that nobody connects to that one.
        let _ = std::fs::remove_file(&socket);
        let mut guest = Self::spawn(command, &socket)?;
        let pid = guest.pid();
        guest.wait_resumed(daemon, name, |other| other == pid)?;
        Ok(guest)
    }

    /// Waits until the guest of a snapshot goes on in the QEMU that is the right one. Before that QEMU has no state: it would take what
    /// comes by the port and forget it when it loads.
    fn wait_resumed(&mut self, daemon: &Daemon, name: &str, is_right: impl Fn(u32) -> bool) -> Result<()> {
        let deadline = Instant::now() + ANSWER_MAX;
        loop {
            let is_it = |vm: &VmInfo| vm.pid.is_some_and(&is_right) && vm.resumed_unix_us.is_some();
            // There is none for a moment.
            if daemon.client().vm(name).is_ok_and(|vm| is_it(&vm)) {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait().context("look after QEMU")? {
                bail!("QEMU ended with {status}; its console:\n{}", self.console.text());
            }
            ensure!(Instant::now() < deadline, "the guest of {name} does not go on");
            std::thread::sleep(RESUMED_LOOK);
        }
    }

    /// The same by any words that become QEMU.
    ///
    /// # Errors
    /// It does not boot.
    pub fn boot_by(words: &[String], dir: &Path, shape: &Shape<'_>, start: &Start<'_>) -> Result<Guest> {
        let guest = Self::begin_boot(words, dir, shape, start)?;
        guest.wait_booted()?;
        Ok(guest)
    }

    /// The same, but for the wait: several guests boot at once.
    ///
    /// # Errors
    /// QEMU does not start.
    pub fn begin_boot(words: &[String], dir: &Path, shape: &Shape<'_>, start: &Start<'_>) -> Result<Guest> {
        let socket = socket_of(dir, shape.name);
        // Of the guest before.
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(["-serial", "stdio", "-serial"]);
        command.arg(format!("unix:{},server=on,wait=off", socket.display()));
        command.args(machine_words(shape, start));
        Self::spawn(command, &socket)
    }

    /// Waits until it takes commands.
    ///
    /// # Errors
    /// It does not boot.
    pub fn wait_booted(&self) -> Result<()> {
        self.port.lines_until(&["ready"]).map(drop).with_context(|| self.console_text())
    }

    fn spawn(mut command: Command, socket: &Path) -> Result<Guest> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        process::die_with_parent(&mut command);
        let mut child = command.spawn().context("start QEMU")?;
        let start_ticks = start_ticks_of(child.id()).unwrap_or(0);
        let kill = Guard::new(Undo::Process { pid: child.id(), start_ticks })?;
        let console = Console::default();
        console.collect(child.stdout.take().context("take the guest's output")?);
        console.collect(child.stderr.take().context("take QEMU's errors")?);
        let port = match connect(socket, &mut child) {
            Ok(port) => port,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error.context(format!("its console:\n{}", console.text())));
            }
        };
        Ok(Guest { child, console, port: Port::of(port)?, _kill: kill })
    }

    /// QEMU's, or that of `pagoda run` which became it.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its QEMU is replaced by another one, by who is its parent: connects to that. `end` ends the one that there is.
    ///
    /// # Errors
    /// No other one starts.
    pub fn replaced(&mut self, daemon: &Daemon, name: &str, end: impl FnOnce() -> Result<()>) -> Result<()> {
        let socket = socket_of(daemon.dir(), name);
        let before = daemon.client().vm(name).context("look at the VM")?.pid;
        std::fs::remove_file(&socket).context("remove the guest's socket")?;
        end()?;
        self.port = Port::of(connect(&socket, &mut self.child)?)?;
        self.wait_resumed(daemon, name, |pid| Some(pid) != before)
    }

    /// Has it do something, and gives the lines of that.
    ///
    /// # Errors
    /// It refuses, found wrong content, or hangs.
    pub fn command(&mut self, text: &str) -> Result<Vec<String>> {
        self.port.command(text).with_context(|| self.console_text())
    }

    /// As `command`, but wrong pages are only counted: all that it has found since it booted.
    ///
    /// # Errors
    /// It refuses, or hangs.
    pub fn command_unverified(&mut self, text: &str) -> Result<(Vec<String>, u64)> {
        self.begin(text)?;
        self.end(text)
    }

    /// Has it do something; [`Guest::end`] waits for that.
    ///
    /// # Errors
    /// It has gone.
    pub fn begin(&mut self, text: &str) -> Result<()> {
        self.port.begin(text)
    }

    /// Waits for a line of this kind in what [`Guest::begin`] asked for. What came before it is not given by [`Guest::end`] any more.
    ///
    /// # Errors
    /// It refuses, or hangs.
    pub fn line(&mut self, kind: &str) -> Result<String> {
        self.line_of(&[kind])
    }

    /// The same of several kinds. The reply is one of them: after it there is no more.
    ///
    /// # Errors
    /// It refuses, or hangs.
    pub fn line_of(&mut self, kinds: &[&str]) -> Result<String> {
        self.port.line(kinds).with_context(|| self.console_text())
    }

    /// Waits until it has done what [`Guest::begin`] asked for.
    ///
    /// # Errors
    /// It refuses, or hangs.
    pub fn end(&mut self, text: &str) -> Result<(Vec<String>, u64)> {
        self.port.end(text).with_context(|| self.console_text())
    }

    fn console_text(&self) -> String {
        format!("its console:\n{}", self.console.text())
    }

    /// Ends it in the regular way: it verifies what is left.
    ///
    /// # Errors
    /// QEMU does not end with success.
    pub fn power_off(mut self) -> Result<()> {
        self.begin("poweroff")?;
        let status = self.child.wait().context("wait for QEMU")?;
        let console = self.console.text();
        ensure!(status.success() && console.contains("result ok"), "{status}; its console:\n{console}");
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // It may have ended; either way it has to be reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// QEMU's words for all but its serial ports.
pub fn machine_words(shape: &Shape<'_>, start: &Start<'_>) -> Vec<String> {
    let Shape { memory_mib, bytes_per_s, append, more, .. } = *shape;
    let mut words = Vec::new();
    let mut add = |some: &[&str]| words.extend(some.iter().map(|word| (*word).to_owned()));
    add(&["-M", "q35", "-accel", start.accelerator.name(), "-m", &format!("{memory_mib}M"), "-smp", "1"]);
    add(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    if let Some(disk) = start.disk {
        let throttle = bytes_per_s.map_or(String::new(), |bytes| format!(",throttling.bps-total={bytes}"));
        let drive = format!("file={},format=raw,if=none,id=d0,cache=none{throttle}", disk.display());
        add(&["-drive", &drive, "-device", "virtio-blk-pci,drive=d0"]);
    }
    add(&["-device", "virtio-balloon-pci"]);
    more.iter().for_each(|word| add(&[word]));
    let images = [&start.images.kernel, &start.images.initrd].map(|path| path.display().to_string());
    add(&["-kernel", &images[0], "-initrd", &images[1]]);
    add(&["-append", &format!("console=ttyS0 quiet panic=-1 pagoda.work=control {append}")]);
    words
}

/// The port by which a guest is led: its second serial one.
pub struct Port {
    stream: UnixStream,
    replies: Console,
}

impl Port {
    /// # Errors
    /// The stream cannot be used twice.
    pub fn of(stream: UnixStream) -> Result<Port> {
        let replies = Console::default();
        replies.collect(stream.try_clone().context("duplicate the port")?);
        Ok(Port { stream, replies })
    }

    /// Has the guest do something, and gives the lines of that.
    ///
    /// # Errors
    /// It refuses, found wrong content, or hangs.
    pub fn command(&mut self, text: &str) -> Result<Vec<String>> {
        self.begin(text)?;
        let (lines, bad_pages) = self.end(text)?;
        ensure!(bad_pages == 0, "{text}: {lines:#?}");
        Ok(lines)
    }

    /// Has it do something; [`Port::end`] waits for that.
    ///
    /// # Errors
    /// It has gone.
    pub fn begin(&mut self, text: &str) -> Result<()> {
        writeln!(self.stream, "{text}").context("write to the guest")
    }

    /// Waits until it has done what [`Port::begin`] asked for: its lines, and the wrong pages that it has found since it booted.
    ///
    /// # Errors
    /// It refuses, or hangs.
    pub fn end(&mut self, text: &str) -> Result<(Vec<String>, u64)> {
        let lines = self.lines_until(&["reply"]).with_context(|| format!("wait for the end of: {text}"))?;
        let reply = lines.last().and_then(|line| Line::parse(line)).context("a reply")?;
        let bad_pages = reply.number("bad").filter(|_| reply.text().starts_with("ok "));
        let bad_pages = bad_pages.with_context(|| format!("{text}: {lines:#?}"))?;
        Ok((lines, bad_pages))
    }

    fn line(&self, kinds: &[&str]) -> Result<String> {
        self.lines_until(kinds)?.pop().context("a line")
    }

    fn lines_until(&self, kinds: &[&str]) -> Result<Vec<String>> {
        let deadline = Instant::now() + ANSWER_MAX;
        let mut lines = Vec::new();
        loop {
            let Output::Line(line) = self.replies.next(deadline) else {
                bail!("no {} from the guest", kinds.join(" or "))
            };
            let found = Line::parse(&line).map(|line| line.kind.to_owned());
            let is_last = found.as_deref().is_some_and(|found| kinds.contains(&found));
            let is_reply = found.as_deref() == Some("reply");
            ensure!(is_last || !is_reply, "no {} from the guest: {line}", kinds.join(" or "));
            lines.push(line);
            if is_last {
                return Ok(lines);
            }
        }
    }
}

/// Where QEMU has the guest's second serial port.
pub fn socket_of(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.control"))
}

/// QEMU makes the socket within its first milliseconds.
fn connect(socket: &Path, child: &mut Child) -> Result<UnixStream> {
    const CONNECT_MAX: Duration = Duration::from_secs(10);
    const LOOK_EVERY: Duration = Duration::from_millis(5);
    let start = Instant::now();
    loop {
        if let Ok(port) = UnixStream::connect(socket) {
            return Ok(port);
        }
        if let Some(status) = child.try_wait().context("look after QEMU")? {
            bail!("QEMU ended with {status}");
        }
        ensure!(start.elapsed() < CONNECT_MAX, "QEMU makes no socket {}", socket.display());
        std::thread::sleep(LOOK_EVERY);
    }
}
