//! Takes snapshots by the VMs' timetables, and removes the oldest of those.
//!
//! One thread does it, one VM at a time, by the procedures that a user's requests have and with their refusals. A VM that cannot
//! be snapshotted at the moment (its last one is not filled, something else is done to it, it does not run) is waited for.
//! What fails is said with the VM, and tried again a period later. Only snapshots are removed whose manifest says that they were
//! taken so, and none that a VM reads.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pagoda_api::types::{ApiError, Snapshot, SnapshotStage};
use pagoda_image::ImageId;
use pagoda_image::limits::SNAPSHOTS_PER_VM_MAX;

use super::{remove, take};
use crate::images::Which;
use crate::registry::{Registry, Vm};
use crate::timetables::Follower;

/// How often it is looked what is due: a part of the shortest period.
const LOOK: Duration = Duration::from_millis(200);

/// Keeps the timetables of all VMs. Never ends: it has a thread of its own, and may wait for disks.
pub fn run(registry: &Arc<Registry>) {
    loop {
        std::thread::sleep(LOOK);
        let followers = followers(registry);
        registry.timetables.follow(&followers, Instant::now(), |vm| age_of_newest(registry, vm));
        // Snapshots that are too many go first, which makes room for new ones.
        for vm in registry.timetables.to_remove().iter().filter(|vm| is_free(registry, vm)) {
            let removed = remove_oldest(registry, vm, 0);
            if let Err(why) = &removed {
                tracing::warn!(vm = %vm.name, "remove a snapshot by its timetable: {why}");
            }
            registry.timetables.removed(vm.id, removed);
        }
        for vm in registry.timetables.due(Instant::now()).iter().filter(|vm| is_free(registry, vm)) {
            // One that is due has room among the VM's snapshots, if one of its own is too many by then.
            if let Err(why) = remove_oldest(registry, vm, SNAPSHOTS_PER_VM_MAX) {
                tracing::warn!(vm = %vm.name, "make room for a snapshot by its timetable: {why}");
            }
            let taken = take::take_automatic(registry, &vm.name, vm.timetable.disks);
            if let Err(error) = &taken {
                tracing::warn!(vm = %vm.name, "take a snapshot by its timetable: {}", error.message);
            }
            registry.timetables.ended(vm.id, Instant::now(), taken.map_err(|error: ApiError| error.message));
        }
    }
}

fn followers(registry: &Registry) -> Vec<Follower> {
    let of = |vm: &Vm| {
        let (id, name) = (vm.governed.id, vm.record.name.clone());
        Some(Follower { id, name, timetable: vm.record.spec.autosnapshot? })
    };
    registry.lock().values().filter_map(of).collect()
}

/// By the wall clock, which is asked once for each VM: a jump of it costs one period at most.
fn age_of_newest(registry: &Registry, vm: &Follower) -> Option<Duration> {
    let newest = automatic(registry, &vm.name).ok()?.last()?.taken_unix_ms;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    Some(now.saturating_sub(Duration::from_millis(newest)))
}

/// Whether a snapshot can begin: known from what the daemon has of the VM.
fn is_free(registry: &Registry, vm: &Follower) -> bool {
    let is_free = |vm: &mut Vm| {
        let is_served = vm.handle.is_some() && vm.keeps_ram && vm.stalled.is_none();
        let is_stopped = vm.record.blocked || vm.governed.block.is_under_way();
        is_served && !is_stopped && vm.record.operation.is_none() && vm.record.image.is_none()
    };
    registry.find_by_id(vm.id, is_free).unwrap_or(false)
}

/// The snapshots of a VM that were taken by its timetable, the oldest first.
fn automatic(registry: &Registry, vm: &str) -> Result<Vec<Snapshot>, ApiError> {
    let mut snapshots = registry.images.list()?.snapshots;
    snapshots.retain(|snapshot| snapshot.vm == vm && snapshot.automatic);
    Ok(snapshots)
}

/// Removes what is not to be kept, if the VM has at least so many snapshots.
fn remove_oldest(registry: &Arc<Registry>, vm: &Follower, at_least: usize) -> Result<(), String> {
    let mut snapshots = registry.images.list().map_err(|error| error.message)?.snapshots;
    snapshots.retain(|snapshot| snapshot.vm == vm.name);
    if snapshots.len() < at_least {
        return Ok(());
    }
    let mut outcome = Ok(());
    for snapshot in superfluous(&snapshots, vm.timetable.keep as usize) {
        // By its id: another one may have its name by now.
        let removed = match snapshot.id.parse::<ImageId>() {
            Ok(id) => remove(registry, &Which::Id(id)).map_err(|error| error.message),
            Err(error) => Err(error.to_string()),
        };
        match removed {
            Ok(_) => tracing::info!(snapshot = %snapshot.full_name(), "removed by its timetable"),
            Err(why) => outcome = Err(format!("{} is not removed: {why}", snapshot.full_name())),
        }
    }
    outcome
}

/// Which of a VM's snapshots are not to be kept, of those that were taken by its timetable; the oldest comes first. One that is
/// lost is worth nothing. One that is damaged is left to its user, and so is one that VMs read: neither counts. If a VM has so many
/// others that there is no room for as many and one more, fewer are kept, and one at least.
fn superfluous(snapshots: &[Snapshot], keep: usize) -> Vec<&Snapshot> {
    let is_ours = |snapshot: &&Snapshot| snapshot.automatic && snapshot.damage.is_none() && snapshot.readers.is_empty();
    let of_stage = |stages: &'static [SnapshotStage]| {
        let ours = snapshots.iter().filter(is_ours);
        ours.filter(move |snapshot| stages.contains(&snapshot.stage)).collect::<Vec<_>>()
    };
    let (lost, whole) = (of_stage(&[SnapshotStage::Lost]), of_stage(&[SnapshotStage::Filled, SnapshotStage::Durable]));
    let others = snapshots.len() - lost.len() - whole.len();
    let room = SNAPSHOTS_PER_VM_MAX.saturating_sub(others + 1);
    let too_many = whole.len().saturating_sub(keep.min(room.max(1)));
    lost.into_iter().chain(whole.into_iter().take(too_many)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(name: &str, stage: &str) -> Snapshot {
        let text = format!(
            r#"{{"id":"00","vm":"web1","name":"{name}","taken_unix_ms":1,"stage":"{stage}","memory_bytes":1,"own_bytes":1,
            "state_bytes":1,"running":true,"qemu":{{"version":"10.0.2","machine":"q35"}},"uid":0,"gid":0,"automatic":true}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn the_oldest_whole_ones_go_and_those_that_are_lost() {
        let check = |snapshots: &[Snapshot], keep: usize, expected: &[&str]| {
            let names: Vec<_> = superfluous(snapshots, keep).iter().map(|of| of.name.as_str()).collect();
            assert_eq!(names, expected);
        };
        let mut all: Vec<_> = ["a", "b", "c"].map(|name| snapshot(name, "durable")).into();
        check(&all, 3, &[]);
        check(&all, 2, &["a"]);
        check(&all, 1, &["a", "b"]);
        all.push(snapshot("d", "begun"));
        check(&all, 3, &[]);
        all.push(snapshot("e", "filled"));
        check(&all, 3, &["a"]);
        all[1] = snapshot("b", "lost");
        check(&all, 3, &["b"]);
        all[0].readers = vec!["web2".into()];
        check(&all, 1, &["b", "c"]);
        all[2].damage = Some("cut".into());
        check(&all, 1, &["b"]);
        // Sixteen at most, of which one is to be taken.
        let mut full: Vec<_> = (0..15).map(|nth| snapshot(&format!("auto-{nth}"), "durable")).collect();
        check(&full, 15, &[]);
        full.push(Snapshot { automatic: false, ..snapshot("mine", "durable") });
        check(&full, 15, &["auto-0"]);
        full[..14].iter_mut().for_each(|of| of.automatic = false);
        check(&full, 15, &[]);
        check(&[snapshot("x", "a stage of a newer daemon")], 1, &[]);
    }
}
