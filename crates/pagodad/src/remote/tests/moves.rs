//! Remote tiers of VMs that move between two hosts of a pool.

use pagoda_core::bits::PageSet;
use pagoda_core::units::{ChunkIdx, PageIdx};
use pagoda_image::ImageId;
use pagoda_move::note::{Decision, Note, Offered, Owned};
use pagoda_move::units::{AttemptId, HostKey};
use pagoda_move::wire::control::DecidedBy;
use pagoda_pager::tier::{Places, Takes, Tier};

use super::cluster::rig::{EtcdProcess, until};
use super::cluster::{is_gone, notes, owner, start};
use super::*;
use crate::record::{Operation, OperationKind};

const CHUNKS: ChunkCount = ChunkCount(128);

/// Another host of the pool. It has the same key, which the servers know.
fn other_host(pool: &Pool, etcd: &EtcdProcess, name: &str) -> Pool {
    let other = Pool::new(name);
    for file in ["node.key", "pool.key"] {
        let secret = std::fs::read_to_string(pool.dir.join(file)).unwrap();
        assert!(store::create_secret(&other.dir.join(file), &secret).unwrap());
    }
    std::fs::copy(pool.dir.join("servers"), other.dir.join("servers")).unwrap();
    other.write("pool.toml", &format!("cluster = \"etcd://{}/test\"\nhost = \"b\"\n", etcd.endpoint()));
    other
}

fn with(record: &Record, kind: OperationKind) -> Record {
    let mut record = record.clone();
    record.kind = VmKind::Qemu;
    record.operation = Some(Operation { kind, image: ImageId(9), resume: true });
    record
}

fn offered() -> Offered {
    Offered {
        attempt: AttemptId(9),
        peer: HostKey([7; 32]),
        generation: pagoda_move::units::Generation(2),
        register: None,
    }
}

fn note(pool: &Pool, note: Option<Note>) {
    pool.dirs.notes.write("web1", note).unwrap();
}

fn check(pool: &Pool, record: &Record) -> Result<()> {
    handover::check(&pool.dirs, &record.name, record.remote.as_ref().unwrap())
}

/// Until its servers answer.
fn greeted(mut opened: OpenedPool) -> OpenedPool {
    assert!(connect::converse(&mut opened.client, PATIENCE, |client| connect::all_up(client)).unwrap());
    opened
}

fn begin_write(opened: &mut OpenedPool, page: u64, byte: u8, token: u64) {
    let now = opened.client.now();
    let begun = opened.client.client.write(now, opened.space, PageNo(page), Class::Eviction, &[byte; PAGE_SIZE], token);
    begun.unwrap();
}

/// The destination reads beside the source, which stays the owner, and then owns. No write of the source lands after that: none that it
/// begins later, and none that was on its way.
#[test]
fn late_writes_of_the_host_before_never_land() {
    let etcd = EtcdProcess::start();
    let (source, _lenders) = start("moves-late", &etcd, &[1, 2]);
    let destination = other_host(&source, &etcd, "moves-late-b");
    let record = owner(&source, &source.tier(2));
    let mut old = opened(&source, &record);
    for page in 0..64 {
        assert_eq!(write(&mut old, page, 1), Ok(()));
    }
    let arrives = with(&record, OperationKind::Arrival);
    check(&destination, &arrives).unwrap();
    let said = format!("{:#}", check(&source, &arrives).unwrap_err());
    assert!(said.contains("one name"), "{said}");

    let remote = record.remote.as_ref().unwrap();
    let mut reader = greeted(open_reader(&destination.dir, &arrives, remote).unwrap().0);
    assert_eq!(read(&mut reader, 3), 1);
    assert_eq!((write(&mut old, 3, 2), read(&mut reader, 3)), (Ok(()), 2), "a reader takes nothing from its owner");

    // Writes that are on their way when the space gets another owner, who writes some of the pages.
    for page in 0..32 {
        begin_write(&mut old, page, 0xee, 100 + page);
    }
    let mut new = greeted(open_in(&destination.dir, &arrives, Served::Before).unwrap().unwrap());
    for page in 0..16 {
        assert_eq!(write(&mut new, page, 5), Ok(()));
    }
    let (mut refused, mut landed, mut page) = (0, 0, [0; PAGE_SIZE]);
    connect::converse(&mut old.client, PATIENCE, |client| {
        while let Some(event) = client.client.poll_event(&mut page) {
            let Event::Written { result, .. } = event else { panic!("{event:?}") };
            (refused, landed) = if result.is_ok() { (refused, landed + 1) } else { (refused + 1, landed) };
        }
        refused + landed == 32
    })
    .unwrap();
    // Writes that it begins after that.
    for page in 0..64 {
        match write(&mut old, page, 0xee) {
            Ok(()) => landed += 1,
            Err(_) => refused += 1,
        }
    }
    assert_eq!((landed, refused), (0, 96), "late writes that land");
    let expected = |page: u64| match page {
        0..16 => 5,
        _ => 1,
    };
    for page in 0..64 {
        assert_eq!(read(&mut new, page), expected(page), "page {page}");
    }
    // The reader's view follows, without a word to anybody.
    assert_eq!([read(&mut reader, 3), read(&mut reader, 40)], [5, 1]);
}

/// A destination takes over what it was told of, and nothing that its source has changed since, whatever an operator thinks of the source.
#[test]
fn what_its_source_went_on_with_is_not_taken_over() {
    let etcd = EtcdProcess::start();
    let (source, _lenders) = start("moves-from", &etcd, &[1]);
    let destination = other_host(&source, &etcd, "moves-from-b");
    let record = owner(&source, &source.tier(1));
    let mut old = opened(&source, &record);
    assert_eq!(write(&mut old, 3, 1), Ok(()));
    let arrives = with(&record, OperationKind::Arrival);
    let read_by = || open_reader(&destination.dir, &arrives, record.remote.as_ref().unwrap()).unwrap().1;
    let open = |from| open_owner(&destination.dir, &arrives, Served::Before, Before::Since(from));
    let first = read_by();
    // Whoever goes on after it has named its pages takes the space over before it changes any.
    let mut next = opened(&source, &record);
    assert_eq!(write(&mut next, 3, 2), Ok(()));
    let said = format!("{:#}", open(first).unwrap_err());
    assert!(said.contains("another host has changed it"), "{said}");
    assert_eq!(write(&mut next, 3, 3), Ok(()), "nothing was taken from it");
    let second = read_by();
    assert!(second > first);
    let mut new = greeted(open(second).unwrap().unwrap());
    assert_eq!(read(&mut new, 3), 3);
    // The answer was lost, so it asks again.
    let mut again = greeted(open(second).unwrap().unwrap());
    assert_eq!(read(&mut again, 3), 3);
}

/// Nor does a source take back what its destination runs with by the word of an operator, whether or not its daemon has been started anew.
#[test]
fn what_its_destination_went_on_with_is_not_taken_back() {
    let etcd = EtcdProcess::start();
    let (source, _lenders) = start("moves-taken", &etcd, &[1]);
    let destination = other_host(&source, &etcd, "moves-taken-b");
    let record = owner(&source, &source.tier(1));
    assert_eq!(write(&mut opened(&source, &record), 3, 1), Ok(()));
    let file = source.dir.join("web1.far");
    RemoteMap::create(&file, CHUNKS).unwrap();
    note(&source, Some(Note::Owned(Owned::Offered(offered()))));
    let (moves, arrives) = (with(&record, OperationKind::Move), with(&record, OperationKind::Arrival));
    for own in [&moves, &record] {
        assert!(for_engine(&source.dirs, &file, own, CHUNKS, true).unwrap().is_some(), "it was the last one");
    }
    let mut new = greeted(open_in(&destination.dir, &arrives, Served::Before).unwrap().unwrap());
    assert_eq!(write(&mut new, 3, 2), Ok(()));
    for own in [&moves, &record] {
        let said = format!("{:#}", for_engine(&source.dirs, &file, own, CHUNKS, true).unwrap_err());
        assert!(said.contains("b has taken it over"), "{said}");
    }
    assert_eq!((write(&mut new, 4, 3), read(&mut new, 3)), (Ok(()), 2), "nothing was taken from it");
}

/// A held tier takes copies for another host. It is not let go as long as one may land, and what it has is named all the same.
#[test]
fn a_tier_takes_copies_while_it_is_held_and_its_pages_are_not_named() {
    let etcd = EtcdProcess::start();
    let (source, _lenders) = start("moves-copies", &etcd, &[1]);
    let record = with(&owner(&source, &source.tier(1)), OperationKind::Move);
    let file = source.dir.join("web1.far");
    RemoteMap::create(&file, CHUNKS).unwrap().set(ChunkIdx(1), PageSet::single(0)).unwrap();
    note(&source, Some(Note::Owned(Owned::Offered(offered()))));
    let mut tier = for_engine(&source.dirs, &file, &record, CHUNKS, true).unwrap().unwrap();
    let turn = |tier: &mut RemoteTier| tier.maintain(&mut std::iter::empty());
    assert_eq!(tier.places(), Places::No);
    handover::hold(&record).unwrap();
    assert_eq!(tier.places(), Places::No, "it does not know yet");
    turn(&mut tier);
    assert!(tier.places() == Places::Now && handover::is_still(&record));
    for chunk in 2..6 {
        tier.place(ChunkIdx(chunk).page(0), vec![7; 64 * PAGE_SIZE]);
    }
    turn(&mut tier);
    assert!(tier.places() == Places::Later && !handover::is_still(&record));
    assert!(handover::let_go(&record).is_err(), "a copy may land");
    assert_eq!((tier.handed_over(ChunkIdx(1)), tier.holds(ChunkIdx(2))), (PageSet::single(0), PageSet::EMPTY));
    tier.forget_placing();
    turn(&mut tier);
    assert!(tier.next_placed().is_none() && tier.places() == Places::Now && handover::is_still(&record));
    handover::name_pages(&record);
    turn(&mut tier);
    assert_eq!(tier.places(), Places::No);
    handover::let_go(&record).unwrap();
}

/// An engine's tier is held, let go, and taken back by its host when the grant comes back. What is there is not sent.
#[test]
fn a_tier_that_was_let_go_comes_back() {
    let etcd = EtcdProcess::start();
    let (source, _lenders) = start("moves-back", &etcd, &[1]);
    let record = with(&owner(&source, &source.tier(1)), OperationKind::Move);
    assert_eq!(write(&mut opened(&source, &record), 256, 8), Ok(()));
    let file = source.dir.join("web1.far");
    RemoteMap::create(&file, CHUNKS).unwrap().set(ChunkIdx(1), PageSet::single(0)).unwrap();
    note(&source, Some(Note::Owned(Owned::Offered(offered()))));
    let mut tier = for_engine(&source.dirs, &file, &record, CHUNKS, true).unwrap().unwrap();
    let turn = |tier: &mut RemoteTier| tier.maintain(&mut std::iter::empty());

    assert!(handover::let_go(&record).is_err() && tier.handed_over(ChunkIdx(1)).is_empty());
    handover::hold(&record).unwrap();
    turn(&mut tier);
    assert!(handover::is_still(&record) && tier.takes(true) == Takes::No);
    assert_eq!(tier.handed_over(ChunkIdx(1)), PageSet::single(0));
    // Given up before anybody was told of it: it was this host's all the time.
    handover::own(&source.dirs, &record, || {});
    turn(&mut tier);
    assert!(tier.handed_over(ChunkIdx(1)).is_empty() && tier.takes(true) != Takes::No);

    handover::hold(&record).unwrap();
    turn(&mut tier);
    handover::let_go(&record).unwrap();
    note(&source, Some(Note::Given(offered(), Decision::Grant)));
    turn(&mut tier);
    assert!(!ownership::may_own(&source.dirs, &record).unwrap());
    assert!(handover::hold(&record).is_err(), "it is given");
    // The destination refuses: it has not run, and so has never owned it.
    note(&source, Some(Note::Owned(Owned::Back(offered()))));
    handover::own(&source.dirs, &record, || {});
    let mut content = [0; PAGE_SIZE];
    until("it is taken back", || {
        turn(&mut tier);
        handover::hold(&record).is_ok()
    });
    tier.read_now(PageIdx(256), &mut content).unwrap();
    assert_eq!(content, [8; PAGE_SIZE]);
}

/// A daemon that starts opens the tier of a VM as its owner only if its note says so.
#[test]
fn a_daemon_that_starts_takes_nothing_from_the_other_host() {
    let etcd = EtcdProcess::start();
    let (pool, _lenders) = start("moves-start", &etcd, &[1]);
    let record = owner(&pool, &pool.tier(1));
    let (given, accepted) = (Note::Given(offered(), Decision::Grant), Note::Accepted(offered(), DecidedBy::Grant));
    let owned = Note::Owned(Owned::Offered(offered()));
    let expect = |kind: Option<OperationKind>, said: Option<Note>, expected: bool| {
        note(&pool, said);
        let record = kind.map_or_else(|| record.clone(), |kind| with(&record, kind));
        assert_eq!(ownership::may_own(&pool.dirs, &record).unwrap(), expected, "{kind:?} {said:?}");
    };
    for said in [None, Some(owned), Some(accepted)] {
        expect(None, said, true);
    }
    let other = Offered { attempt: AttemptId(8), ..offered() };
    for (said, moves, arrives) in [
        (None, false, false),
        (Some(owned), true, false),
        (Some(Note::Owned(Owned::Came(offered()))), true, true),
        (Some(Note::Owned(Owned::Came(other))), true, false),
        (Some(Note::Accepted(other, DecidedBy::Grant)), false, false),
        (Some(given), false, false),
        (Some(accepted), false, true),
        (Some(Note::Incoming(offered())), false, false),
        (Some(Note::Refused(offered())), false, false),
    ] {
        expect(Some(OperationKind::Move), said, moves);
        expect(Some(OperationKind::Arrival), said, arrives);
    }
    // One in the registry file is never another host's.
    note(&pool, Some(given));
    let mut by_file = with(&record, OperationKind::Move);
    by_file.remote.as_mut().unwrap().cluster = None;
    assert!(ownership::may_own(&pool.dirs, &by_file).unwrap());
    std::fs::write(pool.dir.join("moves/web1.note"), "?").unwrap();
    assert!(ownership::may_own(&pool.dirs, &with(&record, OperationKind::Move)).is_err(), "unknown is not owned");
}

/// The VM has gone. Its tier is not given back by the host that had it, nor by one that it did not come to.
#[test]
fn nobody_gives_back_what_another_host_has() {
    let etcd = EtcdProcess::start();
    let (source, lenders) = start("moves-owed", &etcd, &[1]);
    let destination = other_host(&source, &etcd, "moves-owed-b");
    let record = owner(&source, &source.tier(1));
    assert_eq!(write(&mut opened(&source, &record), 0, 6), Ok(()));
    let (moves, arrives) = (with(&record, OperationKind::Move), with(&record, OperationKind::Arrival));
    let remote = record.remote.as_ref().unwrap();
    let file_of = |pool: &Pool, record: &Record| {
        let file = pool.dir.join("web1.vm");
        std::fs::write(&file, record.to_text()).unwrap();
        file
    };
    // Its release is pending, and it is looked at again and again until the note goes.
    let wait_for_note = |pool: &Pool, record: &Record| {
        pending_release::inherit(&pool.dirs, remote, &file_of(pool, record));
        let mut looks = 0;
        pending_release::give_back_patiently(&pool.dirs, record, remote, &mut |_| {
            looks += 1;
            assert_eq!((notes(pool), is_gone(&etcd, record)), (1, false));
            if looks == 3 {
                note(pool, None);
            }
        });
        assert_eq!((looks, notes(pool)), (3, 0), "it is another host's");
    };
    // It ends at the destination before that has it. Nobody knows yet whose it will be.
    note(&destination, Some(Note::Incoming(offered())));
    pending_release::note(&destination.dirs, &arrives).unwrap();
    assert!(check(&destination, &arrives).is_err(), "it is pending");
    wait_for_note(&destination, &arrives);
    check(&destination, &arrives).unwrap();
    // It ends at the source while that has given it away, and runs at the destination under a later attempt.
    note(&source, Some(Note::Given(offered(), Decision::Grant)));
    let mut there = greeted(open_in(&destination.dir, &arrives, Served::Before).unwrap().unwrap());
    wait_for_note(&source, &moves);
    assert_eq!((read(&mut there, 0), is_gone(&etcd, &record)), (6, false));
    // It came back to the source, and its user ends it there.
    drop(there);
    note(&source, Some(Note::Owned(Owned::Back(offered()))));
    drop(greeted(open_in(&source.dir, &moves, Served::Before).unwrap().unwrap()));
    end_of(&source.dirs, &moves, &file_of(&source, &moves));
    until("it is given back", || notes(&source) == 0);
    assert!(is_gone(&etcd, &record));
    assert_eq!(lenders.into_iter().map(Lender::stop).collect::<Vec<_>>(), [0]);
}
