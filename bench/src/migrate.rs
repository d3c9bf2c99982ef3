//! A VM moves to another host over 1 Gbit/s: how long does that take, and how long does the guest stand still?
//!
//! The hosts are network namespaces of this machine, with a token bucket at each end of the link between them. They share its CPUs and
//! its disk. Three quarters of the guest's memory have content.
//!
//! * **ideal**: `pagoda vm move` into as much DRAM as the VM has memory. **ours**: into half of it.
//! * **bare** ([`stream`]): as many bytes as the ideal move has put on the link, from memory to memory, by one encrypted stream.
//! * **QEMU's own** ([`qemu`]): plain QEMU, pre-copy. **naive**: the same into a memory cgroup of half of it with a kernel swap file
//!   on the disk of our swap, or out of one.
//!
//! Guests are idle, or rewrite half of their pages meanwhile. Time is from the request until the guest runs at its destination. For ours
//! it has in it that QEMU is started there; the peer's waits there already. Both times of a pause are QEMU's own time stamps of STOP and
//! RESUME. In each round a guest of each side moves to and fro, and the side that is first changes. Guests verify their memory
//! after each move.

mod figures;
mod guest;
mod hosts;
mod network;
mod qemu;
mod stream;

use anyhow::{Context, Result, ensure};
use testkit::peers::swap::Swap;
use testkit::results::report::Report;

use self::figures::{Case, Measured};
use self::guest::{Size, writer};
use self::hosts::Hosts;
use self::network::Network;
use self::qemu::Peer;
use super::Setup;
use super::balloon::guest::{QEMU, Start};

const SIZES: [Size; 2] = [Size { memory_mib: 512 }, Size { memory_mib: 2048 }];

/// What rounds of one size have in common.
struct Round<'a> {
    setup: &'a Setup,
    start: &'a Start<'a>,
    network: &'a Network,
    size: Size,
    /// Which cases are measured beside the idle ones, to which they are compared.
    written: bool,
    swapped: bool,
}

/// Runs the bench.
///
/// # Errors
/// Not root; a guest does not boot or move, or finds a wrong page.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    ensure!(setup.ours, "this bench has no peers to measure alone");
    let images = testkit::image::build(&testkit::image::ImageArgs::default()).context("make the guest's image")?;
    let accelerator = testkit::accel::find(QEMU, &images, &setup.dir)?;
    let start = Start { images: &images, accelerator, disk: None };
    let network = Network::new()?;
    let mut all = Vec::new();
    for size in if setup.quick { &SIZES[..1] } else { &SIZES } {
        let wants = |load: &str| setup.wants(&format!("{} MiB, {load}", size.memory_mib));
        let [idle, written, swapped] = ["idle", "written", "swapped"].map(wants);
        if !(idle || written || swapped) {
            continue;
        }
        let round = Round { setup, start: &start, network: &network, size: *size, written, swapped };
        all.push((*size, round.all()?));
    }
    let mut report = setup.report_of("migrate", accelerator.name());
    for (size, measured) in &all {
        figures::add(&mut report, *size, measured);
    }
    Ok((report, figures::plot(&all)))
}

impl Round<'_> {
    fn all(&self) -> Result<Measured> {
        let (mut measured, mut write) = (Measured::default(), None);
        for round in 0..self.setup.rounds {
            eprintln!("migrate: {} MiB, round {} of {}", self.size.memory_mib, round + 1, self.setup.rounds);
            if round % 2 == 0 {
                self.ours(&mut measured, &mut write)?;
                self.peer(&mut measured, &mut write)?;
            } else {
                self.peer(&mut measured, &mut write)?;
                self.ours(&mut measured, &mut write)?;
            }
        }
        Ok(measured)
    }

    /// One guest moves to and fro. Where it comes from all its memory is in DRAM, but in the case that is about swap.
    fn ours(&self, measured: &mut Measured, write: &mut Option<String>) -> Result<()> {
        let Size { memory_mib: all, .. } = self.size;
        let half = self.size.half_mib();
        let hosts = Hosts::start(self.setup, self.network, self.start.images)?;
        let mut vm = hosts.boot(self.size, self.start)?;
        let command = match write {
            Some(command) => command.clone(),
            None => write.insert(writer(&mut vm.control, self.size)?).clone(),
        };
        let mut moves = |into: u64, write: Option<&str>, name: &str, case: &mut Case| -> Result<u64> {
            let moved = vm.move_into(into, write).with_context(|| format!("our move, {name}"))?;
            case.add(name, &moved);
            Ok(moved.link_bytes)
        };
        let link_bytes = moves(all, None, "idle into all DRAM", &mut measured.idle.ideal)?;
        let bare_ms = stream::send(self.network, link_bytes)?;
        eprintln!("migrate: bare stream: {bare_ms:.0} ms");
        measured.bare_ms.push(bare_ms);
        moves(half, None, "idle into half the DRAM", &mut measured.idle.ours)?;
        if self.swapped || self.written {
            // Which also brings all of it into DRAM again.
            moves(all, None, "out of swap into all DRAM", &mut measured.swapped)?;
        }
        if self.written {
            moves(all, Some(&command), "written into all DRAM", &mut measured.written.ideal)?;
            moves(half, Some(&command), "written into half the DRAM", &mut measured.written.ours)?;
        }
        vm.end()
    }

    /// The same of the peer.
    fn peer(&self, measured: &mut Measured, write: &mut Option<String>) -> Result<()> {
        let half = Some(self.size.half_mib());
        // On for as long as the peer runs only, and gone behind it.
        let _swap = Swap::on_file(&self.setup.dir, self.size.memory_mib << 20)?;
        let mut peer = Peer::boot(self.setup, self.network, self.size, self.start)?;
        let mut moves = |into: Option<u64>, write: Option<&str>, name: &str, case: &mut Case| -> Result<()> {
            let moved = peer.migrate(into, write).with_context(|| format!("QEMU's own migration, {name}"))?;
            case.add(&format!("QEMU's own, {name}"), &moved);
            Ok(())
        };
        moves(None, None, "idle into all DRAM", &mut measured.qemu)?;
        moves(half, None, "idle into a cgroup of half", &mut measured.idle.naive)?;
        if self.swapped || self.written {
            moves(None, None, "out of a cgroup of half", &mut measured.swapped_naive)?;
        }
        if self.written {
            let command = write.as_deref().context("how the guest writes")?;
            moves(half, Some(command), "written into a cgroup of half", &mut measured.written.naive)?;
        }
        Ok(())
    }
}
