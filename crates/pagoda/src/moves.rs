//! `pagoda vm move` and `pagoda moves`: VMs that move between hosts.
//!
//! The daemon moves a VM whether or not somebody looks: this asks it to begin, and follows until the move has ended. Whoever
//! interrupts the command asks the daemon to give the move up, which it may be too late for.

pub mod follow;
pub mod text;

use anyhow::{Result, bail};
use pagoda_api::{Client, MoveOutcome, MovePlan, MoveReply, MoveRequest, MoveStatus};

use crate::cli::{DramLimit, MoveVm, Moves, OneMove};
use crate::exit::{GivenUp, NotAdmitted, Refused, Undecided, UsageError};
use crate::output::{Format, print_json, print_text};

pub fn move_vm(client: &Client, options: &MoveVm, format: Format) -> Result<()> {
    let request = request(client, options)?;
    request.check().map_err(UsageError)?;
    // Before it begins: an interrupt in between is not lost.
    let interrupt = if options.dry_run || options.detach { None } else { Some(follow::Interrupt::handle()?) };
    match (client.move_vm(&options.name, &request)?, interrupt) {
        (MoveReply::Plan(plan), _) => finish_plan(&plan, format),
        (MoveReply::Begun(status), None) => print_status(&status, format),
        (MoveReply::Begun(status), Some(interrupt)) => finish(&follow::to_its_end(client, status, &interrupt)?, format),
    }
}

pub fn run(client: &Client, command: &Moves, format: Format) -> Result<()> {
    match &command.of {
        None => {
            let list = client.moves()?;
            match format {
                Format::Json => Ok(print_json(&list)?),
                Format::Text => Ok(text::table(&list.moves).print()?),
            }
        }
        Some(OneMove::Show { vm }) => print_status(&client.move_of(vm)?, format),
        Some(OneMove::Cancel { vm }) => print_status(&client.cancel_move(vm)?, format),
        Some(OneMove::Resolve { vm }) => print_status(&client.resolve_move(vm)?, format),
    }
}

fn request(client: &Client, options: &MoveVm) -> Result<MoveRequest> {
    let dram = match options.dram {
        None => None,
        Some(DramLimit::Bytes(bytes)) => Some(bytes),
        Some(DramLimit::All) => Some(client.vm(&options.name)?.memory_bytes),
    };
    Ok(MoveRequest {
        to: options.to.clone(),
        dram,
        bandwidth: options.bandwidth,
        downtime_ms: options.downtime,
        max_time_s: options.max_time,
        on_timeout: options.on_timeout,
        mode: options.mode,
        split: options.split,
        shared_disks: options.shared_disks,
        copy_disks: options.copy_disks,
        dry_run: options.dry_run,
    })
}

fn print_status(status: &MoveStatus, format: Format) -> Result<()> {
    match format {
        Format::Json => Ok(print_json(status)?),
        Format::Text => Ok(print_text(&text::status(status))?),
    }
}

fn finish_plan(plan: &MovePlan, format: Format) -> Result<()> {
    match format {
        Format::Json => print_json(plan)?,
        Format::Text => print_text(&text::plan(plan))?,
    }
    if plan.fits {
        return Ok(());
    }
    Err(NotAdmitted(format!("{} lacks {}", plan.host, text::room(plan.lacks))).into())
}

/// Says how the move has ended; the exit status follows from it.
fn finish(status: &MoveStatus, format: Format) -> Result<()> {
    if format == Format::Json {
        print_json(status)?;
    }
    let MoveStatus { vm, host, .. } = status;
    let why = |otherwise: &str| status.why.clone().unwrap_or_else(|| otherwise.to_owned());
    match status.outcome {
        MoveOutcome::Moved if format == Format::Json => Ok(()),
        MoveOutcome::Moved => Ok(print_text(&text::moved(status))?),
        MoveOutcome::Refused => {
            Err(Refused(format!("{vm} is not moved to {host}: {}", why("the other host refuses it"))).into())
        }
        MoveOutcome::GivenUp => Err(GivenUp(format!(
            "the move of {vm} to {host} is given up, and it runs on here: {}",
            why("nobody says why")
        ))
        .into()),
        MoveOutcome::CameBack => {
            Err(GivenUp(format!("{vm} runs here again: {}", why("the other host has refused it"))).into())
        }
        MoveOutcome::Crashed => bail!("{vm} has crashed during its move to {host}: {}", why("its QEMU has ended")),
        MoveOutcome::None | MoveOutcome::Superseded | MoveOutcome::Lost | MoveOutcome::Unknown => {
            let word = status.outcome.word();
            Err(Undecided(format!(
                "{vm}: {word}: {}\nlook at `pagoda ls` on both hosts",
                why("an operator has decided so")
            ))
            .into())
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A move in its second round.
    pub fn sample() -> MoveStatus {
        serde_json::from_str(
            r#"{"vm":"web1","direction":"out","host":"host2","phase":"copying","sent_bytes":1288490188,
            "left_bytes":858993459,"total_bytes":4294967296,"round":2,"bytes_per_second":117000000,
            "written_bytes_per_second":10000000,"elapsed_ms":11200,"eta_ms":7340,"expected_downtime_ms":7400,
            "waits":"the guest writes as fast as the link sends","outcome":"none"}"#,
        )
        .unwrap()
    }

    #[test]
    fn how_it_ends_is_the_exit_status() {
        let check = |outcome, expected: Option<&str>| {
            let status = MoveStatus { outcome, why: Some("because".into()), ..sample() };
            let error = finish(&status, Format::Text).err();
            let kind = error.as_ref().map(|error| match error {
                error if error.is::<Refused>() => "refused",
                error if error.is::<GivenUp>() => "given up",
                error if error.is::<Undecided>() => "undecided",
                _ => "failed",
            });
            assert_eq!(kind, expected, "{outcome:?}");
            assert!(error.is_none_or(|error| error.to_string().contains("because")), "{outcome:?}");
        };
        check(MoveOutcome::Moved, None);
        check(MoveOutcome::Refused, Some("refused"));
        check(MoveOutcome::GivenUp, Some("given up"));
        check(MoveOutcome::CameBack, Some("given up"));
        check(MoveOutcome::Crashed, Some("failed"));
        check(MoveOutcome::Superseded, Some("undecided"));
        check(MoveOutcome::Lost, Some("undecided"));
        check(MoveOutcome::Unknown, Some("undecided"));
    }
}
