//! What a mapper maps of a VM's RAM.

/// Mappings of one mapper: vhost-user has at most 32 parts of memory, and a table of them is replaced by the next.
pub const MAPS_MAX: usize = 64;

/// A RAM file, by which a mapper knows it again whatever descriptor it comes by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LentFile {
    /// Its device.
    pub dev: u64,
    /// Its inode.
    pub ino: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// A part of a region as a mapper has mapped it: whole pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LentMap {
    /// Index of the region.
    pub region: u32,
    /// First byte, from the region's start.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Address in the mapper.
    pub addr: u64,
}
