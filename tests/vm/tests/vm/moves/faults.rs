//! Faults at moments of a move that stand still until the fault has happened.
//!
//! Both hosts have their notes on disks of their own. A disk that stands still (fsfreeze) holds a move where it writes a note. The
//! guest works all the time: it writes its memory, or numbered blocks of a disk that both hosts have, and compares what it reads with
//! what it has written. So a second one that ran would be noticed.

use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::process::Child;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::{MoveOutcome, MovePhase, MoveStatus};
use rustix::process::Signal;
use vm_tests::control::Control;
use vm_tests::loopfs::{FileSystem, Frozen, LoopFs};
use vm_tests::{Guest, GuestOptions, Lab, MIB, Qemu, wait};

use super::etcd::{self, Etcd};
use super::hosts::{Host, Hosts, Place};
use super::moving::{PHASE_MAX, begin, end, move_of, settled, wait_phase};
use super::network::Way;
use super::processes::{Stopped, kill, wait_for_disk};
use super::{GIVEN_UP, REFUSED, power_off};

pub const MOVED: i32 = 0;
pub const UNDECIDED: i32 = 8;

const FILL: &str = "fill 32";
/// So that a fault finds the move in its rounds.
pub const HOW: [&str; 5] = ["--shared-disks", "--downtime", "2s", "--bandwidth", "320M"];
const DISK_MIB: u64 = 16;
/// Whether it could move.
const READY: [&str; 2] = ["--shared-disks", "--dry-run"];

/// What a move is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The destination starts a QEMU.
    Preparing,
    /// The guest runs, and its pages are on their way.
    Copying,
    /// It stands still, and the destination's QEMU does not load its state.
    Loading,
    /// The source is about to note that it gives the VM away.
    Noting,
    /// The destination is about to note that it accepts.
    Accepting,
    /// The VM runs there, and the source is about to remove its note.
    Settling,
}

/// Which of the two hosts a fault concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Source,
    Destination,
}

/// Which process of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    Daemon,
    Qemu,
}

/// Which messages do not arrive any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Messages {
    All,
    /// Those of the source.
    Sent,
    /// Those of the destination.
    Answers,
}

/// When a cut heals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heals {
    After(Duration),
    /// A host has noticed it.
    Noticed,
    /// The move has been given up.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Cut(Messages, Heals),
    /// Killed. A daemon is started again.
    Kill(End, Whose),
    /// Stands still for so long.
    Stop(End, Whose, Duration),
    /// What held the move until now goes on after so long, and nothing else happens.
    Late(Duration),
    /// The etcd that decides about moves stands still until the move is over.
    NoEtcd,
}

/// Where the VM is to be afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    Moved,
    Stayed,
    /// One of both: which one depends on what was written last.
    Somewhere,
    /// Its QEMU was killed while it had no other one.
    Crashed,
}

pub type Case = (Moment, Fault, Ends);

/// Two hosts and a guest.
pub struct Scene {
    pub hosts: Hosts,
    options: GuestOptions,
    /// Decides about moves, if it is there.
    etcd: Option<Etcd>,
    guest: Rc<Guest>,
    disks: [Rc<LoopFs>; 2],
    /// The file that is the guest's disk.
    blocks: PathBuf,
    /// The host that has it.
    pub at: usize,
    control: Control,
    done: usize,
}

/// What holds a move at a moment until it is dropped.
#[derive(Default)]
pub struct Held<'a> {
    _disks: Vec<Frozen<'a>>,
    _qemu: Option<Stopped>,
}

impl Scene {
    /// One slot: of the two QEMUs one runs, and it waits most of the time.
    pub fn run(name: &str, cases: &[Case]) -> Result<()> {
        Lab::run(name, 1, |lab| {
            let mut scene = Scene::start(lab)?;
            for case in cases {
                scene.case(*case).with_context(|| format!("{case:?}"))?;
            }
            match cases.last() {
                Some((.., Ends::Crashed)) => Ok(()),
                _ => scene.end(),
            }
        })
    }

    fn start(lab: &Lab) -> Result<Scene> {
        const STATE_MIB: u64 = 32;
        let disks = [lab.loop_fs(FileSystem::Ext4, STATE_MIB)?, lab.loop_fs(FileSystem::Ext4, STATE_MIB)?];
        let places = [0, 1].map(|index| Place {
            state: Some(disks[index].path().to_owned()),
            swap: Some(lab.dir().join(format!("swap{index}"))),
        });
        // The same file at the same path on both hosts.
        let path = lab.dir().join("vms/web1.disk");
        let drive = format!(
            "-drive file={},format=raw,if=none,id=d0,cache=none,aio=threads -device virtio-blk-pci,drive=d0",
            path.display()
        );
        let options = GuestOptions::new("web1", "").qemu(Qemu::System).memory("-m 144M").control().more(&drive);
        let hosts = Hosts::start_at(lab, &options, &places)?;
        let blocks = lab.dir().join("web1.blocks");
        fs::File::create(&blocks)?.set_len(DISK_MIB * MIB)?;
        for host in [&hosts.one, &hosts.other] {
            fs::hard_link(&blocks, host.files.join("web1.disk")).context("give a host the disk")?;
        }
        let guest = hosts.guest(lab, &options)?;
        let mut control = guest.control()?;
        control.run(FILL)?;
        Ok(Scene { hosts, options, etcd: None, guest, disks, blocks, at: 0, control, done: 0 })
    }

    /// The same of hosts that have an arbiter.
    pub fn run_with_etcd(name: &str, cases: &[Case]) -> Result<()> {
        let _alone = etcd::alone();
        Lab::run(name, 1, |lab| {
            let mut scene = Scene::start_with_etcd(lab)?;
            for case in cases {
                scene.case(*case).with_context(|| format!("{case:?}"))?;
            }
            scene.end()
        })
    }

    /// Both hosts have one arbiter.
    pub fn start_with_etcd(lab: &Lab) -> Result<Scene> {
        let mut scene = Scene::start(lab)?;
        etcd::connect(&scene.hosts)?;
        let etcd = Etcd::start(lab.dir())?;
        for host in [&scene.hosts.one, &scene.hosts.other] {
            let pool = lab.dir().join(format!("pool-{}", host.name));
            fs::create_dir(&pool).context("make a directory")?;
            let text = format!("cluster = {:?}\nhost = {:?}\n", etcd.address(), host.name);
            fs::write(pool.join("pool.toml"), text).context("write pool.toml")?;
            let moves = host.accepts(&scene.options)? + "\narbiter = \"etcd\"";
            host.configure_with(&format!("pool_dir = {pool:?}\n"), &moves)?;
            host.daemon.stop()?;
            host.daemon.start_again()?;
        }
        scene.etcd = Some(etcd);
        scene.hosts.wait_connected()?;
        scene.wait_arbiter()?;
        // A VM that a daemon has just taken over does not move yet.
        let is_ready =
            || Ok(scene.hosts.try_move(&scene.hosts.one, &scene.hosts.other, &READY)?.status.success().then_some(()));
        wait::until("it can move", wait::HANG, is_ready)?;
        Ok(scene)
    }

    pub fn etcd(&self) -> Result<&Etcd> {
        self.etcd.as_ref().context("these hosts have no arbiter")
    }

    /// Both hosts reach it.
    pub fn wait_arbiter(&self) -> Result<()> {
        for host in [&self.hosts.one, &self.hosts.other] {
            let is_reached = || {
                let own = host.daemon.client().hosts()?.own;
                Ok(own.arbiter.is_some_and(|arbiter| arbiter.reachable).then_some(()))
            };
            wait::until("the arbiter is reached", wait::HANG, is_reached)?;
        }
        Ok(())
    }

    pub fn end(self) -> Result<()> {
        let Scene { hosts, control, at, .. } = self;
        power_off([&hosts.one, &hosts.other][at], control)
    }

    pub fn host(&self, index: usize) -> &Host {
        [&self.hosts.one, &self.hosts.other][index]
    }

    fn case(&mut self, (moment, fault, ends): Case) -> Result<()> {
        let begun = Instant::now();
        self.begin_work(moment, fault)?;
        let (from, to) = (self.host(self.at), self.host(1 - self.at));
        let mut moving = begin(from, to, &HOW)?;
        let (held, there) = match self.reach(moment) {
            Ok(reached) => reached,
            Err(error) => {
                let said = end(moving, &[MOVED]).unwrap_or_else(|error| format!("{error:#}"));
                return Err(error.context(said));
            }
        };
        let healed = self.strike((moment, fault), held, &mut moving)?;
        if ends == Ends::Crashed {
            from.daemon.wait_gone("web1")?;
            to.ensure_nothing_left()?;
            ensure!(self.hosts.qemus().is_empty(), "{:?}", self.hosts.qemus());
            let ended = from.daemon.client().move_of("web1")?;
            ensure!(ended.outcome == MoveOutcome::Crashed, "{ended:?}");
            return end(moving, &[1]).map(drop);
        }
        let at = settled(&self.hosts)?.index;
        let took = healed.elapsed();
        let said = end(moving, &expected(fault, ends))?;
        println!("{moment:?} {fault:?}: on host {at}, {took:?} later, of {:?}; {said}", begun.elapsed());
        let has_moved = at != self.at;
        ensure!(ends == Ends::Somewhere || has_moved == (ends == Ends::Moved), "it is on {}", self.host(at).name);
        self.finish_work(at, there)?;
        ensure!(self.hosts.qemus().len() == 1, "{:?}", self.hosts.qemus());
        self.hosts.wait_connected()?;
        if self.etcd.is_some() {
            self.wait_arbiter()?;
        }
        self.host(1 - at).ensure_nothing_left()
    }

    /// What the guest does meanwhile: every second time with its disk, which is empty at first.
    pub fn begin_work(&mut self, moment: Moment, fault: Fault) -> Result<()> {
        // Its clock stands still as long as it does.
        let seconds = match (moment, fault) {
            // Over before the guest stops: nobody hears what it says at the destination before the move is over.
            (Moment::Preparing, _) => 2,
            (Moment::Copying, Fault::Cut(..) | Fault::Stop(..)) => 10,
            _ => 4,
        };
        self.done += 1;
        if self.done.is_multiple_of(2) {
            return self.control.send(&format!("run random seconds={seconds} write=20"));
        }
        let blocks = OpenOptions::new().write(true).open(&self.blocks).context("open the guest's disk")?;
        blocks.set_len(0)?;
        blocks.set_len(DISK_MIB * MIB)?;
        self.control.send(&format!("run blocks seconds={seconds} write=70"))
    }

    /// The guest's word on that, and on all of its memory.
    pub fn finish_work(&mut self, at: usize, there: Option<Control>) -> Result<()> {
        if at == self.at {
            self.control.reply()?;
        } else {
            self.at = at;
            let there = match there {
                Some(there) => there,
                None => self.host(at).control(&self.guest)?,
            };
            let here = std::mem::replace(&mut self.control, there);
            if !here.has_replied() {
                self.control.reply()?;
            }
        }
        self.control.run("verify").map(drop)
    }

    /// Waits until the move is there, and holds it there. With what the guest says at the destination, once there is a QEMU.
    pub fn reach(&self, moment: Moment) -> Result<(Held<'_>, Option<Control>)> {
        let (from, to) = (self.host(self.at), self.host(1 - self.at));
        if moment == Moment::Preparing {
            wait::until("the destination starts QEMU", PHASE_MAX, || {
                let is_known = to.daemon.client().move_of("web1").is_ok_and(|of| of.phase == MovePhase::Preparing);
                Ok((is_known && self.hosts.qemus().len() == 2).then_some(()))
            })?;
            return Ok((Held::default(), None));
        }
        wait_phase(from, MovePhase::Copying)?;
        // Before the guest runs there: nothing is lost of what it says.
        let there = to.control(&self.guest)?;
        let mut held = Held::default();
        match moment {
            Moment::Preparing | Moment::Copying => {}
            Moment::Loading => {
                held._qemu = Some(Stopped::new(self.qemu(End::Destination)?)?);
                wait_phase(from, MovePhase::Stopped)?;
            }
            Moment::Noting => {
                held._disks.push(self.disks[from.index].freeze()?);
                wait_for_disk(from.daemon.pid(), "move")?;
            }
            Moment::Accepting => {
                held._disks.push(self.disks[to.index].freeze()?);
                wait_for_disk(to.daemon.pid(), "arrival")?;
            }
            Moment::Settling => {
                let qemu = self.qemu(End::Source)?;
                let destination = self.disks[to.index].freeze()?;
                wait_for_disk(to.daemon.pid(), "arrival")?;
                held._disks.push(self.disks[from.index].freeze()?);
                drop(destination);
                wait_phase(to, MovePhase::Settling).context("the destination runs it")?;
                // Its QEMU removes its sockets when it ends.
                wait_for_disk(qemu, "").context("the source's QEMU ends")?;
            }
        }
        Ok((held, Some(there)))
    }

    /// When the fault was over.
    fn strike(&self, (moment, fault): (Moment, Fault), held: Held<'_>, moving: &mut Child) -> Result<Instant> {
        let (from, to) = (self.host(self.at), self.host(1 - self.at));
        match fault {
            Fault::Cut(messages, heals) => {
                let way = match messages {
                    Messages::All => Way::Both,
                    Messages::Sent => Way::From(from.index),
                    Messages::Answers => Way::From(to.index),
                };
                self.hosts.network.cut(way)?;
                drop(held);
                match heals {
                    Heals::After(time) => pass(time)?,
                    Heals::Noticed => wait_noticed(from)?,
                    Heals::Over => drop(wait::until("it is given up", wait::HANG, || Ok(moving.try_wait()?))?),
                }
                if is_granted(moment, messages) {
                    wait_phase(to, MovePhase::Settling).context("it runs there meanwhile")?;
                }
                self.hosts.network.heal(way)?;
            }
            Fault::Kill(end, Whose::Daemon) => {
                let host = if end == End::Source { from } else { to };
                kill(host.daemon.pid())?;
                drop(held);
                host.daemon.kill9()?;
                host.daemon.start_again()?;
            }
            Fault::Kill(end, Whose::Qemu) => {
                let pid = self.qemu(end)?;
                kill(pid)?;
                wait::until("QEMU ends", wait::HANG, || Ok((!self.hosts.qemus().contains(&pid)).then_some(())))?;
                drop(held);
            }
            Fault::Stop(end, whose, time) => {
                let host = if end == End::Source { from } else { to };
                let stopped = Stopped::new(if whose == Whose::Daemon { host.daemon.pid() } else { self.qemu(end)? })?;
                drop(held);
                pass(time)?;
                drop(stopped);
            }
            Fault::Late(time) => {
                pass(time)?;
                drop(held);
            }
            Fault::NoEtcd => {
                self.etcd()?.signal(Signal::STOP)?;
                drop(held);
                wait::until("it is over", wait::HANG, || Ok(moving.try_wait()?))?;
                self.etcd()?.signal(Signal::CONT)?;
            }
        }
        Ok(Instant::now())
    }

    /// The QEMU of a host.
    fn qemu(&self, end: End) -> Result<u32> {
        let source = self.host(self.at).daemon.vm("web1")?.pid;
        let is_source = |pid: &u32| Some(*pid) == source;
        let mut found = self.hosts.qemus();
        found.retain(|pid| is_source(pid) == (end == End::Source));
        match found[..] {
            [pid] => Ok(pid),
            _ => bail!("{:?} of {:?}, the source's is {source:?}", found, self.hosts.qemus()),
        }
    }
}

/// Exit statuses of `pagoda vm move`.
fn expected(fault: Fault, ends: Ends) -> Vec<i32> {
    let mut all = match ends {
        Ends::Moved => vec![MOVED],
        Ends::Stayed => vec![GIVEN_UP, REFUSED],
        Ends::Somewhere | Ends::Crashed => vec![MOVED, GIVEN_UP, REFUSED, UNDECIDED],
    };
    if fault == Fault::Kill(End::Source, Whose::Daemon) {
        all.push(UNDECIDED);
    }
    all
}

/// The source has lost its connection, or has none to lose any more.
fn wait_noticed(from: &Host) -> Result<()> {
    let is_lost = |of: &MoveStatus| of.is_over() || of.waits.as_ref().is_some_and(|why| why.contains("be reached"));
    wait::until("the cut is noticed", wait::HANG, || Ok(move_of(from).is_none_or(|of| is_lost(&of)).then_some(())))
}

/// The destination has the grant, or gets it although messages do not arrive.
fn is_granted(moment: Moment, lost: Messages) -> bool {
    match moment {
        Moment::Accepting => true,
        Moment::Noting => lost == Messages::Answers,
        // At the last one it has run already.
        Moment::Preparing | Moment::Copying | Moment::Loading | Moment::Settling => false,
    }
}

/// Time is what is waited for.
pub fn pass(time: Duration) -> Result<()> {
    let begun = Instant::now();
    wait::until("time passes", wait::HANG, || Ok((begun.elapsed() >= time).then_some(())))
}
