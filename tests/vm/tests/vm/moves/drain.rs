//! All VMs of a host move to two others.

use std::process::Stdio;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use pagoda_api::{CreateVm, HostPatch, VmKind, VmSpec};
use vm_tests::control::Control;
use vm_tests::{Guest, GuestOptions, Lab, MIB, Qemu, wait};

use super::hosts::{Host, Hosts, text};
use super::moving::end;
use super::{DOWNTIME, REFUSED, leave_no_room};

/// As many as boot in a minute or two without KVM. A load test has more: this says how many.
const VMS: usize = 4;
const VMS_ENV: &str = "PAGODA_DRAIN_VMS";

fn options(index: usize) -> GuestOptions {
    GuestOptions::new(&format!("web{}", index + 1), "").qemu(Qemu::System).memory("-m 128M").control()
}

fn names(host: &Host) -> Result<Vec<String>> {
    Ok(host.daemon.client().vms()?.vms.into_iter().map(|vm| vm.name).collect())
}

#[test]
fn a_host_is_drained_to_two_others() -> Result<()> {
    let vms = std::env::var(VMS_ENV).map_or(Ok(VMS), |vms| vms.parse()).context(VMS_ENV)?;
    Lab::run("a host is drained", 1, |lab| {
        let hosts = Hosts::start(lab, &options(0))?;
        let third = hosts.third(lab, &options(0))?;
        let guests: Vec<Rc<Guest>> = (0..vms).map(|index| hosts.guest(lab, &options(index))).collect::<Result<_>>()?;
        // A guest says once that it is ready, to whoever listens then.
        let mut controls = guests.iter().map(|guest| guest.restored_control()).collect::<Result<Vec<_>>>()?;
        for control in &mut controls {
            control.wait_ready()?;
            control.run("fill 20")?;
        }
        drop(controls);
        let before = names(&hosts.one)?;
        let to = ["host", "drain", "--to", "host2,host3"];

        // They fit nowhere: nothing is moved.
        let pools = [&hosts.other, &third].map(|host| host.daemon.client().host());
        leave_no_room(&hosts.other)?;
        leave_no_room(&third)?;
        let refused = hosts.one.daemon.run_cli(&to)?;
        println!("{}{}", text(&refused.stdout), text(&refused.stderr));
        ensure!(refused.status.code() == Some(REFUSED), "{}", refused.status);
        ensure!(text(&refused.stdout).contains("nowhere"), "{}", text(&refused.stdout));
        ensure!(names(&hosts.one)? == before && !hosts.one.daemon.client().host()?.draining, "something has changed");
        for (host, before) in [&hosts.other, &third].into_iter().zip(pools) {
            let pool = Some(before?.policy.pool_bytes);
            host.daemon.client().patch_host(&HostPatch { pool, ..HostPatch::default() })?;
        }

        let plan = hosts.one.daemon.run_cli(&[&to[..], &["--dry-run", "--json"]].concat())?;
        ensure!(plan.status.success(), "{}", text(&plan.stderr));
        let plan: serde_json::Value = serde_json::from_slice(&plan.stdout)?;
        println!("{plan:#}");
        ensure!(plan["fits"] == true && plan["vms"].as_array().is_some_and(|planned| planned.len() == vms), "{plan}");
        ensure!(names(&hosts.one)? == before, "a dry run has moved something");

        let mut draining = hosts.one.daemon.cli()?;
        draining.args(to).args(DOWNTIME).args(["--bandwidth", "160M"]);
        let draining = draining.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("start the drain")?;
        wait::until("this host is drained", wait::HANG, || {
            Ok(hosts.one.daemon.client().host()?.draining.then_some(()))
        })?;
        let new = CreateVm {
            name: "new".into(),
            memory: vec![64 * MIB],
            kind: VmKind::Plain,
            spec: VmSpec::default(),
            launch: None,
            outbox: None,
        };
        let made = hosts.one.daemon.client().create(&new);
        ensure!(made.as_ref().is_err_and(|error| error.to_string().contains("drained")), "{made:?}");
        println!("{}", end(draining, &[0])?);
        ensure!(
            names(&hosts.one)?.is_empty() && !hosts.one.daemon.client().host()?.draining,
            "{:?}",
            names(&hosts.one)
        );
        let (two, three) = (names(&hosts.other)?, names(&third)?);
        println!("{two:?} {three:?}");
        ensure!(two.len() + three.len() == vms && two.len().abs_diff(three.len()) <= 1, "{two:?} {three:?}");
        for guest in &guests {
            let host = if two.contains(&guest.name) { &hosts.other } else { &third };
            let mut control =
                Control::of_restored(&host.files.join(format!("{}.control", guest.name)), guest.deadline())?;
            control.run("verify").with_context(|| format!("{} on {}", guest.name, host.name))?;
            control.send("poweroff")?;
            host.daemon.wait_gone(&guest.name)?;
        }
        Ok(())
    })
}
