//! A QEMU monitor of ours: `stop`, `cont` and what accelerator runs.
//!
//! One short conversation a command: QEMU's socket serves one client at a time, and a monitor kept open would keep an
//! operator's `socat` out. A command may take long (QEMU stops a vCPU only when its page fault is answered), so the wait is
//! bounded; the command itself stays queued in QEMU and takes effect when it can.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// How long an answer is waited for.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// Lines read for one answer: events may come in between, and QEMU is not trusted to ever stop.
const LINES_MAX: usize = 1000;
/// Longest line.
const LINE_MAX: u64 = 1 << 20;

/// Executes one command and returns its `return` value.
pub fn execute(socket: &Path, command: &str) -> Result<Value> {
    let stream = UnixStream::connect(socket).with_context(|| format!("connect to the monitor {}", socket.display()))?;
    stream.set_read_timeout(Some(ANSWER_WAIT))?;
    stream.set_write_timeout(Some(ANSWER_WAIT))?;
    let mut writer = stream.try_clone()?;
    let mut reader = BufReader::new(stream);
    let greeting = read_line(&mut reader)?;
    if greeting.get("QMP").is_none() {
        bail!("the monitor did not greet as QMP");
    }
    for command in ["qmp_capabilities", command] {
        writeln!(writer, "{}", json!({ "execute": command })).context("write to the monitor")?;
        let answer = answer(&mut reader).with_context(|| format!("execute {command}"))?;
        if command != "qmp_capabilities" {
            return Ok(answer);
        }
    }
    bail!("no command was executed")
}

fn answer(reader: &mut impl BufRead) -> Result<Value> {
    for _ in 0..LINES_MAX {
        let mut line = read_line(reader)?;
        if let Some(value) = line.get_mut("return") {
            return Ok(value.take());
        }
        if let Some(error) = line.get("error") {
            bail!("{}", error.get("desc").and_then(Value::as_str).unwrap_or("unknown error"));
        }
    }
    bail!("only events, no answer")
}

fn read_line(reader: &mut impl BufRead) -> Result<Value> {
    let mut line = String::new();
    if std::io::Read::take(&mut *reader, LINE_MAX).read_line(&mut line).context("read from the monitor")? == 0 {
        bail!("the monitor was closed");
    }
    serde_json::from_str(&line).context("parse the monitor's answer")
}

/// What runs the guest: `kvm` or `tcg`; `None` when QEMU does not say.
pub fn accelerator(socket: &Path) -> Option<String> {
    let answer = execute(socket, "query-kvm").ok()?;
    let enabled = answer.get("enabled")?.as_bool()?;
    Some(if enabled { "kvm" } else { "tcg" }.to_owned())
}

/// Whether the guest is paused; `false` when QEMU does not say.
pub fn is_paused(socket: &Path) -> bool {
    execute(socket, "query-status").is_ok_and(|answer| answer.get("status").and_then(Value::as_str) == Some("paused"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn serve(lines: &'static [&'static str]) -> (tempdir::Dir, std::thread::JoinHandle<()>) {
        let dir = tempdir::Dir::new();
        let listener = UnixListener::bind(dir.path().join("qmp")).expect("bind");
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("accept");
            for line in lines {
                writeln!(stream, "{line}").expect("write");
            }
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
        });
        (dir, thread)
    }

    mod tempdir {
        pub struct Dir(std::path::PathBuf);
        impl Dir {
            pub fn new() -> Dir {
                static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
                let next = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                let path = std::env::temp_dir().join(format!("pagoda-qmp-{}-{next}", std::process::id()));
                std::fs::create_dir(&path).expect("make directory");
                Dir(path)
            }
            pub fn path(&self) -> &std::path::Path {
                &self.0
            }
        }
        impl Drop for Dir {
            fn drop(&mut self) {
                let _ = std::fs::remove_dir_all(&self.0);
            }
        }
    }

    #[test]
    fn events_between_are_passed_over() {
        let (dir, thread) = serve(&[
            r#"{"QMP": {"version": {}, "capabilities": []}}"#,
            r#"{"return": {}}"#,
            r#"{"event": "STOP", "timestamp": {}}"#,
            r#"{"return": {"enabled": false}}"#,
        ]);
        assert_eq!(accelerator(&dir.path().join("qmp")).as_deref(), Some("tcg"));
        thread.join().expect("server");
    }

    #[test]
    fn an_error_is_passed_on_and_a_stranger_refused() {
        let (dir, thread) =
            serve(&[r#"{"QMP": {}}"#, r#"{"return": {}}"#, r#"{"error": {"class": "X", "desc": "no such thing"}}"#]);
        let error = execute(&dir.path().join("qmp"), "stop").expect_err("refused");
        assert!(format!("{error:#}").contains("no such thing"));
        thread.join().expect("server");
        let (dir, thread) = serve(&["HTTP/1.1 200 OK"]);
        assert!(execute(&dir.path().join("qmp"), "stop").is_err());
        thread.join().expect("server");
    }
}
