//! The outbox as a whole without a VM: writes as a guest's requests come in, real clients on the loopback.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pagoda_outbox::limits::PAGE_BYTES;
use pagoda_outbox::{Access, HandleId, Ino, Kind, NewNode, ROOT, XattrWrite};

use crate::http::{Folios, Pacer, Site, runtime, serve};
use crate::link::client::Files;
use crate::link::server::Transmitters;
use crate::outbox::{Again, Outbox, now};
use crate::sandbox::{allow_few_calls, allow_transmitting};
use crate::{link, worker};

const TOKEN: &str = "0123456789abcdef";
const MIB: u64 = 1 << 20;
/// For what has to come; tests do not end before.
const PATIENCE: Duration = Duration::from_secs(20);

struct Lab {
    outbox: Arc<Outbox>,
    address: SocketAddr,
}

struct Reply {
    head: String,
    body: Vec<u8>,
    /// The reply was as long as it said, or had its last chunk.
    is_whole: bool,
}

impl Reply {
    fn status(&self) -> u16 {
        self.head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status line")
    }

    fn header(&self, name: &str) -> Option<&str> {
        let line = self.head.lines().find(|line| line.to_lowercase().starts_with(&format!("{name}:")))?;
        line.split_once(':').map(|(_, value)| value.trim())
    }
}

/// Content that differs from byte to byte and from file to file.
fn content(seed: u64, offset: u64, length: u64) -> Vec<u8> {
    let byte = |at: u64| ((at ^ (at >> 8) ^ (at >> 17)).wrapping_mul(31).wrapping_add(seed) >> 1) as u8;
    (offset..offset + length).map(byte).collect()
}

impl Lab {
    fn new(space: u64, wait: Duration) -> Lab {
        Lab::with_folios(space, wait, Folios::of_host().unwrap())
    }

    fn with_folios(space: u64, wait: Duration, folios: Folios) -> Lab {
        Lab::with(space, wait, folios, [None, None])
    }

    /// With these rates: of all clients, and of each.
    fn with(space: u64, wait: Duration, folios: Folios, [rate, client_rate]: [Option<NonZeroU64>; 2]) -> Lab {
        let outbox = Arc::new(Outbox::new(space, wait));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (name, token) = ("vm1".into(), TOKEN.into());
        let (theirs, ours) = link::pair().unwrap();
        let (pacer, files) = (Pacer::new(rate), Arc::new(Files::new(theirs).unwrap()));
        let site = Site { name, token, life: 7, files, folios, pacer, client_rate };
        // Of these threads, as in the processes of a VM.
        std::thread::spawn(move || {
            let runtime = runtime(&listener).unwrap();
            allow_transmitting().unwrap();
            serve(&runtime, Arc::new(site), listener, || {}).unwrap();
        });
        let served = Arc::clone(&outbox);
        std::thread::spawn(move || {
            allow_few_calls().unwrap();
            Transmitters::default().answer(&served, ours);
        });
        worker::expire(&outbox).unwrap();
        Lab { outbox, address }
    }

    fn create(&self, name: &str) -> (HandleId, Ino) {
        let mut space = self.outbox.space();
        let new = NewNode { mode: 0o644, now: now(), ..NewNode::default() };
        let file = space.create(ROOT, name.as_bytes(), new).unwrap();
        (space.open(file.ino, Access::Write).unwrap(), file.ino)
    }

    fn write(&self, (handle, ino): (HandleId, Ino), offset: u64, bytes: &[u8]) -> std::io::Result<u64> {
        let mut left = bytes;
        self.outbox.write(handle, ino, offset, bytes.len() as u64, Again::No, |file: &File, at: u64, count: usize| {
            let (now, later) = left.split_at(count);
            left = later;
            file.write_all_at(now, at).map(|()| count)
        })
    }

    fn close(&self, (handle, _): (HandleId, Ino)) {
        self.outbox.space().release(handle).unwrap();
        self.outbox.settle();
    }

    fn finished(&self, name: &str, seed: u64, length: u64) -> Ino {
        let file = self.create(name);
        assert_eq!(self.write(file, 0, &content(seed, 0, length)).unwrap(), length);
        self.close(file);
        file.1
    }

    fn ask(&self, method: &str, path: &str, headers: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let token = if headers.contains("Authorization") {
            String::new()
        } else {
            format!("Authorization: Bearer {TOKEN}\r\n")
        };
        write!(stream, "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{token}{headers}\r\n").unwrap();
        stream
    }

    fn get(&self, path: &str, headers: &str) -> Reply {
        reply(self.ask("GET", path, headers), false)
    }

    fn status(&self, path: &str, headers: &str) -> u16 {
        self.get(path, headers).status()
    }

    /// In another thread, from now on.
    fn getting(&self, path: &str) -> JoinHandle<Reply> {
        let stream = self.ask("GET", path, "");
        std::thread::spawn(move || reply(stream, false))
    }

    fn wait_until(&self, what: &str, is_so: impl Fn(&Outbox) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so(&self.outbox) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.outbox.space().figures());
            self.outbox.wait_change(Duration::from_millis(5));
        }
    }
}

fn reply(mut stream: TcpStream, is_head: bool) -> Reply {
    let mut all = Vec::new();
    // A connection that is cut off may end with an error; what came before is what counts.
    let _ = stream.read_to_end(&mut all);
    let end = all.windows(4).position(|four| four == b"\r\n\r\n").expect("a head") + 4;
    let head = String::from_utf8(all[..end].to_vec()).unwrap();
    let mut reply = Reply { head, body: all[end..].to_vec(), is_whole: false };
    if reply.header("transfer-encoding") == Some("chunked") {
        (reply.body, reply.is_whole) = unchunked(&reply.body);
    } else {
        let length = reply.header("content-length").map(|text| text.parse::<usize>().unwrap());
        reply.is_whole = is_head || length == Some(reply.body.len());
    }
    reply
}

fn unchunked(mut rest: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    loop {
        let Some(end) = rest.windows(2).position(|two| two == b"\r\n") else { return (body, false) };
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
        if size == 0 {
            return (body, true);
        }
        rest = &rest[end + 2..];
        let there = size.min(rest.len());
        body.extend_from_slice(&rest[..there]);
        if rest.len() < size + 2 {
            return (body, false);
        }
        rest = &rest[size + 2..];
    }
}

#[test]
fn a_file_far_larger_than_the_space_arrives_while_it_grows() {
    let lab = Lab::new(2 * MIB, PATIENCE);
    let file = lab.create("big");
    let client = lab.getting("/vm1/big");
    let total = 24 * MIB + 777;
    let mut at = 0;
    while at < total {
        // Odd sizes, so that pages are written in parts.
        let length = (300_001).min(total - at);
        assert_eq!(lab.write(file, at, &content(3, at, length)).unwrap(), length);
        assert!(real_bytes(&lab.outbox) <= 2 * MIB, "memory above the budget");
        at += length;
    }
    lab.close(file);
    let reply = client.join().unwrap();
    assert!(reply.is_whole && reply.status() == 200);
    assert!(reply.body == content(3, 0, total), "wrong bytes");
    lab.wait_until("delivered", Outbox::is_delivered);
    assert_eq!(lab.status("/vm1/big", ""), 410, "its beginning was given back");
    lab.outbox.resize(0);
    lab.outbox.give_back_excess(u64::MAX);
    assert_eq!((real_bytes(&lab.outbox), lab.outbox.space().figures().used), (0, 0));
}

/// What the kernel holds for files.
fn real_bytes(outbox: &Outbox) -> u64 {
    outbox.memory_files().iter().map(|file| file.metadata().unwrap().blocks() * 512).sum()
}

#[test]
fn a_full_space_makes_writers_wait_and_then_fails() {
    let lab = Lab::new(MIB, Duration::from_millis(300));
    let file = lab.create("full");
    let begin = Instant::now();
    assert_eq!(lab.write(file, 0, &content(1, 0, 2 * MIB)).unwrap(), MIB, "what there was room for");
    assert!(begin.elapsed() >= Duration::from_millis(300));
    let failed = lab.write(file, MIB, b"more").unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(lab.outbox.space().figures().available(), 0);
    // Names go through all the same, and a larger space is there at once.
    let other = lab.create("other");
    lab.outbox.resize(2 * MIB);
    assert_eq!(lab.write(other, 0, b"more").unwrap(), 4);
    // A reader makes room as well.
    lab.outbox.resize(MIB);
    lab.outbox.give_back_excess(u64::MAX);
    assert!(lab.write(other, PAGE_BYTES, b"x").is_err(), "smaller than what is used");
    let client = lab.getting("/vm1/full");
    lab.wait_until("room", |outbox| outbox.space().figures().available() > MIB / 2);
    assert_eq!(lab.write(file, MIB, &content(1, MIB, 4096)).unwrap(), 4096);
    lab.close(file);
    assert!(client.join().unwrap().body == content(1, 0, MIB + 4096));
}

#[test]
fn what_was_sent_does_not_change() {
    let lab = Lab::new(MIB, PATIENCE);
    let file = lab.create("f");
    lab.write(file, 0, &content(1, 0, 10_000)).unwrap();
    let client = lab.getting("/vm1/f");
    lab.wait_until("sent", |outbox| outbox.space().attributes(file.1).unwrap().cursor == 10_000);
    let refused = |result: std::io::Result<u64>| assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EPERM));
    refused(lab.write(file, 9_999, b"xx"));
    refused(lab.write(file, 0, b"x"));
    refused(lab.outbox.truncate(file.1, 9_999).map(|()| 0));
    assert_eq!(lab.outbox.space().figures().refused_changes, 3);
    lab.outbox.truncate(file.1, 10_000).unwrap();
    lab.write(file, 10_000, &content(1, 10_000, 500)).unwrap();
    lab.close(file);
    assert!(client.join().unwrap().body == content(1, 0, 10_500));
    refused(lab.outbox.truncate(file.1, 20_000).map(|()| 0));
}

#[test]
fn a_writer_that_disappears_is_seen() {
    let lab = Lab::new(MIB, PATIENCE);
    let file = lab.create("f");
    lab.write(file, 0, &content(1, 0, 5_000)).unwrap();
    lab.finished("whole", 2, 3_000);
    let client = lab.getting("/vm1/f");
    lab.wait_until("sent", |outbox| outbox.space().attributes(file.1).unwrap().cursor == 5_000);
    lab.outbox.abandon();
    let reply = client.join().unwrap();
    assert!(!reply.is_whole && reply.body == content(1, 0, 5_000));
    assert_eq!(lab.status("/vm1/f", ""), 404);
    assert!(lab.get("/vm1/whole", "").body == content(2, 0, 3_000), "what was closed stays");
    lab.wait_until("nothing is left of it", |outbox| outbox.space().figures().used == PAGE_BYTES);
}

#[test]
fn a_file_without_a_name_is_still_sent() {
    let lab = Lab::new(MIB, PATIENCE);
    let file = lab.create("f");
    lab.write(file, 0, &content(1, 0, 5_000)).unwrap();
    let client = lab.getting("/vm1/f");
    lab.wait_until("sent", |outbox| outbox.space().figures().readers == 1);
    lab.outbox.space().unlink(ROOT, b"f", Kind::File, now()).unwrap();
    assert_eq!(lab.status("/vm1/f", ""), 404);
    lab.write(file, 5_000, &content(1, 5_000, 5_000)).unwrap();
    lab.close(file);
    let reply = client.join().unwrap();
    assert!(reply.is_whole && reply.body == content(1, 0, 10_000));
    lab.wait_until("nothing is left of it", |outbox| {
        outbox.space().figures().used == 0 && outbox.memory_files().is_empty()
    });
}

#[test]
fn a_client_that_goes_has_not_taken_anything_away() {
    let lab = Lab::new(32 * MIB, PATIENCE);
    lab.finished("f", 1, 16 * MIB);
    let mut stream = lab.ask("GET", "/vm1/f", "");
    stream.read_exact(&mut [0; 1000]).unwrap();
    drop(stream);
    lab.wait_until("it is noticed", |outbox| outbox.space().figures().readers == 0);
    assert!(lab.outbox.space().figures().disposable < 16 * MIB);
    assert!(lab.get("/vm1/f", "").body == content(1, 0, 16 * MIB));
    lab.wait_until("delivered", Outbox::is_delivered);
    assert!(lab.get("/vm1/f", "").body == content(1, 0, 16 * MIB), "there is room, so it stays for the next");
}

#[test]
fn more_than_one_delivery() {
    let lab = Lab::new(MIB, PATIENCE);
    let ino = lab.finished("f", 1, 8_192);
    lab.outbox.space().set_xattr(ino, b"user.pagoda.readers", b"2", XattrWrite::Any).unwrap();
    assert_eq!(lab.status("/vm1/f", ""), 200);
    lab.wait_until("the first is noted", |outbox| outbox.space().figures().readers == 0);
    assert_eq!(lab.outbox.space().figures().disposable, 0);
    assert_eq!(lab.status("/vm1/f", "Range: bytes=0-5000\r\n"), 206);
    assert_eq!(lab.status("/vm1/f", "Range: bytes=5001-\r\n"), 206);
    lab.wait_until("the second is noted", |outbox| outbox.space().figures().disposable == 8_192);
}

#[test]
fn requests() {
    let lab = Lab::new(MIB, PATIENCE);
    lab.finished("a b.txt", 1, 10_000);
    let path = "/vm1/a%20b.txt";
    assert_eq!(lab.status(path, "Authorization: Bearer 0123456789abcdeg\r\n"), 401);
    assert_eq!(lab.status(path, "Authorization: Basic eDp5\r\n"), 401);
    // Who is unknown keeps no connection.
    let mut stranger = TcpStream::connect(lab.address).unwrap();
    stranger.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stranger, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    assert!(stranger.read_to_string(&mut answer).is_ok() && answer.starts_with("HTTP/1.1 401 "), "{answer}");
    assert_eq!(reply(lab.ask("PUT", path, "Content-Length: 0\r\n"), false).status(), 405);
    for absent in ["/vm2/a%20b.txt", "/vm1/../vm1/a%20b.txt", "/vm1/x", "/", "/vm1/a%20b.txt/x", "/vm1//a%20b.txt"] {
        assert_eq!(lab.status(absent, ""), 404, "{absent}");
    }
    let whole = lab.get(path, "");
    assert_eq!(
        (whole.header("content-type"), whole.header("accept-ranges")),
        (Some("text/plain; charset=utf-8"), Some("bytes"))
    );
    let tag = whole.header("etag").expect("a finished file has a tag");
    assert!(whole.is_whole && whole.body == content(1, 0, 10_000));
    let head = reply(lab.ask("HEAD", path, ""), true);
    assert_eq!((head.status(), head.header("content-length"), head.body.len()), (200, Some("10000"), 0));
    assert_eq!(lab.status(path, &format!("If-None-Match: {tag}\r\n")), 304);
    assert_eq!(lab.status(path, "If-Match: \"x\"\r\n"), 412);
    let part = lab.get(path, "Range: bytes=9000-20000\r\n");
    assert_eq!((part.status(), part.header("content-range")), (206, Some("bytes 9000-9999/10000")));
    assert!(part.is_whole && part.body == content(1, 9_000, 1_000));
    assert_eq!(lab.get(path, &format!("Range: bytes=-1\r\nIf-Range: {tag}\r\n")).body, content(1, 9_999, 1));
    assert_eq!(lab.get(path, "Range: bytes=-1\r\nIf-Range: \"other\"\r\n").body.len(), 10_000);
    let none = lab.get(path, "Range: bytes=10000-\r\n");
    assert_eq!((none.status(), none.header("content-range")), (416, Some("bytes */10000")));
    let listing = lab.get("/vm1/", "Accept: application/json\r\n");
    let entries: serde_json::Value = serde_json::from_slice(&listing.body).unwrap();
    assert_eq!(
        (&entries[0]["name"], &entries[0]["size"], &entries[0]["state"]),
        (&"a b.txt".into(), &10_000.into(), &"sealed".into())
    );
    assert!(
        String::from_utf8(lab.get("/vm1", "").body)
            .unwrap()
            .contains("href=\"/vm1/a%20b.txt\">a b.txt</a> 10000 sealed")
    );
    let status: serde_json::Value = serde_json::from_slice(&lab.get("/status", "").body).unwrap();
    assert_eq!((&status["space_bytes"], &status["files"]), (&MIB.into(), &1.into()));
}

#[test]
fn a_growing_file_has_no_tag_and_parts_of_what_is_there() {
    let lab = Lab::new(MIB, PATIENCE);
    let file = lab.create("f");
    lab.write(file, 0, &content(1, 0, 5_000)).unwrap();
    let part = lab.get("/vm1/f", "Range: bytes=1000-\r\n");
    assert_eq!(
        (part.status(), part.header("content-range"), part.header("etag")),
        (206, Some("bytes 1000-4999/*"), None)
    );
    assert!(part.is_whole && part.body == content(1, 1_000, 4_000));
    assert_eq!(lab.status("/vm1/f", "Range: bytes=5000-\r\n"), 416);
    // Such a client could not tell a reply that is cut short from a whole one.
    let mut old = TcpStream::connect(lab.address).unwrap();
    old.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(old, "GET /vm1/f HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n\r\n").unwrap();
    assert_eq!(reply(old, false).status(), 505);
    let on_close = lab.create("later");
    lab.outbox.space().set_xattr(on_close.1, b"user.pagoda.mode", b"on-close", XattrWrite::Any).unwrap();
    lab.write(on_close, 0, &content(2, 0, 100)).unwrap();
    assert_eq!(lab.status("/vm1/later", ""), 404);
    lab.write(on_close, 50, &content(2, 50, 100)).unwrap();
    lab.close(on_close);
    assert!(lab.get("/vm1/later", "").body == content(2, 0, 150));
}

/// A socket's queues hold at least so much that its client does not read, and the other at most (tcp_wmem and tcp_rmem of tcp(7)).
const QUEUED_MIN: u64 = 2 * MIB;
const QUEUED_MAX: u64 = 14 * MIB;

impl Lab {
    fn wait_sent(&self, ino: Ino, bytes: u64) {
        self.wait_until("sent", |outbox| outbox.space().attributes(ino).unwrap().cursor >= bytes);
    }

    /// Changes at these places, which are below a send cursor, are refused.
    fn check_refused(&self, file: (HandleId, Ino), places: impl Iterator<Item = u64>) {
        for at in places {
            assert!(self.write(file, at, &[0; 4096]).is_err() && self.outbox.truncate(file.1, at).is_err(), "{at}");
        }
    }
}

#[test]
fn what_is_queued_unread_stays_as_it_was_sent() {
    let lab = Lab::new(32 * MIB, PATIENCE);
    let file = lab.create("f");
    let (changed, end) = (QUEUED_MAX + 777, QUEUED_MAX + 6 * MIB);
    lab.write(file, 0, &content(1, 0, end)).unwrap();
    let client = lab.ask("GET", "/vm1/f", "");
    lab.wait_sent(file.1, QUEUED_MIN);
    lab.check_refused(file, (0..QUEUED_MIN).step_by(100_000).chain([QUEUED_MIN - 1]));
    // What was not sent yet may be cut off and written anew.
    for seed in [9, 1] {
        lab.outbox.truncate(file.1, changed).unwrap();
        lab.write(file, changed, &content(seed, changed, end - changed)).unwrap();
    }
    lab.close(file);
    lab.outbox.space().unlink(ROOT, b"f", Kind::File, now()).unwrap();
    lab.outbox.resize(0);
    lab.outbox.give_back_excess(u64::MAX);
    let reply = reply(client, false);
    assert!(reply.is_whole && reply.body == content(1, 0, end), "wrong bytes");
    lab.wait_until("nothing is left of it", |outbox| outbox.space().figures().used == 0);
    assert!(lab.outbox.memory_files().is_empty());
}

#[test]
fn a_guest_goes_on_in_a_page_that_is_queued() {
    let lab = Lab::new(MIB, PATIENCE);
    let file = lab.create("f");
    let mut end = 100 * 1024 + 777;
    lab.write(file, 0, &content(1, 0, end)).unwrap();
    let client = lab.ask("GET", "/vm1/f", "");
    for length in [1, 2_000, 1_318, 1, 50_000, 200_000] {
        lab.wait_sent(file.1, end);
        lab.check_refused(file, [0, end / 2, end - 1].into_iter());
        lab.write(file, end, &content(1, end, length)).unwrap();
        end += length;
    }
    lab.close(file);
    lab.outbox.space().unlink(ROOT, b"f", Kind::File, now()).unwrap();
    let reply = reply(client, false);
    assert!(reply.is_whole && reply.body == content(1, 0, end), "wrong bytes");
}

/// Why the space refuses, and that the tests around this one are about the file's own memory.
#[test]
fn queued_bytes_are_the_files_own_memory() {
    let folios = Folios::of_host().unwrap();
    let is_copied = folios.may_be_large();
    let lab = Lab::with_folios(MIB, PATIENCE, folios);
    let file = lab.create("f");
    let length = 256 * 1024;
    lab.write(file, 0, &content(1, 0, length)).unwrap();
    let client = lab.ask("GET", "/vm1/f", "");
    lab.wait_sent(file.1, length);
    // No request of a guest can do that.
    lab.outbox.memory_files()[0].write_all_at(&content(9, 0, length), 0).unwrap();
    lab.close(file);
    let body = reply(client, false).body;
    assert!(is_copied || body != content(1, 0, length));
    assert_eq!(body.len() as u64, length);
}

#[test]
fn what_was_acknowledged_unread_outlives_its_memory() {
    let lab = Lab::new(MIB, PATIENCE);
    // As much as a client's kernel takes without anybody reading it: that is acknowledged, and lies there.
    let length = 48 * 1024;
    for is_removed in [false, true] {
        let ino = lab.finished("f", 1, length);
        let client = lab.ask("GET", "/vm1/f", "");
        lab.wait_sent(ino, length);
        lab.wait_until("acknowledged", |outbox| outbox.space().figures().disposable >= length);
        if is_removed {
            lab.outbox.space().unlink(ROOT, b"f", Kind::File, now()).unwrap();
        }
        lab.outbox.resize(0);
        lab.outbox.give_back_excess(u64::MAX);
        lab.wait_until("given back", |outbox| {
            outbox.reclaim(length);
            outbox.space().figures().used == 0
        });
        assert_eq!(real_bytes(&lab.outbox), 0);
        lab.outbox.resize(MIB);
        for index in 0..8 {
            lab.finished(&format!("other-{is_removed}-{index}"), 9, 64 * 1024);
        }
        let reply = reply(client, false);
        assert!(reply.is_whole && reply.body == content(1, 0, length), "wrong bytes");
        for index in 0..8 {
            let name = format!("other-{is_removed}-{index}");
            lab.outbox.space().unlink(ROOT, name.as_bytes(), Kind::File, now()).unwrap();
        }
        let _ = lab.outbox.space().unlink(ROOT, b"f", Kind::File, now());
    }
}

#[test]
fn holes_are_sent_as_zeros_and_take_no_memory() {
    let lab = Lab::new(MIB, PATIENCE);
    let file = lab.create("f");
    lab.outbox.truncate(file.1, 8 * MIB + 5).unwrap();
    lab.write(file, 5 * MIB + 3, &content(1, 0, 100_000)).unwrap();
    lab.close(file);
    let mut expected = vec![0; (8 * MIB + 5) as usize];
    expected[(5 * MIB + 3) as usize..][..100_000].copy_from_slice(&content(1, 0, 100_000));
    for _ in 0..2 {
        assert!(lab.get("/vm1/f", "").body == expected);
        assert!(real_bytes(&lab.outbox) <= lab.outbox.space().figures().used);
    }
}

#[test]
fn copies_and_the_files_own_memory_are_the_same_bytes() {
    for folios in [Folios::of_host().unwrap(), Folios::unknown()] {
        let lab = Lab::with_folios(4 * MIB, PATIENCE, folios);
        lab.finished("f", 1, 3 * MIB + 5);
        // On one connection, one after the other, from and to anywhere.
        let mut stream = TcpStream::connect(lab.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let ranges = [(0, 3 * MIB + 4), (1, 1), (4_095, 4_096 + 40_000), (MIB - 1, 2 * MIB), (0, 32_767), (0, 32_768)];
        for (first, last) in ranges {
            let range = format!("Authorization: Bearer {TOKEN}\r\nRange: bytes={first}-{last}");
            write!(stream, "GET /vm1/f HTTP/1.1\r\nHost: x\r\n{range}\r\n\r\n").unwrap();
        }
        for (first, last) in ranges {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            let mut body = vec![0; (last - first + 1) as usize];
            stream.read_exact(&mut body).unwrap();
            assert!(body == content(1, first, last - first + 1), "{first} to {last}");
        }
    }
}

#[test]
fn clients_are_sent_no_more_than_the_rates() {
    let length = 400_000;
    let of = |rate: u64| NonZeroU64::new(rate);
    // What is allowed at once: the burst, and a turn of each client.
    let least = |bytes: u64, rate: u64| Duration::from_millis((bytes * 1000 / rate).saturating_sub(200));
    for (rates, shared) in [([of(1_000_000), None], 2), ([None, of(1_000_000)], 1), ([of(1_000_000), of(700_000)], 2)] {
        let lab = Lab::with(MIB, PATIENCE, Folios::of_host().unwrap(), rates);
        lab.finished("f", 1, length);
        let began = Instant::now();
        let clients = [lab.getting("/vm1/f"), lab.getting("/vm1/f")];
        for client in clients {
            let reply = client.join().unwrap();
            assert!(reply.is_whole && reply.body == content(1, 0, length));
        }
        assert!(began.elapsed() >= least(shared * length, 1_000_000), "{rates:?}: {:?}", began.elapsed());
        lab.wait_until("delivered", Outbox::is_delivered);
    }
}

#[test]
fn old_files_go_delivered_or_not() {
    let lab = Lab::new(MIB, PATIENCE);
    lab.finished("fetched", 1, 5_000);
    assert!(lab.get("/vm1/fetched", "").is_whole);
    lab.finished("never-fetched", 2, 5_000);
    let kept = lab.finished("kept", 3, 5_000);
    lab.wait_until("delivered", |outbox| outbox.space().figures().disposable > 0);
    lab.outbox.space().set_xattr(kept, b"user.pagoda.ttl", b"never", XattrWrite::Any).unwrap();
    let growing = lab.create("growing");
    lab.write(growing, 0, &content(4, 0, 5_000)).unwrap();
    lab.outbox.space().set_default_ttl(Some(Duration::from_secs(1)));
    lab.wait_until("they are gone", |outbox| outbox.space().figures().expired == 2);
    let figures = lab.outbox.space().figures();
    assert_eq!((figures.nodes, figures.expired_undelivered), (3, 1), "the root and two files");
    assert_eq!([lab.status("/vm1/fetched", ""), lab.status("/vm1/never-fetched", "")], [404, 404]);
    assert!(lab.get("/vm1/kept", "").body == content(3, 0, 5_000));
    // Who reads one keeps it.
    let client = lab.getting("/vm1/growing");
    lab.wait_sent(growing.1, 5_000);
    lab.close(growing);
    assert!(client.join().unwrap().body == content(4, 0, 5_000));
    lab.wait_until("that one too", |outbox| outbox.space().figures().expired == 3);
    lab.wait_until("memory", |outbox| outbox.space().figures().used == 2 * PAGE_BYTES);
}
