//! The timetable of a VM's snapshots.

use clap::{ArgGroup, Args};
use pagoda_api::{Autosnapshot, AutosnapshotChange};

use crate::units::parse_seconds;

/// Have snapshots of a VM taken by a timetable
///
/// The daemon takes them, also when it is restarted in between: the timetable is kept with the VM, and a VM that is restored from
/// one of them goes on by it. Of these snapshots the newest --keep stay, and the oldest are removed; snapshots that you take
/// yourself, and those that a VM reads, are left alone. Their names begin with auto-.
///
/// One that cannot be taken when it is due, because the last one is still being filled or the VM is stopped, is taken as
/// soon as it can be. One that fails is said in `pagoda vm show` and `pagoda host show`, and tried again a period later.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("timetable").required(true).args(["every", "off"]))]
#[command(after_help = "\
Examples:
  pagoda vm autosnapshot web1 --every 10m --keep 6 --no-disks    one hour back, in steps of ten minutes
  pagoda vm autosnapshot web1 --off                   those that there are stay")]
pub struct AutosnapshotOptions {
    /// Name of the VM
    pub name: String,
    /// Time between two snapshots, such as 10m or 1h: 1s to 366d
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    pub every: Option<u64>,
    /// So many of them stay, 1 to 15
    #[arg(long, value_name = "N", default_value_t = 6, conflicts_with = "off")]
    pub keep: u32,
    /// With what is on the VM's disks: each gets an overlay more with each snapshot, 31 at most
    #[arg(long, conflicts_with_all = ["off", "no_disks"])]
    pub disks: bool,
    /// Without what is on the VM's disks
    #[arg(long, conflicts_with = "off", required_unless_present_any = ["disks", "off"])]
    pub no_disks: bool,
    /// Take none any more
    #[arg(long)]
    pub off: bool,
}

impl AutosnapshotOptions {
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    pub fn change(&self) -> Result<AutosnapshotChange, String> {
        let Some(every_s) = self.every else { return Ok(AutosnapshotChange::Off) };
        let timetable = Autosnapshot { every_s, keep: self.keep, disks: self.disks };
        timetable.check().map(|()| AutosnapshotChange::On(timetable))
    }
}
