//! The loop, round by round, with a client at the other end of a socket pair and a pool without servers: all of the disk is holes.

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use super::*;
use crate::wire::{OPTION_MAGIC, REQUEST_MAX, RequestHeader, command, option};
use rmap::client::{ClientConfig, SpaceSpec};
use rmap::crypto::{KEY_SIZE, Keypair, PoolKey};
use rmap::units::{Generation, SpaceId};
use rmap_io::SystemEntropy;
use rmap_io::net::Port;

/// As long as the longest READ.
const SIZE: u64 = REQUEST_MAX as u64;
const SIMPLE_REPLY_SIZE: usize = 16;
/// What a client reads at a time.
const READ_SIZE: usize = 1 << 20;
/// Asked of the system for the socket's answers; it gives what it may, and more than it gives by itself.
const SOCKET_SIZE: usize = 1 << 20;

type Control = Box<dyn FnMut(&ControlRequest) -> ControlReply>;

struct Rig {
    server: Server<Control>,
    client: UnixStream,
    /// What the last round left. Somebody who has just come, or the word to stop, is work, too.
    work: Work,
    /// What the control plane says.
    reply: Rc<RefCell<ControlReply>>,
}

impl Rig {
    /// A client that has been greeted and has said its flags.
    fn new() -> Rig {
        let config = ClientConfig::new(Keypair::from_private([1; KEY_SIZE]), PoolKey::new([2; KEY_SIZE]));
        let mut client = Client::new(config, Box::new(SystemEntropy::default()));
        let spec =
            SpaceSpec { id: SpaceId(1), pages: SIZE / PAGE_SIZE as u64, copies: 1, reserve: 0, key: [3; KEY_SIZE] };
        let space = client.attach(&spec, Generation(1), &[]).unwrap();
        let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let reply = Rc::new(RefCell::new(ControlReply::Done));
        let said = Rc::clone(&reply);
        let control: Control = Box::new(move |_| said.borrow().clone());
        let pool = UdpClient::new(client, Port::bind(local).unwrap(), Wait::BLOCK, Instant::now(), control);
        let export = Export { name: "disk".to_owned(), space, size: SIZE, read_only: false };
        let mut server = Server::new(pool, export, Listener::tcp(local).unwrap(), Wait::BLOCK).unwrap();
        let (ours, client) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, SOCKET_SIZE).unwrap();
        server.admit(ours.into());
        let mut rig = Rig { server, client, work: Work::Left, reply };
        assert_eq!(rig.converse(&3_u32.to_be_bytes()).len(), 18, "the greeting");
        rig
    }

    /// The same, ready for requests without structured replies.
    fn agreed() -> Rig {
        let mut rig = Rig::new();
        assert_eq!(rig.converse(&an_option(option::EXPORT_NAME, b"")).len(), 10);
        rig
    }

    /// One round of [`Server::run`], if there is anything to wake the server. `false` if it sleeps.
    fn round(&mut self) -> bool {
        let mut ready = Vec::with_capacity(CONNECTIONS_MAX + OTHERS);
        epoll::wait(&self.server.epoll, spare_capacity(&mut ready), Some(&Timespec::default())).unwrap();
        if self.work == Work::Done && ready.is_empty() && !self.server.pool.client.has_event() {
            return false;
        }
        ready.iter().for_each(|event| self.server.mark_ready(event.data.u64() as usize, event.flags));
        self.work = self.server.work();
        self.server.pool.flush();
        true
    }

    /// All that is in the socket, so that the server may send as much as fits.
    fn take(&mut self) -> Vec<u8> {
        let (mut taken, mut room) = (Vec::new(), vec![0; READ_SIZE]);
        loop {
            match some(self.client.read(&mut room)) {
                0 => return taken,
                read => taken.extend_from_slice(&room[..read]),
            }
        }
    }

    /// The word to stop.
    fn finish(&mut self, stop: &UnixStream) {
        self.server.finish(stop.as_fd());
        self.work = Work::Left;
    }

    /// Sends all of this, and takes what is answered until the server sleeps.
    fn converse(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        let mut heard = Vec::new();
        loop {
            let sent = if bytes.is_empty() { 0 } else { some(self.client.write(bytes)) };
            bytes = &bytes[sent..];
            let goes_on = self.round();
            let taken = self.take();
            heard.extend_from_slice(&taken);
            if !goes_on && sent == 0 && taken.is_empty() {
                assert!(bytes.is_empty(), "{} bytes are never taken", bytes.len());
                return heard;
            }
        }
    }
}

/// How many bytes went through a socket that never blocks.
fn some(result: io::Result<usize>) -> usize {
    match result {
        Ok(count) => count,
        Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
        Err(error) => panic!("{error}"),
    }
}

fn an_option(number: u32, content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u32).to_be_bytes();
    [&OPTION_MAGIC.to_be_bytes()[..], &number.to_be_bytes(), &length, content].concat()
}

fn request(command: u16, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    RequestHeader { flags: 0, command, cookie: 9, offset, length }.encode(&mut bytes);
    bytes
}

/// A request that waits for the room which an answer takes begins when the answer is taken, with nothing else to wake the server. The
/// answer's end leaves in one piece, or the request would begin before that.
#[test]
fn what_waits_for_room_in_the_output_is_not_forgotten() {
    let mut rig = Rig::agreed();
    let longest = request(command::READ, 0, REQUEST_MAX);
    rig.client.write_all(&longest).unwrap();
    assert!(rig.round());
    let fits = rig.take().len();
    assert_eq!(fits + rig.converse(b"").len(), SIMPLE_REPLY_SIZE + REQUEST_MAX as usize);
    for first in [fits + fits / 2, REQUEST_MAX as usize] {
        let heard = rig.converse(&[&request(command::READ, 0, first as u32)[..], &longest].concat());
        assert_eq!(heard.len(), 2 * SIMPLE_REPLY_SIZE + first + REQUEST_MAX as usize);
    }
}

/// So it is with options, whose answers are longer than they are.
#[test]
fn options_that_wait_for_room_are_not_forgotten() {
    const OPTIONS: usize = 5000;
    let mut rig = Rig::new();
    let info = an_option(option::INFO, &[0; 6]);
    let one = rig.converse(&info).len();
    let heard = rig.converse(&info.repeat(OPTIONS));
    assert!(one * OPTIONS > crate::connection::INPUT_MAX, "there is room for all answers");
    assert_eq!(heard.len(), OPTIONS * one);
}

/// Who is being answered when the server is asked to stop gets all of it, and then the end; who asks for nothing is not waited for.
#[test]
fn a_server_that_stops_answers_first() {
    let mut rig = Rig::agreed();
    let read = request(command::READ, 0, REQUEST_MAX);
    let sent = rig.client.write(&read).unwrap();
    assert!(rig.round());
    assert!(!rig.server.clients[0].as_ref().unwrap().connection.output().is_empty(), "all of it is sent already");
    let (_stop, stopped) = UnixStream::pair().unwrap();
    rig.finish(&stopped);
    assert!(!rig.server.has_finished());
    let heard = rig.converse(b"");
    assert_eq!((sent, heard.len()), (read.len(), SIMPLE_REPLY_SIZE + REQUEST_MAX as usize));
    assert!(rig.server.has_finished());
    assert_eq!(rig.client.read(&mut [0]).unwrap(), 0, "its connection is closed");

    let mut idle = Rig::agreed();
    idle.finish(&stopped);
    idle.round();
    assert!(idle.server.has_finished());
}

/// A client that hangs up right after its last request: that is done all the same, and nothing is left of the client then. One that
/// hangs up without a word keeps no slot.
#[test]
fn a_client_that_said_goodbye_keeps_its_slot_until_all_is_done() {
    for (says_so, stays) in [(true, true), (false, false)] {
        let mut rig = Rig::agreed();
        *rig.reply.borrow_mut() = ControlReply::Later;
        let goodbye = if says_so { request(command::DISCONNECT, 0, 0) } else { Vec::new() };
        let bytes = [request(command::WRITE_ZEROES, 0, SIZE as u32), goodbye].concat();
        assert_eq!(rig.client.write(&bytes).unwrap(), bytes.len());
        let (client, _) = UnixStream::pair().unwrap();
        drop(std::mem::replace(&mut rig.client, client));
        while rig.round() {}
        assert_eq!(rig.server.clients[0].is_some(), stays);
        assert!(!rig.server.disk.is_idle(), "nobody has said that the holes are holes");
        *rig.reply.borrow_mut() = ControlReply::Done;
        let until = Instant::now() + Duration::from_secs(60);
        while !rig.server.disk.is_idle() {
            assert!(Instant::now() < until, "it is never done");
            rig.server.pool.expire();
            rig.round();
        }
        assert!(rig.server.clients[0].is_none());
    }
}
