//! Which VM this process is, and its RAM files.
//!
//! `pagoda run` leaves a token and the attach socket's path in the environment, which the library's constructor reads,
//! before `main` and before any thread. The RAM files are taken from the daemon later, when the program opens the first
//! of their paths ([`crate::take`]). Until then, and in every process that never does (a shell, `timeout`, a helper that
//! QEMU starts: they all inherit the preload), every hook passes its call through, but for the one that hides names
//! ([`crate::gate`]).

use std::ffi::{CStr, c_int};
use std::sync::OnceLock;

use pagoda_abi::attach::List;
use pagoda_abi::{REGIONS_MAX, Token};

/// Fds of the shim start here, out of the way of those the VMM counts on.
const FD_MIN: c_int = 512;
/// Where they start if the VMM's own limit is lower.
const FD_MIN_LOW: c_int = 64;

/// One RAM file. Device and inode name it, whatever fd or path the VMM opens it by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RamFile {
    /// The shim's own fd of the file.
    pub fd: c_int,
    /// Its length in bytes: the mapping's too.
    pub len: u64,
    dev: u64,
    ino: u64,
}

/// What a process is to the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It runs the guest.
    Vmm,
    /// It maps the guest's RAM beside the VMM.
    Mapper,
}

/// What the environment says.
#[derive(Clone, Copy)]
pub struct Name {
    /// Which VM or mapper this is.
    pub token: Token,
    /// Where the daemon listens.
    pub address: libc::sockaddr_un,
}

/// A managed process: a VM, and its RAM.
pub struct Config {
    pub name: Name,
    pub role: Role,
    ram: List<RamFile, REGIONS_MAX>,
}

static NAME: OnceLock<Name> = OnceLock::new();
static ROLE: OnceLock<Role> = OnceLock::new();
/// A copy: the program may change its environment.
static LENDS_TO: OnceLock<([u8; LENDS_TO_MAX], usize)> = OnceLock::new();
/// A path of a socket has at most so many bytes, and an at sign may stand for the first.
const LENDS_TO_MAX: usize = 108;
static CONFIG: OnceLock<Config> = OnceLock::new();

/// The VM that `pagoda run` started this process for.
pub fn name() -> Option<&'static Name> {
    NAME.get()
}

/// The VM and its RAM, once this process has taken it.
pub fn config() -> Option<&'static Config> {
    CONFIG.get()
}

/// What this process was started as.
pub fn role() -> Role {
    ROLE.get().copied().unwrap_or(Role::Vmm)
}

/// The address of the socket on whose connections this VMM lends RAM to a mapper, as getpeername(2) gives it.
pub fn lends_to() -> Option<&'static [u8]> {
    LENDS_TO.get().map(|(bytes, len)| &bytes[..*len])
}

/// From now on this process has the VM's RAM.
pub fn set_ram(name: &Name, ram: List<RamFile, REGIONS_MAX>, role: Role) -> &'static Config {
    CONFIG.get_or_init(|| Config { name: *name, role, ram })
}

impl Config {
    /// The RAM files, one a region, in order.
    pub fn ram(&self) -> &[RamFile] {
        self.ram.as_slice()
    }

    /// Which region's file this fd is.
    pub fn region_of(&self, fd: c_int) -> Option<usize> {
        let (dev, ino, _) = identify(fd)?;
        self.ram().iter().position(|file| file.dev == dev && file.ino == ino)
    }
}

/// Called once, by the constructor.
pub fn load() {
    let Some(path) = env(c"PAGODA_ATTACH") else { return };
    let (token, role) = match (env(c"PAGODA_TOKEN"), env(c"PAGODA_MAPPER_TOKEN")) {
        (Some(token), _) => (token, Role::Vmm),
        (None, Some(token)) => (token, Role::Mapper),
        (None, None) => return,
    };
    let Some(token) = token.to_str().ok().and_then(Token::from_hex) else {
        crate::say::give_up(format_args!(
            "the token in the environment is not 32 hexadecimal digits; start the VM with `pagoda run`"
        ));
    };
    let Some(address) = socket_address(path) else {
        crate::say::give_up(format_args!("the path in PAGODA_ATTACH is longer than a socket's can be (107 bytes)"));
    };
    let _ = NAME.set(Name { token, address });
    let _ = ROLE.set(role);
    if let Some(socket) = env(c"PAGODA_LENDS_TO") {
        let socket = socket.to_bytes();
        let mut copy = [0; LENDS_TO_MAX];
        if let Some(room) = copy.get_mut(..socket.len()) {
            room.copy_from_slice(socket);
            let _ = LENDS_TO.set((copy, socket.len()));
        }
    }
}

fn env(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: the name is NUL-terminated; there is one thread yet, and nobody changes these variables later, so the
    // value (NUL-terminated, in the initial environment) stays.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value))
    }
}

fn socket_address(path: &CStr) -> Option<libc::sockaddr_un> {
    // SAFETY: a plain C structure: all zero bits are valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.to_bytes_with_nul();
    if bytes.len() > address.sun_path.len() {
        return None;
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Some(address)
}

impl RamFile {
    /// RAM of a VM that another process runs: known by what it is, not by a descriptor.
    pub fn of_others(dev: u64, ino: u64, len: u64) -> Self {
        RamFile { fd: -1, len, dev, ino }
    }

    /// Takes over a file of `len` bytes as RAM.
    pub fn adopt(fd: c_int, len: u64) -> Option<Self> {
        let (dev, ino, size) = identify(fd)?;
        (size == len).then_some(RamFile { fd, len, dev, ino })
    }
}

/// Device, inode and length of an open file.
fn identify(fd: c_int) -> Option<(u64, u64, u64)> {
    // SAFETY: a plain C structure: all zero bits are valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: fstat(2) fills the structure it is given; a bad fd is an error.
    let known = unsafe { libc::fstat(fd, &mut stat) } == 0;
    known.then_some((stat.st_dev, stat.st_ino, stat.st_size as u64))
}

/// A second fd of the same file, high and not inherited by what the VMM executes.
pub fn duplicate(fd: c_int) -> Option<c_int> {
    [FD_MIN, FD_MIN_LOW].into_iter().find_map(|min| {
        // SAFETY: F_DUPFD_CLOEXEC takes an int and makes a new fd; errors are reported.
        let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, min) };
        (copy >= 0).then_some(copy)
    })
}
