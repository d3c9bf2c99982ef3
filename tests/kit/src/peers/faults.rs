//! Latency of single faults that Pagoda has no part in: the kernel's own, and a userfaultfd
//! answered by the shortest possible loop.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use pagoda_sys::toy::process;
use pagoda_sys::toy::ram::{Advice, HugePages, PAGE_BYTES, Ram, RamSource};
use pagoda_sys::toy::uffd_loop::{CHUNK_BYTES, FaultLoop, Resolution};

use super::swap::LimitedToy;
use crate::daemon::cpu_s_of;
use crate::stepped::toy_program;
use crate::toy::touch::{Access, TouchArgs, Touched, touch};

/// Every second page, so that no two that are touched have a common run: each is a fault of its own.
pub const LONE_STRIDE: usize = 2;

/// Which of the pages the bare loop's toy touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Every second one, at random: each is a fault of its own.
    LoneAtRandom,
    /// All, ascending: faults only where the answer before did not cover the page.
    Sweep,
}

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

/// What a row of accesses costs.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// Median latency of an access.
    pub p50_us: f64,
    /// 99 % of accesses take no longer.
    pub p99_us: f64,
    /// Wall time of all accesses over their number.
    pub mean_us: f64,
    /// CPU time of everyone who takes part, for each access.
    pub cpu_us: f64,
}

impl Cost {
    /// `other_cpu_s` is what a handler used beside the toy.
    pub fn of(touched: &Touched, other_cpu_s: f64) -> Self {
        let touches = touched.touches.max(1) as f64;
        Self {
            p50_us: touched.latency.p50_us,
            p99_us: touched.latency.p99_us,
            mean_us: touched.seconds * 1e6 / touches,
            cpu_us: (touched.cpu_s + other_cpu_s) * 1e6 / touches,
        }
    }
}

/// Touches every second of `mib` MiB of pages in random order, each of which faults in the kernel.
///
/// # Errors
/// No memory; dropping entries is refused.
pub fn kernel_fault(kind: KernelFault, mib: usize, threads: usize) -> Result<Cost> {
    let bytes = mib << 20;
    let source = match kind {
        KernelFault::AnonymousZero => RamSource::Anonymous(bytes),
        KernelFault::ShmemZero | KernelFault::ShmemMinor => RamSource::Shmem(bytes),
    };
    let mut ram = Ram::map(source, HugePages::Refuse).context("map memory")?;
    let mut stored = vec![0; ram.pages()];
    let minor = kind == KernelFault::ShmemMinor;
    if minor {
        touch(&mut ram, threads, &mut stored, &touches(mib, 1, false))?;
    }
    Ok(Cost::of(&touch(&mut ram, threads, &mut stored, &touches(mib, LONE_STRIDE, minor))?, 0.0))
}

fn touches(mib: usize, stride: usize, drop_entries: bool) -> TouchArgs {
    TouchArgs {
        from_mib: 0,
        mib,
        stride,
        access: Access::Store,
        whole: false,
        in_order: stride == 1,
        drop_entries,
        repeat: 1,
    }
}

/// Latency of loads from pages in swap, on whatever swap is on.
///
/// In a cgroup, because only its reclaim also empties the swap cache: a page that is still there
/// comes back without a read.
///
/// # Errors
/// Not root, no memory controller.
pub fn swap_in(mib: usize, stride: usize, threads: usize) -> Result<Cost> {
    let options = ["--mib", &mib.to_string(), "--no-huge", "--threads", &threads.to_string()];
    let mut limited = LimitedToy::start(&options, mib as u64 * 2)?;
    limited.toy.map()?;
    limited.toy.touch(&format!("--mib {mib} --in-order --whole"))?;
    limited.cgroup.reclaim_down_to((mib as u64) << 16)?;
    let touched = limited.toy.touch(&format!("--mib {mib} --stride {stride} --access load"))?;
    Ok(Cost::of(&touched, 0.0))
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
    /// MINOR, answered for the whole chunk around it.
    ContinueChunk,
    /// A write to a protected page, answered with a copy of 4 KiB and the end of the protection.
    CopyAndUnprotect,
}

impl Answer {
    fn resolution(self) -> Resolution {
        match self {
            Self::ZeroPage => Resolution::ZeroPage,
            Self::Copy => Resolution::Copy,
            Self::Continue => Resolution::Continue,
            Self::ContinueChunk => Resolution::ContinueChunk,
            Self::CopyAndUnprotect => Resolution::CopyAndUnprotect,
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

/// Touches pages of `mib` MiB in random order, each answered by a handler in another process, as
/// the daemon is.
///
/// # Errors
/// No permission for userfaultfd.
pub fn bare_userfaultfd(
    answer: Answer,
    placement: Placement,
    order: Order,
    mib: usize,
    threads: usize,
) -> Result<Cost> {
    // On a thread of its own, so that a CPU pinned here does not outlive the measurement.
    std::thread::scope(|scope| match scope.spawn(|| measure_bare(answer, placement, order, mib, threads)).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

fn measure_bare(answer: Answer, placement: Placement, order: Order, mib: usize, threads: usize) -> Result<Cost> {
    const CHUNK_PAGES: usize = CHUNK_BYTES as usize / PAGE_BYTES;
    // A chunk more for each thread's part, so that parts stay aligned: the last one's fault tells the handler to end.
    let source = RamSource::Shmem((mib << 20) + threads * CHUNK_BYTES as usize);
    let mut ram = Ram::map(source, HugePages::Refuse).context("map memory")?;
    let last = ram.pages() - CHUNK_PAGES;
    let mut stored = vec![0; ram.pages()];
    let minor = matches!(answer, Answer::Continue | Answer::ContinueChunk);
    if minor || answer == Answer::CopyAndUnprotect {
        let all = (ram.pages() * PAGE_BYTES) >> 20;
        touch(&mut ram, threads, &mut stored, &touches(all, 1, false))?;
    }
    if minor {
        ram.advise(last, CHUNK_PAGES, Advice::Drop).context("drop page-table entries")?;
    }
    let faults = FaultLoop::register(&ram, answer.resolution())
        .context("register with userfaultfd (root or access to /dev/userfaultfd is needed)")?;
    let stop_at = ram.address() + (last * PAGE_BYTES) as u64;
    let mut command = Command::new(toy_program()?);
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
    let (stride, in_order) = if order == Order::Sweep { (1, true) } else { (LONE_STRIDE, false) };
    let touched = touch(&mut ram, threads, &mut stored, &TouchArgs { in_order, ..touches(mib, stride, minor) });
    let handler_cpu_s = cpu_s_of(handler.id());
    ram.split(1)[0].store(last, 0, 1);
    let status = handler.wait().context("wait for the handler")?;
    if !status.success() {
        bail!("the userfaultfd handler ended with {status}");
    }
    Ok(Cost::of(&touched?, handler_cpu_s?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_faults_take_time() {
        for kind in [KernelFault::AnonymousZero, KernelFault::ShmemZero, KernelFault::ShmemMinor] {
            let cost = kernel_fault(kind, 1, 1).unwrap();
            assert!(cost.p50_us > 0.05 && cost.p50_us < 1000.0, "{kind:?}: {cost:?}");
        }
    }
}
