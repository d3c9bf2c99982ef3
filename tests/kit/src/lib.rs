//! What tests, benches and the demo share. Nothing here is part of the product.
//!
//! | module | what it does |
//! |---|---|
//! | [`workspace`] | finds the repository and the programs, and builds them |
//! | [`undo`], [`tuned`] | put back what is changed on this machine, whatever happens |
//! | [`daemon`] | starts a private daemon |
//! | [`pool`], [`link`] | start servers of a pool, exporters, and the network between them |
//! | [`image`], [`programs`] | make the images that guests boot, and the C programs that tests run |
//! | [`accel`], [`console`], [`qmp`] | find out whether KVM boots a guest; collect what a VM prints; ask QEMU |
//! | [`cpu`] | CPU time of processes and their children |
//! | [`wait`] | looks until something is so, with a deadline |
//! | [`toy`], [`stepped`] | the toy VMM; leads it through its steps from another process |
//! | [`peers`] | what Pagoda is compared with: the kernel's swap, disks, NBD, a bare userfaultfd loop, libvirt |
//! | [`results`] | results of benches: which there are, what they measure, their format |

pub mod accel;
pub mod console;
pub mod cpu;
pub mod daemon;
pub mod image;
pub mod link;
pub mod peers;
pub mod pool;
pub mod programs;
pub mod qmp;
pub mod results;
pub mod stepped;
pub mod toy;
pub mod tuned;
pub mod undo;
pub mod wait;
pub mod workspace;
