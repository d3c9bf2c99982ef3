//! Every packet reads as written, and nothing else is taken for one.

use super::*;

fn full<T: Copy + Default, const N: usize>(item: T) -> List<T, N> {
    let mut list = List::default();
    while list.push(item) {}
    list
}

fn samples() -> Vec<Packet> {
    let token = Token(*b"0123456789abcdef");
    let range = Range { addr: 0x7f00_0000_0000, len: 1 << 20 };
    let map = LentMap { region: 1, offset: 0xc_0000, len: 1 << 30, addr: 0x7f00_0000_1000 };
    vec![
        Packet::Fetch { token },
        Packet::Fetched { monitor: true, lens: full(1 << 30) },
        Packet::Prepare { token },
        Packet::Prepared { uffds: 3, flags: PREPARED_DEVICE | FLAG_HUGE },
        Packet::Hello {
            token,
            pid: 77,
            regions: full(Region { addr: 1 << 40, len: 1 << 30 }),
            shards: full(Shard { region: 7, offset: 1 << 21, len: 1 << 22 }),
        },
        Packet::Welcome { flags: FLAG_HUGE },
        Packet::Refused { text: Text::new(&"é".repeat(2000)) },
        Packet::Zap { seq: 9, ranges: full(range) },
        Packet::Zapped { seq: 9, epoch: u64::MAX, errno: 22 },
        Packet::Collapse { seq: 10, ranges: Ranges::default() },
        Packet::Collapsed { seq: 10, errno: 11, done: 5 },
        Packet::Clock { seq: 11 },
        Packet::Clocked { seq: 11 },
        Packet::Foreign { reason: ForeignReason::DmaMapped },
        Packet::Calls { token },
        Packet::Discard { seq: 12, region: 1, offset: 4096, len: 8192 },
        Packet::Discarded { seq: 12 },
        Packet::Folios { large: true },
        Packet::Split { seq: 13, ranges: full(range) },
        Packet::Join { seq: 14, ranges: full(range) },
        Packet::Ram { token },
        Packet::Gate { seq: 15, open: true },
        Packet::Gated { seq: 15, open: false },
        Packet::Own { order: 16, region: 1, offset: 1 << 20, len: 1 << 20 },
        Packet::Owned { order: 16, errno: 12 },
        Packet::Outbox { token },
        Packet::Look { seq: 17 },
        Packet::SetSpace { seq: 18, bytes: 1 << 40 },
        Packet::Figures { seq: 18, figures: OutboxFigures::of_words([1, 2, 3, 4, 5, 6, 7, 8, 9, u64::MAX]) },
        Packet::Mapper { token },
        Packet::Lent { flags: PREPARED_DEVICE, slot: 3, files: full(LentFile { dev: 1, ino: u64::MAX, len: 1 << 40 }) },
        Packet::Maps { pid: 77, maps: full(map) },
        Packet::Map { seq: 19, map },
        Packet::Unmap { seq: 20, map },
        Packet::Mapped { seq: 19, errno: 12 },
        Packet::Jobs { seq: 19, after: u64::MAX },
        Packet::JobsEnded {
            seq: 19,
            counts: OutboxCounts::of_words([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, u64::MAX]),
            jobs: full(OutboxJob::new([1, 2, 3, 4, 5, u64::MAX], true, 7, [b'j'; 32], [0xff; 32])),
        },
        Packet::JobsEnded { seq: 20, counts: OutboxCounts::default(), jobs: List::default() },
    ]
}

#[test]
fn every_packet_reads_as_written_and_largest_packets_fit() {
    for packet in samples() {
        assert_eq!(Packet::decode(packet.encode().as_bytes()), Ok(packet));
    }
}

#[test]
fn a_cut_or_padded_packet_is_refused() {
    for packet in samples() {
        let bytes = packet.encode();
        let bytes = bytes.as_bytes();
        for cut in 0..bytes.len() {
            assert!(Packet::decode(&bytes[..cut]).is_err(), "{packet:?} cut to {cut}");
        }
        let mut longer = bytes.to_vec();
        longer.push(0);
        assert_eq!(Packet::decode(&longer), Err(DecodeError::Length));
    }
}

/// Every byte in turn, as a peer might set it: what is taken at all is a packet that reads as written.
#[test]
fn a_damaged_packet_is_refused_or_a_whole_other_one() {
    let (mut refused, mut taken) = (0, 0);
    for packet in samples() {
        let bytes = packet.encode().as_bytes().to_vec();
        for (at, byte) in bytes.iter().enumerate() {
            for other in [0, 1, 0x7f, 0x80, 0xff, byte ^ 1, byte.wrapping_add(1)] {
                let mut damaged = bytes.clone();
                damaged[at] = other;
                match Packet::decode(&damaged) {
                    Ok(packet) => {
                        taken += 1;
                        assert_eq!(Packet::decode(packet.encode().as_bytes()), Ok(packet), "{at} {other}");
                    }
                    Err(_) => refused += 1,
                }
            }
        }
    }
    assert!(refused > 0 && taken > 0);
}

#[test]
fn counts_above_their_cap_are_refused() {
    let mut bytes = Packet::Zap { seq: 1, ranges: Ranges::default() }.encode().as_bytes().to_vec();
    bytes[16..20].copy_from_slice(&(RANGES_MAX as u32 + 1).to_le_bytes());
    assert_eq!(Packet::decode(&bytes), Err(DecodeError::Value));
}

#[test]
fn jobs_that_cannot_be_are_refused() {
    let mut jobs = List::default();
    jobs.push(OutboxJob::default());
    let bytes = Packet::JobsEnded { seq: 1, counts: OutboxCounts::default(), jobs }.encode().as_bytes().to_vec();
    let count_at = HEADER + 8 + 8 * 11;
    let mode_at = count_at + 8 + 8 * 6;
    for (at, value) in [(count_at, JOBS_MAX as u8 + 1), (mode_at, 2)] {
        let mut bad = bytes.clone();
        bad[at] = value;
        assert_eq!(Packet::decode(&bad), Err(DecodeError::Value), "{at}");
    }
    let mut one_too_many = bytes;
    one_too_many[count_at] = 2;
    assert_eq!(Packet::decode(&one_too_many), Err(DecodeError::Length));
}

#[test]
fn a_stranger_and_another_version_are_told_apart() {
    let bytes = Packet::Clock { seq: 1 }.encode().as_bytes().to_vec();
    let mut stranger = bytes.clone();
    stranger[0] = b'X';
    assert_eq!(Packet::decode(&stranger), Err(DecodeError::Magic));
    let mut newer = bytes;
    newer[4] = 99;
    assert_eq!(Packet::decode(&newer), Err(DecodeError::Version(99)));
}
