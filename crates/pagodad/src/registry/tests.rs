//! A registry for tests, and what it does about VMs that have ended.

use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use pagoda_abi::Token;
use pagoda_api::types::{Launch, RemoteRequest, VmKind, VmSpec};
use pagoda_core::units::Bytes;

use super::*;
use crate::config::{LargeFolios, PageIn, PolicyConfig, Replacement};
use crate::record::{FileId, MovedDisk, REMOTE_KEY_SIZE, Record, Remote, TopFile, store};

/// DRAM for all VMs.
const POOL: u64 = 8 << 30;

/// A registry whose files are all below this directory.
pub fn registry(dir: &Path) -> Registry {
    let config = Config {
        state_dir: dir.to_owned(),
        swap_dir: dir.join("swap"),
        pool_dir: dir.join("pool"),
        socket: dir.join("pagoda.sock"),
        attach_socket: dir.join("attach.sock"),
        group: None,
        metrics: None,
        shim: dir.join("shim.so"),
        tune_host: false,
        large_folios: LargeFolios::Off,
        page_sharing: false,
        clone_sharing: false,
        page_in: PageIn::default(),
        replacement: Replacement::default(),
        busy_poll: pagoda_pager::poll::BUSY_POLL_DEFAULT,
        compressed: None,
        snapshots: crate::config::SnapshotsConfig::below(dir),
        hosts: crate::config::HostsConfig::below(dir),
        moves: crate::config::MovesConfig::default(),
        outbox_period: crate::outboxes::PERIOD_DEFAULT,
        file: None,
        policy: PolicyConfig { pool: Some(Bytes(POOL)), ..PolicyConfig::default() },
    };
    let (notices, _) = channel();
    let host = HostFacts { direct: false, protect: true, permission: "device".into(), limits: Vec::new() };
    Registry::new(config, host, notices).unwrap()
}

fn in_dir(name: &str, body: impl FnOnce(&Path)) {
    let dir = std::env::temp_dir().join(format!("pagodad-registry-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    for sub in ["swap", "vms"] {
        std::fs::create_dir_all(dir.join(sub)).unwrap();
    }
    body(&dir);
    std::fs::remove_dir_all(&dir).unwrap();
}

/// A VM whose program has ended, with a disk that cannot be put in order.
fn ended_with_disk() -> Record {
    let own = std::process::id();
    let id = FileId { dev: 1, ino: 2, born_ns: None };
    let top = TopFile { name: "top".into(), node: "node".into(), id, below: None };
    Record {
        pid: (own, pagoda_sys::process::start_time(own).unwrap() - 1),
        disks: vec![MovedDisk::new("/not-there/disk".into(), FileId::NONE, vec![top])],
        launch: Some(Launch::default()),
        ..Record::new("web1", Token([1; 16]), VmKind::Qemu, &[2 << 20], VmSpec::default())
    }
}

/// Whatever becomes of its disks, also if no daemon lives long enough for them.
#[test]
fn that_a_vm_has_crashed_is_noted_once() {
    in_dir("noted-once", |dir| {
        let record = ended_with_disk();
        store::write(&registry(dir).records.path("web1"), &record).unwrap();
        for start in 0..3 {
            let registry = registry(dir);
            registry.load().unwrap();
            assert_eq!(registry.crashes.remove("web1").unwrap(), start == 0, "start {start}");
            let left = registry.unsettled.all();
            assert_eq!((left.len(), &left[0].disks), (1, &record.disks), "start {start}");
        }
    });
}

/// It has borrowed memory, too: there is no moment without a record that has its disks, nor without one that has the space.
#[test]
fn what_a_vm_with_disks_owes_has_a_record_of_its_own() {
    in_dir("owes", |dir| {
        let registry = registry(dir);
        let mut record = ended_with_disk();
        record.spec.remote = Some(RemoteRequest { copies: 1 });
        record.remote = Some(Remote { space: 0x17, copies: 1, key: [7; REMOTE_KEY_SIZE], cluster: None });
        store::write(&registry.records.path("web1"), &record).unwrap();
        // No pool is set up, so nobody gives anything back meanwhile.
        registry.forget(&record);
        let left = store::read(&registry.records.path("web1")).unwrap();
        assert!(left.ended && left.remote.is_none() && left.disks == record.disks, "{left:?}");
        let owed = store::read(&dir.join("far/0000000000000017.vm")).unwrap();
        assert_eq!(owed.remote, record.remote);
    });
}

#[test]
fn a_monitor_that_no_record_names_is_removed() {
    in_dir("monitors", |dir| {
        let (of_nobody, of_vm) = (dir.join("vms/web2.qmp"), dir.join("vms/web1.qmp"));
        for path in [&of_nobody, &of_vm, &dir.join("vms/web1.vm")] {
            std::fs::write(path, "").unwrap();
        }
        // A record that cannot be read is one all the same.
        registry(dir).load().unwrap();
        assert!(!of_nobody.exists() && of_vm.exists());
    });
}

/// Its disks hang, as far as anybody knows: nobody looks at them.
#[test]
fn the_reaper_waits_for_no_disk() {
    in_dir("reaper", |dir| {
        let registry = registry(dir);
        let record = ended_with_disk();
        store::write(&registry.records.path("web1"), &record).unwrap();
        let running = Record { pid: (0, 0), ..record.clone() };
        registry.find_again(running);
        registry.lock().values_mut().for_each(|vm| vm.record.pid = record.pid);
        registry.reap();
        assert!(registry.lock().is_empty(), "it is gone");
        let left = store::read(&registry.records.path("web1")).unwrap();
        assert!(left.ended && left.disks == record.disks, "its name is taken for its disks");
        let why = registry.unsettled.settle("web1", Duration::ZERO).unwrap_err();
        assert!(why.contains("has not answered"), "{why}");
    });
}

/// Its space is refused with the VM, before anything is made, and is nobody else's once it was admitted.
#[test]
fn an_outbox_is_admitted_with_its_vm_and_charged() {
    in_dir("outbox", |dir| {
        std::fs::create_dir_all(crate::outboxes::dir(dir)).unwrap();
        let registry = registry(dir);
        let record = |name: &str, number: u8| {
            Record::new(name, Token([number; 16]), VmKind::Qemu, &[64 << 20], VmSpec::default())
        };
        let plan = |record: &Record, gib: u64| {
            registry.outboxes.plan(&record.name, record.token, Bytes::from_gib(gib)).unwrap()
        };
        let outbox_bytes = || registry.governor.describe_host().outbox_bytes;
        let admit = |record: &Record, gib: u64| registry.admit(&registry.lock(), record, Some(&plan(record, gib)));
        let refused = admit(&record("web1", 1), 8).unwrap_err();
        assert_eq!(refused.code, ErrorCode::NoRoom);
        assert!(
            refused.message.contains("web1 with an outbox of 8 GiB") && refused.message.contains("outboxes 8 GiB"),
            "{refused:?}"
        );
        assert_eq!((outbox_bytes(), registry.outboxes.all().len()), (0, 0));
        admit(&record("web1", 1), 5).unwrap();
        assert_eq!(outbox_bytes(), 5 << 30);
        assert!(admit(&record("web2", 2), 5).is_err(), "it is another's");
        assert_eq!(outbox_bytes(), 5 << 30);
        // A VM without one is charged beside it.
        let large =
            VmSpec { policy: pagoda_api::PolicySettings { min: 4 << 30, ..Default::default() }, ..VmSpec::default() };
        let large = Record::new("web3", Token([3; 16]), VmKind::Qemu, &[4 << 30], large);
        assert!(registry.admit(&registry.lock(), &large, None).unwrap_err().message.contains("outboxes 5 GiB"));
        // Its VM is given up before its process came.
        registry.forget_outbox(Token([1; 16]));
        assert_eq!(outbox_bytes(), 0);
        registry.admit(&registry.lock(), &large, None).unwrap();
    });
}

/// A name means the VM that runs by it, and the last that did if none does.
#[test]
fn an_outbox_of_an_earlier_vm_is_not_taken_for_that_of_a_later_one() {
    in_dir("outbox-names", |dir| {
        std::fs::create_dir_all(crate::outboxes::dir(dir)).unwrap();
        let registry = registry(dir);
        let own = std::process::id();
        let start = pagoda_sys::process::start_time(own).unwrap();
        let make = |number: u8, start: u64| {
            let space = Bytes::from_mib(u64::from(number));
            let outbox = registry.outboxes.plan("web1", Token([number; 16]), space).unwrap();
            registry.outboxes.insert(&outbox);
            registry.outboxes.make(&outbox).unwrap();
            registry.outboxes.take(&outbox, own, start).unwrap();
        };
        let shown = || registry.get_outbox("web1").map(|outbox| outbox.space_bytes >> 20);
        assert_eq!(shown().unwrap_err().code, ErrorCode::NoSuchVm);
        make(2, start);
        make(1, start - 1);
        assert_eq!(shown().unwrap(), 2);
        let refused = registry.set_outbox("web1", &pagoda_api::OutboxPatch::space(4 << 20)).unwrap_err();
        assert!(refused.code == ErrorCode::NoSuchVm && refused.message.contains("does not run"), "{refused:?}");
        registry.find_again(Record::new("web1", Token([3; 16]), VmKind::Qemu, &[64 << 20], VmSpec::default()));
        assert_eq!(shown().unwrap_err().code, ErrorCode::NoSuchOutbox);
        assert_eq!(
            registry.set_outbox("web1", &pagoda_api::OutboxPatch::space(4 << 20)).unwrap_err().code,
            ErrorCode::NoSuchOutbox
        );
        make(3, start);
        assert_eq!((shown().unwrap(), registry.list_outboxes().outboxes.len()), (3, 3));
    });
}
