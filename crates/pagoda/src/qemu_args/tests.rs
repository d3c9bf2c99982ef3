//! Tables: a command line, and what becomes of it. The monitor is descriptor 7.

use super::*;

const TAIL: &str = "-chardev socket,id=pagoda-qmp,fd=7,server=on,wait=off -mon chardev=pagoda-qmp,mode=control";
const FILE: &str = "mem-path=/proc/pagoda-shim/ram";
const BY_ID: &str = "x-use-canonical-path-for-ramblock-id=off";

fn ram_id(machine: Option<&str>) -> Result<String, ArgError> {
    Ok(known_ram_id("/usr/bin/qemu-system-x86_64", machine).expect("a known machine").to_owned())
}

/// Splits at spaces; no argument in the tables has one.
fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

fn planned(line: &str) -> Plan {
    plan(&words(line), None, ram_id).unwrap_or_else(|error| panic!("{line}: {error}"))
}

fn rewritten(plan: &Plan) -> String {
    plan.argv(7).join(" ")
}

fn ram(id: &str, mib: u64, region: usize) -> String {
    format!("qom-type=memory-backend-file,id={id},{BY_ID},size={},{FILE}{region},share=on,align=2097152", mib << 20)
}

/// What `line` becomes; `expected` leaves out the monitor and `-nodefaults` in front.
fn check(line: &str, expected: &str) {
    let got = rewritten(&planned(&format!("-nodefaults {line}")));
    let (head, tail) = got.split_once(TAIL).unwrap_or_else(|| panic!("no monitor: {got}"));
    let got = format!("{head}{}", tail.trim_start());
    assert_eq!(got.trim(), format!("-nodefaults {expected}").trim(), "{line}");
}

fn refused(line: &str, expected: &str) {
    match plan(&words(line), None, ram_id) {
        Ok(plan) => panic!("{line} became {}", rewritten(&plan)),
        Err(error) => {
            assert!(error.to_string().contains(expected), "{line}: {error}");
            assert!(!error.advice.is_empty(), "{line}: no advice");
        }
    }
}

#[test]
fn without_a_back_end_one_is_added() {
    let added = |mib| format!("-object {}", ram("pc.ram", mib, 0));
    let m = "-machine memory-backend=pc.ram";
    check("-m 4G", &format!("-m 4G {} {m}", added(4096)));
    check("-m 4096", &format!("-m 4096 {} {m}", added(4096)));
    check("-m size=4G", &format!("-m size=4G {} {m}", added(4096)));
    check("-m size=786432k", &format!("-m size=786432k {} {m}", added(768)));
    check("-m 1.5G", &format!("-m 1.5G {} {m}", added(1536)));
    check("--m 1G", &format!("--m 1G {} {m}", added(1024)));
    check("-m 1G -m 2G", &format!("-m 1G -m 2G {} {m}", added(2048)));
    check("-m 4G,maxmem=4G", &format!("-m 4G,maxmem=4G {} {m}", added(4096)));
    check("-m 4G,slots=0", &format!("-m 4G,slots=0 {} {m}", added(4096)));
    check("", &format!("-m 128M {} {m}", added(128)));
    check("-append -m", &format!("-append -m -m 128M {} {m}", added(128)));
    check("-S disk.img -m 1G", &format!("-S disk.img -m 1G {} {m}", added(1024)));
}

#[test]
fn the_machine_keeps_its_type() {
    let added = format!("-object {}", ram("pc.ram", 1024, 0));
    let with = "memory-backend=pc.ram";
    check("-machine q35 -m 1G", &format!("-machine q35,{with} -m 1G {added}"));
    check("-M pc,accel=kvm -m 1G", &format!("-M pc,accel=kvm,{with} -m 1G {added}"));
    check("-M pc -machine accel=tcg -m 1G", &format!("-M pc -machine accel=tcg,{with} -m 1G {added}"));
}

#[test]
fn back_ends_are_replaced() {
    let m = "-m 1G -machine q35,memory-backend=r";
    let same = format!("{m} -object {}", ram("r", 1024, 0));
    let check_object = |object: &str| check(&format!("{m} -object {object}"), &same);
    check_object("memory-backend-ram,id=r,size=1G");
    check_object("memory-backend-shm,id=r,size=1G");
    check_object("qom-type=memory-backend-ram,id=r,size=1G,prealloc=off,reserve=off");
    // The machine type says what the block of a file or of a memfd is called, for ours too.
    let check_named = |object: &str| check(&format!("{m} -object {object}"), &same.replace(&format!("{BY_ID},"), ""));
    check_named("memory-backend-memfd,id=r,size=1024M,share=on,seal=off");
    check_named("memory-backend-file,id=r,size=1073741824,mem-path=/var/ram,,1,share=off,discard-data=yes");
    let on = "x-use-canonical-path-for-ramblock-id=on";
    check(
        &format!("{m} -object memory-backend-ram,id=r,size=1G,{on}"),
        &format!("{m} -object qom-type=memory-backend-file,id=r,{on},size=1073741824,{FILE}0,share=on,align=2097152"),
    );
    check_named("memory-backend-memfd,id=r,size=1G,hugetlb=off");
    // What says where memory lies stays.
    check(
        &format!("{m} -object memory-backend-ram,id=r,size=1G,host-nodes.0=0,policy=bind,dump=off,merge=on"),
        &format!(
            "{m} -object qom-type=memory-backend-file,id=r,host-nodes.0=0,policy=bind,dump=off,merge=on,\
             {BY_ID},size=1073741824,{FILE}0,share=on,align=2097152"
        ),
    );
    // -m is added where the back end alone gave the size.
    check(
        "-machine q35,memory-backend=r -object memory-backend-ram,id=r,size=1G",
        &format!("-machine q35,memory-backend=r -object {} -m 1024M", ram("r", 1024, 0)),
    );
}

#[test]
fn json_stays_json() {
    check(
        r#"-machine pc-q35-8.2,memory-backend=pc.ram -m size=786432k -object {"qom-type":"memory-backend-ram","id":"pc.ram","size":805306368}"#,
        r#"-machine pc-q35-8.2,memory-backend=pc.ram -m size=786432k -object {"align":2097152,"id":"pc.ram","mem-path":"/proc/pagoda-shim/ram0","qom-type":"memory-backend-file","share":true,"size":805306368,"x-use-canonical-path-for-ramblock-id":false}"#,
    );
    check(
        r#"-m 1G -machine memory-backend=r -object {"qom-type":"memory-backend-memfd","id":"r","hugetlb":false,"size":1073741824,"host-nodes":[0,1],"policy":"interleave","prealloc":false}"#,
        r#"-m 1G -machine memory-backend=r -object {"align":2097152,"host-nodes":[0,1],"id":"r","mem-path":"/proc/pagoda-shim/ram0","policy":"interleave","qom-type":"memory-backend-file","share":true,"size":1073741824}"#,
    );
}

#[test]
fn nodes_have_a_file_each() {
    let line = "-m 3G -object memory-backend-ram,id=a,size=1G -object memory-backend-ram,id=b,size=2G \
                -numa node,nodeid=0,memdev=b -numa node,nodeid=1,memdev=a -numa node,nodeid=2 \
                -numa dist,src=0,dst=1,val=20";
    let plan = planned(&format!("-nodefaults {line}"));
    // In the order of the back ends, whatever the order of the nodes.
    assert_eq!(plan.memory(), [1 << 30, 2 << 30]);
    check(
        line,
        &format!(
            "-m 3G -object {} -object {} -numa node,nodeid=0,memdev=b -numa node,nodeid=1,memdev=a \
             -numa node,nodeid=2 -numa dist,src=0,dst=1,val=20",
            ram("a", 1024, 0),
            ram("b", 2048, 1)
        ),
    );
}

#[test]
fn memory_that_is_not_ram_stays() {
    let nvdimm = "-object memory-backend-file,id=nv,size=1G,mem-path=/disk,share=on,readonly=on,pmem=on \
                  -device nvdimm,memdev=nv,id=nv1";
    check(
        &format!("-machine q35,nvdimm=on -m 2G,slots=2,maxmem=3G {nvdimm}"),
        &format!(
            "-machine q35,nvdimm=on,memory-backend=pc.ram -m 2G,slots=2,maxmem=3G {nvdimm} -object {}",
            ram("pc.ram", 2048, 0)
        ),
    );
}

#[test]
fn memory_that_would_not_be_managed_is_refused_by_name() {
    let dimm = "-object memory-backend-ram,id=m1,size=1G -device pc-dimm,memdev=m1,id=d1";
    refused(&format!("-m 1G,slots=2,maxmem=2G {dimm}"), "id=m1 is memory of -device pc-dimm");
    refused(&format!("-m 1G {dimm}"), "id=m1");
    let json = r#"{"qom-type":"memory-backend-ram","id":"m1","size":1073741824}"#;
    refused(&format!(r#"-m 1G -object {json} -device {{"driver":"pc-dimm","memdev":"m1"}}"#), "pc-dimm");
    let mem = "-object memory-backend-ram,id=v1,size=1G -device virtio-mem-pci,memdev=v1,requested-size=0";
    refused(&format!("-m 1G,maxmem=2G {mem}"), "id=v1 is memory of -device virtio-mem-pci");
    refused("-m 1G -object memory-backend-ram,id=c1,size=1G -device cxl-type3,volatile-memdev=c1", "cxl-type3");
    refused("-m 1G -object memory-backend-memfd,id=x,size=1G", "no device uses it");
    refused("-m 1G -object memory-backend-epc,id=e,size=1G", "no device uses it");
    refused("-m 1G -object memory-backend-ram,size=1G", "no id");
    let nvdimm =
        |backend: &str| format!("-m 1G,slots=1,maxmem=2G -object {backend},id=n,size=1G -device nvdimm,memdev=n");
    planned(&nvdimm("memory-backend-file,mem-path=/disk,share=on"));
    refused(&nvdimm("memory-backend-ram,share=on"), "not a shared file");
    refused(&nvdimm("memory-backend-file,mem-path=/disk"), "not a shared file");
    refused(&nvdimm("memory-backend-file,mem-path=/disk,readonly=on"), "not a shared file");
    // Room for one more, or for one that is not counted.
    let file = "-object memory-backend-file,id=n,size=1G,share=on,mem-path=/disk";
    refused(&format!("-m 1G,slots=2,maxmem=3G {file} -device nvdimm,memdev=n"), "maxmem=2048M");
    refused(&format!("-m 1G,slots=1,maxmem=2G {file} -device ivshmem-plain,memdev=n"), "hot-plug");
    assert_eq!(planned(&format!("-m 1G {file} -device ivshmem-plain,memdev=n")).device_files().next(), Some("/disk"));
}

#[test]
fn refusals_of_memory_options() {
    refused("-m 4G,slots=2,maxmem=8G", "hot-plug");
    refused("-m 4G,maxmem=8G", "hot-plug");
    refused("-m 4X", "not a size");
    refused("-m 4095", "multiple of 2 MiB");
    refused("-m", "no argument");
    refused("-mem-path /dev/hugepages -m 1G", "-mem-path");
    refused("-mem-prealloc", "--reserve-swap");
    refused("-overcommit mem-lock=on", "locks guest memory");
    refused("-overcommit mem-lock=on-fault", "locks guest memory");
    refused("-realtime mlock=on", "locks guest memory");
    refused("-machine q35,memory.size=4G", "write -m");
    refused("-machine q35,confidential-guest-support=sev0", "cannot be paged");
    refused("-machine none", "no memory");
    refused("-numa node,mem=2G -numa node,mem=2G", "memdev=ram0");
    refused("-numa node -m 1G", "which memory");
    refused("-machine memory-backend=r", "no -object");
    let object = |props: &str| format!("-m 1G -machine memory-backend=r -object {props},id=r,size=1G");
    refused(&object("memory-backend-ram,prealloc=on"), "leave prealloc out");
    refused(&object("memory-backend-memfd,hugetlb=on"), "hugetlbfs");
    refused(&object("memory-backend-file,mem-path=/x,readonly=on"), "writable");
    refused(&object("memory-backend-file,mem-path=/x,pmem=on"), "persistence");
    refused(&object("memory-backend-file,mem-path=/x,offset=4096"), "offset");
    refused(&object("memory-backend-ram,new-thing=1"), "new-thing");
    refused(&object("memory-backend-epc"), "memory-backend-ram");
    refused("-machine memory-backend=r -object memory-backend-ram,id=r", "the size");
    refused("-machine memory-backend=r -object memory-backend-ram,id=r,size=3M", "multiple of 2 MiB");
    refused("-m 2G -machine memory-backend=r -object memory-backend-ram,id=r,size=1G", "sizes agree");
    let twice = "-object memory-backend-ram,id=r,size=1G";
    refused(&format!("-machine memory-backend=r {twice} {twice}"), "two -object");
    refused(&format!("{twice} -numa node,memdev=r -numa node,memdev=r"), "two NUMA nodes");
    refused(&format!("-machine memory-backend=r {twice} -numa node,memdev=r"), "exclude each other");
    refused(r#"-object {"qom-type":"memory-backend-ram" -machine memory-backend=r"#, "valid JSON");
}

#[test]
fn refusals_of_other_options() {
    refused("-readconfig vm.cfg", "-readconfig");
    refused("-chroot /var/empty", "-sandbox");
    refused("-run-with chroot=/var/empty", "-sandbox");
    refused("-run-with user=nobody", "that user");
    refused("-runas nobody", "that user");
    refused("-set object.ram0.share=off", "-set");
    refused("-set device.nv1.memdev=other", "-set");
    planned("-m 1G -set device.d0.bootindex=1");
    refused(r#"-incoming {"channel-type":"cpr","addr":{"transport":"socket","type":"unix","path":"/s"}}"#, "defer");
    refused("-incoming channel-type=cpr,addr.transport=socket,addr.type=unix,addr.path=/s", "defer");
    refused("-incoming cpr,addr.transport=socket,addr.type=unix,addr.path=/s", "defer");
    for main in
        [r#"{"channel-type":"main","addr":{"transport":"file"}}"#, "channel-type=main,addr.x=y", "tcp::1", "fd:3"]
    {
        planned(&format!("-m 1G -incoming {main}"));
    }
    for xen in ["-accel xen", "-machine pc,accel=xen:kvm", "-M xenfv-4.2", "-xen-domid 7", "-xen-attach"] {
        refused(xen, "the hypervisor has");
    }
}

#[test]
fn harmless_options_pass() {
    let plan = planned(
        "-nodefaults -m 1G -overcommit mem-lock=off -overcommit cpu-pm=on -sandbox on,spawn=deny \
         -run-with async-teardown=on -incoming defer -daemonize -device virtio-net-pci,netdev=n \
         -netdev tap,id=n,fd=9,vhost=on,vhostfd=10 -blockdev driver=file,node-name=d,filename=x \
         -uuid 6ba7b810-9dad-11d1-80b4-00c04fd430c8 -smbios type=1,serial=7",
    );
    assert!(rewritten(&plan).contains("-uuid 6ba7b810-9dad-11d1-80b4-00c04fd430c8 -smbios type=1,serial=7"));
    assert_eq!(plan.pinned, None);
}

#[test]
fn memory_given_to_pagoda() {
    let given = |line: &str, gib: u64| plan(&words(line), Some(gib << 30), ram_id);
    assert!(given("-m 4G", 4).is_ok());
    assert!(given("-m 4G", 2).unwrap_err().to_string().contains("let them agree"));
    let plan = given("-nodefaults", 4).unwrap();
    assert_eq!(plan.memory(), [4 << 30]);
    assert!(rewritten(&plan).contains("-m 4096M"));
    let object = "-machine memory-backend=r -object memory-backend-ram,id=r,size=1G";
    assert!(given(object, 1).is_ok());
    assert!(given(object, 2).unwrap_err().to_string().contains("--memory is 2G"));
}

#[test]
fn pins() {
    let check = |line: &str, expected: Option<&str>| {
        let pinned = planned(line).pinned;
        match expected {
            None => assert_eq!(pinned, None, "{line}"),
            Some(text) => assert!(pinned.as_ref().is_some_and(|p| p.contains(text)), "{line}: {pinned:?}"),
        }
    };
    check("-device vfio-pci,host=01:00.0", Some("-device vfio-pci: the device writes"));
    check(r#"-device {"driver":"vfio-pci","host":"01:00.0"}"#, Some("by DMA"));
    check("-device vfio-user-pci,socket=s", Some("by DMA"));
    check("-device vhost-user-fs-pci,chardev=c", Some("another process maps"));
    check("-device vhost-user-fs-pci,chardev=pagoda-outbox,tag=outbox", None);
    check("-device vhost-user-blk-pci,chardev=pagoda-outbox", Some("another process maps"));
    check("-netdev vhost-user,id=n,chardev=c", Some("another process maps"));
    check("-netdev type=vhost-user,id=n,chardev=c", Some("another process maps"));
    check("-netdev vhost-vdpa,id=n,vhostdev=/dev/vhost-vdpa-0", Some("by DMA"));
    check("-object cryptodev-vhost-user,id=c,chardev=c", Some("another process maps"));
    check("-drive file=nvme://0000:01:00.0/1,if=none", Some("-drive nvme"));
    check("-blockdev driver=nvme,node-name=d,device=0000:01:00.0,namespace=1", Some("-blockdev nvme"));
    check(r#"-blockdev {"driver":"raw","node-name":"d","file":{"driver":"nvme"}}"#, Some("nvme"));
    check("-device nvme,drive=d,serial=1", None);
    check("-device vhost-vsock-pci,guest-cid=3", None);
    check("-chardev socket,id=c,path=/run/vhost-user.sock", None);
}

#[test]
fn balloons_report_free_pages_and_give_way() {
    let device = |device: &str| {
        let plan = planned(&format!("-nodefaults -device {device}"));
        plan.argv(7)[2].clone()
    };
    assert_eq!(device("virtio-balloon-pci"), "virtio-balloon-pci,free-page-reporting=on,deflate-on-oom=on");
    let tail = "free-page-reporting=on,deflate-on-oom=on";
    assert_eq!(device("virtio-balloon,id=b"), format!("virtio-balloon,id=b,{tail}"));
    let no_reports = "virtio-balloon-pci,free-page-reporting=off";
    assert_eq!(device(no_reports), format!("{no_reports},deflate-on-oom=on"));
    let off = "virtio-balloon-pci,free-page-reporting=off,deflate-on-oom=off";
    assert_eq!(device(off), off);
    assert_eq!(
        device(r#"{"driver":"virtio-balloon-pci","id":"b"}"#),
        r#"{"deflate-on-oom":true,"driver":"virtio-balloon-pci","free-page-reporting":true,"id":"b"}"#
    );
    assert_eq!(device("virtio-rng-pci"), "virtio-rng-pci");
}

#[test]
fn the_default_console_stays() {
    let check = |line: &str, expected: &str| {
        let got = rewritten(&planned(line));
        if expected.is_empty() {
            assert!(!got.contains("-monitor v") && !got.contains("stdio"), "{line}: {got}");
        } else {
            assert!(got.contains(expected), "{line}: {got}");
        }
    };
    check("-nographic", "-serial mon:stdio");
    check("-nographic -device isa-serial,chardev=c", "-monitor stdio");
    check("-nographic -serial null", "-monitor stdio");
    check("-m 1G", "-monitor vc:80Cx24C");
    check("-nographic -nodefaults", "");
    check("-nographic -monitor none", "");
    check("-nographic -qmp unix:s", "");
    check("-mon chardev=c", "");
}

#[test]
fn names_and_caps() {
    let name = |line: &str| guest_name(&words(line));
    assert_eq!(name("-name web1").as_deref(), Some("web1"));
    assert_eq!(name("-name guest=web1,debug-threads=on").as_deref(), Some("web1"));
    assert_eq!(name("-name process=p"), None);
    assert_eq!(name("-m 1G"), None);

    let line = "-nodefaults -m 2G -fw_cfg name=opt/org.pagoda/dram,string=1G -S";
    assert_eq!(dram_of(&words(line)), Ok(Some(1 << 30)));
    assert_eq!(dram_of(&words("-m 1G")), Ok(None));
    let plan = planned(line);
    assert!(rewritten(&plan).starts_with("-nodefaults -m 2G -S -object"), "{}", rewritten(&plan));
    let other = "-fw_cfg name=opt/com.example,string=x";
    assert!(rewritten(&planned(other)).starts_with(other));
    refused("-fw_cfg name=opt/org.pagoda/dram,string=1", "no unit");
}

#[test]
fn probes() {
    let check = |line: &str, expected: bool| assert_eq!(is_probe(&words(line)), expected, "{line}");
    check("--version", true);
    check("-help", true);
    check("-machine help", true);
    check("-cpu ?", true);
    check("-device virtio-net-pci,help", true);
    check(
        "-S -no-user-config -nodefaults -nographic -machine none,accel=kvm:tcg -qmp unix:/m,server=on \
         -pidfile /p -daemonize",
        true,
    );
    check("-m 1G -machine q35", false);
    check("-append help -m 1G", false);
    check("-name help", false);
    check("", false);
}

#[test]
fn programs() {
    for program in ["qemu-system-x86_64", "/usr/bin/qemu-system-aarch64", "/usr/libexec/qemu-kvm", "kvm"] {
        assert!(is_qemu(program), "{program}");
    }
    for program in ["qemu-img", "./toy", "/opt/qemu-system-x/run"] {
        assert!(!is_qemu(program), "{program}");
    }
}

/// Each row of the table has a test, and it is there.
#[test]
fn the_documents_rows_have_tests() {
    let root = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let table = read("docs/qemu-options.md");
    let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert!(rows.len() > 30, "{}", rows.len());
    for row in rows {
        let tests = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        for tests in tests.split("; ").filter(|tests| *tests != "the same") {
            let (file, names) = tests.split_once(": ").unwrap_or_else(|| panic!("{row}: no test"));
            let text = match file.trim_matches('`') {
                "qemu_args" => read("crates/pagoda/src/qemu_args/tests.rs"),
                file => read(&format!("tests/vm/tests/vm/{file}.rs")),
            };
            for name in names.split(", ") {
                assert!(text.contains(&format!("\nfn {name}(")), "{row}: no test {name}");
            }
        }
    }
}
