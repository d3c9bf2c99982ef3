//! Announcements on the loopback: to a group and by broadcast.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use rmap::announce::{Announcement, Announcer, Ignored, Listening};
use rmap::client::ServerInfo;
use rmap::crypto::{KEY_SIZE, Keypair, PoolKey};
use rmap::units::{BootEpoch, ServerId};
use rmap::wire::message::Pressure;
use rmap_io::net::{ANNOUNCE_GROUP, AnnounceListener, AnnounceSender};

/// A guard against a hang.
const HANG: Duration = Duration::from_secs(120);
const NOW: u64 = 1_800_000_000_000;
const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;

fn free_port() -> u16 {
    UdpSocket::bind((LOOPBACK, 0)).unwrap().local_addr().unwrap().port()
}

#[test]
fn announcements_are_heard_by_group_and_by_broadcast() {
    let (keys, pool) = (Keypair::from_private([7; KEY_SIZE]), PoolKey::new([3; KEY_SIZE]));
    let announcer = Announcer::new(&keys, pool.clone());
    let about = Announcement {
        server: ServerId(5),
        addr: "127.0.0.1:7070".parse().unwrap(),
        key: keys.public(),
        zone: 1,
        epoch: BootEpoch(2),
        slabs: 8,
        free: 3,
        pressure: Pressure::None,
    };
    let Announcement { server: id, addr, key, zone, .. } = about;
    let listed = ServerInfo { id, addr, key, zone, announcer: Some(announcer.public()) };
    for to in [ANNOUNCE_GROUP, Ipv4Addr::new(127, 255, 255, 255)] {
        let to = SocketAddrV4::new(to, free_port());
        // Two of a host, each with a memory of its own.
        let mut listeners = [(); 2].map(|()| {
            let mut listening = Listening::new(pool.clone());
            assert!(listening.know(&listed));
            (AnnounceListener::bind(LOOPBACK, to).unwrap(), listening)
        });
        let sender = AnnounceSender::bind(LOOPBACK, to).unwrap();
        let noise = UdpSocket::bind((LOOPBACK, 0)).unwrap();
        noise.set_broadcast(true).unwrap();
        socket2::SockRef::from(&noise).set_multicast_if_v4(&LOOPBACK).unwrap();
        let bytes = announcer.encode(NOW, &about);
        for sent in [&[1; 9000][..], &bytes[..20], &bytes, &bytes] {
            noise.send_to(sent, to).unwrap();
        }
        sender.send(&announcer.encode(NOW + 1, &about)).unwrap();
        for (listener, listening) in &mut listeners {
            let began = Instant::now();
            let mut heard = Vec::new();
            while heard.len() < 5 {
                assert!(began.elapsed() < HANG, "{to}: {heard:?}");
                listener.receive(|datagram| heard.push(listening.take(NOW, datagram))).unwrap();
                std::thread::yield_now();
            }
            let malformed = Err(Ignored::Malformed);
            assert_eq!(heard, [malformed, malformed, Ok(about), Err(Ignored::Replayed), Ok(about)], "{to}");
        }
    }
}
