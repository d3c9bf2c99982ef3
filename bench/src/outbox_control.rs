//! Sizes of outboxes by SLO: in simulation ([`simulated`]), and with guests.
//!
//! With guests all of the product takes part: the daemon's controller, `pagoda outbox set` and `explain`, files over virtio-fs, HTTP
//! over a link of its own for each VM. Time is scaled by [`course::SCALE`]. The guests of a course have the same jobs at the same time:
//! one whose size follows its SLO, one that is led by the baseline, and several of fixed sizes.
//!
//! * **course** ([`phases`]): the phases of the simulation's standard scenario, its infeasible ones in a VM beside, and the predictions
//!   for the fixed sizes. **pair** ([`pair`]): two VMs on a pool too small for both. They follow each other on one daemon.
//! * **soak** ([`soak`]): two guests for an hour, whose clients come, stall and die.

mod client;
mod course;
mod drive;
mod lab;
mod link;
mod pair;
mod phases;
mod simulated;
mod soak;

use anyhow::{Context, Result, ensure};
use testkit::image::{ImageArgs, Images, KernelFlavour};
use testkit::results::report::Report;

use super::Setup;
use super::balloon::guest::{QEMU, Start};

const WINDOWS_ABOVE_MAX: f64 = 10.0;
const MEMORY_MAX: f64 = 1.25;
const SAID_AFTER_MAX: f64 = 5.0;
const ERROR_MAX: f64 = 10.0;

/// The parts, as `--only` has them.
const SIMULATED: &str = "simulated";
const COURSE: &str = "course";
const SOAK: &str = "soak";

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// Not root; a guest fails; wrong bytes were delivered; no fixed size keeps the SLO where one has to.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    ensure!(setup.ours, "this bench has no peers to measure alone");
    let wants = [SIMULATED, COURSE, SOAK].map(|part| setup.wants(part));
    ensure!(wants.contains(&true), "--only takes one of simulated, course and soak");
    let images = images()?;
    let accelerator = testkit::accel::find(QEMU, &images, &setup.dir)?;
    let mut report = setup.report_of("outbox-control", accelerator.name());
    let start = Start { images: &images, accelerator, disk: None };
    let mut plot = String::new();
    let [wants_simulated, wants_course, wants_soak] = wants;
    if wants_simulated {
        plot = simulated::run(setup, &mut report)?;
    }
    if wants_course {
        plot = phases::run(setup, &start, &mut report)?;
    }
    if wants_soak {
        soak::run(setup, &start, &mut report)?;
    }
    Ok((report, plot))
}

/// What the guests boot.
fn images() -> Result<Images> {
    let wanted = ImageArgs { client: true, kernel: KernelFlavour::Full, ..ImageArgs::default() };
    let mut images = testkit::image::build(&wanted).context("make the guest's image")?;
    images.initrd = images.client_initrd.clone().context("the guest's image")?;
    Ok(images)
}
