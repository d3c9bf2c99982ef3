use proptest::prelude::*;

use super::*;

const NOW: u64 = 1_800_000_000_000;

fn keys() -> Keypair {
    Keypair::from_private([7; KEY_SIZE])
}

fn pool() -> PoolKey {
    PoolKey::new([3; KEY_SIZE])
}

fn about() -> Announcement {
    Announcement {
        server: ServerId(5),
        addr: "10.0.0.5:7070".parse().unwrap(),
        key: keys().public(),
        zone: 2,
        epoch: BootEpoch(99),
        slabs: 512,
        free: 100,
        pressure: Pressure::Yellow,
    }
}

fn listed(server: u32, announcer: &Announcer) -> ServerInfo {
    let Announcement { addr, key, zone, .. } = about();
    ServerInfo { id: ServerId(server), addr, key, zone, announcer: Some(announcer.public()) }
}

fn listening() -> Listening {
    let mut listening = Listening::new(pool());
    assert!(listening.know(&listed(5, &Announcer::new(&keys(), pool()))));
    listening
}

#[test]
fn it_is_as_documented() {
    let bytes = Announcer::new(&keys(), pool()).encode(NOW, &about());
    assert_eq!(bytes[..8], [5, 1, 1, 4, 5, 0, 0, 0]);
    assert_eq!(bytes[8..16], 99_u64.to_le_bytes());
    assert_eq!(bytes[16..24], NOW.to_le_bytes());
    assert_eq!(bytes[24..40], [0, 2, 0, 0, 100, 0, 0, 0, 2, 0, 0, 0, 0x9e, 0x1b, 0, 0]);
    assert_eq!(bytes[40..56], [10, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[56..88], keys().public().0);
    assert_eq!(listening().take(NOW, &bytes), Ok(about()));
}

#[test]
fn what_is_not_to_be_believed_is_ignored() {
    let announcer = Announcer::new(&keys(), pool());
    let good = announcer.encode(NOW, &about());
    let mut listening = listening();
    assert_eq!(listening.take(NOW, &good[..167]), Err(Ignored::Malformed));
    assert_eq!(listening.take(NOW, &[&good[..], &[0]].concat()), Err(Ignored::Malformed));
    let elsewhere = Announcer::new(&keys(), PoolKey::new([4; KEY_SIZE])).encode(NOW, &about());
    assert_eq!(listening.take(NOW, &elsewhere), Err(Ignored::Stranger));
    // Somebody of the pool, in the name of another.
    let other = Announcer::new(&Keypair::from_private([8; KEY_SIZE]), pool());
    assert_eq!(listening.take(NOW, &other.encode(NOW, &about())), Err(Ignored::Forged));
    let stranger = Announcement { server: ServerId(6), ..about() };
    assert_eq!(listening.take(NOW, &announcer.encode(NOW, &stranger)), Err(Ignored::Unknown));
    let rekeyed = Announcement { key: PublicKey([1; KEY_SIZE]), ..about() };
    assert_eq!(listening.take(NOW, &announcer.encode(NOW, &rekeyed)), Err(Ignored::Unknown));
    for addr in ["0.0.0.0:1", "10.0.0.5:0", "224.0.0.1:1", "255.255.255.255:1", "[::]:1", "[ff02::1]:1"] {
        let nowhere = Announcement { addr: addr.parse().unwrap(), ..about() };
        assert_eq!(listening.take(NOW, &announcer.encode(NOW, &nowhere)), Err(Ignored::Malformed), "{addr}");
    }
    // Nothing of that has kept the true one from being taken, once.
    assert_eq!(listening.take(NOW, &good), Ok(about()));
    assert_eq!(listening.take(NOW, &good), Err(Ignored::Replayed));
    assert_eq!(listening.take(NOW, &announcer.encode(NOW - 1, &about())), Err(Ignored::Replayed));
    let moved = Announcement { addr: "[fd00::1]:9".parse().unwrap(), ..about() };
    assert_eq!(listening.take(NOW, &announcer.encode(NOW + 1, &moved)), Ok(moved));
    let age = AGE_MAX.as_millis() as u64;
    let late = announcer.encode(NOW + 2, &about());
    assert_eq!(listening.take(NOW + 3 + age, &late), Err(Ignored::Late));
    let early = announcer.encode(NOW + 1 + age, &about());
    assert_eq!(listening.take(NOW, &early), Err(Ignored::Late));
}

#[test]
fn forgeries_cost_only_so_much() {
    let mut listening = listening();
    let forged = Announcer::new(&Keypair::from_private([8; KEY_SIZE]), pool()).encode(NOW, &about());
    let looked = (0..CHECKS_PER_SECOND).filter(|_| listening.take(NOW, &forged) == Err(Ignored::Forged)).count();
    assert_eq!(looked as u32, CHECKS_PER_SECOND);
    assert_eq!(listening.take(NOW, &forged), Err(Ignored::TooMany));
    let good = Announcer::new(&keys(), pool()).encode(NOW, &about());
    assert_eq!(listening.take(NOW + 1000, &good), Ok(about()));
}

proptest! {
    #[test]
    fn any_comes_back(server: u32, epoch: u64, zone: u32, slabs: u32, free: u32, port in 1..=u16::MAX, ip: [u8; 4], six: bool) {
        let ip = Ipv4Addr::from([ip[0] % 127 + 1, ip[1], ip[2], ip[3]]);
        let ip = if six { IpAddr::from(ip.to_ipv6_mapped()) } else { ip.into() };
        let about = Announcement {
            server: ServerId(server),
            addr: SocketAddr::new(ip, port),
            epoch: BootEpoch(epoch),
            zone,
            slabs,
            free: free.min(slabs),
            ..about()
        };
        let announcer = Announcer::new(&keys(), pool());
        let mut listening = Listening::new(pool());
        prop_assert!(listening.know(&listed(server, &announcer)));
        prop_assert_eq!(listening.take(NOW, &announcer.encode(NOW, &about)), Ok(about));
    }

    /// No bit can be changed, and no bytes of somebody else's are taken.
    #[test]
    fn nothing_else_is_taken(at in 0..ANNOUNCEMENT_SIZE, bit in 0..8_u32, noise in proptest::collection::vec(any::<u8>(), 0..400)) {
        let mut bytes = Announcer::new(&keys(), pool()).encode(NOW, &about());
        bytes[at] ^= 1 << bit;
        let mut listening = listening();
        prop_assert!(listening.take(NOW, &bytes).is_err());
        prop_assert!(listening.take(NOW, &noise).is_err());
        // Even by somebody who knows the pool's key.
        let code = pool().announcement_code(&bytes[..CODED]);
        bytes[CODED..].copy_from_slice(&code);
        if at < CODED {
            prop_assert!(listening.take(NOW, &bytes).is_err());
        }
    }
}
