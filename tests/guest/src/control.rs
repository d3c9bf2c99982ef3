//! Commands from the host on the second serial port, so that a test can step a guest. Every command is answered
//! on that port by the lines of what it does and then exactly one `reply ok` or `reply error MESSAGE`. The word `enough` is no
//! command: it ends the one that is at work.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

use crate::params::Step;
use crate::report::Report;
use crate::session::Session;
use crate::{boot, driver, echo, enough, produce, publish, store, tools};

const PORT: &str = "/dev/ttyS1";

/// Longer than any command; more is not one.
const COMMAND_BYTES_MAX: usize = 1024;

pub fn serve(session: &mut Session<'_>, console: &Report) -> Result<()> {
    let port = open_port().with_context(|| format!("open {PORT}: give the VM a second serial port"))?;
    let commands = read(BufReader::new(port.try_clone().context("duplicate the serial port")?));
    let report = Report::serial(port);
    console.line(format_args!("control port={PORT}"));
    report.line(format_args!("ready {}", boot::describe()?));
    loop {
        let command = commands.recv().with_context(|| format!("{PORT} was hung up"))?;
        match obey(session, &command, &report) {
            Ok(next) => {
                report.line(format_args!("reply ok bad={}", report.bad_pages()));
                if matches!(next, Next::End) {
                    break;
                }
            }
            Err(error) => report.line(format_args!("reply error {error:#}")),
        }
    }
    console.add_bad_pages(report.bad_pages());
    Ok(())
}

/// Reads commands while others are at work. The host's word is about the command before it: another one takes it back.
fn read(port: BufReader<File>) -> Receiver<String> {
    let (commands, received) = channel();
    std::thread::spawn(move || {
        let lines = port.lines().map_while(|line| line.ok());
        for line in lines.map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()) {
            let is_word = line == enough::WORD;
            enough::set(is_word);
            // Whoever obeyed them has ended.
            if !is_word && commands.send(line).is_err() {
                return;
            }
        }
    });
    received
}

enum Next {
    Command,
    End,
}

fn obey(session: &mut Session<'_>, command: &str, report: &Report) -> Result<Next> {
    if command.len() > COMMAND_BYTES_MAX {
        bail!("a command has at most {COMMAND_BYTES_MAX} bytes");
    }
    let words: Vec<_> = command.split_ascii_whitespace().collect();
    match words[..] {
        ["fill", mib] => {
            session.fill(Some(megabytes(mib)?), session.params.run, report)?;
        }
        ["verify"] if session.has_memory() => session.verify(report),
        ["verify"] => bail!("nothing to verify: fill first"),
        ["run", name, ref settings @ ..] => {
            let step = Step::parse([name].into_iter().chain(settings.iter().copied()), session.params.run)?;
            if matches!(step, Step::Control) {
                bail!("already under control");
            }
            session.run(&step, report)?;
        }
        ["idle", seconds] => {
            let seconds = seconds.parse().with_context(|| format!("{seconds:?} is not a number of seconds"))?;
            session.idle(Duration::from_secs(seconds), report)?;
        }
        ["drop"] => session.drop_memory(report)?,
        ["swapon", disk] => tools::swapon(disk)?,
        ["sh", ..] => tools::shell(command.trim_start_matches("sh"), report)?,
        ["store", path, mib] => store::write(path, megabytes(mib)?, session.params.disk.seed, report)?,
        ["check", path] => store::check(path, session.params.disk.seed, report)?,
        ["echo", server, count, bytes] => {
            let count = count.parse().with_context(|| format!("{count:?} is not a number of echoes"))?;
            let bytes = bytes.parse().with_context(|| format!("{bytes:?} is not a number of bytes"))?;
            echo::measure(server, count, bytes, report)?;
        }
        ["publish", to, mib, ..] => {
            // As it was written, for the shell.
            let beside = command.splitn(4, ' ').nth(3).unwrap_or_default();
            publish::publish(to, megabytes(mib)?, beside, report)?;
        }
        ["watch", path] => publish::watch(path, report)?,
        ["jobs", directory, name, ref numbers @ ..] => {
            produce::Work::parse(directory, name, numbers)?.run(report)?;
        }
        ["unbind", name] => driver::unbind(name)?,
        ["bind", name] => driver::bind(name)?,
        ["poweroff"] => return Ok(Next::End),
        _ => bail!(
            "unknown command {command:?}; say fill MIB, verify, run PHASE [KEY=VALUE...], idle SECONDS, drop, \
             swapon DISK, sh LINE, store or check FILE, echo SERVER COUNT BYTES, publish TO MIB [LINE], watch DIRECTORY, jobs DIRECTORY NAME NUMBERS, bind or unbind DRIVER, or poweroff"
        ),
    }
    Ok(Next::Command)
}

fn megabytes(mib: &str) -> Result<usize> {
    mib.parse().with_context(|| format!("{mib:?} is not a number of MiB"))
}

/// Raw, so that the host's bytes are not echoed and lines end as they are written.
fn open_port() -> Result<File> {
    let port = OpenOptions::new().read(true).write(true).open(PORT)?;
    let mut settings = tcgetattr(&port)?;
    settings.make_raw();
    tcsetattr(&port, OptionalActions::Now, &settings)?;
    Ok(port)
}
