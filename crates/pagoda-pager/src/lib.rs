//! The engine of one VM: the loop around [`pagoda_core::fault::Machine`], and its tiers.
//!
//! * [`arriving`]: where the pages of a VM go that comes from another host.
//! * [`engine`]: the thread. It waits, turns what happened into events, and executes the machine's actions in order.
//! * [`space`]: where a page is in the VMM and in the RAM files.
//! * [`tier`]: where pages are that are not in DRAM: the swap file, an image, the host that the VM has moved from, other
//!   machines' memory, compressed memory, shared frames.
//! * [`share`]: share groups, whose VMs have equal pages in frames.
//! * [`handle`]: how the rest of the daemon talks to an engine.
//! * [`image`]: what both agree on about an image.
//! * [`loan`]: what the VM borrows of its snapshot's template.
//! * [`latency`]: how long faults took.
//! * [`mapper`]: other processes that map the VM's RAM.
//! * [`poll`]: waits for the end of a page-in without sleeping.
//!
//! One thread owns everything of a VM; those that read an image, or bring pages from another host, only hand it pages. If the
//! daemon dies between any two lines, the RAM files, the files of the tiers and the intents in shared memory say where every
//! page is (`recover`), and the shim holds all that the next daemon needs.

pub mod arriving;
pub mod engine;
mod follow;
pub mod handle;
pub mod image;
pub mod latency;
pub mod loan;
pub mod mapper;
pub mod poll;
mod recover;
pub mod share;
mod source;
pub mod space;
mod threads;
pub mod tier;
