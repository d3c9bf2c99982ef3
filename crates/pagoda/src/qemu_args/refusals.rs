//! Options that cannot work under a pager.

use super::error::ArgError;
use super::words::{Opt, Props, is_on};

/// Refuses `option` if it cannot work, with the reason and what to do.
pub fn check(option: &Opt<'_>) -> Result<(), ArgError> {
    let refuse = |problem: String, advice: &str| Err(ArgError::new(problem, advice));
    let Opt { name, value, .. } = *option;
    let props = |implied: &str| Props::parse(name, value, implied);
    let on = |props: &Props, key: &str| props.get(key).filter(|value| is_on(value) || value == "on-fault");
    match name {
        "mem-path" => refuse(
            format!("-mem-path {value} puts guest memory into a file of yours, but it will be in Pagoda's"),
            "leave it out",
        ),
        "mem-prealloc" => refuse(
            "-mem-prealloc would touch all of the VM's memory at the start and push most of it to swap".into(),
            "leave it out; --reserve-swap makes sure of the room on the swap disk",
        ),
        "overcommit" if on(&props("")?, "mem-lock").is_some() => refuse(
            "-overcommit mem-lock=on locks guest memory in DRAM, so none of it could be evicted".into(),
            "leave it out (in libvirt: <locked/> of <memoryBacking>), or run this VM without Pagoda",
        ),
        "realtime" if on(&props("")?, "mlock").is_some() => refuse(
            "-realtime mlock=on locks guest memory in DRAM, so none of it could be evicted".into(),
            "leave it out, or run this VM without Pagoda",
        ),
        "readconfig" => refuse(
            format!("-readconfig {value} may set memory options that Pagoda does not see"),
            "write its options on the command line",
        ),
        "set" if sets_memory(value) => {
            refuse(format!("-set {value} changes an option that Pagoda reads"), "write it in that option itself")
        }
        "incoming" if !is_main_channel(value)? => refuse(
            format!(
                "-incoming {value}: the target would take over the source's memory, but its RAM is in Pagoda's files"
            ),
            "send the whole state: -incoming defer, or one channel of the type main",
        ),
        "xen-attach" | "xen-domid" => refuse_xen(&format!("-{name}")),
        "accel" if props("accel")?.get("accel").as_deref() == Some("xen") => refuse_xen("-accel xen"),
        "chroot" => refuse_chroot("-chroot"),
        "run-with" => {
            let props = props("")?;
            if props.get("chroot").is_some() {
                return refuse_chroot("-run-with chroot=");
            }
            if props.get("user").is_some() { refuse_user("-run-with user=") } else { Ok(()) }
        }
        "runas" => refuse_user("-runas"),
        "machine" | "M" => check_machine(&props("type")?),
        "numa" => {
            let props = props("type")?;
            if props.get("type").as_deref() == Some("node") && props.get("mem").is_some() {
                return refuse(
                    format!("-numa {value} gives the node memory that has no name"),
                    "write -object memory-backend-ram,id=ram0,size=... -numa node,memdev=ram0 (also \
                     QEMU's own advice; machine types from 5.1 on know nothing else)",
                );
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// A URI, or a channel for the whole state. That of CPR (QEMU 10) brings descriptors of memory instead of its content.
fn is_main_channel(value: &str) -> Result<bool, ArgError> {
    // QEMU tells a URI from a channel in the same way.
    let is_uri = value.split_once(':').is_some_and(|(scheme, _)| scheme.bytes().all(|b| b.is_ascii_alphabetic()));
    if is_uri || value == "defer" {
        return Ok(true);
    }
    Ok(Props::parse("incoming", value, "channel-type")?.get("channel-type").is_none_or(|kind| kind == "main"))
}

/// `GROUP.ID.PROPERTY=VALUE`, of a group or a property that has to do with memory.
fn sets_memory(value: &str) -> bool {
    let (path, _) = value.split_once('=').unwrap_or((value, ""));
    let group = path.split('.').next().unwrap_or(path);
    matches!(group, "object" | "memory" | "machine" | "numa") || path.ends_with("memdev")
}

fn refuse_xen(option: &str) -> Result<(), ArgError> {
    Err(ArgError::new(
        format!("{option}: under Xen the hypervisor has the guest's memory, so it cannot be paged"),
        "use -accel kvm or -accel tcg",
    ))
}

fn refuse_chroot(option: &str) -> Result<(), ArgError> {
    Err(ArgError::new(
        format!("{option} would hide Pagoda's socket, and the VM could not come back to a restarted daemon"),
        "leave it out; -sandbox on works",
    ))
}

fn refuse_user(option: &str) -> Result<(), ArgError> {
    Err(ArgError::new(
        format!("{option} changes the user, and the VM could not come back to a restarted daemon"),
        "start `pagoda run` as that user, with a daemon of that user",
    ))
}

fn check_machine(props: &Props) -> Result<(), ArgError> {
    if let Some(key) = props.keys().into_iter().find(|key| key.starts_with("memory.")) {
        return Err(ArgError::new(
            format!("-machine {key}= is another way to write -m, which Pagoda does not read"),
            "write -m",
        ));
    }
    if let Some(key) =
        ["confidential-guest-support", "memory-encryption"].into_iter().find(|key| props.get(key).is_some())
    {
        return Err(ArgError::new(
            format!("-machine {key}= keeps guest memory from the host, so it cannot be paged"),
            "run this VM without Pagoda",
        ));
    }
    let by_xen = props.get("accel").is_some_and(|accel| accel.split(':').any(|one| one == "xen"));
    let is_xen = props.get("type").is_some_and(|kind| kind.starts_with("xenfv") || kind.starts_with("xenpv"));
    if by_xen || is_xen {
        return refuse_xen("-machine");
    }
    if props.get("type").as_deref() == Some("none") {
        return Err(ArgError::new(
            "-machine none has no memory",
            "name a machine type such as q35, or run it without Pagoda",
        ));
    }
    Ok(())
}
