//! Sharing of equal pages among the VMs of a group: the tier `shared`.
//!
//! A shared page is a hole in its VM's RAM file; its content is a **frame** of the group's pool, and the VM's table names
//! the frame. Pool and tables are memfds that the VMMs keep, so they outlive the daemon; reference counts and the index
//! of contents do not and are made again from the tables.
//!
//! * [`frames`]: the pool and the counts. A frame does not change from its publication until its count is 0.
//! * [`group`]: the index of contents, and who belongs to the group.
//! * [`table`]: one VM's table, and its part in the group.
//!
//! Engines meet here and nowhere else: counts are atomics, the index is a lock that looking for equal pages takes, a page
//! at a time, and a fault never. If the daemon dies, tables say what is shared; if a VMM dies, its references go with its
//! table. A VMM holds descriptors with which it can neither read nor write the pool and its table.

pub mod frames;
pub mod group;
pub mod table;

pub use group::{Group, Hint, Look};
pub use table::Member;

#[cfg(test)]
mod tests;
