//! Two hosts ask one etcd, which is Debian's, and no VM is needed for that.

use std::path::{Path, PathBuf};
use std::sync::mpsc::channel as queue;

use pagoda_move::owner::Step;
use rustix::process::Signal;

use super::*;
use crate::config::MovesConfig;
use crate::moves::arbiter::Arbiter;
use crate::registry::tests::registry;
use crate::remote::tests::cluster::rig::{EtcdProcess, HANG, until};

const SOURCE: HostKey = HostKey([1; 32]);
const DESTINATION: HostKey = HostKey([2; 32]);
const ATTEMPT: AttemptId = AttemptId(7);

/// A daemon's part of it.
struct Asker {
    dir: PathBuf,
    registry: Arc<Registry>,
}

impl Asker {
    fn start(name: &str, etcd: &EtcdProcess) -> Asker {
        let dir = std::env::temp_dir().join(format!("pagodad-arbiter-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(dir.join("pool")).unwrap();
        write_pool(&dir, etcd);
        Asker::again(dir)
    }

    /// The next daemon of a host, which has this directory already.
    fn again(dir: PathBuf) -> Asker {
        let mut registry = registry(&dir);
        registry.config.moves = MovesConfig { arbiter: true, ..MovesConfig::default() };
        let registry = Arc::new(registry);
        start(&registry).unwrap();
        Asker { dir, registry }
    }

    fn arbiter(&self) -> &Arbiter {
        &self.registry.moves.arbiter
    }

    fn register(&self) -> RegisterId {
        until("etcd is reached", || self.arbiter().register().is_some());
        self.arbiter().register().expect("it is")
    }

    fn ask(&self, claim: Claim) -> Option<Registered> {
        let (said, heard) = queue();
        self.arbiter().ask("web1", claim, move |answer| said.send(answer).unwrap());
        heard.recv_timeout(HANG).expect("an answer")
    }
}

fn write_pool(dir: &Path, etcd: &EtcdProcess) {
    let text = format!("cluster = \"etcd://{}/test\"\nhost = \"a\"\n", etcd.endpoint());
    std::fs::write(dir.join("pool/pool.toml"), text).unwrap();
}

fn claim(register: RegisterId, step: Step) -> Claim {
    Claim { register, attempt: ATTEMPT, source: SOURCE, destination: DESTINATION, offered: Generation(5), step }
}

const fn registered(generation: u64, owner: HostKey) -> Option<Registered> {
    Some(Registered { generation: Generation(generation), owner })
}

fn is_there(etcd: &EtcdProcess) -> bool {
    !etcd.etcdctl(&["get", "/rmap/1/test/moves/0000000000000007"]).is_empty()
}

#[test]
fn two_hosts_ask_the_same_registers_and_one_has_the_vm() {
    let etcd = EtcdProcess::start();
    let (one, other) = (Asker::start("one", &etcd), Asker::start("other", &etcd));
    let register = one.register();
    assert_eq!(other.register(), register);
    assert_eq!(other.ask(claim(register, Step::Run)), None, "the source makes it");
    assert_eq!(one.ask(claim(register, Step::Begin)), registered(4, SOURCE));
    assert_eq!(one.ask(claim(register, Step::TakeBack)), registered(6, SOURCE));
    assert_eq!(other.ask(claim(register, Step::Run)), registered(6, SOURCE), "the source was first");
    // A late one of a daemon that has ended changes nothing.
    let one = Asker::again(one.dir);
    assert_eq!(one.ask(claim(register, Step::Begin)), registered(6, SOURCE));
    one.arbiter().remove(register, ATTEMPT);
    until("it is removed", || !is_there(&etcd));
    assert_eq!(other.ask(claim(register, Step::Run)), None, "and nobody has it anew");
}

/// The daemon is started again with another etcd: what was agreed on is not asked of that.
#[test]
fn another_etcd_is_never_asked_about_what_was_agreed_on() {
    let (etcd, another) = (EtcdProcess::start(), EtcdProcess::start());
    let (one, other) = (Asker::start("agreed", &etcd), Asker::start("elsewhere", &another));
    let register = one.register();
    assert_ne!(other.register(), register);
    assert_eq!(one.ask(claim(register, Step::Begin)), registered(4, SOURCE));
    write_pool(&one.dir, &another);
    let one = Asker::again(one.dir);
    assert_eq!(one.register(), other.register());
    for step in [Step::Begin, Step::TakeBack, Step::Run, Step::Refuse] {
        assert_eq!(one.ask(claim(register, step)), None, "{step:?}");
    }
    assert!(!is_there(&another) && is_there(&etcd));
    // An arbiter without a thread answers nothing either.
    let alone = Arbiter::default();
    let (said, heard) = queue();
    alone.ask("web1", claim(register, Step::Run), move |answer| said.send(answer).unwrap());
    assert_eq!(heard.try_recv(), Ok(None));
}

#[test]
fn what_cannot_be_right_is_no_answer() {
    let etcd = EtcdProcess::start();
    let one = Asker::start("hostile", &etcd);
    let register = one.register();
    let begun = registered(4, SOURCE);
    assert_eq!(one.ask(claim(register, Step::Begin)), begun);
    let key = "/rmap/1/test/moves/0000000000000007";
    let good = etcd.etcdctl(&["get", "--print-value-only", key]).trim().to_owned();
    let (theirs, nobody) = ("01".repeat(32), "03".repeat(32));
    for (from, to) in [("web1", "web2"), ("0004", "0005"), ("0004", "0009"), (theirs.as_str(), nobody.as_str())] {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good);
        etcd.etcdctl(&["put", key, &bad]);
        assert_eq!(one.ask(claim(register, Step::Run)), None, "{bad}");
        assert_eq!(etcd.etcdctl(&["get", "--print-value-only", key]).trim(), bad, "it is left alone");
    }
    assert_eq!(one.arbiter().register(), Some(register), "that is no trouble of others");
    etcd.etcdctl(&["put", key, &good]);
    assert_eq!(one.ask(claim(register, Step::Run)), registered(5, DESTINATION));
}

/// Nobody waits long, not even behind others, and `health` says it.
#[test]
fn an_etcd_that_is_away_is_no_answer_and_is_said() {
    let etcd = EtcdProcess::start();
    let one = Asker::start("away", &etcd);
    let register = one.register();
    assert_eq!(one.ask(claim(register, Step::Begin)), registered(4, SOURCE));
    etcd.signal(Signal::STOP);
    let begun = Instant::now();
    let (said, heard) = queue();
    for _ in 0..20 {
        let said = said.clone();
        one.arbiter().ask("web1", claim(register, Step::Run), move |answer| said.send(answer).unwrap());
    }
    for _ in 0..20 {
        assert_eq!(heard.recv_timeout(HANG), Ok(None));
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert_eq!(one.arbiter().register(), None, "moves that begin now have none");
    let problems = one.registry.parts.problems();
    assert!(problems.iter().any(|what| what.contains(PART) && what.contains("does not answer")), "{problems:?}");
    etcd.signal(Signal::CONT);
    assert_eq!(one.register(), register, "it is looked for");
    until("it is said no more", || one.registry.parts.problems().is_empty());
    // Nobody knows whether any of them took effect.
    assert_eq!(one.ask(claim(register, Step::Run)), registered(5, DESTINATION));
}

#[test]
fn a_configuration_without_etcd_is_said_and_read_again() {
    let etcd = EtcdProcess::start();
    let dir = std::env::temp_dir().join(format!("pagodad-arbiter-{}-none", std::process::id()));
    std::fs::create_dir_all(dir.join("pool")).unwrap();
    let one = Asker::again(dir);
    until("it is said", || !one.registry.parts.problems().is_empty());
    let problems = one.registry.parts.problems();
    assert!(problems[0].contains("needs the address of etcd: `cluster` in") && problems[0].contains("pool.toml"));
    write_pool(&one.dir, &etcd);
    one.register();
}
