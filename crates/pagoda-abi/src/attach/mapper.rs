//! What a mapper maps of a VM's RAM.

/// Mappings of one mapper: vhost-user has at most 32 parts of memory, and a table of them is replaced by the next.
pub const MAPS_MAX: usize = 64;

/// A RAM file, by which a mapper knows it again whatever descriptor it comes by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LentFile {
    /// The file is on the device of this number.
    pub dev: u64,
    /// The file has this inode on its device.
    pub ino: u64,
    /// The file has so many bytes.
    pub len: u64,
}

/// A part of a region as a mapper has mapped it: whole pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LentMap {
    /// Index of the region.
    pub region: u32,
    /// First byte, from the region's start.
    pub offset: u64,
    /// The mapping has so many bytes.
    pub len: u64,
    /// The mapping begins at this address of the mapper.
    pub addr: u64,
}
