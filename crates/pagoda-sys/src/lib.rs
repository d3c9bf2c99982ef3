//! Every system interface of the daemon, and all of its unsafe code, behind a safe API.
//!
//! | module | what it owns |
//! |---|---|
//! | [`uffd`] | userfaultfd: faults in, pages out |
//! | [`ram`] | a VM's RAM file and the daemon's own mapping of it |
//! | [`swapfile`] | a VM's private swap file: direct I/O, holes, lock |
//! | [`ring`] | io_uring: disk I/O into RAM and bounce buffers, polling |
//! | [`socket`] | attach socket, fd passing, the memory shared with the shim |
//! | [`pagemap`] | which pages of a process are mapped |
//! | [`part`] | a part of a file in memory that is sent from where it is |
//! | [`template`] | memory that clones of a snapshot read, and nobody can change |
//! | [`peek`] | what another process maps and holds |
//! | [`process`] | processes seen through /proc, wake-ups, limits |
//! | [`tcp`] | what TCP knows of a connection |
//! | [`mapper`] | what a program that maps RAM beside a VMM asks of the shim in it |
//! | [`host`] | kernel settings and the start-up self-test |
//! | `allocations` | what a thread allocates, for tests (feature `test-kit`) |
//! | `guest` | a VM's RAM as its VMM maps it, for tests (feature `test-kit`) |
//! | `toy` | what the toy VMM of tests and benches needs (feature `test-kit`) |
//!
//! Nothing here knows policy or the page table. The functions on the page path (`uffd`, `ring`, and `ram`'s views) do not
//! allocate.

#[cfg(feature = "test-kit")]
pub mod allocations;
#[cfg(any(test, feature = "test-kit"))]
pub mod guest;
pub mod host;
pub mod mapper;
pub mod pagemap;
pub mod part;
pub mod peek;
pub mod process;
pub mod ram;
pub mod ring;
pub mod socket;
pub mod swapfile;
pub mod tcp;
pub mod template;
#[cfg(test)]
mod testing;
#[cfg(feature = "test-kit")]
pub mod toy;
pub mod uffd;

pub use rustix::io::Errno;

/// Size of a page in bytes.
pub const PAGE_SIZE: usize = pagoda_abi::PAGE_SIZE;

/// The calling thread's errno, after a libc function failed.
fn errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
