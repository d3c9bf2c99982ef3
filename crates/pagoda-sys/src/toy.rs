//! What the toy VMM and the peers of the benches need from the kernel, behind a safe API.
//!
//! Nothing in here is on the daemon's path. The toy VMM is a plain process that maps RAM and
//! verifies it at native speed; the peers are the kernel's own swap, the disk by itself and a
//! userfaultfd loop without Pagoda.

pub mod disk;
#[cfg(all(feature = "kvm", target_arch = "x86_64"))]
pub mod kvm;
pub mod process;
pub mod ram;
pub mod skip;
pub mod uffd_loop;
