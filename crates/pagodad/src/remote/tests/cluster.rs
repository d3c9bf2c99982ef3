//! Remote tiers that etcd keeps: Debian's.

/// Other tests need more of it.
#[allow(dead_code)]
#[path = "../../../../rmap-etcd/tests/etcd/rig.rs"]
pub mod rig;

use rig::{EtcdProcess, until};
use rmap::control::MapEntry;
use rmap::units::SlabNo;
use rmap_etcd::{EtcdError, Member, Node, NodeState};
use rustix::process::Signal;

use super::*;

/// A pool whose map is in etcd and whose servers are in the list.
fn cluster(name: &str, etcd: &EtcdProcess, lenders: &[Lender]) -> Pool {
    let pool = Pool::with_keys(name);
    in_etcd(&pool, etcd, "test");
    pool.write("servers", &lenders.iter().map(|lender| lender.line.as_str()).collect::<String>());
    pool
}

fn in_etcd(pool: &Pool, etcd: &EtcdProcess, name: &str) {
    pool.write("pool.toml", &format!("cluster = \"etcd://{}/{name}\"\nhost = \"a\"\n", etcd.endpoint()));
}

/// The keys come first: lenders know them.
pub(super) fn start(name: &str, etcd: &EtcdProcess, ids: &[u32]) -> (Pool, Vec<Lender>) {
    let pool = cluster(name, etcd, &[]);
    let lenders: Vec<Lender> = ids.iter().map(|id| Lender::start(&pool, *id)).collect();
    pool.write("servers", &lenders.iter().map(|lender| lender.line.as_str()).collect::<String>());
    (pool, lenders)
}

/// A VM that has this tier.
pub(super) fn owner(pool: &Pool, tier: &NewTier) -> Record {
    tier.keep(&pool.dirs);
    vm(Some(tier.remote.clone()))
}

fn space(record: &Record) -> SpaceId {
    SpaceId(record.remote.as_ref().unwrap().space)
}

fn map(etcd: &EtcdProcess, record: &Record) -> Vec<(SlabNo, MapEntry)> {
    etcd.connect("b").look(space(record)).unwrap().1
}

pub(super) fn is_gone(etcd: &EtcdProcess, record: &Record) -> bool {
    let name = pagoda_pool::record::tier_name(space(record));
    let keys = etcd.etcdctl(&["get", "--prefix", "--keys-only", "/rmap/1/test/"]);
    let left = keys.contains(&format!("{:016x}", space(record).0));
    let known = etcd.connect("b").space(&name);
    assert_eq!(known.is_err(), !left, "{keys}");
    matches!(known, Err(EtcdError::NoSuchSpace { .. }))
}

pub(super) fn notes(pool: &Pool) -> usize {
    pending_release::all(&pool.dirs).len()
}

/// A slab of it is given back while the VM runs, and by its next daemons.
#[test]
fn the_next_daemon_finds_what_etcd_keeps() {
    let etcd = EtcdProcess::start();
    let (pool, lenders) = start("etcd-life", &etcd, &[1, 2]);
    let tier = pool.tier(2);
    assert_eq!((tier.remote.cluster.as_deref(), notes(&pool)), (Some("test"), 1), "pending as long as no VM has it");
    let record = owner(&pool, &tier);
    assert_eq!((notes(&pool), is_gone(&etcd, &record), record.remote.is_some()), (0, false, true));
    assert!(!pool.dir.join("registry").exists(), "etcd keeps it");

    let mut first = opened(&pool, &record);
    for (page, byte) in [(17, 1), (16_384, 2)] {
        assert_eq!(write(&mut first, page, byte), Ok(()));
    }
    let now = first.client.now();
    assert!(first.client.client.discard_slab(now, first.space, SlabNo(1)));
    assert!(connect::converse(&mut first.client, PATIENCE, |client| client.client.is_settled()).unwrap());
    let entries: Vec<(bool, usize)> =
        map(&etcd, &record).iter().map(|(_, entry)| (entry.empty, entry.replicas.len())).collect();
    assert_eq!(entries, [(false, 2), (true, 0)]);

    let mut next = open_in(&pool.dir, &record, Served::Before).unwrap().unwrap();
    assert_eq!([read(&mut next, 17), read(&mut next, 16_384)], [1, 0]);
    assert_eq!(write(&mut next, 16_385, 3), Ok(()));
    drop(next);
    let mut third = open_in(&pool.dir, &record, Served::Before).unwrap().unwrap();
    assert_eq!([read(&mut third, 17), read(&mut third, 16_385)], [1, 3]);

    assert!(matches!(pool.give_back(&record), Ok(GivenBack::All(_))));
    assert!(is_gone(&etcd, &record));
    assert!(matches!(pool.give_back(&record), Ok(GivenBack::All(_))), "it is no mistake to try again");
    assert_eq!(lenders.into_iter().map(Lender::stop).collect::<Vec<_>>(), [0, 0]);
}

/// Whatever `pool.toml` says later, a tier is looked for where it was made, and nowhere else.
#[test]
fn a_tier_stays_where_it_was_made() {
    let etcd = EtcdProcess::start();
    let (pool, _lenders) = start("etcd-stays", &etcd, &[1]);
    let record = owner(&pool, &pool.tier(1));
    let mut first = opened(&pool, &record);
    assert_eq!(write(&mut first, 0, 7), Ok(()));
    let refused = |parts: &[&str]| {
        let said = format!("{:#}", open_in(&pool.dir, &record, Served::Before).unwrap_err());
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        assert!(pool.give_back(&record).is_err(), "it is given back there alone");
    };
    pool.write("pool.toml", "");
    refused(&["remote tier of web1", "kept in etcd (pool test)", "`cluster = ", "pool.toml"]);
    in_etcd(&pool, &etcd, "other");
    refused(&["remote tier of web1", "belongs to the pool test", "other", "pool.toml"]);
    in_etcd(&pool, &etcd, "test");
    pool.write("pool.toml", &format!("cluster = \"etcd://{}/test\"\nhost = \"b\"\n", etcd.endpoint()));
    let said = format!("{:#}", pool.give_back(&record).unwrap_err());
    assert!(said.contains("a was the last to have it"), "{said}");
    in_etcd(&pool, &etcd, "test");
    let mut next = open_in(&pool.dir, &record, Served::Before).unwrap().unwrap();
    assert_eq!(read(&mut next, 0), 7);
    // One of the registry file does not move either.
    pool.write("pool.toml", "");
    let by_file = owner(&pool, &pool.tier(1));
    assert_eq!(write(&mut opened(&pool, &by_file), 0, 8), Ok(()));
    in_etcd(&pool, &etcd, "test");
    let mut next = open_in(&pool.dir, &by_file, Served::Before).unwrap().unwrap();
    assert_eq!(read(&mut next, 0), 8);
}

/// Killed anywhere between the space in etcd and the record, and between the record's end and the space's: the next daemon gives
/// back what no VM has, and nothing else.
#[test]
fn what_no_vm_has_is_given_back_by_the_next_daemon() {
    let etcd = EtcdProcess::start();
    let (pool, lenders) = start("etcd-owed", &etcd, &[1]);
    // Never made; made for a VM that did not come to be; a VM's; one of a VM that has ended.
    let unmade = pool.tier(1);
    let unmade = vm(Some(Remote { space: unmade.remote.space ^ 1, ..unmade.remote }));
    let [made, kept, ended] = [(); 3].map(|()| vm(Some(pool.tier(1).remote)));
    pending_release::note(&pool.dirs, &unmade).unwrap();
    for record in [&kept, &ended] {
        assert_eq!(write(&mut opened(&pool, record), 0, 9), Ok(()));
    }
    pending_release::settle(&pool.dirs, ended.remote.as_ref().unwrap());
    let file = pool.dir.join("web1.vm");
    std::fs::write(&file, ended.to_text()).unwrap();
    pending_release::inherit(&pool.dirs, ended.remote.as_ref().unwrap(), &file);
    assert!(!file.exists());
    let before = pending_release::all(&pool.dirs);
    assert_eq!(before.len(), 5);
    assert!(before.contains(&ended), "all that its memory's return needs");

    give_back_of_before(&pool.dirs, &before, std::slice::from_ref(&kept));
    until("all is given back", || notes(&pool) == 0);
    assert_eq!([&unmade, &made, &kept, &ended].map(|record| is_gone(&etcd, record)), [true, true, false, true]);
    let mut next = open_in(&pool.dir, &kept, Served::Before).unwrap().unwrap();
    assert_eq!(read(&mut next, 0), 9);
    assert_eq!(lenders.into_iter().map(Lender::stop).collect::<Vec<_>>(), [1]);
}

/// Pages that servers have are read and written, others are declined for the swap file; nothing is begun, and nothing is lost.
#[test]
fn a_tier_goes_on_without_etcd() {
    let mut etcd = EtcdProcess::start();
    let (pool, _lenders) = start("etcd-away", &etcd, &[1, 2]);
    let record = owner(&pool, &pool.tier(2));
    let mut first = opened(&pool, &record);
    assert_eq!(write(&mut first, 0, 1), Ok(()));
    etcd.signal(Signal::STOP);
    assert_eq!(write(&mut first, 16_384, 2), Err(Failure::Declined), "no map says where it is");
    let began = std::time::Instant::now();
    for page in 16_384..16_484 {
        assert_eq!(write(&mut first, page, 2), Err(Failure::Declined));
    }
    assert!(began.elapsed() < MAP_PATIENCE, "at once, once it is known");
    for byte in 3..9 {
        assert_eq!((write(&mut first, 0, byte), read(&mut first, 0)), (Ok(()), byte));
    }
    let now = first.client.now();
    assert!(first.client.client.control_silent_for(now).is_some());
    let said = format!("{:#}", open_in(&pool.dir, &record, Served::Before).unwrap_err());
    assert!(said.contains("remote tier of web1") && said.contains("does not answer"), "{said}");
    etcd.signal(Signal::CONT);
    let settled = |client: &mut UdpClient<Control>| client.client.is_settled();
    assert!(connect::converse(&mut first.client, rig::HANG, settled).unwrap());
    assert_eq!((write(&mut first, 16_384, 4), read(&mut first, 16_385)), (Ok(()), 0));
    etcd.kill();
    let said = new_tier(&pool.dirs, "web2", &REGIONS, RemoteRequest::default()).unwrap_err();
    assert!(said.message.contains("does not answer") && notes(&pool) == 0, "{said:?}");
    assert!(pool.give_back(&record).is_err());
    assert_eq!([read(&mut first, 0), read(&mut first, 16_384)], [8, 4]);
    etcd.restart();
    let mut next = open_in(&pool.dir, &record, Served::Before).unwrap().unwrap();
    assert_eq!([read(&mut next, 0), read(&mut next, 16_384), read(&mut next, 16_385)], [8, 4, 0]);
    assert!(matches!(pool.give_back(&record), Ok(GivenBack::All(_))));
    assert!(is_gone(&etcd, &record));
}

/// The server tells etcd of itself, until the member is dropped.
fn join(etcd: &EtcdProcess, lender: &Lender) -> Member {
    let info = rmap::servers::parse(&lender.line).unwrap().remove(0);
    let node = Node {
        id: info.id,
        addr: info.addr,
        key: info.key,
        zone: info.id.0,
        slab_size: SlabSize::default(),
        slabs: SLABS as u32,
        free: SLABS as u32,
        state: NodeState::Up,
        epoch: BootEpoch(1),
        announcer: None,
    };
    Member::join(etcd.config("b"), node, Duration::from_secs(5)).unwrap()
}

/// After etcd was away the leases of servers that live are over: no copy is given up before they could come back. One that comes
/// later than that is used again, too.
#[test]
fn servers_that_have_copies_are_missed_for_a_while() {
    let etcd = EtcdProcess::start();
    let (pool, lenders) = start("etcd-missed", &etcd, &[1, 2]);
    pool.write("servers", "");
    let [_stays, leaves] = [0, 1].map(|at: usize| join(&etcd, &lenders[at]));
    let record = owner(&pool, &pool.tier(2));
    assert_eq!(write(&mut opened(&pool, &record), 0, 1), Ok(()));
    leaves.leave();
    for _ in 0..2 {
        let said = format!("{:#}", open_in(&pool.dir, &record, Served::Before).unwrap_err());
        assert!(said.contains("not in etcd: 2") && said.contains("15 s"), "{said}");
    }
    let back = join(&etcd, &lenders[1]);
    drop(open_in(&pool.dir, &record, Served::Before).unwrap().unwrap());
    assert_eq!(map(&etcd, &record)[0].1.replicas.len(), 2);
    back.leave();
    missed(|spaces| spaces.insert(space(&record).0, Instant::now().checked_sub(MISS_FOR).unwrap()));
    let mut alone = open_in(&pool.dir, &record, Served::Before).unwrap().unwrap();
    assert_eq!((read(&mut alone, 0), map(&etcd, &record)[0].1.replicas.len()), (1, 1));
    let _back = join(&etcd, &lenders[1]);
    let mended = connect::converse(&mut alone.client, rig::HANG, |client| {
        let now = client.now();
        alone.watch.inform(&mut client.client, now);
        client.client.in_sync(alone.space) == (1, 1)
    });
    assert!(mended.unwrap(), "there are two copies again");
}

/// A server that tells etcd of itself while the VM runs is used for what the others have no room for.
#[test]
fn a_server_that_comes_is_used() {
    let etcd = EtcdProcess::start();
    let (pool, mut lenders) = start("etcd-comes", &etcd, &[1]);
    let record = owner(&pool, &pool.tier(1));
    let mut first = opened(&pool, &record);
    assert_eq!(write(&mut first, 0, 1), Ok(()));
    let lender = Lender::start(&pool, 2);
    let _member = join(&etcd, &lender);
    assert!(
        connect::converse(&mut first.client, rig::HANG, |client| {
            let now = client.now();
            first.watch.inform(&mut client.client, now);
            connect::up(client).len() == 2
        })
        .unwrap()
    );
    // The only one that is left: what the first has cannot be had, and is not lost.
    assert_eq!(lenders.remove(0).stop(), 1);
    until("its silence is noticed", || {
        connect::converse(&mut first.client, Duration::from_millis(50), |_| false).unwrap();
        connect::up(&first.client) == [ServerId(2)]
    });
    assert_eq!((write(&mut first, 16_384, 2), read(&mut first, 16_384)), (Ok(()), 2));
    assert_eq!(map(&etcd, &record)[1].1.replicas[0].server, ServerId(2));
    assert_eq!(lender.stop(), 1);
}
