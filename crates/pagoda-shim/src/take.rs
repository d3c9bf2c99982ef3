//! Taking the VM's RAM from the daemon, once, when its program first opens a path of RAM.
//!
//! The paths ([`pagoda_abi::RAM_PATH`]) name nothing: only the hooks of open(2) answer for them. So RAM is out of reach of
//! a program that lost the shim on its way here, however that came about.
//! Between taking RAM and attaching it nobody manages it. That takes a VMM no longer than its next mmap(2), and RAM cannot
//! be touched before the last of its files is mapped; a process that leaves it at that is ended by the [`watchdog`].

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pagoda_abi::attach::{List, Packet};
use pagoda_abi::{RAM_PATH, REGIONS_MAX};

use crate::attach::reach;
use crate::attachment::attachment;
use crate::config::{Config, Name, RamFile, Role, config, name, set_ram};
use crate::link::{self, Broken};
use crate::say::{give_up, say};
use crate::{agent, config};

/// How long RAM may be taken and not attached; QEMU needs milliseconds.
const ATTACH_MAX: Duration = Duration::from_secs(10);

/// The region that a path names.
pub fn region_of_path(path: &CStr) -> Option<usize> {
    let digits = path.to_bytes().strip_prefix(RAM_PATH.as_bytes())?;
    match digits {
        [digit @ b'0'..=b'9'] => Some(usize::from(digit - b'0')),
        _ => None,
    }
}

/// A new fd of a region's RAM file, or an errno. It is closed on exec, whatever was asked for: a program that this process
/// starts must not have RAM.
pub fn open(region: usize) -> Result<c_int, c_int> {
    let config = taken()?;
    let file = config.ram().get(region).ok_or(libc::ENOENT)?;
    // SAFETY: F_DUPFD_CLOEXEC takes an int and makes a new fd; errors are reported.
    let fd = unsafe { libc::fcntl(file.fd, libc::F_DUPFD_CLOEXEC, 0) };
    if fd >= 0 { Ok(fd) } else { Err(libc::EMFILE) }
}

/// This process's RAM, taken now if it was not before.
fn taken() -> Result<&'static Config, c_int> {
    /// One thread takes, others wait for it.
    static TAKING: Mutex<()> = Mutex::new(());
    if let Some(config) = config() {
        return Ok(config);
    }
    let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    match (config(), name()) {
        (Some(config), _) => Ok(config),
        (None, Some(name)) => take(name),
        (None, None) => Err(libc::ENOENT),
    }
}

fn take(name: &'static Name) -> Result<&'static Config, c_int> {
    let ram = reach(&name.address, |link| {
        link::send(link, &Packet::Ram { token: name.token }, &[])?;
        let (packet, fds) = link::receive(link)?;
        let result = match packet {
            Packet::Fetched { monitor: false, lens } => adopt(lens.as_slice(), fds.as_slice()),
            Packet::Refused { text } => {
                say(format_args!("the daemon does not give this process RAM: {}", text.as_str()));
                Err(libc::EACCES)
            }
            _ => return Err(Broken::Nonsense(pagoda_abi::attach::DecodeError::Value)),
        };
        fds.as_slice().iter().for_each(|fd| link::close(*fd));
        Ok(result)
    });
    link::close(ram.link);
    let config = set_ram(name, ram.value?, Role::Vmm);
    agent::start_thread(watchdog, null_mut());
    Ok(config)
}

/// High fds of our own of the files that came.
fn adopt(lens: &[u64], fds: &[c_int]) -> Result<List<RamFile, REGIONS_MAX>, c_int> {
    let mut ram = List::default();
    for (index, len) in lens.iter().enumerate() {
        let Some(fd) = fds.get(index).copied().and_then(config::duplicate) else {
            // The daemon has given them away and gives them once.
            give_up(format_args!("no free file descriptor for the VM's RAM; raise the limit (ulimit -n)"));
        };
        let Some(file) = RamFile::adopt(fd, *len) else {
            give_up(format_args!("what the daemon gave as RAM is not of the length it says"));
        };
        ram.push(file);
    }
    Ok(ram)
}

/// Ends a process that took RAM and did not attach it: it would be a VM that nobody manages.
extern "C" fn watchdog(_: *mut c_void) -> *mut c_void {
    // SAFETY: PR_SET_NAME reads a NUL-terminated name of at most 16 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"pagoda-watchdog".as_ptr()) };
    std::thread::sleep(ATTACH_MAX);
    if attachment().is_none() {
        give_up(format_args!(
            "this process opened its RAM and did not map all of it within {} s; it ends, for its memory would not be managed",
            ATTACH_MAX.as_secs()
        ));
    }
    null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_no_vm_has_no_ram() {
        assert_eq!(open(0), Err(libc::ENOENT));
    }

    #[test]
    fn paths_of_ram() {
        let table = [
            (c"/proc/pagoda-shim/ram0", Some(0)),
            (c"/proc/pagoda-shim/ram7", Some(7)),
            (c"/proc/pagoda-shim/ram", None),
            (c"/proc/pagoda-shim/ram10", None),
            (c"/proc/pagoda-shim/ramx", None),
            (c"/proc/pagoda-shim", None),
            (c"", None),
        ];
        for (path, expected) in table {
            assert_eq!(region_of_path(path), expected, "{path:?}");
        }
    }
}
