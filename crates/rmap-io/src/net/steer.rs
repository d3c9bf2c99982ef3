//! Several sockets of one address, one for each worker of a server. The kernel hands each datagram to the worker that
//! has its session, by a classic BPF program that says what [`worker_of`](rmap::server::worker_of) says, and hellos by
//! their address.
//!
//! Not by the address alone, as the kernel would by itself: a client's address may change in the middle of a session, and
//! what another server answers to a copy from here has to find the worker that sent it.

use std::io;
use std::net::{SocketAddr, UdpSocket};

use nix::libc::{
    BPF_ABS, BPF_ALU, BPF_AND, BPF_B, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_RSH, sock_filter, sock_fprog,
};
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Protocol, Socket, Type};

use rmap::server::{WORKER_BITS, WORKER_SHIFT};
use rmap::wire::datagram::{HELLO, RECEIVER_AT};

/// What BPF_RET | BPF_A is, which the libc crate lacks (linux/filter.h).
const BPF_A: u32 = 0x10;
/// No socket has this number: the kernel decides by the addresses.
const BY_ADDRESS: u32 = u32::MAX;

/// Binds `count` sockets to one address. Whoever has it already keeps it: that is an error.
///
/// # Errors
/// The address cannot be bound, or the kernel cannot hand datagrams out so.
pub fn bind(addr: SocketAddr, count: usize) -> io::Result<Vec<UdpSocket>> {
    // Without sharing at first: with it, another server of this user at the same address would go unnoticed.
    let first = UdpSocket::bind(addr)?;
    let addr = first.local_addr()?;
    let mut sockets = vec![first];
    if count > 1 {
        setsockopt(&sockets[0], sockopt::ReusePort, &true)?;
    }
    for _ in 1..count {
        let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))?;
        setsockopt(&socket, sockopt::ReusePort, &true)?;
        socket.bind(&addr.into())?;
        sockets.push(socket.into());
    }
    if count > 1 {
        let mut program = program();
        let program = sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        setsockopt(&sockets[0], sockopt::AttachReusePortCbpf, &program)?;
    }
    Ok(sockets)
}

/// A socket's number is that of its worker, because the kernel numbers them as they were bound.
fn program() -> [sock_filter; 7] {
    const {
        // The program looks at one byte of the receiver's number, the second lowest.
        assert!(WORKER_SHIFT >= 8 && WORKER_SHIFT + WORKER_BITS <= 16);
    }
    let step = |code: u32, k: u32| sock_filter { code: code as u16, jt: 0, jf: 0, k };
    [
        step(BPF_LD | BPF_B | BPF_ABS, 0),
        sock_filter { jt: 0, jf: 1, ..step(BPF_JMP | BPF_JEQ | BPF_K, u32::from(HELLO)) },
        step(BPF_RET | BPF_K, BY_ADDRESS),
        step(BPF_LD | BPF_B | BPF_ABS, RECEIVER_AT as u32 + 1),
        step(BPF_ALU | BPF_RSH | BPF_K, WORKER_SHIFT - 8),
        step(BPF_ALU | BPF_AND | BPF_K, (1 << WORKER_BITS) - 1),
        step(BPF_RET | BPF_A, 0),
    ]
}
