//! Latency of single faults that Pagoda has no part in: the kernel's own, and a userfaultfd
//! answered by the shortest possible loop.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use pagoda_sys::toy::process;
use pagoda_sys::toy::ram::{Advice, HugePages, PAGE_BYTES, Ram, RamSource};
use pagoda_sys::toy::uffd_loop::{FaultLoop, Resolution};

use super::swap::LimitedToy;
use crate::bench::stepped::this_program;
use crate::toy::Latency;
use crate::toy::histogram::LatencyHistogram;
use crate::toy::workload::Chance;

/// One access for so many pages.
const SWAP_IN_SAMPLE_OF: usize = 16;

/// The kernel's own faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelFault {
    /// First write of an anonymous page.
    AnonymousZero,
    /// First write of a shmem page.
    ShmemZero,
    /// Write to a shmem page that is in the page cache but not mapped.
    ShmemMinor,
}

/// How the bare loop runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Wherever the scheduler puts the two.
    Free,
    /// Both on one CPU.
    SameCpu,
}

/// Touches `pages` pages in random order, each of which faults in the kernel.
///
/// # Errors
/// No memory; paging out is refused.
pub fn kernel_fault(kind: KernelFault, pages: usize) -> Result<LatencyHistogram> {
    let bytes = pages * PAGE_BYTES;
    let source = match kind {
        KernelFault::AnonymousZero => RamSource::Anonymous(bytes),
        KernelFault::ShmemZero | KernelFault::ShmemMinor => RamSource::Shmem(bytes),
    };
    let mut ram = Ram::map(source, HugePages::Refuse).context("map memory")?;
    match kind {
        KernelFault::AnonymousZero | KernelFault::ShmemZero => {}
        KernelFault::ShmemMinor => {
            fill(&mut ram);
            ram.advise(0, pages, Advice::Drop).context("drop page-table entries")?;
        }
    }
    Ok(touch_at_random(&mut ram, pages))
}

/// Latency of accesses to pages in swap, on whatever swap is on.
///
/// In a cgroup, because only its reclaim also empties the swap cache: a page that is still there
/// comes back without a read.
///
/// # Errors
/// Not root, no memory controller.
pub fn swap_in(pages: usize) -> Result<Latency> {
    let mib = (pages * PAGE_BYTES).div_ceil(1 << 20).max(1);
    let options = ["--mib", &mib.to_string(), "--no-huge"];
    let mut limited = LimitedToy::start(&options, mib as u64 * 2)?;
    limited.toy.fill()?;
    let allowed = (mib as u64) << 16;
    limited.cgroup.reclaim_down_to(allowed)?;
    // Few enough that hardly any page is met twice.
    let ops = pages / SWAP_IN_SAMPLE_OF;
    let done = limited.toy.go(&format!("--workload random --mode read-write --ops {ops}"))?;
    done.latency.context("the toy gave no latency")
}

/// Command line of the handler process.
#[derive(Debug, Clone, Args)]
pub struct HandlerArgs {
    /// Number of the userfaultfd it inherits
    #[arg(long)]
    fd: i32,
    /// Answer to a fault
    #[arg(long, value_enum)]
    answer: Answer,
    /// Address of the page whose fault ends it
    #[arg(long)]
    stop_at: u64,
    /// CPU to run on
    #[arg(long)]
    cpu: Option<usize>,
}

/// How a bare loop answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Answer {
    /// MISSING with a zero page.
    ZeroPage,
    /// MISSING with a copy.
    Copy,
    /// MINOR with the page there.
    Continue,
}

impl Answer {
    fn resolution(self) -> Resolution {
        match self {
            Self::ZeroPage => Resolution::ZeroPage,
            Self::Copy => Resolution::Copy,
            Self::Continue => Resolution::Continue,
        }
    }
}

/// The handler process of [`bare_userfaultfd`].
///
/// # Errors
/// Reading or answering a fault failed.
pub fn handler_main(args: &HandlerArgs) -> Result<bool> {
    if let Some(cpu) = args.cpu {
        process::pin_to_cpu(cpu).context("pin to a CPU")?;
    }
    let fd = process::adopt_fd(args.fd).context("take over the userfaultfd")?;
    let faults = FaultLoop::adopt(fd);
    faults.serve(args.answer.resolution(), args.stop_at).context("serve faults")?;
    Ok(true)
}

/// Touches `pages` pages in random order, each answered by a handler in another process, as the
/// daemon is.
///
/// # Errors
/// No permission for userfaultfd.
pub fn bare_userfaultfd(answer: Answer, placement: Placement, pages: usize) -> Result<LatencyHistogram> {
    // On a thread of its own, so that a CPU pinned here does not outlive the measurement.
    let measure = || -> Result<LatencyHistogram> {
        // The extra page's fault tells the handler to end.
        let source = RamSource::Shmem((pages + 1) * PAGE_BYTES);
        let mut ram = Ram::map(source, HugePages::Refuse).context("map memory")?;
        if answer == Answer::Continue {
            fill(&mut ram);
            ram.advise(0, pages + 1, Advice::Drop).context("drop page-table entries")?;
        }
        let faults = FaultLoop::register(&ram, answer.resolution())
            .context("register with userfaultfd (root or access to /dev/userfaultfd is needed)")?;
        let stop_at = ram.address() + (pages * PAGE_BYTES) as u64;
        let mut command = Command::new(this_program()?);
        let fd = std::os::fd::AsRawFd::as_raw_fd(faults.fd());
        command.args(["uffd-handler", "--fd", &fd.to_string(), "--stop-at", &stop_at.to_string()]);
        let answer_name = answer.to_possible_value().map(|value| value.get_name().to_owned());
        command.args(["--answer", &answer_name.unwrap_or_default()]).stdin(Stdio::null());
        if placement == Placement::SameCpu {
            command.args(["--cpu", "0"]);
            process::pin_to_cpu(0).context("pin to a CPU")?;
        }
        process::inherit_fd(&mut command, faults.fd());
        process::die_with_parent(&mut command);
        let mut handler = command.spawn().context("start the handler")?;
        // The fd is the handler's alone from here: when it dies, faults here end as zeros
        // instead of waiting for ever.
        drop(faults);
        let latency = touch_at_random(&mut ram, pages);
        ram.split(1)[0].store(pages, 0, 1);
        let status = handler.wait().context("wait for the handler")?;
        if !status.success() {
            bail!("the userfaultfd handler ended with {status}");
        }
        Ok(latency)
    };
    std::thread::scope(|scope| match scope.spawn(measure).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

fn fill(ram: &mut Ram) {
    let pages = ram.pages();
    let mut parts = ram.split(1);
    let mut chance = Chance::new(3);
    for page in 0..pages {
        // Every word, so that zram has a page to compress that does not compress.
        for word in 0..PAGE_BYTES / 8 {
            parts[0].store(page, word, chance.next());
        }
    }
}

fn touch_at_random(ram: &mut Ram, pages: usize) -> LatencyHistogram {
    let mut order: Vec<usize> = (0..pages).collect();
    let mut chance = Chance::new(pages as u64);
    for left in (1..pages).rev() {
        order.swap(left, chance.below(left as u64 + 1) as usize);
    }
    let mut latency = LatencyHistogram::default();
    let mut parts = ram.split(1);
    for page in order {
        let start = Instant::now();
        parts[0].store(page, 0, 1);
        latency.record(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
    latency
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_faults_take_time() {
        let pages = 256;
        for kind in [KernelFault::AnonymousZero, KernelFault::ShmemZero, KernelFault::ShmemMinor] {
            let latency = kernel_fault(kind, pages).unwrap();
            let p50 = latency.percentile_us(0.5);
            assert!(p50 > 0.05 && p50 < 1000.0, "{kind:?}: {p50} us");
        }
    }
}
