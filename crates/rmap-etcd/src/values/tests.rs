use proptest::prelude::*;

use super::*;

fn node() -> Node {
    Node {
        id: ServerId(3),
        addr: "10.0.0.5:7070".parse().unwrap(),
        key: PublicKey([0x3b; 32]),
        zone: 2,
        slab_size: SlabSize::default(),
        slabs: 512,
        free: 500,
        state: NodeState::Up,
        epoch: BootEpoch(u64::MAX),
        announcer: None,
    }
}

fn space() -> Space {
    Space { name: "scratch".to_owned(), id: SpaceId(7), pages: 1 << 24, copies: 2, reserve: 16 }
}

fn entry() -> MapEntry {
    let copy = |server| Replica { server: ServerId(server), grant: Version::from_bits(0x1000_0000_0002) };
    MapEntry { revision: 4, ..MapEntry::of(vec![copy(1), copy(9)]) }
}

fn register() -> Register {
    Register { vm: "web1".to_owned(), generation: 5, owner: [0xa7; 32] }
}

fn without_copies() -> [MapEntry; 2] {
    [MapEntry::lost(), MapEntry::empty()].map(|entry| MapEntry { revision: 5, ..entry })
}

/// What is written in `docs/protocol/etcd.md`.
#[test]
fn values_are_as_documented() {
    let owner = Owner { generation: Generation(3), sealed: false, host: "host-a".to_owned(), nonce: 0xab };
    let golden = [
        (
            node().encode(),
            r#"{"v":1,"id":3,"addr":"10.0.0.5:7070","key":"KEY","zone":2,"slab_pages":16384,"slabs":512,"free":500,"state":"up","epoch":"ffffffffffffffff"}"#
                .replace("KEY", &"3b".repeat(32)),
        ),
        (
            space().encode(),
            r#"{"v":1,"name":"scratch","id":"0000000000000007","pages":16777216,"copies":2,"reserve":16}"#.to_owned(),
        ),
        (owner.encode(), r#"{"v":1,"generation":3,"host":"host-a","nonce":"00000000000000ab"}"#.to_owned()),
        (
            Owner { sealed: true, ..owner.clone() }.encode(),
            r#"{"v":1,"generation":3,"sealed":true,"host":"host-a","nonce":"00000000000000ab"}"#.to_owned(),
        ),
        (
            entry().encode(),
            r#"{"v":1,"revision":4,"lost":false,"copies":[{"server":1,"grant":"0000100000000002"},{"server":9,"grant":"0000100000000002"}]}"#
                .to_owned(),
        ),
        (RegistersId { nonce: 0xcd }.encode(), r#"{"v":1,"nonce":"00000000000000cd"}"#.to_owned()),
        (
            register().encode(),
            r#"{"v":1,"vm":"web1","generation":"0000000000000005","owner":"KEY"}"#.replace("KEY", &"a7".repeat(32)),
        ),
        (without_copies()[0].encode(), r#"{"v":1,"revision":5,"lost":true,"copies":[]}"#.to_owned()),
        (without_copies()[1].encode(), r#"{"v":1,"revision":5,"lost":false,"empty":true,"copies":[]}"#.to_owned()),
    ];
    for (bytes, text) in golden {
        assert_eq!(String::from_utf8(bytes).unwrap(), text);
    }
    assert_eq!(Node::decode(&node().encode()), Ok(node()));
    assert_eq!(Space::decode(&space().encode()), Ok(space()));
    assert_eq!(Register::decode(&register().encode()), Ok(register()));
    for owner in [Owner { sealed: true, ..owner.clone() }, owner] {
        assert_eq!(Owner::decode(&owner.encode()), Ok(owner));
    }
    for entry in without_copies().into_iter().chain([entry()]) {
        assert_eq!(MapEntry::decode(&entry.encode()), Ok(entry));
    }
}

#[test]
fn what_cannot_be_right_is_refused() {
    let entry = String::from_utf8(entry().encode()).unwrap();
    let node = String::from_utf8(node().encode()).unwrap();
    let space = String::from_utf8(space().encode()).unwrap();
    let bad_entry = |from: &str, to: &str| {
        let bad = entry.replacen(from, to, 1);
        assert!(bad != entry && MapEntry::decode(bad.as_bytes()).is_err(), "{bad}");
    };
    bad_entry(r#""v":1"#, r#""v":2"#);
    bad_entry(r#""server":9"#, r#""server":1"#);
    bad_entry("0000100000000002", "0000000000000000");
    bad_entry("0000100000000002", "100000000002");
    bad_entry("0000100000000002", "+000100000000002");
    bad_entry("false", "true");
    bad_entry("4", "-4");
    bad_entry("4", "4.5");
    bad_entry("4", "1e300");
    bad_entry(r#""lost""#, r#""last""#);
    bad_entry(r#","copies""#, r#","more":1,"copies""#);
    bad_entry(r#","copies""#, r#","empty":true,"copies""#);
    bad_entry(r#","copies""#, r#","empty":1,"copies""#);
    for said in [r#""lost":false"#, r#""lost":false,"empty":false"#, r#""lost":true,"empty":true"#] {
        let none = format!(r#"{{"v":1,"revision":4,{said},"copies":[]}}"#);
        assert!(MapEntry::decode(none.as_bytes()).is_err(), "it would read as zeros: {none}");
    }
    for (from, to) in [
        ("10.0.0.5:7070", "10.0.0.5"),
        ("10.0.0.5:7070", "0.0.0.0:7070"),
        ("10.0.0.5:7070", "224.0.0.1:7070"),
        ("10.0.0.5:7070", "10.0.0.5:0"),
        ("3b3b", "3b"),
        ("16384", "16383"),
        (":500", ":513"),
        (r#""up""#, r#""down""#),
    ] {
        let bad = node.replacen(from, to, 1);
        assert!(bad != node && Node::decode(bad.as_bytes()).is_err(), "{bad}");
    }
    for (from, to) in [("scratch", "Scratch"), ("scratch", ""), (":2,", ":3,"), ("16777216", "0")] {
        let bad = space.replacen(from, to, 1);
        assert!(bad != space && Space::decode(bad.as_bytes()).is_err(), "{bad}");
    }
    let register = String::from_utf8(register().encode()).unwrap();
    for (from, to) in [
        ("web1", ""),
        ("web1", "a\\n"),
        ("web1", &"x".repeat(256)),
        ("0000000000000005", "0000000000000000"),
        ("0000000000000005", "5"),
        ("a7a7", "a7"),
        ("a7a7", "zza7"),
        (r#""v":1"#, r#""v":2"#),
        (r#""owner""#, r#""more":1,"owner""#),
    ] {
        let bad = register.replacen(from, to, 1);
        assert!(bad != register && Register::decode(bad.as_bytes()).is_err(), "{bad}");
    }
    assert!(RegistersId::decode(br#"{"v":1,"nonce":"0000000000000000"}"#).is_err());
    let long = format!("{}{}", entry, " ".repeat(VALUE_MAX));
    assert!(MapEntry::decode(long.as_bytes()).is_err());
}

proptest! {
    /// Nothing makes the decoders do anything but refuse, or give what encodes to the same meaning.
    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200), at in 0..100_usize, byte: u8) {
        let _ = (Node::decode(&bytes), Space::decode(&bytes), Owner::decode(&bytes), Register::decode(&bytes));
        prop_assert!(MapEntry::decode(&bytes).is_err());
        let mut damaged = entry().encode();
        let at = at % damaged.len();
        damaged[at] = byte;
        if let Ok(read) = MapEntry::decode(&damaged) {
            prop_assert_eq!(MapEntry::decode(&read.encode()), Ok(read));
        }
    }

    #[test]
    fn entries_come_back(revision in 1..u64::MAX, servers in proptest::collection::btree_set(any::<u32>(), 0..4_usize), grant in 1..u64::MAX, given_back: bool) {
        let copy = |server| Replica { server: ServerId(server), grant: Version::from_bits(grant) };
        let replicas: Vec<Replica> = servers.into_iter().map(copy).collect();
        let none = if given_back { MapEntry::empty() } else { MapEntry::lost() };
        let entry = if replicas.is_empty() { none } else { MapEntry::of(replicas) };
        let entry = MapEntry { revision, ..entry };
        prop_assert_eq!(MapEntry::decode(&entry.encode()), Ok(entry));
    }
}
