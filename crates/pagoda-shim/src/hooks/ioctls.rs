//! ioctl(2): what each request may do with guest RAM.
//!
//! A request that is known to copy, or not to name memory, passes. One that does DMA during the call is on the clock. Any other
//! might keep pages for later, so it is reported and the VM's memory stays. An ioctl(2)'s size field differs between
//! kernels, so a request is known by its type and number (Documentation/userspace-api/ioctl/ioctl-number.rst).

use std::ffi::{c_int, c_ulong, c_void};
use std::fs::File;
use std::io::Read;

use super::hook;
use crate::clock::sync::timed;
use crate::config::config;
use crate::say::say;
use crate::{foreign, ram, real};
use pagoda_abi::attach::ForeignReason;

/// What a request may do with RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It copies, or names no memory.
    Copies,
    /// It may do DMA, all of it before it returns. Which memory it names is not looked at.
    Dma,
    /// It gives memory away for longer.
    Keeps(ForeignReason),
    /// vhost-net transmits for its guest; zero-copy is an option of the module.
    VhostNet,
    /// The request is not on the list.
    Unknown,
}

const fn keeps_mapping() -> Effect {
    Effect::Keeps(ForeignReason::DmaMapped)
}

/// The list, by type and number. A type's first line that fits counts.
pub fn effect(request: c_ulong) -> Effect {
    use Effect::{Copies, Dma, Keeps, Unknown, VhostNet};
    match ((request >> 8) as u8, request as u8) {
        // linux/kvm.h. KVM maps guest pages under MMU notifiers, so a page that leaves is unmapped first. _ENCRYPT_OP and
        // _REG_REGION pin encrypted guests' RAM.
        (0xae, 0xba | 0xbb) => keeps_mapping(),
        (0xae, _) => Copies,
        // linux/vfio.h: VFIO_IOMMU_MAP_DMA. linux/iommufd.h: IOMMU_IOAS_MAP, _COPY and _MAP_FILE.
        (b';', 0x71 | 0x83 | 0x85 | 0x8f) => keeps_mapping(),
        // linux/vfio.h: groups, devices, their interrupts and regions; unmapping.
        (b';', 0x64..=0x70 | 0x72) => Copies,
        // linux/vhost.h: owner, memory table, logs, rings, workers, features: vhost's threads copy through the VMM's page tables.
        (0xaf, 0x00..=0x16 | 0x20..=0x26 | 0x83..=0x85) => Copies,
        (0xaf, 0x30) => VhostNet,
        // VHOST_SCSI_SET_ENDPOINT: the kernel then does direct I/O on RAM by itself.
        (0xaf, 0x40) => Keeps(ForeignReason::UntrackedIo),
        (0xaf, 0x41..=0x44) => Copies,
        // linux/vhost.h: vhost-vsock copies through the VMM's page tables, as drivers/vhost/vsock.c shows.
        (0xaf, 0x60 | 0x61) => Copies,
        // Everything of vDPA, which maps RAM by messages on its fd.
        (0xaf, 0x70..=0x82) => keeps_mapping(),
        // linux/vduse.h: VDUSE_IOTLB_REG_UMEM pins memory of the caller.
        (0x81, 0x18) => keeps_mapping(),
        // linux/udmabuf.h: UDMABUF_CREATE and _CREATE_LIST pin pages of a memfd.
        (b'u', 0x42 | 0x43) => keeps_mapping(),
        // rdma/rdma_user_ioctl_cmds.h: RDMA_VERBS_IOCTL, memory registration among others.
        (0x1b, 0x01) => keeps_mapping(),
        // linux/userfaultfd.h: what is filled and protected stays in the page tables, and nothing is pinned.
        (0xaa, _) => Copies,

        // scsi/sg.h: SG_IO maps the caller's pages. SG_SET_* and SG_GET_* do not.
        (0x22, 0x85) => Dma,
        (0x22, _) => Copies,
        // linux/cdrom.h and scsi/scsi_ioctl.h: CDROMREADRAW, CDROM_SEND_PACKET and others map the caller's pages.
        (0x53, _) => Dma,
        // linux/nvme_ioctl.h: passthrough of commands.
        (b'N', 0x40..=0x4f) => Dma,
        // linux/mmc/ioctl.h, and linux/mtio.h for tapes: through buffers of the kernel, or the caller's pages.
        (0xb3 | b'm', _) => Dma,

        // linux/fs.h: block devices (BLK*), files (FS_IOC_*, FIEMAP, FICLONE, fscrypt).
        (0x12, _) | (b'f', _) | (0x94, 0x09 | 0x0d | 0x36) | (b'X', _) | (0x15, _) => Copies,
        // linux/loop.h, linux/nbd.h, linux/dm-ioctl.h, linux/hdreg.h, linux/blkzoned.h (with 0x12), linux/fd.h.
        (b'L' | 0xab | 0xfd | 0x03 | 0x02, _) => Copies,
        // asm-generic/ioctls.h and linux/if_tun.h: terminals, FIO*, tun.
        (b'T', _) => Copies,
        // linux/sockios.h: what is asked of sockets and interfaces is copied.
        (0x89, _) => Copies,
        // linux/input.h, linux/uinput.h, linux/hidraw.h, linux/hiddev.h, linux/usbdevice_fs.h (URBs are copied to
        // buffers of the kernel; what it maps is its own memory).
        (b'E' | b'H' | b'U', _) => Copies,
        // linux/soundcard.h, sound/asound.h: samples are copied to buffers of the kernel, and from them.
        (b'A' | b'P' | b'M' | b'Q' | b'C', _) => Copies,
        // linux/watchdog.h, linux/rtc.h and linux/ppdev.h, linux/random.h, linux/vtpm_proxy.h, linux/perf_event.h.
        (b'W' | b'p' | b'R' | 0xa1 | b'$', _) => Copies,
        // linux/pidfd.h (0xff), linux/nsfs.h, linux/eventpoll.h.
        (0xff | 0xb7 | 0x8a, _) => Copies,
        // drm/drm.h: those of the core. Of a driver's own (0x40-0x9f) some pin memory by its address (USERPTR).
        (b'd', 0x00..=0x3f | 0xa0..=0xff) => Copies,
        _ => Unknown,
    }
}

/// Whether vhost-net sends without a copy. Only a "0" of the module's parameter is known to mean that it copies.
fn vhost_net_copies() -> bool {
    let mut value = [0u8; 1];
    let read =
        File::open("/sys/module/vhost_net/parameters/experimental_zcopytx").and_then(|mut file| file.read(&mut value));
    matches!(read, Ok(1)) && value == *b"0"
}

/// What the call needs before it is made: true when it is to be on the clock.
pub fn before(request: c_ulong, argument: *mut c_void) -> bool {
    if config().is_none() {
        return false;
    }
    match effect(request) {
        // A buffer in RAM may be read and written by a copy; that it is only that is what the list says.
        Effect::Copies => false,
        Effect::Dma => ram::is_mapped(),
        Effect::Keeps(reason) => {
            foreign::report_and_wait(reason);
            false
        }
        Effect::VhostNet => {
            if !vhost_net_copies() {
                foreign::report(ForeignReason::UntrackedIo);
            }
            false
        }
        Effect::Unknown => {
            if foreign::report(ForeignReason::UntrackedIo) {
                say(format_args!(
                    "ioctl {request:#x} is not known to leave guest memory alone, so this VM's memory is no longer \
                     paged out; please report the number and the device (argument {argument:p})"
                ));
            }
            true
        }
    }
}

hook! {
    /// Controls a device, perhaps one that is given RAM for DMA.
    fn ioctl | __ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
        let on_clock = before(request, argument);
        // SAFETY: the caller's call, passed on unchanged. An argument that was not given is not used by it.
        timed(on_clock, || unsafe { real::ioctl(fd, request, argument) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dma_is_told_from_everything_else() {
        let mapped = Effect::Keeps(ForeignReason::DmaMapped);
        let table = [
            (0x3b71, mapped),
            (0x3b72, Effect::Copies),
            (0x3b85, mapped),
            (0x3bfe, Effect::Unknown),
            (0x8004_af70, mapped),
            (0x4010_af03, Effect::Copies),
            (0x4008_af30, Effect::VhostNet),
            (0xae80, Effect::Copies),
            (0x8010_aebb, mapped),
            (0x40e8_af40, Effect::Keeps(ForeignReason::UntrackedIo)),
            (0x4018_7542, mapped),
            (0xaa00, Effect::Copies),
            // SG_IO, CDROM_SEND_PACKET and NVME_IOCTL_ADMIN_CMD map the caller's pages.
            (0x2285, Effect::Dma),
            (0x5393, Effect::Dma),
            (0xc048_4e41, Effect::Dma),
            // BLKGETSIZE64, TUNSETIFF, FIONREAD, SIOCGIFNAME, FS_IOC_GETFLAGS
            (0x8008_1272, Effect::Copies),
            (0x4004_54ca, Effect::Copies),
            (0x541b, Effect::Copies),
            (0x8910, Effect::Copies),
            (0x8008_6601, Effect::Copies),
            // DRM_IOCTL_VERSION copies, and DRM_IOCTL_I915_GEM_USERPTR is a driver's own.
            (0xc040_6400, Effect::Copies),
            (0xc018_6473, Effect::Unknown),
            (0xc008_9999, Effect::Unknown),
        ];
        for (request, expected) in table {
            assert_eq!(effect(request), expected, "{request:#x}");
        }
    }
}
