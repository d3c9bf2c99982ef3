use super::super::{plan, restored};
use super::*;

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

fn of(line: &str, net: Net) -> Result<String, ArgError> {
    cloned(&words(line), Target { name: "job-01", net, has_disks: false }).map(|cloned| cloned.words.join(" "))
}

#[test]
fn what_qemu_makes_gets_the_clones_name() {
    let check = |line: &str, expected: &str| {
        let found = of(&format!("-nodefaults {line}"), Net::None).unwrap();
        assert_eq!(found, format!("-nodefaults {expected} -name job-01"), "{line}");
    };
    check("-m 1G -M q35 -enable-kvm -S", "-m 1G -M q35 -enable-kvm -S");
    check("-serial stdio -monitor none", "-serial stdio -monitor none");
    check("-serial mon:stdio", "-serial mon:stdio");
    check("-serial unix:/run/a,server=on,wait=off", "-serial unix:/run/a.job-01,server=on,wait=off");
    check("-qmp unix:a.qmp,server,nowait", "-qmp unix:a.qmp.job-01,server,nowait");
    check("-serial file:/var/log/a", "-serial file:/var/log/a.job-01");
    check(
        "-chardev socket,id=c,path=/run/a,server=on,wait=off",
        "-chardev backend=socket,id=c,path=/run/a.job-01,server=on,wait=off",
    );
    check("-chardev file,id=c,path=/x,logfile=/l", "-chardev backend=file,id=c,path=/x.job-01,logfile=/l.job-01");
    // Of several the last one counts.
    check("-chardev file,id=c,path=/a,path=/b", "-chardev backend=file,id=c,path=/b.job-01");
    check("-chardev stdio,id=c,mux=on", "-chardev stdio,id=c,mux=on");
    check("-mon chardev=c,mode=control", "-mon chardev=c,mode=control");
    check("-pidfile /run/a.pid -D /tmp/log", "-pidfile /run/a.pid.job-01 -D /tmp/log.job-01");
    check("-vnc unix:/run/vnc,password=on -display none", "-vnc unix:/run/vnc.job-01,password=on -display none");
    let json = r#"{"backend":"socket","id":"c","path":"/a","server":true,"wait":false}"#;
    check(
        &format!("-chardev {json}"),
        r#"-chardev {"backend":"socket","id":"c","path":"/a.job-01","server":true,"wait":false}"#,
    );
}

#[test]
fn a_clone_has_its_name_and_another_generation_id() {
    let named = of("-name guest=web1,debug-threads=on -nic none", Net::None).unwrap();
    assert_eq!(named, "-name guest=job-01,debug-threads=on -nic none");
    let id = "324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87";
    let with_id = of(&format!("-nodefaults -device vmgenid,guid={id}"), Net::None).unwrap();
    assert_eq!(with_id, "-nodefaults -device driver=vmgenid,guid=auto -name job-01");
}

#[test]
fn what_only_is_read_is_kept() {
    for line in [
        "-drive file=a.qcow2,readonly=on,if=virtio",
        "-drive if=pflash,format=raw,readonly=on,file=OVMF_CODE.fd",
        "-drive file=a.iso,media=cdrom -cdrom b.iso",
        "-drive if=none,id=cd,media=cdrom -device ide-cd,drive=cd",
        "-blockdev driver=file,node-name=f,filename=a,auto-read-only=on",
        "-blockdev driver=qcow2,node-name=q,file=f,read-only=on -device virtio-blk-pci,drive=q",
        "-kernel k -initrd i -append console=ttyS0",
        "-object rng-random,id=r,filename=/dev/urandom -device virtio-rng-pci,rng=r",
        "-object memory-backend-ram,id=m,size=1G -numa node,memdev=m",
        "-device virtio-serial-pci -device virtserialport,chardev=c -device ich9-usb-ehci1 -device usb-tablet",
        "-global ICH9-LPC.disable_s3=1 -audiodev none,id=a -display none -vga std",
        "-device virtio-balloon-pci -device pcie-root-port,id=r",
    ] {
        let line = format!("-nodefaults {line} -name job-01");
        let expected = line.replace("-name job-01", "-name guest=job-01");
        assert_eq!(of(&line, Net::None), Ok(expected), "{line}");
    }
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let check = |line: &str, expected: &str| {
        let said = of(&format!("-nodefaults {line}"), Net::None).unwrap_err().to_string();
        assert!(said.contains(expected), "{line}: {said}");
    };
    check("disk.img", "disk.img is a disk that the guest may write to");
    check("-m 1G -S disk.img", "disk.img is a disk");
    check("-m 1G disk.img -S", "disk.img is a disk");
    check("-append -S disk.img", "disk.img is a disk");
    check("-hda disk.img", "-hda disk.img is a disk");
    check("-drive file=a.qcow2,if=virtio", "-drive file=a.qcow2,if=virtio is a disk");
    check("-drive file=a.qcow2,snapshot=on", "is a disk");
    check("-blockdev driver=qcow2,node-name=q,file=f", "is a disk");
    check("-device vfio-pci,host=01:00.0", "a device of the host");
    check("-device vhost-vsock-pci,guest-cid=3", "its address");
    check("-device vhost-user-fs-pci,chardev=c", "its address, or the process that serves it");
    check("-device ivshmem-plain,memdev=m", "shared with others");
    check("-device virtio-9p-pci,fsdev=f,mount_tag=t", "written by both");
    check("-device nvdimm,memdev=m", "both would write");
    check("-device something-new", "-device something-new is not known");
    check("-device virtio-blk-vfio", "is not known");
    check("-virtfs local,path=/,mount_tag=t,security_model=none", "-virtfs");
    check("-fsdev local,id=f,path=/,security_model=none", "-fsdev");
    check("-object memory-backend-epc,id=m", "is not known");
    check("-global vhost-vsock-pci.guest-cid=4", "is not known");
    check("-chardev socket,id=c,path=/run/a", "connects to what serves its source");
    check("-chardev socket,id=c,path=/run/a,server=on", "wait for a client");
    check("-chardev udp,id=c,port=4", "is not known");
    check("-chardev pipe,id=c,path=p", "is not known");
    check("-serial unix:/run/a", "connects to");
    check("-serial unix:/run/a,server", "wait for a client");
    check("-serial /dev/ttyS0", "is not known");
    check("-tpmdev emulator,id=t,chardev=c", "-tpmdev");
    check("-daemonize", "-daemonize is not known");
    check("-spice port=5900", "-spice");
    check("-snapshot", "-snapshot is not known");
    check("-display vnc=:1", "is not known");
    check("-some-new-option x", "-some-new-option x is not known");
}

#[test]
fn each_clone_has_overlays_on_the_disks_of_the_snapshot() {
    let check = |line: &str, expected: &str, disk: &str| {
        let target = Target { name: "job-01", net: Net::None, has_disks: true };
        let cloned = cloned(&words(&format!("-nodefaults {line} -nic none")), target).unwrap();
        assert_eq!(cloned.words.join(" "), format!("-nodefaults {expected} -nic none -name job-01"), "{line}");
        let overlay = Overlay { disk: disk.into(), file: format!("{disk}.pagoda-clone-job-01") };
        assert_eq!(cloned.overlays, [overlay], "{line}");
    };
    check(
        "-drive file=a.qcow2,if=virtio,format=qcow2",
        "-drive file=a.qcow2.pagoda-clone-job-01,if=virtio,format=qcow2",
        "a.qcow2",
    );
    check("-drive if=none,id=d,file=/d/a", "-drive if=none,id=d,file=/d/a.pagoda-clone-job-01,format=qcow2", "/d/a");
    check("-hda a.qcow2 -S", "-hda a.qcow2.pagoda-clone-job-01 -S", "a.qcow2");
    check(
        "a.qcow2 -S -drive file=b,readonly=on",
        "a.qcow2.pagoda-clone-job-01 -S -drive file=b,readonly=on",
        "a.qcow2",
    );
    for line in [
        "-drive file=a,format=raw",
        "-drive file=a,snapshot=on",
        "-drive file=nbd:unix:/s",
        "-drive file.filename=a,driver=qcow2",
        "-blockdev driver=qcow2,node-name=n,file=f",
        "nbd://host/a",
    ] {
        let target = Target { name: "job-01", net: Net::None, has_disks: true };
        let said = cloned(&words(&format!("-nodefaults {line}")), target).unwrap_err().to_string();
        assert!(said.contains("may write to"), "{line}: {said}");
    }
}

#[test]
fn addresses_and_cards_need_a_network_of_their_own() {
    let check = |line: &str, expected: &str| {
        let said = of(line, Net::None).unwrap_err().to_string();
        assert!(said.contains(expected) && said.contains("--net isolated"), "{line}: {said}");
        assert_eq!(of(line, Net::Isolated), Ok(format!("{line} -name job-01")), "{line}");
    };
    check("-nodefaults -s", "-s listens on an address");
    check("-nodefaults -gdb tcp::1234", "-gdb tcp::1234 listens");
    check("-nodefaults -vnc :1", "-vnc :1 listens");
    check("-nodefaults -serial tcp:0.0.0.0:4444,server=on,wait=off", "listens");
    check("-nodefaults -chardev socket,id=c,host=0.0.0.0,port=4444,server=on,wait=off", "listens");
    check("-nodefaults -nic user,hostfwd=tcp::2222-:22", "listens");
    check("-nodefaults -nic user,model=e1000", "-nic user,model=e1000: all clones would have the MAC address");
    check("-nodefaults -netdev user,id=n -device virtio-net-pci,netdev=n", "virtio-net-pci,netdev=n: all clones");
    check("-nodefaults -netdev tap,id=n,ifname=tap0,script=no,downscript=no", "an interface of the host");
    check("-m 1G", "the card that QEMU adds by itself");
    for line in ["-nodefaults -m 1G", "-nic none", "-net none", "-nodefaults -netdev user,id=n"] {
        assert!(of(line, Net::None).is_ok(), "{line}");
    }
    for line in ["-netdev vhost-user,id=n,chardev=c", "-netdev socket,id=n,listen=:4", "-nic user,smb=/home"] {
        assert!(of(&format!("-nodefaults {line}"), Net::Isolated).unwrap_err().to_string().contains("is not known"));
    }
    for script in ["", ",script=no", ",script=no,downscript=/etc/down"] {
        let said = of(&format!("-nodefaults -netdev tap,id=n{script}"), Net::Isolated).unwrap_err().to_string();
        assert!(said.contains("runs scripts of the host"), "{said}");
    }
}

/// A setting may be a path, or have QEMU listen.
#[test]
fn settings_that_are_not_known_are_refused() {
    for line in [
        "-serial unix:/a,server=on,wait=off,logfile=/l",
        "-serial unix:/a,server=on,wait=off,path=/b",
        "-serial file:/a,append=on",
        "-chardev socket,id=c,path=/a,server=on,wait=off,tls-creds=t",
        "-chardev file,id=c,path=/a,input-path=/b",
        "-chardev pty,id=c,path=/a",
        "-vnc unix:/v,websocket=unix:/w",
        "-netdev tap,id=n,script=no,downscript=no,helper=/h",
        "-netdev user,id=n,hostfwd=tcp::2222-:22,smb=/home",
        "-nic user,hostfwd=tcp::2222-:22,guestfwd=tcp:10.0.2.100:1-cmd:/bin/true",
    ] {
        let said = of(&format!("-nodefaults {line}"), Net::Isolated).unwrap_err().to_string();
        assert!(said.contains("is not known to be right for two VMs"), "{line}: {said}");
    }
}

#[test]
fn a_clone_can_be_run_and_restored() {
    let target = Target { name: "job-01", net: Net::None, has_disks: false };
    let cloned = cloned(&words("-name web1 -m 1G -M q35 -nodefaults"), target).unwrap();
    let plan = plan(&restored(&cloned.words, "pc-q35-10.0").unwrap(), None, |_| Ok("pc.ram".to_owned())).unwrap();
    assert_eq!((plan.memory(), plan.name.as_deref()), (vec![1 << 30], Some("job-01")));
    assert!(plan.argv(7).join(" ").contains("-S -incoming defer"));
}
