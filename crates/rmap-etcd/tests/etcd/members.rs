//! Servers that are in etcd by a lease: they are listed while it lives, and gone when it has ended.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rmap::announce::AnnounceKey;
use rmap::crypto::PublicKey;
use rmap::units::{BootEpoch, ServerId, SlabSize};
use rmap_etcd::{Etcd, EtcdError, Load, Member, Membership, Node, NodeState};
use rustix::process::{Pid, Signal, kill_process};

use crate::rig::{EtcdProcess, Scheme, config, until};

/// The shortest that etcd gives.
const TTL: Duration = Duration::from_secs(2);
/// Where a process that is only a member finds its etcd.
const MEMBER_OF: &str = "RMAP_TEST_MEMBER_OF";

fn node(id: u32, key: u8) -> Node {
    Node {
        id: ServerId(id),
        addr: format!("10.0.0.{id}:7070").parse().unwrap(),
        key: PublicKey([key; 32]),
        zone: id,
        slab_size: SlabSize::default(),
        slabs: 64,
        free: 64,
        state: NodeState::Up,
        epoch: BootEpoch(9),
        announcer: Some(AnnounceKey([key; 32])),
    }
}

fn ids(etcd: &mut Etcd) -> Vec<u32> {
    let (nodes, bad) = etcd.nodes().unwrap();
    assert_eq!(bad, []);
    nodes.iter().map(|node| node.id.0).collect()
}

/// Runs as a process of its own, to be killed and paused like one; in a run of the tests it has nothing to do.
#[test]
fn process_of_a_member() {
    let Ok(endpoint) = std::env::var(MEMBER_OF) else { return };
    let member = Member::join(config(&endpoint, Scheme::Plain, "child", None), node(7, 7), TTL).unwrap();
    println!("joined");
    // Until it is killed; and what it believes when it believes something else.
    let mut last = Membership::Member;
    until("killed", || {
        let now = member.membership();
        if now != last {
            println!("{}", if now == Membership::Member { "member" } else { "unsure" });
            last = now;
        }
        false
    });
}

/// A process that is a member.
struct MemberProcess {
    child: Child,
    said: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl MemberProcess {
    fn start(etcd: &EtcdProcess) -> MemberProcess {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "members::process_of_a_member", "--nocapture"])
            .env(MEMBER_OF, etcd.endpoint())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut process = MemberProcess { child, said };
        process.says("joined");
        process
    }

    /// Waits for these words; the child ends, and with it this, when it hangs.
    fn says(&mut self, what: &str) {
        let said = self.said.find(|line| line.as_ref().is_ok_and(|line| line.ends_with(what)));
        assert!(said.is_some(), "it ended without having said {what}");
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id().cast_signed()).unwrap(), signal).unwrap();
    }
}

impl Drop for MemberProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn members_are_there_as_long_as_they_live() {
    let etcd = EtcdProcess::start();
    let mut way = etcd.connect("a");
    let first = Member::join(etcd.config("one"), node(1, 1), TTL).unwrap();
    let second = Member::join(etcd.config("two"), node(2, 2), TTL).unwrap();
    assert_eq!(way.nodes().unwrap(), (vec![node(1, 1), node(2, 2)], vec![]));
    // The number is taken by another key; the same key is an earlier life.
    let taken = Member::join(etcd.config("thief"), node(2, 3), TTL).map(drop);
    assert_eq!(taken, Err(EtcdError::NodeTaken { id: 2, addr: "10.0.0.2:7070".to_owned() }));
    let reborn = Member::join(etcd.config("two"), Node { epoch: BootEpoch(10), ..node(2, 2) }, TTL).unwrap();
    assert_eq!(way.nodes().unwrap().0[1].epoch, BootEpoch(10));
    drop((second, reborn));
    first.set_load(Load { free: 3, state: NodeState::Draining });
    until("the load is told", || way.nodes().unwrap().0.iter().any(|node| node.free == 3));
    assert_eq!(way.nodes().unwrap().0[0].state, NodeState::Draining);
    assert_eq!(first.membership(), Membership::Member);
    first.leave();
    assert!(!ids(&mut way).contains(&1), "at once");
    // One that dies says nothing: its lease runs out.
    let process = MemberProcess::start(&etcd);
    assert!(ids(&mut way).contains(&7));
    process.signal(Signal::KILL);
    until("its lease runs out", || !ids(&mut way).contains(&7));
}

/// A member that was paused longer than its lease finds out that others may have gone on without it, and comes back.
#[test]
fn a_paused_member_knows_that_it_was_away() {
    let etcd = EtcdProcess::start();
    let mut way = etcd.connect("a");
    let mut process = MemberProcess::start(&etcd);
    process.signal(Signal::STOP);
    until("its lease runs out", || !ids(&mut way).contains(&7));
    process.signal(Signal::CONT);
    until("it comes back", || ids(&mut way).contains(&7));
    process.says("unsure");
    process.says("member");
}

#[test]
fn members_survive_etcd() {
    let mut etcd = EtcdProcess::start();
    let mut config = etcd.config("one");
    config.request_timeout = Duration::from_millis(500);
    let member = Member::join(config, node(1, 1), TTL).unwrap();
    etcd.signal(Signal::STOP);
    until("it is not sure any more", || matches!(member.membership(), Membership::Unsure { .. }));
    etcd.signal(Signal::CONT);
    until("it is a member again", || member.membership() == Membership::Member);
    until("others see it", || ids(&mut etcd.connect("a")) == [1]);
    etcd.kill();
    until("it is not sure any more", || matches!(member.membership(), Membership::Unsure { .. }));
    etcd.restart();
    until("it is a member again", || member.membership() == Membership::Member);
    until("others see it", || ids(&mut etcd.connect("a")) == [1]);
}
