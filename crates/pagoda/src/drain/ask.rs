//! What a plan rests on: what each VM would take on each host, by the word of the hosts.

use anyhow::{Result, bail};
use pagoda_api::{Client, ClientError, ErrorCode, MovePlan, MoveReply, MoveRequest, MoveRoom, VmInfo};

use super::plan::{self, HostIdx, Wanted};
use super::types::{DrainPlan, PlannedHost, PlannedVm};
use crate::exit::GivenUp;
use crate::moves::text::room;
use crate::output::Progress;

/// What was said of a VM.
struct Asked {
    vm: String,
    /// What each host said, in the order of the hosts.
    on: Vec<Result<MovePlan, String>>,
}

/// Asks all hosts about all VMs of this one, and plans.
///
/// # Errors
/// A host does not answer, or is none; the command was interrupted. Nothing was changed.
pub fn plan(
    client: &Client,
    hosts: &[String],
    request: &MoveRequest,
    is_interrupted: &dyn Fn() -> bool,
) -> Result<DrainPlan> {
    let vms = client.vms()?.vms;
    let mut progress = Progress::default();
    let (mut asked, questions) = (Vec::with_capacity(vms.len()), vms.len() * hosts.len());
    for VmInfo { name, .. } in vms {
        let mut on = Vec::with_capacity(hosts.len());
        for host in hosts {
            if is_interrupted() {
                drop(progress);
                return Err(GivenUp("interrupted while it was planned: nothing is moved".to_owned()).into());
            }
            let question = asked.len() * hosts.len() + on.len() + 1;
            progress.say(&format!("asking {host} about {name} ({question} of {questions})"));
            match ask(client, &name, &MoveRequest { to: host.clone(), dry_run: true, ..request.clone() })? {
                Some(answer) => on.push(answer),
                None => break,
            }
        }
        // A VM that has ended meanwhile does not move.
        if on.len() == hosts.len() {
            asked.push(Asked { vm: name, on });
        }
    }
    Ok(planned(hosts, asked))
}

/// `None`: it has ended.
fn ask(client: &Client, vm: &str, request: &MoveRequest) -> Result<Option<Result<MovePlan, String>>> {
    match client.move_vm(vm, request) {
        Ok(MoveReply::Plan(plan)) => Ok(Some(Ok(plan))),
        Ok(MoveReply::Begun(_)) => bail!("{vm} moves, although it was only asked whether it would"),
        Err(error) if error.code() == Some(ErrorCode::NoSuchVm) => Ok(None),
        // Without one of the hosts there is no plan: its user may have another idea then.
        Err(error) if error.is_unreachable() => Err(error.into()),
        Err(error) if matches!(error.code(), Some(ErrorCode::NoSuchHost | ErrorCode::Unreachable)) => Err(error.into()),
        Err(ClientError::Refused(error)) => Ok(Some(Err(error.message))),
        Err(error) => Err(error.into()),
    }
}

fn planned(hosts: &[String], asked: Vec<Asked>) -> DrainPlan {
    let free: Vec<MoveRoom> = (0..hosts.len()).map(|host| free_of(&asked, host)).collect();
    let needs = |of: &Asked| -> Wanted {
        of.on.iter().map(|plan| plan.as_ref().map(|plan| plan.reserves).map_err(Clone::clone)).collect()
    };
    let wanted: Vec<Wanted> = asked.iter().map(needs).collect();
    let places = plan::plan(&wanted, &free);
    let mut shown: Vec<PlannedHost> = hosts
        .iter()
        .zip(&free)
        .map(|(host, free)| PlannedHost { host: host.clone(), vms: 0, free: *free, takes: MoveRoom::default() })
        .collect();
    let mut vms: Vec<PlannedVm> = Vec::with_capacity(asked.len());
    for ((asked, wanted), place) in asked.into_iter().zip(&wanted).zip(places) {
        if let Some(HostIdx(host)) = place
            && let Ok(plan) = &asked.on[host]
        {
            let of = &mut shown[host];
            of.vms += 1;
            of.takes.dram_bytes += plan.reserves.dram_bytes;
            of.takes.swap_bytes += plan.reserves.swap_bytes;
            vms.push(PlannedVm {
                vm: asked.vm,
                host: Some(hosts[host].clone()),
                takes: plan.reserves,
                sends_bytes: plan.sends_bytes,
                time_ms: plan.time_ms,
                why: None,
            });
        } else {
            let takes = wanted.iter().flatten().next().copied().unwrap_or_default();
            let why = Some(why_nowhere(hosts, wanted, &free));
            vms.push(PlannedVm { vm: asked.vm, host: None, takes, sends_bytes: 0, time_ms: None, why });
        }
    }
    // Those that fit nowhere first; then the biggest, which move first.
    vms.sort_by(|a, b| {
        let key = |vm: &PlannedVm| (vm.host.is_some(), std::cmp::Reverse(vm.takes.dram_bytes + vm.takes.swap_bytes));
        key(a).cmp(&key(b)).then_with(|| a.vm.cmp(&b.vm))
    });
    DrainPlan { fits: vms.iter().all(|vm| vm.host.is_some()), vms, hosts: shown }
}

/// The least that it has said meanwhile: others may come there too.
fn free_of(asked: &[Asked], host: usize) -> MoveRoom {
    let said = asked.iter().filter_map(|of| of.on[host].as_ref().ok()).map(|plan| plan.free);
    let least = |a: MoveRoom, b: MoveRoom| MoveRoom {
        dram_bytes: a.dram_bytes.min(b.dram_bytes),
        swap_bytes: a.swap_bytes.min(b.swap_bytes),
    };
    said.reduce(least).unwrap_or_default()
}

fn why_nowhere(hosts: &[String], wanted: &Wanted, free: &[MoveRoom]) -> String {
    if plan::fits_alone(wanted, free) {
        return "there is no room beside the others".to_owned();
    }
    let mut whys: Vec<String> = Vec::new();
    for ((host, needs), free) in hosts.iter().zip(wanted).zip(free) {
        let why = match needs {
            Err(why) => why.clone(),
            Ok(needs) => format!("{host} has {} free, and {} are needed", room(*free), room(*needs)),
        };
        // What this host says against it is the same for all of them.
        if !whys.contains(&why) {
            whys.push(why);
        }
    }
    whys.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn room_of(dram: u64, swap: u64) -> MoveRoom {
        MoveRoom { dram_bytes: dram * GIB, swap_bytes: swap * GIB }
    }

    fn yes(reserves: MoveRoom, free: MoveRoom) -> Result<MovePlan, String> {
        Ok(MovePlan { reserves, free, sends_bytes: 7, time_ms: Some(3), ..MovePlan::default() })
    }

    #[test]
    fn those_that_fit_nowhere_come_first_with_the_reason() {
        let hosts = ["host2".to_owned(), "host3".to_owned()];
        let (two, three) = (room_of(4, 100), room_of(2, 100));
        let asked = |vm: &str, on| Asked { vm: vm.to_owned(), on };
        let planned = planned(
            &hosts,
            vec![
                asked("small", vec![yes(room_of(1, 1), two), yes(room_of(1, 1), three)]),
                asked("huge", vec![yes(room_of(9, 1), two), Err("host3 refuses".into())]),
                asked("disk", vec![Err("it has writable disks".into()), Err("it has writable disks".into())]),
                // What was free a moment later counts.
                asked("big", vec![yes(room_of(3, 1), room_of(3, 99)), yes(room_of(3, 1), three)]),
                asked("other", vec![yes(room_of(2, 1), two), Err("no".into())]),
            ],
        );
        let words: Vec<(&str, Option<&str>, Option<&str>)> =
            planned.vms.iter().map(|vm| (vm.vm.as_str(), vm.host.as_deref(), vm.why.as_deref())).collect();
        let expected = [
            ("huge", None, Some("host2 has 3G DRAM + 99G swap free, and 9G DRAM + 1G swap are needed; host3 refuses")),
            ("other", None, Some("there is no room beside the others")),
            ("disk", None, Some("it has writable disks")),
            ("big", Some("host2"), None),
            ("small", Some("host3"), None),
        ];
        assert_eq!(words, expected);
        assert!(!planned.fits);
        let takes: Vec<(u32, MoveRoom)> = planned.hosts.iter().map(|host| (host.vms, host.takes)).collect();
        assert_eq!(takes, [(1, room_of(3, 1)), (1, room_of(1, 1))]);
    }
}
