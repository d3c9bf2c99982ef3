//! What a guest publishes reaches a client: by its outbox, and by the ways that there are without one ([`Way`]).
//!
//! Each way has in each round a guest of its own, alike but for what the way needs: one CPU, 1 GiB, a network card. The client is in a
//! network namespace behind a veth pair ([`network`]), takes all bytes and compares their digest with one that was made without any of
//! this. Wrong bytes end the bench.
//!
//! * **delivery**: a stream that costs its program nothing. CPU time is that of QEMU and of all the way's processes, Pagoda's daemon
//!   among them, from the command until the client has the last byte; the client's is apart.
//! * **beside**: the same while gzip computes in the guest. **served**: a file that was published before is fetched over and over by a
//!   link of 1 Gbit/s while gzip computes, against gzip alone.
//! * **gzip**, **ffmpeg**: until the client has all of a program's output, by the link as it is and by one of 50 Mbit/s.
//! * **paged**: a VM whose DRAM is half of its memory, most of which is in use, against one that has all of it.
//! * **memory**: what host and guest hold of what is delivered ([`memory`]). **resize**: from the request for another space until a
//!   program in the guest that asks for it all the time (`statvfs`, as `df`) has written a line to its serial port and that has come.
//!
//! The client of nginx asks when the file is closed: before, nginx would give it a part as if that was all. It is told so at once, which
//! it is not in life.

pub mod client;
mod figures;
mod leg;
mod machine;
mod memory;
mod network;
mod peers;
mod way;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use testkit::image::{ImageArgs, Images, KernelFlavour};
use testkit::results::report::Report;

use self::client::WrongBytes;
use self::figures::Cases;
use self::leg::{Measured, Part, measure};
use self::machine::PROGRAMS;
use self::network::Network;
use self::way::Way;
use super::Setup;
use super::balloon::guest::{QEMU, Start};
use super::migrate::case::Case;
use super::migrate::options::version;

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// Not root; a program is missing; wrong bytes were delivered.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    ensure!(setup.ours, "this bench has no peers to measure alone");
    let images = images()?;
    let accelerator = testkit::accel::find(QEMU, &images, &setup.dir)?;
    let start = Start { images: &images, accelerator, disk: None };
    let ways: Vec<Way> =
        Way::ALL.into_iter().filter(|way| Part::ALL.iter().any(|part| part.is_of(*way, setup))).collect();
    ensure!(!ways.is_empty(), "--only takes one of delivery, beside, served, gzip, ffmpeg, memory, resize and paged");
    let mut cases = Cases::default();
    for round in 0..setup.rounds {
        // To and fro: who is first changes.
        let mut order = ways.clone();
        if round % 2 == 1 {
            order.reverse();
        }
        for way in order {
            eprintln!("outbox: {}, round {} of {}", way.text(), round + 1, setup.rounds);
            one(way, setup, &start, cases.of_mut(way))?;
        }
    }
    let mut report = setup.report_of("outbox", accelerator.name());
    let qemu = version(Path::new(QEMU))?;
    figures::add(&mut report, setup, &qemu, &cases);
    Ok((report, figures::plot(&cases)))
}

/// One round of one way. What fails is said in its rows.
fn one(way: Way, setup: &Setup, start: &Start<'_>, case: &mut Case<Measured>) -> Result<()> {
    for again in (0..way.tries()).rev() {
        let network = Network::new()?;
        match measure(way, setup, &network, start) {
            Ok(measured) => {
                case.add(measured);
                return Ok(());
            }
            Err(error) if error.downcast_ref::<WrongBytes>().is_some() => return Err(error.context(way.text())),
            Err(error) if again > 0 => {
                eprintln!("outbox: {}: failed, and is tried again: {error:#}", way.text());
                case.again();
            }
            Err(error) => case.fail(&format!("outbox: {}", way.text()), &error),
        }
    }
    Ok(())
}

/// What the guests boot.
fn images() -> Result<Images> {
    let with = PROGRAMS.map(Into::into).to_vec();
    let initrd = Some("outbox".to_owned());
    let wanted = ImageArgs { client: true, with, initrd, kernel: KernelFlavour::Full, ..ImageArgs::default() };
    let mut images = testkit::image::build(&wanted).context("make the guest's image")?;
    images.initrd = images.client_initrd.clone().context("the guest's image")?;
    Ok(images)
}
