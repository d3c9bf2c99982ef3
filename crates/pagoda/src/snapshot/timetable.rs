//! The timetable of a VM's snapshots, for `pagoda vm show`.

use pagoda_api::VmInfo;

use crate::units::format_seconds;

/// Terms and values; none for a VM without a timetable.
pub fn timetable_lines(vm: &VmInfo) -> Vec<(&'static str, String)> {
    let (Some(timetable), Some(info)) = (vm.spec.autosnapshot, &vm.autosnapshot) else { return Vec::new() };
    let disks = if timetable.disks { "" } else { ", without disks" };
    let every = format_seconds(timetable.every_s);
    let mut lines = vec![("autosnapshot", format!("every {every}, the newest {} stay{disks}", timetable.keep))];
    let last = info.last.as_ref().map_or_else(String::new, |last| format!("the last is {last}; "));
    let next = match info.next_in_s {
        0 => "the next is due".to_owned(),
        seconds => format!("the next is due in {}", format_seconds(seconds)),
    };
    lines.push(("", last + &next));
    lines.extend(info.problem.as_ref().map(|why| ("", format!("failed, tried again then: {why}"))));
    lines
}

#[cfg(test)]
mod tests {
    use pagoda_api::{Autosnapshot, AutosnapshotInfo};

    use super::*;
    use crate::show::tests::sample;

    #[test]
    fn a_timetable_is_shown() {
        let mut vm = sample("web1");
        assert!(timetable_lines(&vm).is_empty());
        vm.spec.autosnapshot = Some(Autosnapshot { every_s: 600, keep: 6, disks: false });
        vm.autosnapshot = Some(AutosnapshotInfo { next_in_s: 0, ..AutosnapshotInfo::default() });
        let first = ("autosnapshot", "every 10m, the newest 6 stay, without disks".to_owned());
        assert_eq!(timetable_lines(&vm), [first.clone(), ("", "the next is due".to_owned())]);
        vm.autosnapshot = Some(AutosnapshotInfo {
            last: Some("auto-1".into()),
            next_in_s: 90,
            problem: Some("it is stalled".into()),
            ..AutosnapshotInfo::default()
        });
        let lines = timetable_lines(&vm);
        assert_eq!(lines[1].1, "the last is auto-1; the next is due in 90s");
        assert_eq!(lines[2].1, "failed, tried again then: it is stalled");
    }
}
