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

/// Below this directory.
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
