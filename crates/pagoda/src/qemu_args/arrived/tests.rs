use std::path::PathBuf;

use super::arrived;

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

fn check(line: &str) -> Result<Vec<String>, Vec<String>> {
    arrived(&words(line), &[PathBuf::from("/vms"), PathBuf::from("/run/vms")])
}

fn refused(line: &str, expected: &str) {
    // Among others that are right, in which nothing may hide.
    for line in [line.to_owned(), format!("-nodefaults -m 1G {line}"), format!("{line} -nographic -vga none")] {
        let said = check(&line).expect_err(&line).join("; ");
        assert!(said.contains(expected), "{line}: {said}");
    }
}

#[test]
fn usual_words_start_as_they_are() {
    for line in [
        "-M q35 -m 4G -smp 2 -cpu host -enable-kvm -nodefaults -nographic -sandbox on,spawn=deny",
        "-nodefaults -display none -drive file=/vms/a.qcow2,if=virtio,format=qcow2,cache=none -kernel /vms/k -append root=/dev/vda",
        "-nodefaults -display none -drive if=pflash,readonly=on,format=raw,file=/usr/share/OVMF/OVMF_CODE.fd disk.img",
        "-nodefaults -display none -hda disks/a.qcow2 -cdrom /vms/cd.iso -drive file=nbd://10.0.0.5/disk,format=raw",
        "-nodefaults -display none -blockdev driver=qcow2,node-name=d,file.driver=file,file.filename=/vms/d -device virtio-blk-pci,drive=d",
        r#"-nodefaults -display none -blockdev {"driver":"qcow2","node-name":"d","file":{"driver":"file","filename":"/vms/d"}}"#,
        "-nodefaults -display none -netdev user,id=n,hostfwd=tcp::2222-:22,hostfwd=tcp::80-:80 -device virtio-net-pci,netdev=n",
        "-nodefaults -display none -netdev tap,id=n,ifname=tap0,script=no,downscript=no,vhost=on -device e1000,netdev=n",
        "-nodefaults -display none -chardev socket,id=m,path=/run/vms/m,server=on,wait=off -mon chardev=m,mode=control",
        "-nodefaults -display none -chardev socket,id=s,host=0.0.0.0,port=1,server=on,wait=off -device isa-serial,chardev=s",
        "-nodefaults -display none -qmp unix:/run/vms/q,server=on,wait=off -serial file:/vms/log -vnc :1 -device vmgenid,guid=auto",
        "-nodefaults -display none -monitor vc -vnc unix:/run/vms/v -object rng-random,id=r,filename=/dev/urandom",
        "-nodefaults -nographic -serial mon:stdio -name guest=/etc,debug-threads=on -pidfile /run/vms/p -gdb none",
    ] {
        assert_eq!(check(line).as_deref(), Ok(&words(line)[..]), "{line}");
    }
}

#[test]
fn it_needs_no_desktop_and_stays_with_its_parent() {
    let check = |line: &str, expected: &str| assert_eq!(check(line).unwrap().join(" "), expected);
    check("-m 1G", "-m 1G -display none -monitor none");
    check("-m 1G -vnc :1", "-m 1G -vnc :1 -display none -monitor none");
    check("-daemonize -m 1G -monitor null", "-m 1G -monitor null -display none");
    check("-nographic", "-nographic");
    refused("-display gtk", "-display gtk is not known to be safe");
    refused("-curses", "-curses is not known");
}

#[test]
fn programs_are_not_started() {
    refused("-netdev tap,id=n", "runs scripts");
    refused("-netdev tap,id=n,script=/vms/x,downscript=no", "runs scripts");
    refused("-netdev tap,id=n,script=no,downscript=no,helper=/vms/h", "helper=/vms/h is not known");
    refused("-nic bridge,br=br0", "not known");
    refused("-netdev bridge,type=user,id=n", "says type twice");
    refused("-netdev user,id=n,hostfwd=tcp::1-:1,smb=/vms", "not known");
    refused("-nic user,guestfwd=tcp:10.0.2.100:1-cmd:/bin/true", "not known");
    refused(r#"-netdev {"type":"user","id":"n","smb":"/vms"}"#, "not known");
    refused("-drive file=ssh://h/x", "ssh://h/x is not known");
    refused("-drive file.filename=json:{},format=raw", "not known");
    refused("-blockdev driver=qcow2,node-name=d,file.driver=ssh,file.path=x", "file.driver=ssh is not known");
    refused(r#"-blockdev {"driver":"raw","node-name":"d","file":{"driver":"vvfat","dir":"x"}}"#, "vvfat is not known");
    refused("-hda fat:rw:x", "fat:rw:x");
    refused("exec:x", "exec:x");
    refused("-fsdev local,id=f,path=/vms,security_model=none", "not known");
    refused("-tpmdev emulator,id=t,chardev=c", "not known");
    refused("-device vfio-pci,host=01:00.0", "not known");
    refused("-device vhost-user-fs-pci,chardev=c", "not known");
    refused("-object filter-dump,id=f,netdev=n,file=x", "not known");
    refused("-plugin x.so", "not known");
    refused("-readconfig x", "not known");
    refused("-set device.d.romfile=x", "not known");
    refused("-spice port=1", "not known");
    refused("-foo -m", "-foo -m is not known");
    refused("-sandbox off", "takes a protection off");
    refused("-sandbox on,enable=off", "says enable twice");
}

#[test]
fn nobody_reaches_a_monitor() {
    refused("-monitor tcp::4444,server=on,wait=off", "can start programs");
    refused("-qmp telnet:0.0.0.0:1,server,nowait", "can start programs");
    refused("-serial mon:tcp::1,server=on,wait=off", "can start programs");
    refused("-chardev socket,id=m,port=1,host=::,server=on,wait=off -mon chardev=m", "can start programs");
    refused("-chardev socket,id=m,port=1,host=::,server=on,wait=off -qmp chardev:m", "can start programs");
    refused("-vnc :1 -monitor vc:80x24", "can start programs");
    refused("-vnc :1 -serial mon:vc", "can start programs");
    refused("-vnc 10.0.0.1:1,password=on -chardev vc,id=m -mon m", "can start programs");
    refused("-s", "lets whoever reaches it");
    refused("-gdb tcp::1", "lets whoever reaches it");
    refused("-serial tcp::1,server=on", "wait=off");
    refused("-chardev socket,id=m,path=/vms/m,server=on", "wait=off");
    refused("-chardev udp,id=m,port=1", "not known");
}

#[test]
fn files_stay_where_they_may_be() {
    let outside = |line: &str, path: &str| refused(line, &format!("{path} is not below a directory of [moves] paths"));
    outside("-drive file=/etc/shadow,format=raw", "/etc/shadow");
    outside("-drive file=file:/etc/shadow,format=raw", "/etc/shadow");
    outside("-hda ../x", "../x");
    outside("/vms/../etc/shadow", "/vms/../etc/shadow");
    outside("/vmsx/a", "/vmsx/a");
    outside("-drive file=/vms-evil/a,format=raw", "/vms-evil/a");
    outside("-drive file=/vms/../../etc/shadow,format=raw", "/vms/../../etc/shadow");
    outside("-serial unix:/vms-evil/s,server=on,wait=off", "/vms-evil/s");
    outside("-kernel /boot/k", "/boot/k");
    outside("-bios /etc/shadow", "/etc/shadow");
    outside("-initrd /vms/i,/etc/shadow", "/etc/shadow");
    outside("-initrd /vms/i,,/../../etc/shadow", "/../../etc/shadow");
    outside("-L /home", "/home");
    outside("-fw_cfg name=opt/x,file=/etc/shadow", "/etc/shadow");
    outside("-smbios file=/etc/shadow", "/etc/shadow");
    outside("-object secret,id=s,file=/etc/shadow", "/etc/shadow");
    outside("-chardev socket,id=s,path=/run/docker.sock", "/run/docker.sock");
    outside("-chardev null,id=s,logfile=/etc/x", "/etc/x");
    outside("-serial unix:/run/docker.sock", "/run/docker.sock");
    outside("-serial file:/etc/x", "/etc/x");
    outside("-vnc unix:/run/x", "/run/x");
    outside("-pidfile /etc/x", "/etc/x");
    outside("-D /etc/x", "/etc/x");
    outside("-device virtio-net-pci,romfile=/etc/shadow", "/etc/shadow");
    outside("-netdev user,id=n,tftp=/etc", "/etc");
    outside(r#"-blockdev {"driver":"file","node-name":"d","filename":"\u002fetc/shadow"}"#, "/etc/shadow");
    outside(r#"-blockdev {"driver":"nbd","node-name":"d","server":{"type":"unix","path":"/run/x"}}"#, "/run/x");
}

#[test]
fn all_reasons_are_said_at_once() {
    let said = check("-s -hda /etc/x -netdev tap,id=n -fsdev x /y").unwrap_err();
    assert_eq!(said.len(), 5, "{said:?}");
}
