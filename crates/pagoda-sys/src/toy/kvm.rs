//! A test VMM on KVM: its guest writes and verifies memory, so that the pages are faulted in by KVM itself.
//!
//! The guest's code and the walk are in [`program`]. While vCPUs run, the host touches nothing of the RAM, for such a
//! touch would bring the page back before the guest comes to it. [`Machine::run`] gives the RAM back for a last look
//! from user space once all vCPUs have stopped. Where KVM cannot run the guest, [`probe`] says what stopped it.

pub mod program;

use std::fmt::Write as _;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::Duration;

use kvm_bindings::{
    CpuId, KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_sregs, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::ram::{HugePages, PAGE_BYTES, Ram, RamSource};
use program::{FIRST_WALKED_PAGE, POSITIONS_PER_REPORT, REPORT_ADDRESS, WRONG_ADDRESS, Walk};

/// The page tables of the guest end at 4 GiB and `REPORT_ADDRESS` must be above all RAM.
pub const RAM_BYTES_MAX: usize = 3 << 30;
/// As many threads as a test of a small machine starts; KVM itself would take hundreds.
pub const VCPUS_MAX: usize = 8;
/// Wrong pages whose numbers are kept.
const WRONG_PAGES_KEPT: usize = 16;
/// KVM's example addresses (Documentation/virt/kvm/api.rst): three pages and one, above all RAM. Only Intel processors
/// without "unrestricted guest" use them.
const TSS_ADDRESS: usize = 0xfffb_d000;
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

/// Why KVM does not run this guest.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// No `/dev/kvm`, or no permission.
    #[error("open /dev/kvm: {0}")]
    Open(kvm_ioctls::Error),
    /// The kernel's KVM has another API version.
    #[error("KVM has API version {0}, not {KVM_API_VERSION}")]
    ApiVersion(i32),
    /// An ioctl of KVM failed.
    #[error("{call}: {source}")]
    Call {
        /// The ioctl has this name.
        call: &'static str,
        /// The ioctl failed with this error.
        source: kvm_ioctls::Error,
    },
    /// The RAM does not fit the guest.
    #[error("{bytes} bytes of RAM: the guest takes at least {min} for its vCPUs and at most {RAM_BYTES_MAX}")]
    RamSize {
        /// The caller gave so many bytes of RAM.
        bytes: usize,
        /// So many vCPUs need at least this.
        min: usize,
    },
    /// Too few or too many vCPUs.
    #[error("{0} vCPUs: give 1 to {VCPUS_MAX}")]
    VcpuCount(usize),
    /// The guest did what it never does.
    #[error("vCPU {vcpu} left the guest by {exit}")]
    Exit {
        /// The vCPU has this number.
        vcpu: usize,
        /// KVM gave this reason for the exit.
        exit: String,
    },
    /// A thread of the VMM panicked.
    #[error("the thread of vCPU {0} panicked")]
    Panicked(usize),
    /// The probe's guest and its memory do not agree, without any pager.
    #[error("the guest found wrong pages in plain memory")]
    Wrong,
    /// The probe's guest is stuck.
    #[error("the guest reported nothing for {} s", .0.as_secs())]
    Silent(Duration),
}

/// What a vCPU found.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The vCPU has come so far in its walk.
    pub walk: Walk,
    /// Times that a page was not as it was left.
    pub wrong: u64,
    /// The first wrong pages have these numbers.
    pub wrong_pages: Vec<u64>,
}

/// A VM with its vCPUs, ready to run once.
#[derive(Debug)]
pub struct Machine<'ram> {
    // Dropped first: they belong to the VM.
    vcpus: Vec<(VcpuFd, Walk)>,
    _vm: VmFd,
    /// The guest owns the RAM until the machine is dropped.
    ram: PhantomData<&'ram mut Ram>,
}

impl<'ram> Machine<'ram> {
    /// Loads the program and makes the VM; all of `ram` must be zeros.
    ///
    /// # Errors
    /// KVM refuses something, or the RAM does not fit.
    pub fn new(ram: &'ram mut Ram, vcpu_count: usize) -> Result<Self, KvmError> {
        if vcpu_count == 0 || vcpu_count > VCPUS_MAX {
            return Err(KvmError::VcpuCount(vcpu_count));
        }
        let bytes = ram.pages() * PAGE_BYTES;
        let min = (FIRST_WALKED_PAGE + vcpu_count * POSITIONS_PER_REPORT as usize) * PAGE_BYTES;
        if bytes < min || bytes > RAM_BYTES_MAX {
            return Err(KvmError::RamSize { bytes, min });
        }
        let kvm = Kvm::new().map_err(KvmError::Open)?;
        if kvm.get_api_version() != KVM_API_VERSION.cast_signed() {
            return Err(KvmError::ApiVersion(kvm.get_api_version()));
        }
        let vm = kvm.create_vm().map_err(called("KVM_CREATE_VM"))?;
        vm.set_tss_address(TSS_ADDRESS).map_err(called("KVM_SET_TSS_ADDR"))?;
        vm.set_identity_map_address(IDENTITY_MAP_ADDRESS).map_err(called("KVM_SET_IDENTITY_MAP_ADDR"))?;
        ram.split(1).iter_mut().for_each(program::load);
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: bytes as u64,
            userspace_addr: ram.address(),
        };
        // SAFETY: KVM_SET_USER_MEMORY_REGION lets the guest read and write the range, which must stay mapped and be
        // nobody else's while the guest runs. It is the mapping of `ram`, all of it, page-aligned. It runs only inside
        // `run`, which needs `self`, and `self` borrows `ram` mutably: no Rust access to the RAM meanwhile, no unmapping.
        unsafe { vm.set_user_memory_region(region) }.map_err(called("KVM_SET_USER_MEMORY_REGION"))?;
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(called("KVM_GET_SUPPORTED_CPUID"))?;
        let walked = ram.pages() - FIRST_WALKED_PAGE;
        let vcpus = (0..vcpu_count).map(|index| {
            let first = walked * index / vcpu_count;
            let end = walked * (index + 1) / vcpu_count;
            let walk = Walk::new(FIRST_WALKED_PAGE + first, end - first);
            Ok((new_vcpu(&vm, index as u64, &cpuid, &walk)?, walk))
        });
        Ok(Self { vcpus: vcpus.collect::<Result<_, KvmError>>()?, _vm: vm, ram: PhantomData })
    }

    /// Runs all vCPUs, each on a thread of its own, until `go_on` breaks; it is asked at every report.
    ///
    /// # Errors
    /// A vCPU left the guest in an unexpected way. The others stop at their next report.
    pub fn run(self, go_on: impl Fn(&Walk) -> ControlFlow<()> + Sync) -> Result<Vec<Outcome>, KvmError> {
        let failed = &AtomicBool::new(false);
        let go_on = &|walk: &Walk| if failed.load(Relaxed) { ControlFlow::Break(()) } else { go_on(walk) };
        std::thread::scope(|scope| {
            let start = |(index, (vcpu, walk))| {
                scope.spawn(move || run_vcpu(index, vcpu, walk, go_on).inspect_err(|_| failed.store(true, Relaxed)))
            };
            let threads: Vec<_> = self.vcpus.into_iter().enumerate().map(start).collect();
            let ends = threads.into_iter().enumerate();
            ends.map(|(index, thread)| thread.join().unwrap_or(Err(KvmError::Panicked(index)))).collect()
        })
    }
}

fn called(call: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
    move |source| KvmError::Call { call, source }
}

/// A vCPU that is about to run the program in 64-bit mode.
///
/// Ring 3, because a KVM that runs inside of another hypervisor without nested paging may emulate ring 0 instruction by
/// instruction and runs ring 3 on the processor (measured: a thousandfold, Linux 6.18).
fn new_vcpu(vm: &VmFd, index: u64, cpuid: &CpuId, walk: &Walk) -> Result<VcpuFd, KvmError> {
    // Intel SDM volume 3, 2.2 and 2.5.
    const CR0_PE_MP_ET_NE_WP_AM_PG: u64 = 0x8005_0033;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_SCE_LME_LMA_NXE: u64 = 0xd01;
    const RFLAGS_ALWAYS_SET: u64 = 2;
    let vcpu = vm.create_vcpu(index).map_err(called("KVM_CREATE_VCPU"))?;
    vcpu.set_cpuid2(cpuid).map_err(called("KVM_SET_CPUID2"))?;
    let data = segment(0x2b, 3, 0);
    let reset = vcpu.get_sregs().map_err(called("KVM_GET_SREGS"))?;
    let sregs = kvm_sregs {
        cs: segment(0x33, 11, 1),
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        cr0: CR0_PE_MP_ET_NE_WP_AM_PG,
        cr3: (program::TOP_TABLE_PAGE * PAGE_BYTES) as u64,
        cr4: CR4_PAE,
        efer: EFER_SCE_LME_LMA_NXE,
        ..reset
    };
    vcpu.set_sregs(&sregs).map_err(called("KVM_SET_SREGS"))?;
    let regs = kvm_regs {
        rip: (program::CODE_PAGE * PAGE_BYTES) as u64,
        rflags: RFLAGS_ALWAYS_SET,
        rsp: walk.mask(),
        r8: walk.first_page as u64,
        r9: walk.pages as u64,
        r11: REPORT_ADDRESS,
        ..kvm_regs::default()
    };
    vcpu.set_regs(&regs).map_err(called("KVM_SET_REGS"))?;
    Ok(vcpu)
}

/// A flat segment of ring 3; `long` is 1 for 64-bit code.
fn segment(selector: u16, type_: u8, long: u8) -> kvm_segment {
    kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl: 3,
        db: 1 - long,
        s: 1,
        l: long,
        g: 1,
        ..kvm_segment::default()
    }
}

fn run_vcpu(
    index: usize,
    mut vcpu: VcpuFd,
    walk: Walk,
    go_on: &(impl Fn(&Walk) -> ControlFlow<()> + Sync),
) -> Result<Outcome, KvmError> {
    let mut outcome = Outcome { walk, wrong: 0, wrong_pages: Vec::new() };
    loop {
        let exit = match vcpu.run() {
            Ok(VcpuExit::MmioWrite(REPORT_ADDRESS, data)) => {
                let positions = le_u64(data);
                if outcome.walk.report(positions) {
                    if go_on(&outcome.walk).is_break() {
                        return Ok(outcome);
                    }
                    continue;
                }
                format!("a report of {positions} positions after {:?}", outcome.walk)
            }
            Ok(VcpuExit::MmioWrite(WRONG_ADDRESS, data)) => {
                outcome.wrong += 1;
                if outcome.wrong_pages.len() < WRONG_PAGES_KEPT {
                    outcome.wrong_pages.push(le_u64(data));
                }
                continue;
            }
            // A signal, or KVM wants to be asked again (api.rst, KVM_RUN).
            Err(error) if [libc::EINTR, libc::EAGAIN].contains(&error.errno()) => continue,
            Ok(VcpuExit::Intr) => continue,
            Ok(other) => format!("{other:?}"),
            Err(error) => format!("KVM_RUN: {error}"),
        };
        return Err(KvmError::Exit { vcpu: index, exit: exit + &where_it_was(&mut vcpu) });
    }
}

fn le_u64(data: &[u8]) -> u64 {
    data.iter().rev().fold(0, |value, byte| (value << 8) | u64::from(*byte))
}

/// For the message about an unexpected exit.
fn where_it_was(vcpu: &mut VcpuFd) -> String {
    let mut text = format!(" (exit reason {}", vcpu.get_kvm_run().exit_reason);
    if let (Ok(regs), Ok(sregs)) = (vcpu.get_regs(), vcpu.get_sregs()) {
        // Writing to a String cannot fail.
        let _ = write!(text, ", rip {:#x}, page {:#x}, cr2 {:#x}", regs.rip, regs.rbx, sregs.cr2);
    }
    text + ")"
}

/// Runs the guest for a moment on RAM of its own, to see whether this machine's KVM can.
///
/// # Errors
/// Why it cannot. After [`KvmError::Silent`] a thread of this process is stuck until the process ends.
pub fn probe(vcpu_count: usize) -> Result<(), KvmError> {
    /// Two passes, so that it has compared what it wrote; milliseconds where the processor runs the guest, a second
    /// where every instruction is emulated.
    const PASSES: u64 = 2;
    const ANSWER_MAX: Duration = Duration::from_secs(20);
    let (answer, answered) = mpsc::channel();
    std::thread::spawn(move || {
        let pages = FIRST_WALKED_PAGE + VCPUS_MAX * POSITIONS_PER_REPORT as usize;
        let attempt = || -> Result<(), KvmError> {
            let ram = Ram::map(RamSource::Anonymous(pages * PAGE_BYTES), HugePages::Refuse);
            let mut ram = ram.map_err(|error| KvmError::Call {
                call: "mmap",
                source: kvm_ioctls::Error::new(error.raw_os_error().unwrap_or(libc::ENOMEM)),
            })?;
            let until =
                |walk: &Walk| if walk.passes < PASSES { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
            let outcomes = Machine::new(&mut ram, vcpu_count)?.run(until)?;
            let ram = &ram.split(1)[0];
            let right = |outcome: &Outcome| outcome.wrong == 0 && outcome.walk.wrong_pages(ram).is_empty();
            if outcomes.iter().all(right) { Ok(()) } else { Err(KvmError::Wrong) }
        };
        // The receiver is gone only after its time is over.
        let _ = answer.send(attempt());
    });
    answered.recv_timeout(ANSWER_MAX).unwrap_or(Err(KvmError::Silent(ANSWER_MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: usize = FIRST_WALKED_PAGE + 500;

    /// Runs two vCPUs for so many passes over RAM in which one word of `damaged` was changed before.
    fn run(damaged: Option<usize>, passes: u64) -> Option<(u64, usize)> {
        if let Err(error) = probe(2) {
            crate::toy::skip::skipped(&format!("KVM does not run the guest here: {error}"));
            return None;
        }
        let mut ram = Ram::map(RamSource::Anonymous(PAGES * PAGE_BYTES), HugePages::Refuse).unwrap();
        if let Some(page) = damaged {
            ram.split(1)[0].store(page, 511, 1);
        }
        let go_on = |walk: &Walk| if walk.passes < passes { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
        let outcomes = Machine::new(&mut ram, 2).unwrap().run(go_on).unwrap();
        let in_guest = outcomes.iter().map(|outcome| outcome.wrong).sum();
        let at_end = outcomes.iter().map(|outcome| outcome.walk.wrong_pages(&ram.split(1)[0]).len()).sum();
        Some((in_guest, at_end))
    }

    #[test]
    fn the_guest_and_user_space_agree_in_every_order() {
        for passes in 1..=program::ORDERS.len() as u64 + 1 {
            let found = run(None, passes);
            assert!(found.is_none_or(|wrong| wrong == (0, 0)), "{passes} passes: {found:?}");
        }
    }

    #[test]
    fn the_guest_notices_a_changed_word() {
        let found = run(Some(FIRST_WALKED_PAGE + 300), 2);
        assert!(found.is_none_or(|wrong| wrong == (1, 0)), "{found:?}");
    }

    #[test]
    fn ram_that_does_not_fit_is_refused() {
        let mut small = Ram::map(RamSource::Anonymous(FIRST_WALKED_PAGE * PAGE_BYTES), HugePages::Refuse).unwrap();
        assert!(matches!(Machine::new(&mut small, 1), Err(KvmError::RamSize { .. })));
        assert!(matches!(Machine::new(&mut small, 0), Err(KvmError::VcpuCount(0))));
    }
}
