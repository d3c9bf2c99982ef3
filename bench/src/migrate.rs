//! A VM moves to another host: how long does that take, and how long does the guest stand still?
//!
//! The hosts are network namespaces of this machine, with a link between them: 1 Gbit/s by a token bucket at each end, or what the CPUs
//! can do. They share its CPUs and its disk. Two thirds of the guest's memory are filled by its program, most of it with what
//! programs hold ([`guest::Size`]); how well that compresses is printed.
//!
//! * **ideal**: `pagoda vm move` into as much DRAM as the VM has memory. **ours**: into half of it. Encrypted.
//! * **bare** ([`stream`]): as many bytes as the ideal move has put on the link, from memory to memory, by one encrypted stream.
//! * **QEMU's own** ([`qemu`]): plain QEMU, pre-copy, not encrypted, with the settings that are fastest here. **naive**: the same into a
//!   memory cgroup of half of it with a kernel swap file on the disk of our swap, or out of one.
//!
//! Guests are idle, or rewrite half of their pages meanwhile. Time is from the request until the guest runs at its destination. For ours
//! it has in it that QEMU is started there; the peer's waits there already. Both times of a pause are QEMU's own time stamps of STOP and
//! RESUME. In each round a guest of each side moves to and fro, and the side that is first changes. Guests verify their memory
//! after each move. What fails says so in its row, and the rest goes on with a new guest.

pub mod case;
mod content;
mod disk;
mod figures;
pub mod guest;
pub mod hosts;
pub mod leg;
pub mod network;
pub mod options;
pub mod qemu;
mod reads;
mod stream;

use anyhow::{Context, Result, ensure};
use testkit::image::{ImageArgs, Images, KernelFlavour};
use testkit::peers::swap::Swap;
use testkit::results::report::{NO_VALUE, Report};

use self::disk::BareDisk;
use self::figures::{Bare, Measured};
use self::guest::{Common, Moved};
use self::hosts::Hosts;
use self::leg::{Leg, Side, Stopped};
use self::network::Network;
use self::options::Setting;
use self::qemu::{Peer, Way};
use super::Setup;
use super::balloon::guest::{QEMU, Start};

/// Programs of Debian that are in the guest, beside those of a client of a pool: content of its memory, and what is run after moves.
const PROGRAMS: [&str; 2] = ["perl", "memcached"];
/// A leg of the peer is tried so often in a round, ours once: what QEMU loses is said in [`qemu`].
const PEER_TRIES: usize = 3;

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// Not root; the guest's image or the network cannot be made.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    ensure!(setup.ours, "this bench has no peers to measure alone");
    let images = images()?;
    let accelerator = testkit::accel::find(QEMU, &images, &setup.dir)?;
    let start = Start { images: &images, accelerator, disk: None };
    let mut all = Vec::new();
    for setting in setup.moves.settings(setup.quick)? {
        let network = Network::new(setting.link)?;
        let common = setting.common(setup, &network, &start);
        let round = Round { common, legs: legs(setup, &setting), name: setting.name() };
        if !round.legs.is_empty() {
            let measured = round.all()?;
            all.push((setting, measured));
        }
    }
    let mut report = setup.report_of("migrate", accelerator.name());
    for (setting, measured) in &all {
        figures::add(&mut report, setting, measured);
    }
    Ok((report, figures::plot(&all)))
}

impl Setting {
    /// With what is there for it.
    pub(super) fn common<'a>(&'a self, setup: &'a Setup, network: &'a Network, start: &'a Start<'a>) -> Common<'a> {
        Common { setup, network, start, qemu: &self.qemu, size: self.size }
    }
}

/// What the guests boot.
///
/// # Errors
/// A program is missing, or it cannot be built.
pub fn images() -> Result<Images> {
    let with = PROGRAMS.map(Into::into).to_vec();
    let initrd = Some("moves".to_owned());
    let wanted = ImageArgs { client: true, with, initrd, kernel: KernelFlavour::Full, ..ImageArgs::default() };
    let mut images = testkit::image::build(&wanted).context("make the guest's image")?;
    images.initrd = images.client_initrd.clone().context("the guest's image")?;
    Ok(images)
}

/// Those that are asked for, and the idle ones, to which they are compared.
fn legs(setup: &Setup, setting: &Setting) -> Vec<Leg> {
    let wants = |load: &str| setup.wants(&format!("{}, {load}", setting.name()));
    let wanted = |leg: &Leg| match leg {
        Leg::Ideal | Leg::Half => ["idle", "written", "swapped", "both", "post-copy"].into_iter().any(wants),
        Leg::Out => wants("swapped"),
        Leg::WrittenIdeal | Leg::WrittenHalf => wants("written"),
        Leg::Both => wants("both"),
        Leg::Postcopy => wants("post-copy"),
    };
    Leg::ALL.into_iter().filter(wanted).collect()
}

/// What rounds of one setting have in common.
struct Round<'a> {
    common: Common<'a>,
    legs: Vec<Leg>,
    name: String,
}

impl Round<'_> {
    fn all(&self) -> Result<Measured> {
        let setup = self.common.setup;
        let (mut measured, mut write) = (Measured::default(), None);
        let way = self.fastest_way(&mut measured);
        for round in 0..setup.rounds {
            eprintln!("migrate: {}, round {} of {}", self.name, round + 1, setup.rounds);
            if round % 2 == 0 {
                self.ours(&mut measured, &mut write);
                self.peer(&mut measured, way, &mut write)?;
            } else {
                self.peer(&mut measured, way, &mut write)?;
                self.ours(&mut measured, &mut write);
            }
        }
        Ok(measured)
    }

    fn ours(&self, measured: &mut Measured, write: &mut Option<String>) {
        let Measured { ours, bare_ideal_ms, both, direct_mib_per_s, page_read_us, .. } = measured;
        let rounds = bare_ideal_ms.len() + 1;
        leg::all("ours", &self.legs, 1, ours, |legs, cases| {
            let hosts = Hosts::start(self.common)?;
            let vm = hosts.boot()?;
            let mut side = Beside { vm, common: self.common, bare_ideal_ms, both, direct_mib_per_s, page_read_us };
            leg::lead(&mut side, legs, self.common.size, write, cases)?;
            side.vm.end().map_err(Stopped::from)
        });
        // Of a round in which it failed.
        bare_ideal_ms.resize(rounds, NO_VALUE);
        both.resize(rounds, Bare::UNKNOWN);
        direct_mib_per_s.resize(rounds, NO_VALUE);
        page_read_us.resize(rounds, NO_VALUE);
    }

    fn peer(&self, measured: &mut Measured, way: Way, write: &mut Option<String>) -> Result<()> {
        let Common { setup, size, .. } = self.common;
        // On for as long as the peer runs only, and gone behind it. Both its hosts swap to it.
        let _swap = Swap::on_file(&setup.dir, (size.memory_mib << 20) * 2)?;
        leg::all("QEMU's own", &self.legs, PEER_TRIES, &mut measured.peer, |legs, cases| {
            let mut peer = Peer::boot(self.common, way)?;
            leg::lead(&mut peer, legs, size, write, cases)
        });
        Ok(())
    }

    /// The settings by which QEMU moves an idle guest fastest. Prints what the guest's memory holds.
    fn fastest_way(&self, measured: &mut Measured) -> Way {
        for way in Way::ALL {
            let moved = Peer::boot(self.common, way).and_then(|mut peer| {
                if way == Way::Plain {
                    let (content, own_bytes) = peer.content()?;
                    eprintln!(
                        "migrate: of the guest's memory {:.0} % are zero, LZ4 makes the rest {:.2} times smaller; QEMU has {} MiB of \
                         its own",
                        content.zero * 100.0,
                        content.lz4,
                        own_bytes >> 20
                    );
                }
                peer.move_into(false, None)
            });
            match moved {
                Ok(moved) => {
                    moved.show(&format!("QEMU's own by {}", way.text()));
                    measured.ways.push((way, Some(moved.ms)));
                }
                Err(error) => {
                    eprintln!("migrate: QEMU's own by {}: failed: {error:#}", way.text());
                    measured.ways.push((way, None));
                }
            }
        }
        let fastest = measured.ways.iter().filter_map(|(way, ms)| Some((*way, (*ms)?)));
        fastest.min_by(|one, other| one.1.total_cmp(&other.1)).map_or(Way::Plain, |(way, _)| way)
    }
}

/// Our side, and what is measured beside its moves.
struct Beside<'a> {
    vm: hosts::Vm<'a>,
    common: Common<'a>,
    bare_ideal_ms: &'a mut Vec<f64>,
    both: &'a mut Vec<Bare>,
    direct_mib_per_s: &'a mut Vec<f64>,
    page_read_us: &'a mut Vec<f64>,
}

impl Side for Beside<'_> {
    const NAME: &'static str = "ours";

    fn control(&mut self) -> &mut guest::Control {
        self.vm.control()
    }

    fn is_half(&self) -> bool {
        self.vm.is_half()
    }

    fn only_move(&mut self, half: bool, write: Option<&str>) -> Result<Moved> {
        self.vm.only_move(half, write)
    }

    fn postcopy(&mut self, command: &str) -> Result<Moved> {
        self.vm.postcopy(command)
    }

    fn moved(&mut self, leg: Leg, moved: &Moved) -> Result<()> {
        let Common { setup, network, size, .. } = self.common;
        let disk = || BareDisk::new(&setup.dir, size.memory_mib << 20);
        match leg {
            Leg::Ideal => {
                let ms = stream::send(network, moved.link_bytes)?;
                eprintln!("migrate: bare stream: {ms:.0} ms");
                self.bare_ideal_ms.push(ms);
            }
            Leg::Out => {
                let ms = disk()?.read_ms(moved.swapped_bytes)?;
                let mib = moved.swapped_bytes as f64 / f64::from(1 << 20);
                let rate = mib / ms * 1e3;
                let own = moved.read_bytes_per_s / f64::from(1 << 20);
                eprintln!("migrate: swap read at {own:.0} MiB/s, plain direct I/O {rate:.0} MiB/s of {mib:.0} MiB");
                self.direct_mib_per_s.push(rate);
            }
            Leg::Both => {
                let disk = disk()?;
                let bare = Bare {
                    source_ms: disk.read_ms(moved.swapped_bytes)?,
                    link_ms: stream::send(network, moved.link_bytes)?,
                    destination_ms: disk.write_ms(moved.swapped_there_bytes)?,
                };
                eprintln!("migrate: alone: {bare:.0?}");
                self.both.push(bare);
            }
            Leg::Postcopy => {
                let us = crate::rmap::read_us(setup)?;
                eprintln!(
                    "migrate: a page read of bench rmap: {us:.0} us; a fault over the link: {:.0} us",
                    moved.fault_p50_us
                );
                self.page_read_us.push(us);
            }
            Leg::Half | Leg::WrittenIdeal | Leg::WrittenHalf => {}
        }
        Ok(())
    }
}
