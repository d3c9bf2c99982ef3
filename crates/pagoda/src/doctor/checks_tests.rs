//! Each check against facts that differ from a good host in one thing.

use pagoda_api::{Health, Version};

use super::*;
use crate::doctor::facts::{Daemon, Program};

fn good() -> Facts {
    Facts {
        kernel: "6.12.48+deb13-amd64".into(),
        uffd_device: Device::Usable,
        has_cap_sys_ptrace: false,
        unprivileged_userfaultfd: Some(0),
        is_root: false,
        folios_top: Some("advise".into()),
        folios_huge: Some("inherit".into()),
        folios_chunk: Some("advise".into()),
        host_swap: Some(false),
        max_map_count: Some(1_048_576),
        io_uring_disabled: Some(0),
        memlock_bytes: None,
        kvm: Device::Usable,
        qemu: Ok(Program {
            path: "/usr/bin/qemu-system-x86_64".into(),
            version: "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)".into(),
        }),
        swap_dir: "/swap".into(),
        swap: SwapTrial::Works { free_bytes: 100 << 30, file_system: "ext4".into() },
        daemon: Ok(Daemon {
            version: Version { version: "0.1.0".into(), api: API_VERSION },
            health: Health { ok: true, problems: Vec::new() },
        }),
    }
}

/// Changes the good host, and expects of check `name` this verdict and this text.
fn check(name: &str, change: impl FnOnce(&mut Facts), verdict: Verdict, text: &str) {
    let mut facts = good();
    change(&mut facts);
    for check in check_all(&facts) {
        if check.name == name {
            let said = format!("{} / {}", check.found, check.advice);
            assert_eq!(check.verdict, verdict, "{said}");
            assert!(said.contains(text), "{text:?} in {said}");
            assert_eq!(check.advice.is_empty(), verdict == Verdict::Ok, "{said}");
            return;
        }
    }
    panic!("no check is named {name}");
}

#[test]
fn a_good_host_has_no_complaints() {
    for check in check_all(&good()) {
        assert_eq!(check.verdict, Verdict::Ok, "{check:?}");
    }
}

#[test]
fn kernels() {
    check("kernel", |f| f.kernel = "6.1.0-13-amd64".into(), Verdict::Ok, "6.1.0");
    check("kernel", |f| f.kernel = "5.15.0-100-generic".into(), Verdict::Fail, "6.1 or newer");
    check("kernel", |f| f.kernel.clear(), Verdict::Fail, "6.1 or newer");
}

#[test]
fn ways_to_userfaultfd() {
    let check = |change: fn(&mut Facts), verdict, text| {
        let denied = |facts: &mut Facts| {
            facts.uffd_device = Device::NoPermission;
            change(facts);
        };
        check("userfaultfd", denied, verdict, text);
    };
    check(|_| {}, Verdict::Fail, "setfacl");
    check(|f| f.has_cap_sys_ptrace = true, Verdict::Ok, "CAP_SYS_PTRACE");
    check(|f| f.unprivileged_userfaultfd = Some(1), Verdict::Ok, "vm.unprivileged_userfaultfd=1");
    check(|f| f.uffd_device = Device::Missing, Verdict::Fail, "AmbientCapabilities");
    check(|f| (f.uffd_device, f.is_root) = (Device::Missing, true), Verdict::Fail, "--cap-add SYS_PTRACE");
    check(|f| f.uffd_device = Device::Broken("bad".into()), Verdict::Fail, "CONFIG_USERFAULTFD");
}

#[test]
fn folio_settings() {
    let set = |top: &'static str, huge: Option<&'static str>| {
        move |facts: &mut Facts| {
            facts.folios_top = Some(top.into());
            facts.folios_huge = huge.map(Into::into);
        }
    };
    check("huge mappings", set("never", Some("inherit")), Verdict::Warn, "hugepages-2048kB");
    check("huge mappings", set("never", Some("advise")), Verdict::Ok, "advise");
    check("huge mappings", set("advise", None), Verdict::Ok, "advise");
    check("huge mappings", set("never", None), Verdict::Warn, "never");
    check("huge mappings", set("deny", Some("advise")), Verdict::Warn, "shmem_enabled");
    check("huge mappings", set("force", Some("never")), Verdict::Ok, "force");
    check("large folios", |f| f.folios_chunk = Some("never".into()), Verdict::Warn, "hugepages-1024kB");
    check("large folios", |f| f.folios_chunk = None, Verdict::Warn, "not in this kernel");
}

#[test]
fn khugepaged_before_linux_6_4() {
    let set = |kernel: &'static str, top: Option<&'static str>| {
        move |facts: &mut Facts| (facts.kernel, facts.folios_top) = (kernel.into(), top.map(Into::into))
    };
    for top in ["always", "within_size", "force"] {
        check("khugepaged", set("6.1.0-28-amd64", Some(top)), Verdict::Fail, "echo advise");
        check("khugepaged", set("", Some(top)), Verdict::Fail, "echo advise");
        check("khugepaged", set("6.4.0", Some(top)), Verdict::Ok, "alone");
    }
    for top in [Some("advise"), Some("never"), Some("deny"), None] {
        check("khugepaged", set("6.1.0-28-amd64", top), Verdict::Ok, "unasked");
    }
}

#[test]
fn host_swap_beside_large_folios() {
    const NAME: &str = "the host's own swap";
    for (kernel, verdict) in [
        ("6.1.0-28-amd64", Verdict::Ok),
        ("6.12.48+deb13-amd64", Verdict::Warn),
        ("6.12.78+deb13-amd64", Verdict::Ok),
        ("6.15.3", Verdict::Warn),
        ("6.18.8", Verdict::Warn),
        ("6.18.44", Verdict::Ok),
        ("7.1.0", Verdict::Ok),
    ] {
        check(NAME, |f| (f.kernel, f.host_swap) = (kernel.into(), Some(true)), verdict, "on");
    }
    let small = |f: &mut Facts| {
        f.host_swap = Some(true);
        (f.folios_top, f.folios_huge, f.folios_chunk) = (Some("never".into()), None, Some("never".into()));
    };
    check(NAME, small, Verdict::Ok, "on");
    check(NAME, |f| f.host_swap = Some(false), Verdict::Ok, "off");
}

#[test]
fn limits() {
    check("vm.max_map_count", |f| f.max_map_count = Some(65530), Verdict::Warn, "1048576");
    check("vm.max_map_count", |f| f.max_map_count = None, Verdict::Warn, "/proc");
    check("io_uring", |f| f.io_uring_disabled = None, Verdict::Ok, "allowed");
    check("io_uring", |f| f.io_uring_disabled = Some(1), Verdict::Warn, "io_uring_group");
    check("io_uring", |f| f.io_uring_disabled = Some(2), Verdict::Fail, "io_uring_disabled=0");
    check("memlock limit", |f| f.memlock_bytes = Some(8 << 20), Verdict::Warn, "LimitMEMLOCK");
    check("memlock limit", |f| f.memlock_bytes = Some(1 << 30), Verdict::Ok, "1G");
    check("memlock limit", |f| (f.memlock_bytes, f.is_root) = (Some(8 << 20), true), Verdict::Ok, "not for root");
}

#[test]
fn swap_directories() {
    let check = |swap: SwapTrial, verdict, text| {
        check("swap directory", move |f| f.swap = swap, verdict, text);
    };
    let works = |free_bytes| SwapTrial::Works { free_bytes, file_system: "xfs".into() };
    check(works(5 << 30), Verdict::Ok, "/swap: xfs, 5G free");
    check(works(1 << 30), Verdict::Warn, "make room");
    check(SwapTrial::NoDirectIo, Verdict::Fail, "ext4 or XFS");
    check(SwapTrial::NoHoles, Verdict::Fail, "punch holes");
    let failed = SwapTrial::Failed { step: "look at the directory", error: "not there".into() };
    check(failed, Verdict::Fail, "mkdir -p");
}

#[test]
fn programs_and_devices() {
    check("KVM", |f| f.kvm = Device::Missing, Verdict::Warn, "TCG");
    check("KVM", |f| f.kvm = Device::NoPermission, Verdict::Warn, "group kvm");
    check("QEMU", |f| f.qemu = Err("not in PATH".into()), Verdict::Warn, "apt install");
    let old = Program { path: "/q".into(), version: "QEMU emulator version 4.2.1".into() };
    check("QEMU", |f| f.qemu = Ok(old), Verdict::Fail, "5.1 or newer");
}

#[test]
fn daemons() {
    check("daemon", |f| f.daemon = Err("start it".into()), Verdict::Warn, "start it");
    let change = |change: fn(&mut Daemon)| move |facts: &mut Facts| change(facts.daemon.as_mut().unwrap());
    check("daemon", change(|d| d.version.api = 99), Verdict::Fail, "of one version");
    let ill = |d: &mut Daemon| d.health = Health { ok: false, problems: vec!["disk full".into()] };
    check("daemon", change(ill), Verdict::Fail, "disk full");
}
