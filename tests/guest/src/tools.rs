//! Debian's own tools, from the tools image. A memory tester that finds wrong memory is a wrong page here.

use std::io::ErrorKind;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::report::Report;

/// The end of a failed tool's output, where it says what it found.
const OUTPUT_LINES_SHOWN: usize = 20;

/// memtester(8): the bits of its exit status that say that a test failed; bit 0 is bad usage or no memory.
const MEMTESTER_FAILED: i32 = 0x02 | 0x04;

/// stress-ng(1): "One or more stressors failed", as when --verify finds wrong memory.
const STRESS_FAILED: i32 = 2;

pub fn memtester(arguments: &[String], report: &Report) -> Result<()> {
    ensure!(!arguments.is_empty(), "give memtester its arguments: pagoda.memtester=200M,1");
    run("memtester", arguments, |status| status & MEMTESTER_FAILED != 0, report)
}

pub fn stress(arguments: &[String], report: &Report) -> Result<()> {
    ensure!(
        !arguments.is_empty(),
        "give stress-ng its arguments: pagoda.stress=--vm,1,--vm-bytes,200M,--verify,-t,10s"
    );
    run("stress-ng", arguments, |status| status == STRESS_FAILED, report)
}

/// Has the guest swap to a disk, `vda` for example, on which mkswap was run.
pub fn swapon(disk: &str) -> Result<()> {
    ensure!(disk.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{disk:?} is not the name of a disk, such as vda");
    let output = Command::new("/bin/swapon").arg(format!("/dev/{disk}")).output();
    let output = output.context("start swapon: boot the tools image")?;
    ensure!(output.status.success(), "swapon: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// Has the shell do something, as an administrator would; what it says is shown line by line.
pub fn shell(line: &str, report: &Report) -> Result<()> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", line]).env("PATH", "/bin").stdin(Stdio::null());
    let output = command.output().context("start a shell: boot the image of a client")?;
    for text in [&output.stdout, &output.stderr] {
        for line in String::from_utf8_lossy(text).lines() {
            report.line(format_args!("output {line}"));
        }
    }
    ensure!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

fn run(tool: &str, arguments: &[String], found_wrong: impl Fn(i32) -> bool, report: &Report) -> Result<()> {
    let start = Instant::now();
    report.line(format_args!("tool name={tool} arguments={}", arguments.join(",")));
    let output = Command::new(format!("/bin/{tool}")).args(arguments).output().map_err(|error| match error.kind() {
        ErrorKind::NotFound => anyhow::anyhow!("{tool} is not in this image: boot the tools image"),
        _ => anyhow::Error::from(error).context(format!("start {tool}")),
    })?;
    let us = start.elapsed().as_micros();
    if !output.status.success() {
        show_end(tool, &output, report);
    }
    let status = output.status.code().with_context(|| format!("{tool} was killed: {}", output.status))?;
    if found_wrong(status) {
        report.bad_memory_by_tool();
    } else if status != 0 {
        bail!("{tool} could not run: exit status {status}");
    }
    report.line(format_args!("done phase={tool} status={status} bad={} us={us}", u8::from(status != 0)));
    Ok(())
}

fn show_end(tool: &str, output: &Output, report: &Report) {
    let text = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    let text = String::from_utf8_lossy(&text);
    // memtester draws its progress with backspaces.
    let lines: Vec<_> = text.lines().map(|line| line.replace('\u{8}', "")).collect();
    for line in lines.iter().skip(lines.len().saturating_sub(OUTPUT_LINES_SHOWN)) {
        report.line(format_args!("tool-output {tool}: {line}"));
    }
}
