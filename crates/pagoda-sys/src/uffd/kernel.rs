//! Kernel structures and numbers of userfaultfd (linux/userfaultfd.h), checked at compile time.
//!
//! A wrongly encoded number fails with EINVAL at best and does something else at worst, so sizes and numbers are
//! asserted against the values that the C header gives on x86-64 and AArch64.

use std::mem::size_of;

pub const API: u64 = 0xAA;

pub const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
pub const FEATURE_EVENT_REMAP: u64 = 1 << 2;
pub const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
pub const FEATURE_THREAD_ID: u64 = 1 << 8;
pub const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
pub const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;

pub const EVENT_PAGEFAULT: u8 = 0x12;
pub const EVENT_REMAP: u8 = 0x14;
pub const FAULT_WRITE: u64 = 1 << 0;
pub const FAULT_WP: u64 = 1 << 1;
pub const FAULT_MINOR: u64 = 1 << 2;

pub const REGISTER_MISSING: u64 = 1 << 0;
pub const REGISTER_WP: u64 = 1 << 1;
pub const REGISTER_MINOR: u64 = 1 << 2;

pub const COPY_WP: u64 = 1 << 1;
pub const CONTINUE_WP: u64 = 1 << 1;
pub const WRITEPROTECT_WP: u64 = 1 << 0;

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct UffdioApi {
    pub api: u64,
    pub features: u64,
    pub ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct UffdioRange {
    pub start: u64,
    pub len: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct UffdioRegister {
    pub range: UffdioRange,
    pub mode: u64,
    pub ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct UffdioCopy {
    pub dst: u64,
    pub src: u64,
    pub len: u64,
    pub mode: u64,
    pub copy: i64,
}

/// `uffdio_zeropage` and `uffdio_continue`: the same layout.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct UffdioFill {
    pub range: UffdioRange,
    pub mode: u64,
    pub done: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct UffdioWriteprotect {
    pub range: UffdioRange,
    pub mode: u64,
}

/// `uffd_msg`, with the union read as its page-fault member. The header packs it; these fields are aligned anyway.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct UffdMsg {
    pub event: u8,
    pub reserved1: u8,
    pub reserved2: u16,
    pub reserved3: u32,
    pub flags: u64,
    pub address: u64,
    pub ptid: u32,
    pub padding: u32,
}

const READ: u64 = 2;
const READ_WRITE: u64 = 3;

/// `_IOC(direction, 0xAA, number, size)` of asm-generic/ioctl.h.
const fn ioc(direction: u64, number: u64, size: usize) -> u64 {
    (direction << 30) | ((size as u64) << 16) | (0xAA << 8) | number
}

pub const USERFAULTFD_IOC_NEW: u64 = ioc(0, 0x00, 0);
pub const UFFDIO_API: u64 = ioc(READ_WRITE, 0x3F, size_of::<UffdioApi>());
pub const UFFDIO_REGISTER: u64 = ioc(READ_WRITE, 0x00, size_of::<UffdioRegister>());
/// The header's direction of this one and of WAKE is `_IOR`, although the kernel reads: part of the ABI.
pub const UFFDIO_UNREGISTER: u64 = ioc(READ, 0x01, size_of::<UffdioRange>());
pub const UFFDIO_WAKE: u64 = ioc(READ, 0x02, size_of::<UffdioRange>());
pub const UFFDIO_COPY: u64 = ioc(READ_WRITE, 0x03, size_of::<UffdioCopy>());
pub const UFFDIO_ZEROPAGE: u64 = ioc(READ_WRITE, 0x04, size_of::<UffdioFill>());
pub const UFFDIO_WRITEPROTECT: u64 = ioc(READ_WRITE, 0x06, size_of::<UffdioWriteprotect>());
pub const UFFDIO_CONTINUE: u64 = ioc(READ_WRITE, 0x07, size_of::<UffdioFill>());

// What a C compiler prints for the header of Linux 6.18.
const _: () = assert!(size_of::<UffdMsg>() == 32 && std::mem::offset_of!(UffdMsg, address) == 16);
const _: () = assert!(std::mem::offset_of!(UffdMsg, ptid) == 24);
const _: () = assert!(USERFAULTFD_IOC_NEW == 0xAA00);
const _: () = assert!(UFFDIO_API == 0xC018_AA3F);
const _: () = assert!(UFFDIO_REGISTER == 0xC020_AA00);
const _: () = assert!(UFFDIO_UNREGISTER == 0x8010_AA01);
const _: () = assert!(UFFDIO_WAKE == 0x8010_AA02);
const _: () = assert!(UFFDIO_COPY == 0xC028_AA03);
const _: () = assert!(UFFDIO_ZEROPAGE == 0xC020_AA04);
const _: () = assert!(UFFDIO_WRITEPROTECT == 0xC018_AA06);
const _: () = assert!(UFFDIO_CONTINUE == 0xC020_AA07);
