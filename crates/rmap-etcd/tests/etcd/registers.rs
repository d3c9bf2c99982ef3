//! Registers of moves: one of two hosts has the VM, whatever is asked at once, twice, late or of another etcd.

use std::time::{Duration, Instant};

use rmap_etcd::{EtcdConfig, EtcdError, Register, Registers};
use rustix::process::Signal;

use crate::relay::Relay;
use crate::rig::{EtcdProcess, Scheme, config};

const ATTEMPT: u64 = 0xa7;
const KEY: &str = "/rmap/1/test/moves/00000000000000a7";
const ID: &str = "/rmap/1/test/registers";

fn open(config: EtcdConfig) -> Registers {
    Registers::open(config).expect("a configuration")
}

fn register(generation: u64) -> Register {
    Register { vm: "web1".to_owned(), generation, owner: [generation as u8; 32] }
}

/// If it is there, and below a generation.
fn claim(registers: &mut Registers, below: u64, generation: u64) -> Result<Option<Register>, EtcdError> {
    registers.change(ATTEMPT, |before| Ok(before.filter(|b| b.generation < below).map(|_| register(generation))))
}

fn begin(registers: &mut Registers) -> Option<Register> {
    registers.change(ATTEMPT, |before| Ok(before.is_none().then(|| register(4)))).unwrap()
}

#[test]
fn a_register_is_made_once_changed_by_one_and_removed() {
    let etcd = EtcdProcess::start();
    let (mut one, mut other) = (open(etcd.config("a")), open(etcd.config("b")));
    assert_eq!(claim(&mut one, 5, 6).unwrap(), None, "it is made by nobody else");
    assert!(etcd.etcdctl(&["get", KEY]).is_empty());
    assert_eq!(begin(&mut one), Some(register(4)));
    assert_eq!(begin(&mut other), Some(register(4)));
    let stored = etcd.etcdctl(&["get", "--print-value-only", KEY]);
    let owner = "04".repeat(32);
    let expected = format!(r#"{{"v":1,"vm":"web1","generation":"0000000000000004","owner":"{owner}"}}"#);
    assert_eq!(stored.trim(), expected);
    assert_eq!(claim(&mut other, 5, 5).unwrap(), Some(register(5)));
    assert_eq!(claim(&mut one, 5, 6).unwrap(), Some(register(5)), "the other was first");
    assert_eq!(claim(&mut other, 5, 5).unwrap(), Some(register(5)));
    assert_eq!(claim(&mut other, 6, 6).unwrap(), Some(register(6)), "it was given back");
    one.remove(ATTEMPT).unwrap();
    one.remove(ATTEMPT).unwrap();
    assert_eq!(claim(&mut other, 9, 6).unwrap(), None);
    assert!(etcd.etcdctl(&["get", KEY]).is_empty());
}

/// Both hosts at once, from the same state, many times.
#[test]
fn of_two_hosts_one_has_the_vm() {
    let etcd = EtcdProcess::start();
    let (mut one, mut other) = (open(etcd.config("a")), open(etcd.config("b")));
    let mut wins = [0; 2];
    for _ in 0..40 {
        begin(&mut one);
        let (a, b) = std::thread::scope(|scope| {
            let a = scope.spawn(|| claim(&mut one, 5, 6).unwrap().unwrap());
            let b = scope.spawn(|| claim(&mut other, 5, 5).unwrap().unwrap());
            (a.join().unwrap(), b.join().unwrap())
        });
        assert_eq!(a, b, "both hear the same");
        wins[usize::from(a == register(5))] += 1;
        one.remove(ATTEMPT).unwrap();
    }
    assert_eq!(wins.iter().sum::<i32>(), 40, "{wins:?}");
}

#[test]
fn hosts_know_by_a_number_whether_they_ask_the_same_registers() {
    let (etcd, another) = (EtcdProcess::start(), EtcdProcess::start());
    let mut same = [open(etcd.config("a")), open(etcd.config("b"))];
    // Both are the first ones.
    let numbers: Vec<u64> = std::thread::scope(|scope| {
        let looks: Vec<_> = same.iter_mut().map(|one| scope.spawn(|| one.look().unwrap())).collect();
        looks.into_iter().map(|look| look.join().unwrap()).collect()
    });
    assert!(numbers[0] != 0 && numbers[0] == numbers[1], "{numbers:x?}");
    assert_eq!(same[0].look().unwrap(), numbers[0]);
    assert_ne!(open(another.config("a")).look().unwrap(), numbers[0], "another etcd");
    let pool = EtcdConfig { pool: "more".to_owned(), ..etcd.config("a") };
    assert_ne!(open(pool).look().unwrap(), numbers[0], "another pool");
}

/// etcd was emptied, or put in another one's place: what was agreed on before is not asked there.
#[test]
fn registers_that_take_the_place_of_others_are_not_asked() {
    let etcd = EtcdProcess::start();
    let (mut one, mut other) = (open(etcd.config("a")), open(etcd.config("b")));
    let number = one.look().unwrap();
    begin(&mut one);
    etcd.etcdctl(&["del", ID]);
    assert!(matches!(claim(&mut one, 5, 6), Err(EtcdError::OtherRegisters { .. })));
    let new = other.look().unwrap();
    assert_ne!(new, number);
    for refused in [claim(&mut one, 5, 6).map(drop), one.remove(ATTEMPT)] {
        assert!(matches!(refused, Err(EtcdError::OtherRegisters { .. })), "{refused:?}");
    }
    assert_eq!(claim(&mut other, 0, 5).unwrap(), Some(register(4)), "nothing was changed");
    // Said once, and then these are the registers.
    assert!(matches!(one.look(), Err(EtcdError::OtherRegisters { .. })));
    assert_eq!(one.look().unwrap(), new);
}

#[test]
fn a_lost_answer_is_heard_when_it_is_asked_again() {
    let etcd = EtcdProcess::start();
    let relay = Relay::before(&etcd.endpoint());
    let mut one = open(config(&relay.endpoint, Scheme::Plain, "a", None));
    let mut other = open(etcd.config("b"));
    begin(&mut one);
    // What it has comes; that it was changed does not.
    relay.lose(1, 1);
    let lost = claim(&mut one, 5, 6);
    assert!(lost.as_ref().is_err_and(EtcdError::is_transient), "{lost:?}");
    assert!(relay.is_done());
    assert_eq!(claim(&mut other, 5, 5).unwrap(), Some(register(6)), "it has taken effect");
    assert_eq!(claim(&mut one, 5, 6).unwrap(), Some(register(6)));
}

#[test]
fn what_cannot_be_right_decides_nothing() {
    let etcd = EtcdProcess::start();
    let mut one = open(etcd.config("a"));
    begin(&mut one);
    let good = String::from_utf8(etcd.etcdctl(&["get", "--print-value-only", KEY]).trim().into()).unwrap();
    let longest = good.replace("web1", &"w".repeat(5000));
    for bad in ["{}", "x", &good.replace("0004\"", "000g\""), &good.replace("\"v\":1", "\"v\":2"), &longest] {
        etcd.etcdctl(&["put", KEY, bad]);
        let said = claim(&mut one, 9, 6);
        assert!(matches!(&said, Err(EtcdError::Garbage { key, .. }) if key == KEY), "{bad}: {said:?}");
    }
    etcd.etcdctl(&["put", KEY, &good]);
    let refused = one.change(ATTEMPT, |_| Err("it is of another VM".to_owned()));
    assert!(matches!(refused, Err(EtcdError::Garbage { .. })), "{refused:?}");
    etcd.etcdctl(&["put", ID, r#"{"v":1,"nonce":"0000000000000000"}"#]);
    assert!(matches!(open(etcd.config("c")).look(), Err(EtcdError::Garbage { .. })));
}

/// A VM may stand still meanwhile.
#[test]
fn nobody_waits_long_for_an_etcd_that_is_away() {
    let mut etcd = EtcdProcess::start();
    let mut one = open(etcd.config("a"));
    begin(&mut one);
    etcd.signal(Signal::STOP);
    let begun = Instant::now();
    assert!(claim(&mut one, 5, 6).is_err_and(|error| error.is_transient()));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    etcd.signal(Signal::CONT);
    etcd.kill();
    assert!(claim(&mut one, 5, 6).is_err_and(|error| error.is_transient()));
    etcd.restart();
    assert_eq!(claim(&mut one, 5, 6).unwrap(), Some(register(6)));
}
