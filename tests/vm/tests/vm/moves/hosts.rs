//! Two hosts on one machine, or three: each has a network, a daemon and files of its own.
//!
//! A VM has its files at the same paths on both hosts. So the path of its directory leads to another directory on each: daemon and
//! VMs of a host are in a mount namespace where it does. The test sees these directories beside each other.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use pagoda_api::{HostList, TrustedHost};
use rustix::process::{Pid, Signal, kill_process};
use vm_tests::control::Control;
use vm_tests::{Daemon, DaemonOptions, Folios, Guest, GuestOptions, Lab, programs, wait};

use super::network::{self, Network, address};

/// In a mount namespace of its own: binds the first directory to the second, goes there, and becomes the rest.
const BECOME: &str = r#"mount --bind "$0" "$1" && cd "$1" && shift && exec "$@""#;

/// Names of the hosts, as the other one calls them.
const NAMES: [&str; 3] = ["host1", "host2", "host3"];

/// Where a host has its files, unless that is all the same.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// A directory that is there, for the daemon's state directory.
    pub state: Option<PathBuf>,
    pub swap: Option<PathBuf>,
}

/// One of the two.
pub struct Host {
    pub name: &'static str,
    /// Its place among the hosts, from which its address comes.
    pub index: usize,
    pub daemon: Rc<Daemon>,
    /// Its directory of VMs' files, as the test sees it.
    pub files: PathBuf,
    /// The same, as all on the host see it.
    seen: PathBuf,
    namespace: String,
    config: PathBuf,
}

impl Host {
    /// A command that runs a program on this host.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.namespace));
        command.args(["unshare", "--mount", "--propagation", "private", "sh", "-c", BECOME]);
        command.arg(&self.files).arg(&self.seen).arg(program);
        command
    }

    fn address(&self) -> String {
        address(self.index)
    }

    /// Writes the configuration; its daemon reads it when it starts. `moves` is the section of that name.
    pub fn configure(&self, moves: &str) -> Result<()> {
        self.configure_with("", moves)
    }

    /// The same, with more lines that are in no section.
    pub fn configure_with(&self, more: &str, moves: &str) -> Result<()> {
        let text = format!("{more}\n[hosts]\nlisten = \"{}\"\n\n[moves]\n{moves}\n", self.address());
        fs::write(&self.config, text).context("write the configuration")
    }

    /// A section that accepts what the tests move.
    pub fn accepts(&self, options: &GuestOptions) -> Result<String> {
        let qemu = options.qemu.require()?;
        let images = programs::images()?;
        let images = images.kernel.parent().context("the directory of images")?;
        Ok(format!(
            "accept = true\nprograms = [{:?}, {:?}]\nusers = [\"root\"]\npaths = [{:?}, {images:?}]",
            qemu,
            fs::canonicalize(&qemu).context("look at QEMU")?,
            self.seen,
        ))
    }

    /// The guest's second serial port. On the host that it was started on it says at once that it is ready, later nothing.
    pub fn control(&self, guest: &Guest) -> Result<Control> {
        Control::of_restored(&self.files.join("web1.control"), guest.deadline())
    }

    /// What the guest has written to its console on this host.
    pub fn console(&self) -> String {
        fs::read_to_string(self.files.join("web1.console")).unwrap_or_default()
    }

    /// Nothing of the VM is left here: no record, no note, no swap, no socket of the daemon's, no mapping, and no move under way, which
    /// would have the next one refused.
    pub fn ensure_nothing_left(&self) -> Result<()> {
        self.daemon.wait_gone("web1").with_context(|| format!("on {}", self.name))?;
        let mut left = Vec::new();
        let is_nothing = wait::until("nothing is left", wait::HANG, || {
            left = self.left()?;
            let is_moving = self.daemon.client().moves()?.moves.iter().any(|of| of.vm == "web1" && !of.is_over());
            Ok((left.is_empty() && !is_moving).then_some(()))
        });
        is_nothing.with_context(|| format!("{} has {left:?}", self.name))
    }

    /// Files of the VM. What its QEMU has printed is none: it stays for whoever wants to read it.
    fn left(&self) -> Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        let mut dirs = vec![self.daemon.state_dir().to_owned(), self.daemon.swap_dir()];
        while let Some(dir) = dirs.pop() {
            // One that has just gone has nothing.
            let Ok(entries) = fs::read_dir(&dir) else { continue };
            for entry in entries {
                let path = entry?.path();
                let is_of_vm = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("web1."));
                if path.is_dir() && !path.is_symlink() {
                    dirs.push(path);
                } else if is_of_vm && path.extension().is_none_or(|of| of != "log") {
                    found.push(path);
                }
            }
        }
        Ok(found)
    }
}

/// Both, and what is between them. Dropped, all VMs on them end.
pub struct Hosts {
    pub one: Host,
    pub other: Host,
    seen: PathBuf,
    pub network: Network,
}

impl Hosts {
    /// Two hosts that trust each other and accept VMs with these options.
    pub fn start(lab: &Lab, options: &GuestOptions) -> Result<Hosts> {
        Hosts::start_at(lab, options, &<[Place; 2]>::default())
    }

    /// The same with their files elsewhere.
    pub fn start_at(lab: &Lab, options: &GuestOptions, places: &[Place; 2]) -> Result<Hosts> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let namespaces = ["a", "b"].map(|end| network::name(&format!("{number}{end}")));
        let seen = lab.dir().join("vms");
        fs::create_dir(&seen).context("make a directory for VMs' files")?;
        let network = Network::new(namespaces)?;
        let [one, other] = [0, 1].map(|index| host(lab, index, &network.namespaces[index], &seen, &places[index]));
        let hosts = Hosts { one: one?, other: other?, seen, network };
        for host in [&hosts.one, &hosts.other] {
            host.configure(&host.accepts(options)?)?;
            host.daemon.start_again()?;
        }
        hosts.trust(&hosts.one, &hosts.other)?;
        hosts.trust(&hosts.other, &hosts.one)?;
        hosts.wait_connected()?;
        Ok(hosts)
    }

    /// A third host, which is in the network of the other one with an address of its own. The first one and it trust each other.
    pub fn third(&self, lab: &Lab, options: &GuestOptions) -> Result<Host> {
        self.network.add_third()?;
        let third = host(lab, 2, &self.network.namespaces[1], &self.seen, &Place::default())?;
        third.configure(&third.accepts(options)?)?;
        third.daemon.start_again()?;
        let both = [(&self.one, &third), (&third, &self.one)];
        both.into_iter().try_for_each(|(who, whom)| self.trust(who, whom))?;
        for (who, whom) in both {
            let ping = || Ok(who.daemon.client().ping(whom.name).ok());
            wait::until(&format!("{} answers", whom.name), wait::HANG, ping)?;
        }
        Ok(third)
    }

    pub fn trust(&self, who: &Host, whom: &Host) -> Result<()> {
        let HostList { own, .. } = whom.daemon.client().hosts()?;
        let host = TrustedHost { name: whom.name.to_owned(), key: own.key, address: whom.address() };
        who.daemon.client().trust(&host)?;
        Ok(())
    }

    /// Waits until each can ask the other.
    pub fn wait_connected(&self) -> Result<()> {
        for (who, whom) in [(&self.one, &self.other), (&self.other, &self.one)] {
            let ping = || Ok(who.daemon.client().ping(whom.name).ok());
            wait::until(&format!("{} answers", whom.name), wait::HANG, ping)?;
        }
        Ok(())
    }

    /// The VM of these options, which is `web1` in most tests, on the first host.
    pub fn guest(&self, lab: &Lab, options: &GuestOptions) -> Result<Rc<Guest>> {
        let mut command = self.one.command(&programs::bin_dir()?.join("pagoda"));
        command.arg("--socket").arg(self.one.daemon.socket()).args(["run", "--name", &options.name]);
        command.args(&options.run_options);
        if let Some(dram) = &options.dram {
            command.args(["--dram", dram]);
        }
        command.arg("--").arg(options.qemu.require()?).args(self.qemu_words(options)?);
        Ok(lab.keep_guest(Guest::spawn(command, &self.one.files, options)?))
    }

    /// As of other guests, but with the console in a file, which each host has, and without a monitor of the test's own.
    fn qemu_words(&self, options: &GuestOptions) -> Result<Vec<String>> {
        let mut words = options.qemu_words(&self.seen)?;
        let monitor = words.iter().position(|word| word == "-qmp").context("the words have a monitor")?;
        words.drain(monitor..monitor + 2);
        let console = words.iter_mut().find(|word| *word == "stdio").context("the words have a console")?;
        *console = format!("file:{}", self.seen.join(format!("{}.console", options.name)).display());
        Ok(words)
    }

    /// Runs `pagoda vm move` to its end.
    pub fn try_move(&self, from: &Host, to: &Host, more: &[&str]) -> Result<Output> {
        from.daemon.run_cli(&[&["vm", "move", "web1", "--to", to.name], more].concat())
    }

    /// The VM moves, and what `pagoda vm move` says of it.
    pub fn moves(&self, from: &Host, to: &Host, more: &[&str]) -> Result<String> {
        let done = self.try_move(from, to, more)?;
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        let failed = || format!("{} to {}: {} {}", from.name, to.name, done.status, text(&done.stderr));
        ensure!(done.status.success() && said.starts_with(&format!("moved web1 to {}: ", to.name)), failed());
        print!("{said}");
        Ok(said)
    }

    /// QEMUs of `web1`, on both hosts.
    pub fn qemus(&self) -> Vec<u32> {
        self.qemus_with("web1.control")
    }

    /// QEMUs on whose command line a name in the directory of VMs' files begins so.
    fn qemus_with(&self, name: &str) -> Vec<u32> {
        let seen = self.seen.join(name).to_string_lossy().into_owned();
        let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let is_qemu = |pid: &u32| {
            // It may end in this moment.
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = words.split(|byte| *byte == 0).map(String::from_utf8_lossy);
            words.next().is_some_and(|program| program.contains("qemu")) && words.any(|word| word.contains(&seen))
        };
        pids.filter(is_qemu).collect()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // Those that a daemon has started are nobody's children.
        for pid in self.qemus_with("") {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// One whose daemon has stopped. From its next start on it is in the host's namespaces.
fn host(lab: &Lab, index: usize, namespace: &str, seen: &Path, place: &Place) -> Result<Host> {
    let name = NAMES[index];
    let (files, config) = (lab.dir().join(name), lab.dir().join(format!("{name}.toml")));
    fs::create_dir(&files).with_context(|| format!("make {}", files.display()))?;
    fs::write(&config, "").context("write the configuration")?;
    let more = vec!["--config".to_owned(), config.display().to_string()];
    let options = DaemonOptions { more, swap_dir: place.swap.clone(), ..DaemonOptions::new(Folios::Small) };
    let daemon = match &place.state {
        Some(dir) => lab.daemon_in(dir, options)?,
        None => lab.daemon_with(options)?,
    };
    daemon.stop()?;
    let host = Host { name, index, daemon, files, seen: seen.to_owned(), namespace: namespace.to_owned(), config };
    let command = host.command(&programs::bin_dir()?.join("pagodad"));
    let words = [command.get_program()].into_iter().chain(command.get_args());
    let words: Vec<String> = words.map(|word| format!("'{}'", word.to_string_lossy())).collect();
    let script = lab.dir().join(format!("{name}.sh"));
    make_script(&script, &format!("#!/bin/sh\nexec {} \"$@\"\n", words.join(" ")))?;
    host.daemon.replace_program(&script);
    Ok(host)
}

/// Another process writes it: a child of this one that has it open to write would keep it from being started.
fn make_script(path: &Path, content: &str) -> Result<()> {
    let mut install = Command::new("install");
    install.args(["-m", "755", "/dev/stdin"]).arg(path).stdin(Stdio::piped());
    let mut child = install.spawn().context("run install (coreutils)")?;
    let mut input = child.stdin.take().context("its input")?;
    std::io::Write::write_all(&mut input, content.as_bytes()).context("write the script")?;
    drop(input);
    ensure!(child.wait().context("wait for install")?.success(), "{} is not written", path.display());
    Ok(())
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
