//! The list of files whose transfers are known to copy: what read(2), write(2) and their relatives move between such a
//! file and guest RAM has left the pages, and holds none of them, whenever the call is not running a copy.
//!
//! A transfer with any other file is on the clock, because the kernel may pin the pages for it. O_DIRECT is only the
//! best known reason: a FUSE file opened with FOPEN_DIRECT_IO, 9p and CIFS with `cache=none`, NFS with direct I/O by mount,
//! a socket with kernel TLS and an AF_ALG socket pin, too, and no flag of the file tells.
//!
//! The list is there for calls that may wait for long, such as a read from a socket: on the clock, they would hold page-out back
//! for as long as nothing arrives. Of regular files those in memory (tmpfs) are known to copy. A VMM's transfers with an offset are
//! on the clock without a look at the file: a slot costs less than the system calls that would look. A mapper's transfers wait for
//! page-ins themselves, and there are many: vectors of files in memory are off the clock there, also with an offset.

use std::ffi::{c_int, c_uint};

use libc::{major, minor};

/// The option of a TCP socket that names its upper layer protocol (`linux/tcp.h`).
const TCP_ULP: c_int = 31;
/// Longest name of an upper layer protocol (`TCP_ULP_NAME_MAX`).
const ULP_NAME_MAX: usize = 16;

/// Whether transfers of this file are known to copy. Anything unknown is `false`, and so is a bad fd.
pub fn is_known_to_copy(fd: c_int) -> bool {
    // SAFETY: a plain C structure: all zero bits are valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: fstat(2) fills the structure it is given; a bad fd is an error.
    if unsafe { libc::fstat(fd, &mut stat) } != 0 {
        return false;
    }
    match stat.st_mode & libc::S_IFMT {
        // fs/pipe.c: pipe_read() and pipe_write() copy, in packet mode (O_DIRECT), too. vmsplice(2) is a door of its own.
        libc::S_IFIFO => true,
        libc::S_IFSOCK => is_copying_socket(fd),
        libc::S_IFCHR => is_copying_device(major(stat.st_rdev), minor(stat.st_rdev)),
        libc::S_IFREG => is_on_tmpfs(fd),
        _ => false,
    }
}

/// mm/shmem.c: shmem_file_read_iter() and the generic write copy, with O_DIRECT too (since Linux 6.6 it is accepted, and has no effect).
/// memfds are such files.
fn is_on_tmpfs(fd: c_int) -> bool {
    // SAFETY: a plain C structure: all zero bits are valid.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: fstatfs(2) fills the structure it is given; a bad fd is an error.
    let known = unsafe { libc::fstatfs(fd, &mut found) } == 0;
    known && found.f_type == libc::TMPFS_MAGIC
}

/// Whether transfers of this character device copy (Documentation/admin-guide/devices.txt).
fn is_copying_device(major: c_uint, minor: c_uint) -> bool {
    match (major, minor) {
        // drivers/char/mem.c and random.c: null, zero, full, random, urandom, kmsg.
        (1, 3 | 5 | 7 | 8 | 9 | 11) => true,
        // drivers/tty: read and write go through buffers of the kernel (consoles, /dev/tty, ptys, serial lines).
        (4 | 5 | 136..=143, _) => true,
        // drivers/net/tun.c: zero-copy is for messages of vhost only (`msg_control`), which no system call can set.
        (10, 200) => true,
        _ => false,
    }
}

/// Sockets without zero-copy. MSG_ZEROCOPY is looked at where messages are sent.
fn is_copying_socket(fd: c_int) -> bool {
    match option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) {
        // net/unix, net/netlink, net/packet (rings are the kernel's memory), net/vmw_vsock.
        Some(libc::AF_UNIX | libc::AF_NETLINK | libc::AF_PACKET | libc::AF_VSOCK) => true,
        Some(libc::AF_INET | libc::AF_INET6) => match option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) {
            // An upper layer protocol may encrypt out of, and decrypt into, the user's pages: net/tls does.
            Some(libc::IPPROTO_TCP) => has_no_upper_layer(fd),
            Some(libc::IPPROTO_UDP | libc::IPPROTO_ICMP | libc::IPPROTO_ICMPV6) => true,
            _ => false,
        },
        // AF_ALG encrypts in place (crypto/af_alg.c pins); of the others nobody knows.
        _ => false,
    }
}

fn has_no_upper_layer(fd: c_int) -> bool {
    let mut name = [0u8; ULP_NAME_MAX];
    let mut len = name.len() as libc::socklen_t;
    // SAFETY: getsockopt(2) writes at most `len` bytes to `name`, and the length to `len`.
    let asked = unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, TCP_ULP, name.as_mut_ptr().cast(), &mut len) };
    asked == 0 && len == 0
}

fn option(fd: c_int, level: c_int, name: c_int) -> Option<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: getsockopt(2) writes at most `len` bytes to `value`, and the length to `len`.
    let asked = unsafe { libc::getsockopt(fd, level, name, (&raw mut value).cast(), &mut len) };
    (asked == 0 && len as usize == size_of::<c_int>()).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn pipes_and_plain_sockets_copy_and_files_may_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (unix, _other) = UnixStream::pair().unwrap();
        let (pipe, _writer) = std::io::pipe().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        // SAFETY: eventfd(2) makes a new fd; that of a kind of file that the list does not know.
        let event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        let table = [
            ("TCP", stream.as_raw_fd(), true),
            ("UDP", datagrams.as_raw_fd(), true),
            ("Unix", unix.as_raw_fd(), true),
            ("pipe", pipe.as_raw_fd(), true),
            ("/dev/null", null.as_raw_fd(), true),
            ("a regular file", file.as_raw_fd(), false),
            ("an eventfd", event, false),
            ("no file", -1, false),
        ];
        for (name, fd, expected) in table {
            assert_eq!(is_known_to_copy(fd), expected, "{name}");
        }
        // SAFETY: our own fd.
        unsafe { libc::close(event) };
    }

    #[test]
    fn sockets_that_encrypt_are_not_on_the_list() {
        // SAFETY: socket(2) makes a new fd.
        let alg = unsafe { libc::socket(libc::AF_ALG, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
        assert!(!is_known_to_copy(alg), "AF_ALG");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        // SAFETY: setsockopt(2) reads the three bytes it is given.
        let with_tls =
            unsafe { libc::setsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, TCP_ULP, c"tls".as_ptr().cast(), 3) };
        // A kernel without TLS cannot have such a socket.
        assert_eq!(is_known_to_copy(stream.as_raw_fd()), with_tls != 0, "kernel TLS");
    }

    #[test]
    fn devices_that_map_memory_are_not_on_the_list() {
        for (name, major, minor, expected) in [
            ("/dev/mem", 1, 1, false),
            ("/dev/fuse", 10, 229, false),
            ("/dev/net/tun", 10, 200, true),
            ("/dev/sg0", 21, 0, false),
            ("a terminal", 136, 3, true),
        ] {
            assert_eq!(is_copying_device(major, minor), expected, "{name}");
        }
    }
}
