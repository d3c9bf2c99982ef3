//! A new daemon takes a running VM up, whatever else of it does not work.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command};
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use vm_tests::daemon::command;
use vm_tests::loopfs::FileSystem;
use vm_tests::toy::ToyOptions;
use vm_tests::{Daemon, DaemonOptions, Folios, Lab, Toy, programs, wait};

/// A capped toy whose pages are in the swap file.
fn paged_toy(lab: &Lab, daemon: &Daemon) -> Result<Rc<Toy>> {
    let toy = lab.toy(daemon, &ToyOptions { name: "web1".into(), memory_mib: 192, dram_mib: 64, threads: 1 })?;
    toy.fill()?;
    Ok(toy)
}

/// The toy reads all of its pages, most of which the daemon has to bring in, and they are right.
fn is_served(daemon: &Daemon, toy: &Toy) -> Result<()> {
    toy.go("--workload seq --mode read --passes 1")?;
    ensure!(daemon.vm("web1")?.counters.get("pages_in").is_some_and(|n| *n > 0), "nothing was brought in");
    toy.quit()?;
    daemon.wait_gone("web1")
}

fn problem(daemon: &Daemon, expected: &str) -> Result<()> {
    wait::until(&format!("health says {expected:?}"), wait::HANG, || {
        let problems = daemon.client().health()?.problems;
        Ok(problems.iter().any(|problem| problem.contains(expected)).then_some(()))
    })
}

#[test]
fn the_metrics_port_is_taken_or_not_of_this_host() -> Result<()> {
    Lab::run("metrics", 1, |lab| {
        let taken = TcpListener::bind("127.0.0.1:0")?;
        for (number, address) in [taken.local_addr()?.to_string(), "192.0.2.7:9464".into()].into_iter().enumerate() {
            let options = DaemonOptions { metrics: Some(address.clone()), ..DaemonOptions::new(Folios::Small) };
            let daemon = Daemon::start(&lab.dir().join(format!("m{number}")), options)?;
            let toy = paged_toy(lab, &daemon)?;
            daemon.kill9()?;
            daemon.start_again()?;
            problem(&daemon, &address)?;
            is_served(&daemon, &toy)?;
            daemon.stop()?;
        }
        Ok(())
    })
}

#[test]
fn the_control_socket_cannot_be_had() -> Result<()> {
    Lab::run("no control socket", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let toy = paged_toy(lab, &daemon)?;
        daemon.kill9()?;
        // Something else is at its path.
        fs::remove_file(daemon.socket())?;
        fs::create_dir(daemon.socket())?;
        daemon.start_unanswered()?;
        toy.go("--workload seq --mode read --passes 1")?;
        fs::remove_dir(daemon.socket())?;
        wait::until("the control socket", wait::HANG, || Ok(daemon.client().version().ok()))?;
        is_served(&daemon, &toy)
    })
}

/// Fills a file system to its last block.
fn fill(dir: &Path) -> Result<()> {
    let mut block = 1 << 20;
    while block >= 512 {
        let mut file = fs::OpenOptions::new().create(true).append(true).open(dir.join("filler"))?;
        if std::io::Write::write_all(&mut file, &vec![1; block]).is_err() {
            block /= 2;
        }
    }
    for number in 0.. {
        if fs::write(dir.join(format!("filler{number}")), "x").is_err() {
            break;
        }
    }
    Ok(())
}

#[test]
fn the_state_disk_is_full_or_read_only() -> Result<()> {
    Lab::run("state disk", 1, |lab| {
        for (number, fault) in ["full", "full, with the log on it", "read-only"].into_iter().enumerate() {
            let disk = lab.loop_fs(FileSystem::Ext4, 64)?;
            let [swap, run] = ["swap", "run"].map(|name| lab.dir().join(format!("{name}{number}")));
            fs::create_dir(&swap).and_then(|()| fs::create_dir(&run))?;
            let mut options = DaemonOptions::new(Folios::Small).swap_dir(&swap);
            options.run_dir = (number != 1).then_some(run);
            let daemon = Daemon::start(&disk.path().join("d"), options)?;
            let toy = paged_toy(lab, &daemon)?;
            daemon.kill9()?;
            if number == 2 {
                remount(disk.path(), "ro")?
            } else {
                fill(disk.path())?
            }
            daemon.start_again().with_context(|| fault.to_owned())?;
            toy.go("--workload seq --mode read --passes 1").with_context(|| fault.to_owned())?;
            if number == 0 {
                let new = daemon.run_cli(&["run", "--plain", "--name", "new", "--memory", "128M", "--", "true"])?;
                let said = String::from_utf8_lossy(&new.stderr).into_owned();
                let dir = disk.path().display().to_string();
                ensure!(!new.status.success() && said.contains(&dir) && said.contains("make room there"), "{said}");
            }
            remount(disk.path(), "rw")?;
            is_served(&daemon, &toy).with_context(|| fault.to_owned())?;
            daemon.stop()?;
        }
        Ok(())
    })
}

fn remount(dir: &Path, mode: &str) -> Result<()> {
    let status = Command::new("mount").args(["-o", &format!("remount,{mode}")]).arg(dir).status()?;
    ensure!(status.success(), "mount ended with {status}");
    Ok(())
}

/// A daemon under a limit of its process.
fn limited(daemon_dir: &Path, options: &DaemonOptions, limit: &str) -> Result<Child> {
    let ours = command(&programs::bin_dir()?.join("pagodad"), daemon_dir, options)?;
    // Without the privilege to raise it again.
    let mut setpriv = Command::new("setpriv");
    setpriv.args(["--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource"]).arg("prlimit").arg(limit);
    setpriv.arg(ours.get_program()).args(ours.get_args());
    pagoda_sys::toy::process::die_with_parent(&mut setpriv);
    setpriv.spawn().context("start a limited daemon")
}

#[test]
fn files_may_not_be_long() -> Result<()> {
    Lab::run("RLIMIT_FSIZE", 1, |lab| {
        let options = DaemonOptions::new(Folios::Small);
        let dir = lab.dir().join("d");
        let daemon = Daemon::start(&dir, options.clone())?;
        let toy = paged_toy(lab, &daemon)?;
        daemon.kill9()?;
        // The state disk's files are short; the swap file of 192 MiB is not.
        let mut second = limited(&dir, &options, "--fsize=100000000:100000000")?;
        let outcome = (|| {
            wait::until("the daemon answers", wait::HANG, || Ok(daemon.client().version().ok()))?;
            problem(&daemon, "LimitFSIZE=infinity")?;
            // It reads, and says why it cannot write; it is not ended by a signal.
            wait::until("it serves or says why not", wait::HANG, || {
                ensure!(second.try_wait()?.is_none(), "the daemon ended");
                let state = daemon.vm("web1")?;
                Ok((state.state.word() != "waiting").then_some(()))
            })
        })();
        second.kill()?;
        second.wait()?;
        outcome?;
        daemon.start_again()?;
        is_served(&daemon, &toy)
    })
}
