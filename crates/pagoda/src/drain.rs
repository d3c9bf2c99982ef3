//! `pagoda host drain`: all VMs of this host move to others.
//!
//! The order: this host takes no new VMs -> each VM is asked for at each host, as `vm move --dry-run` does -> a plan, which is shown ->
//! refused as a whole if it leaves a VM here, unless what fits is to go -> the moves, some at a time -> a report. A VM whose move fails
//! stays, and the others go on. Whatever ends the command, this host takes VMs again, unless the command is killed: `--stop` is for that.

mod ask;
mod moving;
mod plan;
mod report;
mod text;
mod types;

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use pagoda_api::{Client, HostPatch, MoveRequest};

use crate::cli::HostDrain;
use crate::exit::{Refused, Undecided, UsageError};
use crate::moves::follow::Interrupt;
use crate::output::{Format, print_json, print_text};

/// Runs the command.
///
/// # Errors
/// What keeps VMs here.
pub fn run(client: &Client, options: &HostDrain, format: Format) -> Result<()> {
    if options.stop {
        return stop(client, format);
    }
    let request = request(options)?;
    let hosts = hosts(options)?;
    if options.dry_run {
        let planned = ask::plan(client, &hosts, &request, &no_interrupt)?;
        report::print_plan(&planned, format)?;
        return if planned.fits { Ok(()) } else { Err(refused(&planned).into()) };
    }
    // Before anything begins: an interrupt in between is not lost.
    let interrupt = Interrupt::handle()?;
    let draining = Draining::begin(client)?;
    let planned = ask::plan(client, &hosts, &request, &|| interrupt.has_come())?;
    if !planned.fits && !options.what_fits {
        report::print_plan(&planned, format)?;
        return Err(refused(&planned).into());
    }
    if format == Format::Text {
        report::print_plan(&planned, format)?;
    }
    let ended = moving::move_all(client, &planned, &request, options.at_once.into(), &|| draining.again(), &interrupt);
    let came = came_meanwhile(client, &planned);
    drop(draining);
    match came {
        Ok(came) => report::finish(planned, ended, came, format),
        Err(error) => {
            report::finish(planned, ended, Vec::new(), format)?;
            Err(Undecided(format!("who is here now cannot be told: {error:#}")).into())
        }
    }
}

/// VMs that nobody has asked about: they were just being made, or were restored.
fn came_meanwhile(client: &Client, planned: &types::DrainPlan) -> Result<Vec<String>> {
    let names = client.vms()?.vms.into_iter().map(|vm| vm.name);
    Ok(names.filter(|name| planned.vms.iter().all(|vm| vm.vm != *name)).collect())
}

fn no_interrupt() -> bool {
    false
}

fn request(options: &HostDrain) -> Result<MoveRequest> {
    let request = MoveRequest {
        bandwidth: options.bandwidth,
        downtime_ms: options.downtime,
        max_time_s: options.max_time,
        on_timeout: options.on_timeout,
        mode: options.mode,
        shared_disks: options.shared_disks,
        copy_disks: options.copy_disks,
        ..MoveRequest::new("")
    };
    // The name of a host comes later.
    let any = MoveRequest { to: "any".to_owned(), ..request.clone() };
    any.check().map_err(UsageError)?;
    Ok(request)
}

/// The hosts that the user names, each of them once.
fn hosts(options: &HostDrain) -> Result<Vec<String>> {
    let mut seen = BTreeSet::new();
    let twice = options.to.iter().find(|host| !seen.insert(host.as_str()));
    ensure!(twice.is_none(), UsageError(format!("{} is named twice", twice.map_or("a host", String::as_str))));
    Ok(options.to.clone())
}

fn stop(client: &Client, format: Format) -> Result<()> {
    let host = client.patch_host(&HostPatch { draining: Some(false), ..HostPatch::default() })?;
    match format {
        Format::Json => Ok(print_json(&host)?),
        Format::Text => Ok(print_text("this host takes new VMs\n")?),
    }
}

fn refused(planned: &types::DrainPlan) -> Refused {
    let left: Vec<&str> = planned.vms.iter().filter(|vm| vm.host.is_none()).map(|vm| vm.vm.as_str()).collect();
    Refused(format!(
        "nothing is moved: {} would stay here; --what-fits moves the others, and more hosts in --to make more room",
        left.join(", ")
    ))
}

/// This host takes no new VMs as long as this is there.
struct Draining<'a>(&'a Client);

impl Draining<'_> {
    fn begin(client: &Client) -> Result<Draining<'_>> {
        client.patch_host(&HostPatch { draining: Some(true), ..HostPatch::default() })?;
        Ok(Draining(client))
    }

    /// The daemon was started again, and knows of no drain.
    fn again(&self) {
        if let Err(error) = self.0.patch_host(&HostPatch { draining: Some(true), ..HostPatch::default() }) {
            eprintln!("pagoda: this host may take new VMs meanwhile: {error}");
        }
    }
}

impl Drop for Draining<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.patch_host(&HostPatch { draining: Some(false), ..HostPatch::default() }) {
            eprintln!(
                "pagoda: this host may take no new VMs still: {error}\nwhen its daemon is back: pagoda host drain --stop"
            );
        }
    }
}
