//! Quicksort in a guest: an unmodified Debian kernel whose one program sorts more than the VM's DRAM.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testkit::accel::{self, Accelerator};
use testkit::image::{self, Images};
use testkit::peers::nbd_disk::Cache;
use testkit::results::report::{Bar, Report};

use super::{Bench, DISK_RATIO_MAX, LOCAL_RATIO_MAX, ON_SATA, Tier};
use crate::Setup;
use crate::guest::run_to_end;

const QEMU: &str = "qemu-system-x86_64";
/// What is sorted, and the rest: the guest's kernel, and what it keeps free.
const SORTED_MIB: u64 = 192;
const QUICK_MIB: u64 = 96;
const KERNEL_MIB: u64 = 128;
const VM: &str = "bench-sort";
/// Boot, fill, sort and check, emulated, on the slowest disk; a guest that needs longer hangs.
const GUEST_MAX: Duration = Duration::from_secs(600);
pub const ROUNDS_MAX: usize = 3;

/// What a guest runs on.
pub struct Guests {
    images: Images,
    accelerator: Accelerator,
    sorted_mib: u64,
    pool: Vec<f64>,
    swap: Vec<f64>,
    sata: Vec<f64>,
    nbd: Vec<f64>,
    dram: Vec<f64>,
}

impl Guests {
    /// # Errors
    /// No QEMU, or no image can be made.
    pub fn new(setup: &Setup) -> Result<Guests> {
        let images = image::build(&image::ImageArgs::default()).context("make the guest's image")?;
        let accelerator = accel::find(QEMU, &images, &setup.dir)?;
        let sorted_mib = if setup.quick { QUICK_MIB } else { SORTED_MIB };
        let [pool, swap, sata, nbd, dram] = [const { Vec::new() }; 5];
        Ok(Guests { images, accelerator, sorted_mib, pool, swap, sata, nbd, dram })
    }

    /// One sort on each side.
    ///
    /// # Errors
    /// A guest does not sort, or wrongly.
    pub fn round(&mut self, setup: &Setup) -> Result<()> {
        let bench = Bench::start(setup, "800M")?;
        self.pool.push(self.sort(&bench, Tier::Pool)?);
        self.swap.push(self.sort(&bench, Tier::Swap)?);
        self.dram.push(self.sort(&bench, Tier::Dram)?);
        drop(bench);
        if let Some(bench) = Bench::on_sata(setup)? {
            self.sata.push(self.sort(&bench, Tier::Swap)?);
        }
        let bench = Bench::on_nbd(setup, self.sorted_mib + KERNEL_MIB, Cache::Nothing)?;
        self.nbd.push(self.sort(&bench, Tier::Swap)?);
        Ok(())
    }

    pub fn report(&self, report: &mut Report) {
        let guest = format!("quicksort of {} MiB in a guest ({})", self.sorted_mib, self.accelerator.name());
        for (peer, seconds, max) in [
            ("private swap on the disk", &self.swap, DISK_RATIO_MAX),
            (ON_SATA, &self.sata, DISK_RATIO_MAX),
            ("private swap on an NBD disk", &self.nbd, DISK_RATIO_MAX),
            ("all of it in DRAM", &self.dram, LOCAL_RATIO_MAX),
        ] {
            // Why one was left out was said then.
            if seconds.is_empty() && !self.pool.is_empty() {
                continue;
            }
            report.pair(&format!("{guest}, far tier pool: {peer}"), "s", &self.pool, seconds, Bar::AtMost(max));
        }
    }

    fn sort(&self, bench: &Bench, tier: Tier) -> Result<f64> {
        let memory_mib = self.sorted_mib + KERNEL_MIB;
        let dram_mib = if tier == Tier::Dram { memory_mib } else { self.sorted_mib / 2 + KERNEL_MIB / 2 };
        let words = bench.daemon.cli_words()?;
        let mut command = Command::new(&words[0]);
        let (memory, dram) = (format!("{memory_mib}M"), format!("{dram_mib}M"));
        command.args(&words[1..]).args(["run", "--name", VM, "--memory", &memory, "--dram", &dram]);
        if tier == Tier::Pool {
            command.args(["--remote", "pool:"]);
        }
        command.args(["--", QEMU, "-M", "q35", "-accel", self.accelerator.name(), "-m", &memory, "-smp", "1"]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"]);
        command.arg("-kernel").arg(&self.images.kernel).arg("-initrd").arg(&self.images.initrd);
        let sorted = self.sorted_mib;
        command.arg("-append").arg(format!("console=ttyS0 quiet panic=-1 pagoda.work=sort pagoda.mib={sorted}"));
        let mut seconds = None;
        run_to_end(command, GUEST_MAX, |line, _| {
            if line.kind == "done" && line.get("phase") == Some("sort") {
                seconds = line.number("us").map(|us| us as f64 / 1e6);
                let from_pool = bench.daemon.vm(VM)?.counters.get("remote_in_pages").copied().unwrap_or(0);
                ensure!((tier == Tier::Pool) == (from_pool > 0), "{from_pool} pages came from the pool, with {tier:?}");
            }
            Ok(())
        })?;
        bench.daemon.wait_gone(VM, super::GONE_MAX)?;
        seconds.context("the guest did not sort")
    }
}
