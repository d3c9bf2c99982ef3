//! Process 1 of the test guests: brings the system up, runs the workloads that the kernel command line names,
//! reports every wrong page on the console and powers off. If it dies, the kernel panics and (`panic=-1`) resets,
//! so a host never waits for a verdict that cannot come.

mod blocks;
mod boot;
mod control;
mod corpus;
mod disk;
mod driver;
mod echo;
mod enough;
mod files;
mod memory;
mod params;
mod phases;
mod produce;
mod publish;
mod reboots;
mod report;
mod session;
mod sort;
mod store;
mod tools;

use std::process::ExitCode;

use params::Params;
use report::Report;
use session::{End, Session};

fn main() -> ExitCode {
    if std::process::id() != 1 {
        eprintln!("pagoda-guest is process 1 of a test guest: boot it with `cargo xtask image` and QEMU");
        return ExitCode::FAILURE;
    }
    let report = Report::console();
    let end = run(&report).unwrap_or_else(|error| {
        report.line(format_args!("error {error:#}"));
        report.line(format_args!("result error"));
        End::PowerOff
    });
    boot::leave(end)
}

fn run(report: &Report) -> anyhow::Result<End> {
    boot::mount_file_systems()?;
    boot::load_modules()?;
    enough::listen()?;
    let params = Params::parse(&boot::command_line()?)?;
    let boots = reboots::BootCount::load(&params)?;
    report.line(format_args!("ready {} boot={}", boot::describe()?, boots.number()));
    let mut session = Session::new(&params);
    for step in &params.work {
        session.run(step, report)?;
    }
    session.verify(report);
    boots.finish(report)
}
