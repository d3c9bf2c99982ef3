//! A registry for tests, and what it does about VMs that have ended.

use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use pagoda_abi::Token;
use pagoda_api::types::{Launch, VmKind, VmSpec};
use pagoda_core::units::Bytes;

use super::*;
use crate::config::{LargeFolios, PageIn, PolicyConfig, Replacement};
use crate::record::{FileId, MovedDisk, Record, TopFile, store};

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
