//! What a destination refuses before anything is sent: each reason by name, and what to do about it.
//!
//! All reasons are given at once, so that nobody has to try three times. Whether there is room is asked afterwards.

use std::time::Duration;

use crate::units::{Generation, RegisterId};
use crate::wire::limits::{PROTOCOL_VERSION, REASONS_MAX};
use crate::wire::offer::{Capabilities, Hello, Reason, ReasonKind, RegionFacts, Welcome};

/// Clocks that differ by more are not set. A guest's clock follows its host's, and jumps with it.
pub const CLOCK_OFF_MAX: Duration = Duration::from_secs(60);
/// CPU features of a guest that one refusal names; it counts the others.
const FEATURES_NAMED: usize = 8;

/// A VM of the same name at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namesake {
    /// None, or one that an earlier attempt of this source has left and that is being removed.
    None,
    /// A VM that this host owns.
    Owned(Generation),
    /// An earlier move of it has not ended.
    Unsettled,
}

/// What the destination knows of itself.
#[derive(Clone, Debug)]
pub struct HostFacts<'a> {
    pub software: &'a str,
    pub unix_s: u64,
    pub capabilities: Capabilities,
    /// What this host cannot do without.
    pub required: Capabilities,
    /// Those of its arbiter, if it has one and reaches it.
    pub register: Option<RegisterId>,
    /// The QEMU that would run the VM, if there is one.
    pub qemu: Option<&'a str>,
    /// Machine types that it knows.
    pub machines: &'a [&'a str],
    /// What its CPUs can give to a guest, as QEMU names it.
    pub cpu_features: &'a [&'a str],
    /// Regions as this host would make them by the VM's launch specification.
    pub regions: &'a [RegionFacts],
    pub namesake: Namesake,
    /// What the host's administrator does not allow of the launch specification.
    pub forbidden: &'a [String],
}

/// Whether this host takes the VM.
///
/// # Errors
/// All reasons why it does not.
pub fn compare(hello: &Hello, host: &HostFacts<'_>) -> Result<Welcome, Vec<Reason>> {
    let mut reasons = Vec::new();
    compare_versions(hello, host, &mut reasons);
    compare_machine(hello, host, &mut reasons);
    compare_regions(&hello.regions, host.regions, &mut reasons);
    compare_name(hello, host, &mut reasons);
    let clock_off = hello.unix_s.abs_diff(host.unix_s);
    if clock_off > CLOCK_OFF_MAX.as_secs() {
        reasons.push(reason(
            ReasonKind::Clock,
            format!("the clocks of the two hosts are {clock_off} s apart"),
            "set both clocks, for instance by NTP",
        ));
    }
    for what in host.forbidden {
        let remedy = "ask the destination's administrator to allow it";
        reasons.push(reason(ReasonKind::Forbidden, what.clone(), remedy));
    }
    reasons.truncate(REASONS_MAX);
    if !reasons.is_empty() {
        return Err(reasons);
    }
    Ok(Welcome {
        attempt: hello.attempt,
        protocol: PROTOCOL_VERSION,
        capabilities: agreed(hello, host),
        software: host.software.to_owned(),
    })
}

/// What both can do. Two hosts have an arbiter if they ask the same registers: an etcd each is none.
fn agreed(hello: &Hello, host: &HostFacts<'_>) -> Capabilities {
    let both = hello.capabilities.both(host.capabilities);
    let is_one = hello.register.is_some() && hello.register == host.register;
    if is_one { both } else { both.without(Capabilities::ARBITER) }
}

fn compare_versions(hello: &Hello, host: &HostFacts<'_>, reasons: &mut Vec<Reason>) {
    if !(hello.protocol_min..=hello.protocol_max).contains(&PROTOCOL_VERSION) {
        let (min, max) = (hello.protocol_min, hello.protocol_max);
        reasons.push(reason(
            ReasonKind::Protocol,
            format!("the source ({}) speaks versions {min} to {max}, this host {PROTOCOL_VERSION}", hello.software),
            "upgrade the older of the two hosts",
        ));
    }
    for (lacks, has, who) in [
        (hello.required, host.capabilities, "this host lacks"),
        (host.required, hello.capabilities, "the source lacks"),
    ] {
        if !has.has(lacks) {
            let missing = lacks.0 & !has.0;
            reasons.push(reason(
                ReasonKind::Capability,
                format!("{who} what the other needs: {}", names(Capabilities(missing))),
                "upgrade that host, or configure both alike",
            ));
        }
    }
}

fn names(capabilities: Capabilities) -> String {
    let known = [
        (Capabilities::LZ4, "LZ4"),
        (Capabilities::ZSTD, "zstd"),
        (Capabilities::POSTCOPY, "post-copy"),
        (Capabilities::REMOTE_TIER, "remote tiers that are handed over"),
        (Capabilities::DISKS, "disks that are copied"),
        (Capabilities::ARBITER, "an arbiter of owners (etcd)"),
    ];
    let named: Vec<&str> = known.iter().filter(|(bit, _)| capabilities.has(*bit)).map(|(_, name)| *name).collect();
    if named.is_empty() { format!("bits {:#x}", capabilities.0) } else { named.join(", ") }
}

fn compare_machine(hello: &Hello, host: &HostFacts<'_>, reasons: &mut Vec<Reason>) {
    let Some(qemu) = host.qemu else {
        let remedy = "install it, or allow another one for this VM";
        reasons.push(reason(ReasonKind::Qemu, "this host has no QEMU for this VM".to_owned(), remedy));
        return;
    };
    // A versioned type is the same in every QEMU that has it, older or newer than the source's.
    if !host.machines.contains(&hello.machine.as_str()) {
        reasons.push(reason(
            ReasonKind::Machine,
            format!("QEMU {qemu} of this host does not know {}, which QEMU {} made", hello.machine, hello.qemu),
            "start the VM with a machine type that both know, with its version",
        ));
    }
    let wanted = hello.cpu_features.split(',').filter(|feature| !feature.is_empty());
    let missing: Vec<&str> = wanted.filter(|feature| !host.cpu_features.contains(feature)).collect();
    if !missing.is_empty() {
        let mut list = missing[..missing.len().min(FEATURES_NAMED)].join(", ");
        if missing.len() > FEATURES_NAMED {
            list += &format!(" and {} more", missing.len() - FEATURES_NAMED);
        }
        reasons.push(reason(
            ReasonKind::CpuFeature,
            format!("the CPUs of this host lack {list}"),
            "start the VM with a CPU model that both hosts have",
        ));
    }
}

/// QEMU's state names regions by their ids, and their sizes have to be equal.
fn compare_regions(theirs: &[RegionFacts], ours: &[RegionFacts], reasons: &mut Vec<Reason>) {
    for region in theirs {
        match ours.iter().find(|our| our.id == region.id) {
            None => reasons.push(reason(
                ReasonKind::RegionId,
                format!("RAM {:?} does not exist in the VM as this host would start it", region.id),
                "start the VM here with the memory back ends that it has there",
            )),
            Some(our) if our.size != region.size => reasons.push(reason(
                ReasonKind::RegionSize,
                format!("RAM {:?} has {} there and {} here", region.id, region.size, our.size),
                "give the VM the same memory on both hosts",
            )),
            Some(_) => {}
        }
    }
    for our in ours.iter().filter(|our| !theirs.iter().any(|region| region.id == our.id)) {
        reasons.push(reason(
            ReasonKind::RegionId,
            format!("RAM {:?} of this host does not exist in the VM", our.id),
            "start the VM here with the memory back ends that it has there",
        ));
    }
}

fn compare_name(hello: &Hello, host: &HostFacts<'_>, reasons: &mut Vec<Reason>) {
    match host.namesake {
        Namesake::None => {}
        Namesake::Owned(generation) => reasons.push(reason(
            ReasonKind::NameTaken,
            format!("this host has a VM {:?} of its own, at generation {}", hello.vm, generation.0),
            "rename one of the two, or remove the one that is not wanted",
        )),
        Namesake::Unsettled => reasons.push(reason(
            ReasonKind::Unsettled,
            format!("an earlier move of {:?} to this host has not ended", hello.vm),
            "wait until it has; 'pagoda moves' shows what it waits for",
        )),
    }
}

fn reason(kind: ReasonKind, what: String, remedy: &str) -> Reason {
    Reason { kind, what, remedy: remedy.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{AttemptId, ConnectionNo};
    use pagoda_core::units::Bytes;

    fn regions() -> Vec<RegionFacts> {
        vec![RegionFacts { id: "pc.ram".to_owned(), size: Bytes::from_mib(512) }]
    }

    fn hello() -> Hello {
        Hello {
            attempt: AttemptId(1),
            connection: ConnectionNo(1),
            generation: Generation(3),
            protocol_min: 1,
            protocol_max: 1,
            capabilities: Capabilities::LZ4.with(Capabilities::POSTCOPY),
            required: Capabilities::POSTCOPY,
            unix_s: 1000,
            register: RegisterId::of(7),
            software: "0.1.0".to_owned(),
            vm: "web1".to_owned(),
            qemu: "10.0.2".to_owned(),
            machine: "pc-q35-7.2".to_owned(),
            cpu_features: "sse,avx2".to_owned(),
            regions: regions(),
        }
    }

    fn host(regions: &[RegionFacts]) -> HostFacts<'_> {
        HostFacts {
            software: "0.1.1",
            unix_s: 1050,
            capabilities: Capabilities::POSTCOPY,
            required: Capabilities::default(),
            register: RegisterId::of(7),
            qemu: Some("7.2.22"),
            machines: &["pc-q35-7.1", "pc-q35-7.2"],
            cpu_features: &["sse", "avx2", "avx512f"],
            regions,
            namesake: Namesake::None,
            forbidden: &[],
        }
    }

    fn check(change: impl FnOnce(&mut Hello, &mut HostFacts<'_>), expected: &[(ReasonKind, &str)]) {
        let (mut hello, regions) = (hello(), regions());
        let mut host = host(&regions);
        change(&mut hello, &mut host);
        match compare(&hello, &host) {
            Ok(welcome) => {
                assert!(expected.is_empty(), "{expected:?}");
                assert_eq!((welcome.protocol, welcome.capabilities), (1, Capabilities::POSTCOPY));
            }
            Err(reasons) => {
                let found: Vec<ReasonKind> = reasons.iter().map(|reason| reason.kind).collect();
                assert_eq!(found, expected.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), "{reasons:?}");
                for (reason, (_, text)) in reasons.iter().zip(expected) {
                    assert!(reason.what.contains(text) && !reason.remedy.is_empty(), "{reason:?}");
                }
            }
        }
    }

    #[test]
    fn a_host_that_can_have_the_vm_takes_it() {
        check(|_, _| (), &[]);
        check(|hello, _| hello.qemu = "7.2".to_owned(), &[]);
    }

    #[test]
    fn an_arbiter_is_agreed_on_by_hosts_that_ask_the_same_registers() {
        let regions = regions();
        for (theirs, ours, is_agreed) in [(7, 7, true), (7, 8, false), (7, 0, false), (0, 7, false), (0, 0, false)] {
            let capabilities = Capabilities::POSTCOPY.with(Capabilities::ARBITER);
            let hello = Hello { register: RegisterId::of(theirs), capabilities, ..hello() };
            let host = HostFacts { register: RegisterId::of(ours), capabilities, ..host(&regions) };
            let welcome = compare(&hello, &host).expect("it is no reason to refuse");
            assert_eq!(welcome.capabilities.has(Capabilities::ARBITER), is_agreed, "{theirs} {ours}");
            assert!(welcome.capabilities.has(Capabilities::POSTCOPY));
        }
        // One that does not say that it can is not asked to.
        let hello = hello();
        let host = HostFacts { capabilities: Capabilities::ARBITER, ..host(&regions) };
        assert!(
            !compare(&Hello { required: Capabilities::default(), ..hello }, &host)
                .unwrap()
                .capabilities
                .has(Capabilities::ARBITER)
        );
    }

    #[test]
    fn each_reason_is_named() {
        use ReasonKind::*;
        check(
            |hello, _| (hello.protocol_min, hello.protocol_max) = (2, 3),
            &[(Protocol, "versions 2 to 3, this host 1")],
        );
        check(
            |hello, _| hello.required = Capabilities::ARBITER,
            &[(Capability, "this host lacks what the other needs: an")],
        );
        check(
            |_, host| host.required = Capabilities(1 << 40),
            &[(Capability, "the source lacks what the other needs: bits 0x")],
        );
        check(|_, host| host.qemu = None, &[(Qemu, "no QEMU")]);
        check(
            |hello, _| hello.machine = "pc-q35-10.0".to_owned(),
            &[(Machine, "7.2.22 of this host does not know pc-q35-10.0")],
        );
        check(|_, host| host.cpu_features = &["sse"], &[(CpuFeature, "lack avx2")]);
        let many = |hello: &mut Hello| hello.cpu_features = (0..10).map(|index| format!("f{index},")).collect();
        check(|hello, _| many(hello), &[(CpuFeature, "f7 and 2 more")]);
        check(
            |hello, _| hello.regions[0].size = Bytes::from_mib(256),
            &[(RegionSize, "256 MiB there and 512 MiB here")],
        );
        check(
            |hello, _| hello.regions[0].id = "ram".to_owned(),
            &[(RegionId, "\"ram\" does not exist"), (RegionId, "\"pc.ram\" of this host")],
        );
        check(
            |_, host| host.namesake = Namesake::Owned(Generation(9)),
            &[(NameTaken, "\"web1\" of its own, at generation 9")],
        );
        check(|_, host| host.namesake = Namesake::Unsettled, &[(Unsettled, "has not ended")]);
        check(|_, host| host.unix_s = 9000, &[(Clock, "8000 s apart")]);
        let forbidden = ["program /tmp/qemu".to_owned()];
        check(|_, host| host.forbidden = Box::leak(Box::new(forbidden)), &[(Forbidden, "program /tmp/qemu")]);
    }

    #[test]
    fn all_reasons_come_at_once() {
        use ReasonKind::*;
        let change = |hello: &mut Hello, host: &mut HostFacts<'_>| {
            (hello.unix_s, host.cpu_features, host.namesake) = (0, &[], Namesake::Unsettled);
            host.unix_s = 100;
        };
        check(change, &[(CpuFeature, "sse, avx2"), (Unsettled, ""), (Clock, "100 s")]);
    }
}
