//! Spaces by name, lost answers, values that cannot be right, wrong clusters, TLS.

use rmap::control::{Change, ControlPlane, ControlReply, ControlRequest, MapEntry, Replica, Today};
use rmap::units::{Generation, ServerId, SlabNo, SpaceId, Version};
use rmap_etcd::{BATCH_MAX, Control, Etcd, EtcdError, NewSpace, Space};

use crate::relay::Relay;
use crate::rig::{EtcdProcess, Scheme, config, until};

pub fn new_space(name: &str) -> NewSpace {
    NewSpace { name: name.to_owned(), pages: 1 << 16, copies: 2, reserve: 0 }
}

fn change(space: SpaceId, generation: Generation, slab: u32, revision: u64) -> Change {
    let copy = |server| Replica { server: ServerId(server), grant: Version::new(generation, revision, false) };
    let entry = MapEntry { revision, ..MapEntry::of(vec![copy(1), copy(2)]) };
    Change { space, generation, slab: SlabNo(slab), entry }
}

#[test]
fn spaces_have_names() {
    let etcd = EtcdProcess::start();
    let mut way = etcd.connect("a");
    let scratch = way.create_space(&new_space("scratch")).unwrap();
    let taken = etcd.connect("b").create_space(&new_space("scratch"));
    assert_eq!(taken, Err(EtcdError::NameTaken { name: "scratch".to_owned() }));
    let other = way.create_space(&new_space("other")).unwrap();
    assert_eq!(way.spaces().unwrap(), [other.clone(), scratch.clone()]);
    assert_eq!(way.space("scratch").unwrap(), scratch);
    assert!(matches!(way.space("nothing"), Err(EtcdError::NoSuchSpace { .. })));
    for bad in [
        NewSpace { name: "No".to_owned(), ..new_space("") },
        NewSpace { pages: 0, ..new_space("x") },
        NewSpace { copies: 3, ..new_space("x") },
        NewSpace { reserve: u32::MAX, ..new_space("x") },
    ] {
        assert!(matches!(way.create_space(&bad), Err(EtcdError::Invalid { .. })), "{bad:?}");
    }
    // Only the owner removes it; what is gone is gone wholly.
    let (generation, _) = way.take_over(scratch.id).unwrap();
    way.swap(&change(scratch.id, generation, 0, 1)).unwrap();
    let late = Generation(generation.0 - 1);
    assert_eq!(way.remove_space(&scratch, late), Err(EtcdError::NotOwner { generation: late.0 }));
    way.remove_space(&scratch, generation).unwrap();
    assert_eq!(etcd.etcdctl(&["get", "--prefix", "--keys-only", "/rmap/1/test/"]).matches("/rmap").count(), 2);
    assert!(matches!(way.take_over(scratch.id), Err(EtcdError::NoSuchSpace { .. })));
    // The same name is another space.
    assert!(way.create_space(&new_space("scratch")).unwrap().id != scratch.id);
}

/// Who looks again and again sees every change of others, whatever it was, and the end of the space.
#[test]
fn looks_see_what_others_have_changed() {
    let etcd = EtcdProcess::start();
    let (mut way, mut reader) = (etcd.connect("a"), etcd.connect("b"));
    let space = way.create_space(&new_space("scratch")).unwrap();
    let mut look = move || reader.answer(&ControlRequest::Look { space: space.id }).unwrap();
    let seen = |generation: u32, map: &[(u32, u64)]| {
        let entry =
            |(slab, revision): &(u32, u64)| (SlabNo(*slab), change(space.id, Generation(1), *slab, *revision).entry);
        let map = map.iter().map(entry).collect();
        ControlReply::Seen(Today { generation: Generation(generation), sealed: false, map })
    };
    let mut assert_seen = |generation, map: &[(u32, u64)]| {
        (0..3).for_each(|_| assert_eq!(look(), seen(generation, map)));
    };
    assert_seen(0, &[]);
    let (generation, _) = way.take_over(space.id).unwrap();
    assert_seen(1, &[]);
    way.swap(&change(space.id, generation, 0, 1)).unwrap();
    assert_seen(1, &[(0, 1)]);
    // Changes of other spaces are none.
    let other = way.create_space(&new_space("other")).unwrap();
    way.take_over(other.id).unwrap();
    assert_seen(1, &[(0, 1)]);
    way.swap(&change(space.id, generation, 7, 1)).unwrap();
    way.swap(&change(space.id, generation, 0, 2)).unwrap();
    assert_seen(1, &[(0, 2), (7, 1)]);
    let (generation, _) = way.take_over(space.id).unwrap();
    assert_seen(2, &[(0, 2), (7, 1)]);
    way.remove_space(&space, generation).unwrap();
    (0..2).for_each(|_| assert_eq!(look(), ControlReply::Gone));
}

/// Every kind of change, its answer lost: done once, and known to be done.
#[test]
fn lost_answers_are_recognized() {
    let etcd = EtcdProcess::start();
    let relay = Relay::before(&etcd.endpoint());
    let mut way = Etcd::connect(config(&relay.endpoint, Scheme::Plain, "a", None)).unwrap();
    for lost in 1..3 {
        let name = format!("space-{lost}");
        relay.lose(0, lost);
        let space: Space = way.create_space(&new_space(&name)).unwrap();
        assert!(relay.is_done());
        // The first answer is that of the look at the owner, the second that of the change.
        relay.lose(1, lost);
        let (generation, map) = way.take_over(space.id).unwrap();
        assert!(relay.is_done());
        assert_eq!((generation, map), (Generation(1), vec![]), "not taken over twice");
        assert_eq!(way.generation(space.id).unwrap(), Generation(1));
        relay.lose(0, lost);
        assert_eq!(way.swap(&change(space.id, generation, 0, 1)).unwrap(), ControlReply::Done);
        assert!(relay.is_done());
        let batch: Vec<_> = (0..BATCH_MAX as u32).map(|slab| change(space.id, generation, slab + 1, 1)).collect();
        relay.lose(0, lost);
        assert_eq!(way.answer_batch(&batch).unwrap(), vec![ControlReply::Done; BATCH_MAX]);
        relay.lose(0, lost);
        way.remove_space(&space, generation).unwrap();
        assert!(relay.is_done());
        assert!(way.spaces().unwrap().is_empty());
    }
}

#[test]
fn a_batch_does_what_can_be_done() {
    let etcd = EtcdProcess::start();
    let mut way = etcd.connect("a");
    let space = way.create_space(&new_space("batch")).unwrap().id;
    let (generation, _) = way.take_over(space).unwrap();
    let there = change(space, generation, 1, 1);
    way.swap(&there).unwrap();
    let mut else_there = there.clone();
    else_there.entry.replicas.pop();
    let batch = [change(space, generation, 0, 1), else_there, change(space, generation, 2, 1)];
    let expected = [ControlReply::Done, ControlReply::Conflict(there.entry.clone()), ControlReply::Done];
    assert_eq!(way.answer_batch(&batch).unwrap(), expected);
    let twice = [change(space, generation, 0, 2), change(space, generation, 0, 2)];
    assert!(matches!(way.answer_batch(&twice), Err(EtcdError::Invalid { .. })));
    let too_many: Vec<_> = (0..=BATCH_MAX as u32).map(|slab| change(space, generation, slab, 9)).collect();
    assert!(matches!(way.answer_batch(&too_many), Err(EtcdError::Invalid { .. })));
    let mut zeros = change(space, generation, 5, 1);
    zeros.entry.replicas.clear();
    assert!(matches!(way.swap(&zeros), Err(EtcdError::Invalid { .. })), "no copies, and not lost: it reads as zeros");
    way.take_over(space).unwrap();
    let late: Vec<_> = (0..3).map(|slab| change(space, generation, slab + 7, 1)).collect();
    assert_eq!(way.answer_batch(&late).unwrap(), vec![ControlReply::Fenced; 3]);
}

#[test]
fn values_that_cannot_be_right_are_not_acted_on() {
    let etcd = EtcdProcess::start();
    let mut way = etcd.connect("a");
    let space = way.create_space(&new_space("garbled")).unwrap();
    let (generation, _) = way.take_over(space.id).unwrap();
    way.swap(&change(space.id, generation, 0, 1)).unwrap();
    let base = format!("/rmap/1/test/spaces/{:016x}", space.id.0);
    let (owner, slab) = (format!("{base}/owner"), format!("{base}/map/00000000"));
    let is_garbage = |result: Result<(), EtcdError>, key: &str| match result {
        Err(EtcdError::Garbage { key: named, .. }) => assert_eq!(named, key),
        other => panic!("{key}: {other:?}"),
    };
    // An entry with one more copy than was agreed on: right in itself, but not counted as a change.
    let written = etcd.etcdctl(&["get", "--print-value-only", &slab]);
    let forged = written.trim().replace(r#""server":2"#, r#""server":3"#);
    for value in ["rubbish", "", r#"{"v":2}"#, r#"{"v":1,"revision":1,"lost":false,"copies":[]}"#, &forged] {
        etcd.etcdctl(&["put", &slab, "--", value]);
        // A take-over that cannot read the map has used up its generation.
        let today = way.generation(space.id).unwrap();
        is_garbage(way.swap(&change(space.id, today, 0, 2)).map(drop), &slab);
        is_garbage(way.take_over(space.id).map(drop), &slab);
    }
    let generation = way.generation(space.id).unwrap();
    // The thread goes on with the slabs that are right, and says what waits.
    let mut control = Control::start(etcd.config("a")).unwrap();
    let health = control.health();
    let (bad, good) = (change(space.id, generation, 0, 2), change(space.id, generation, 1, 1));
    assert_eq!(control.ask(&ControlRequest::Change(bad.clone())), ControlReply::Later);
    until("the good one is done", || control.ask(&ControlRequest::Change(good.clone())) == ControlReply::Done);
    until("the bad one is told", || matches!(health.get().trouble, Some(EtcdError::Garbage { .. })));
    assert_eq!(control.ask(&ControlRequest::Change(bad.clone())), ControlReply::Later);
    assert_eq!((health.get().waiting, health.get().reachable), (1, true));
    let stray = format!("{base}/map/zz");
    etcd.etcdctl(&["del", &slab]);
    etcd.etcdctl(&["put", &stray, "--", written.trim()]);
    is_garbage(way.take_over(space.id).map(drop), &stray);
    // An owner of another time.
    let value = etcd.etcdctl(&["get", "--print-value-only", &owner]);
    etcd.etcdctl(&["put", &owner, "--", value.trim()]);
    is_garbage(way.take_over(space.id).map(drop), &owner);
    is_garbage(way.swap(&change(space.id, generation, 9, 1)).map(drop), &owner);
    etcd.etcdctl(&[
        "put",
        "/rmap/1/test/names/moved",
        "--",
        r#"{"v":1,"name":"garbled","id":"0000000000000007","pages":1,"copies":1,"reserve":0}"#,
    ]);
    is_garbage(way.space("moved").map(drop), "/rmap/1/test/names/moved");
    etcd.etcdctl(&["put", "/rmap/1/test/nodes/00000001", "--", "rubbish"]);
    let (nodes, bad) = way.nodes().unwrap();
    assert!(nodes.is_empty() && matches!(&bad[..], [EtcdError::Garbage { key, .. }] if key.ends_with("00000001")));
}

#[test]
fn another_cluster_is_not_believed() {
    let (one, other) = (EtcdProcess::start(), EtcdProcess::start());
    let both = format!("{},{}", one.endpoint(), other.endpoint());
    let mut config = config(&both, Scheme::Plain, "a", None);
    config.request_timeout = std::time::Duration::from_secs(60);
    let mut way = Etcd::connect(config).unwrap();
    drop(one);
    // The next member is asked, and found to be none.
    assert!(matches!(way.spaces(), Err(EtcdError::OtherCluster { .. })));
}

#[test]
fn over_tls() {
    let etcd = EtcdProcess::start_with(Scheme::Tls);
    let mut way = etcd.connect("a");
    let space = way.create_space(&new_space("secret")).unwrap();
    assert_eq!(way.take_over(space.id).unwrap().0, Generation(1));
    // Nobody else's certificate will do.
    let other = EtcdProcess::start_with(Scheme::Tls);
    let mut config = config(&other.endpoint(), Scheme::Tls, "a", Some(etcd.certificate()));
    config.patience = std::time::Duration::ZERO;
    assert!(matches!(Etcd::connect(config), Err(EtcdError::Unreachable { .. })));
}
