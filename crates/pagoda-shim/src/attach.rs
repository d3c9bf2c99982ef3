//! Handing a VM's memory to the daemon.
//!
//! Makes what [`crate::attachment`] owns.
//! Order: all regions mapped, MADV_DONTFORK, Prepare, userfaultfds made, Hello, Welcome; only then the VMM's mmap
//! returns. UFFDIO_API and UFFDIO_REGISTER are the daemon's, on its end of the same files.
//! If the daemon cannot be reached or refuses, the process ends: a VM must not run unmanaged.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use pagoda_abi::attach::{
    FLAG_HUGE, List, PREPARED_DEVICE, PREPARED_LENDING, PREPARED_SHARING, PREPARED_TEMPLATE, Packet, Region, Shard,
};
use pagoda_abi::shared::{SHARED_MAGIC, Shared};
use pagoda_abi::{REGION_ALIGN, REGIONS_MAX, UFFDS_MAX};

use crate::attachment::{Attachment, attachment, hello, keep, receive_patiently};
use crate::config::{Config, duplicate};
use crate::link::{self, Broken, Fds};
use crate::say::give_up;
use crate::{agent, borrow, clock, end, folios, foreign, ram, real};

/// How long the daemon may be unreachable when a VM starts; longer than its own restart takes.
const REACH_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two attempts: connect(2) to an absent socket costs microseconds.
const REACH_PAUSE: Duration = Duration::from_millis(20);
/// `USERFAULTFD_IOC_NEW` of `linux/userfaultfd.h`: `_IO(0xAA, 0)`.
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;

/// A connection, and what was asked on it.
pub struct Reached<T> {
    pub link: c_int,
    pub value: T,
}

/// Connects to the daemon and asks it something, again until it has answered; ends the process if nobody answers.
pub fn reach<T>(address: &libc::sockaddr_un, mut ask: impl FnMut(c_int) -> Result<T, Broken>) -> Reached<T> {
    let deadline = Instant::now() + REACH_TIMEOUT;
    loop {
        let attempt = link::connect(address).and_then(|link| match ask(link) {
            Ok(value) => Ok(Reached { link, value }),
            Err(broken) => {
                link::close(link);
                Err(broken)
            }
        });
        match attempt {
            Ok(reached) => return reached,
            Err(Broken::Nonsense(error)) => give_up(format_args!("attach: {error}")),
            Err(Broken::Gone) if Instant::now() < deadline => std::thread::sleep(REACH_PAUSE),
            Err(Broken::Gone) => give_up(format_args!(
                "attach: no daemon answers at the attach socket; start pagodad, then `pagoda run` again"
            )),
        }
    }
}

/// All regions are mapped: hand them over, and return when the daemon has taken them.
pub fn attach(config: &'static Config) {
    let mut flags = 0;
    let link = reach(&config.name.address, |link| introduce(link, config, &mut flags)).link;
    if flags & FLAG_HUGE != 0 {
        folios::allow();
    }
    let agent = duplicate(link).unwrap_or_else(|| no_descriptor());
    link::close(link);
    agent::start(agent);
}

/// Prepare to Welcome on a new connection.
fn introduce(link: c_int, config: &'static Config, flags: &mut u32) -> Result<(), Broken> {
    let attachment = match attachment() {
        // The daemon went away between Hello and Welcome; what was made for it serves the next one too.
        Some(attachment) => attachment,
        None => {
            link::send(link, &Packet::Prepare { token: config.name.token }, &[])?;
            let attachment = make(config, prepared(link, flags)?);
            keep(attachment)
        }
    };
    *flags |= hello(link, attachment)?.unwrap_or_else(|text| give_up(format_args!("attach refused: {text}")));
    Ok(())
}

/// What Prepared says and carries.
struct Prepared {
    /// How many userfaultfds the VMM is to make.
    uffds: usize,
    /// The daemon's device that makes them; `None`: it has given none.
    device: Option<c_int>,
    shared: c_int,
    /// What the VM borrows of its snapshot, to be mapped and kept.
    template: Option<c_int>,
    /// Table and pool of shared pages, to be kept.
    kept: Option<[c_int; 2]>,
}

fn prepared(link: c_int, flags: &mut u32) -> Result<Prepared, Broken> {
    let (packet, fds) = receive_patiently(link)?;
    match (packet, fds.as_slice()) {
        (Packet::Prepared { uffds, flags: given }, [shared, rest @ ..]) => {
            *flags |= given;
            if given & PREPARED_LENDING != 0 {
                foreign::allow_lending();
            }
            let device = rest.first().copied().filter(|_| given & PREPARED_DEVICE != 0);
            let next = usize::from(device.is_some());
            let template = rest.get(next).copied().filter(|_| given & PREPARED_TEMPLATE != 0);
            let kept = rest.last_chunk().copied().filter(|_| given & PREPARED_SHARING != 0);
            Ok(Prepared { uffds: uffds as usize, device, shared: *shared, template, kept })
        }
        (Packet::Refused { text }, _) => give_up(format_args!("attach refused: {}", text.as_str())),
        _ => Err(Broken::Nonsense(pagoda_abi::attach::DecodeError::Value)),
    }
}

/// Makes everything a Hello hands over.
fn make(config: &Config, prepared: Prepared) -> Attachment {
    let Prepared { uffds, device, shared, template, kept } = prepared;
    let mut regions: List<Region, REGIONS_MAX> = List::default();
    let mut fds = Fds::default();
    for (index, file) in config.ram().iter().enumerate() {
        let Some((addr, len)) = ram::mapping(index) else {
            give_up(format_args!("attach: RAM was unmapped while it was being attached"));
        };
        regions.push(Region { addr: addr as u64, len: len as u64 });
        fds.push(file.fd);
    }
    let shards = plan_shards(regions.as_slice(), uffds);
    for _ in shards.as_slice() {
        let Some(uffd) = make_uffd(device) else {
            if [libc::EMFILE, libc::ENFILE].contains(&link::errno()) {
                no_descriptor();
            }
            no_permission();
        };
        fds.push(duplicate_and_close(uffd).unwrap_or_else(|| no_descriptor()));
    }
    if let Some(device) = device {
        link::close(device);
    }
    let shared = duplicate_and_close(shared).unwrap_or_else(|| no_descriptor());
    map_shared(shared);
    end::watch();
    fds.push(shared);
    for file in kept.into_iter().flatten() {
        fds.push(duplicate_and_close(file).unwrap_or_else(|| no_descriptor()));
    }
    if let Some(template) = template {
        let template = duplicate_and_close(template).unwrap_or_else(|| no_descriptor());
        borrow::map(config, template);
        fds.push(template);
    }
    let pid = std::process::id();
    Attachment { hello: Packet::Hello { token: config.name.token, pid, regions, shards }, fds }
}

/// Divides the regions among about `uffds` userfaultfds: one at least for each region, of about equal size, on
/// multiples of [`REGION_ALIGN`] so that no huge page spans two.
fn plan_shards(regions: &[Region], uffds: usize) -> List<Shard, UFFDS_MAX> {
    let total: u64 = regions.iter().map(|region| region.len).sum();
    let uffds = uffds.clamp(regions.len(), UFFDS_MAX);
    // Each region's last shard may be short, so this many of full size keep the sum within `uffds`.
    let full = (uffds - regions.len() + 1) as u64;
    let size = total.div_ceil(full).next_multiple_of(REGION_ALIGN);
    let mut shards = List::default();
    for (index, region) in regions.iter().enumerate() {
        let mut offset = 0;
        while offset < region.len {
            let len = size.min(region.len - offset);
            shards.push(Shard { region: index as u32, offset, len });
            offset += len;
        }
    }
    shards
}

pub fn no_permission() -> ! {
    give_up(format_args!(
        "attach: no permission for userfaultfd: let the VM's user open /dev/userfaultfd, or give it CAP_SYS_PTRACE, or set \
         vm.unprivileged_userfaultfd=1"
    ))
}

/// A device of the host's that makes userfaultfds, if this user may open it.
pub fn open_device() -> Option<c_int> {
    // SAFETY: open(2) with a NUL-terminated path.
    let own = unsafe { real::open(c"/dev/userfaultfd".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC, 0) };
    (own >= 0).then_some(own)
}

/// By the daemon's device, else our own, else the system call: which of them is allowed is the host's choice.
pub fn make_uffd(device: Option<c_int>) -> Option<c_int> {
    const FLAGS: c_int = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: USERFAULTFD_IOC_NEW takes its flags by value and touches no memory; on any other fd it is an error.
    let from = |device: c_int| unsafe { real::ioctl(device, USERFAULTFD_IOC_NEW, FLAGS as usize as *mut _) };
    let made = device.map(from).filter(|fd| *fd >= 0);
    let made = made.or_else(|| {
        let own = open_device()?;
        let made = Some(from(own)).filter(|fd| *fd >= 0);
        link::close(own);
        made
    });
    made.or_else(|| {
        // SAFETY: userfaultfd(2) takes its flags by value and touches no memory.
        let fd = unsafe { real::syscall(libc::SYS_userfaultfd, FLAGS.into(), 0, 0, 0, 0, 0) };
        (fd >= 0).then_some(fd as c_int)
    })
}

fn no_descriptor() -> ! {
    give_up(format_args!("attach: no free file descriptor; raise the limit (ulimit -n)"))
}

fn duplicate_and_close(fd: c_int) -> Option<c_int> {
    let copy = duplicate(fd)?;
    link::close(fd);
    Some(copy)
}

/// Maps the memory that this process shares with the daemon.
pub fn map_shared(fd: c_int) {
    // SAFETY: a plain C structure: all zero bits are valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: fstat(2) fills the structure it is given.
    let fits = unsafe { libc::fstat(fd, &mut stat) } == 0 && stat.st_size as usize >= size_of::<Shared>();
    if !fits {
        give_up(format_args!("attach: the daemon's shared memory is too small; install matching pagoda packages"));
    }
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let mapping = unsafe {
        real::mmap(null_mut(), size_of::<Shared>(), libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd, 0)
    };
    if mapping == libc::MAP_FAILED {
        give_up(format_args!("attach: the shared memory cannot be mapped"));
    }
    let shared = mapping.cast::<Shared>();
    // SAFETY: mapped just now, page aligned and long enough; all fields are atomics.
    if unsafe { (*shared).magic.load(std::sync::atomic::Ordering::SeqCst) } != SHARED_MAGIC {
        give_up(format_args!("attach: the shared memory has another layout; install matching pagoda packages"));
    }
    // SAFETY: it is never unmapped.
    unsafe { clock::set_shared(shared) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn shards_cover_every_region_once_within_the_hint() {
        let table: [(&[u64], usize, usize); 7] = [
            (&[512], 4, 4),
            (&[512], 0, 1),
            (&[512], 1, 1),
            (&[2], 16, 1),
            (&[512, 512], 4, 4),
            (&[6, 1000], 8, 8),
            (&[512; REGIONS_MAX], UFFDS_MAX, UFFDS_MAX),
        ];
        for (sizes, hint, most) in table {
            let regions: Vec<Region> = sizes.iter().map(|mib| Region { addr: 0, len: mib * MIB }).collect();
            let shards = plan_shards(&regions, hint);
            let shards = shards.as_slice();
            assert!(shards.len() <= most, "{sizes:?} {hint}: {}", shards.len());
            for (index, region) in regions.iter().enumerate() {
                let mut end = 0;
                for shard in shards.iter().filter(|shard| shard.region as usize == index) {
                    assert_eq!(shard.offset, end);
                    assert!(shard.offset % REGION_ALIGN == 0 && shard.len > 0);
                    end += shard.len;
                }
                assert_eq!(end, region.len, "{sizes:?} {hint}");
            }
        }
    }
}
