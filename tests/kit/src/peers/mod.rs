//! What Pagoda is compared with: the kernel's swap, the disk by itself, a bare userfaultfd loop, libvirt's own saving.

pub mod cgroup;
pub mod disk;
pub mod faults;
pub mod libvirt;
pub mod nbd_disk;
pub mod swap;
