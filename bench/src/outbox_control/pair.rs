//! Two VMs with different SLOs and weights on a pool that is too small for the fixed sizes of both.

use anyhow::{Context, Result, ensure};
use pagoda_api::HostPatch;
use pagoda_core::outbox::simulate::PeriodRecord;
use pagoda_core::outbox::simulate::judge::{Tally, tally};
use pagoda_core::outbox::slo::Slo;
use pagoda_core::units::Bytes;
use testkit::results::report::{Bar, Report};

use super::WINDOWS_ABOVE_MAX;
use super::client::Manner;
use super::course::{MIN_MIB, SLO, dropped};
use super::drive::{self, Plans};
use super::lab::{Lab, Tenant};
use super::phases::records_of;

/// The SLO of the VM of half the weight.
const SLO_LIGHT: &str = "mean 180ms";
/// What the daemon learns the two VMs in; not judged.
const LEAD_IN: usize = 5;
/// What each would need alone, if no fixed size was seen to keep its SLO; in MiB.
const NEED_DEFAULT_MIB: [u64; 2] = [4, 2];
/// The pool is found to this.
const POOL_STEP: u64 = 1 << 20;
const MB: f64 = 1e6;

/// What came of one round.
pub struct Pair {
    /// Of the VM of twice the weight, and of the other.
    tallies: [Tally; 2],
    needs: [Bytes; 2],
    pool: Bytes,
}

/// Measures it with two guests that run, and ends them.
///
/// # Errors
/// A guest fails; wrong bytes were delivered; the pool cannot be made so small.
pub fn measure(
    lab: &Lab,
    mut tenants: Vec<Tenant>,
    kept: impl Fn(&Slo) -> Option<Bytes>,
    periods: usize,
    seed: u64,
) -> Result<Pair> {
    let slos: [Slo; 2] = [SLO.parse().context("an SLO")?, SLO_LIGHT.parse().context("an SLO")?];
    let need = |nth: usize| kept(&slos[nth]).unwrap_or(Bytes::from_mib(NEED_DEFAULT_MIB[nth]));
    let needs = [need(0), need(1)];
    let pool = Bytes(needs[0].0 + needs[1].0 / 2);
    let names: Vec<String> = tenants.iter().map(|tenant| tenant.name.clone()).collect();
    let least = format!("{MIN_MIB}M");
    for name in &names {
        lab.pagoda(&["outbox", "set", name, "--space", &least])?;
    }
    shrink_pool(lab, pool, &names[0])?;
    // The other one's least is nobody else's.
    let max = format!("{}K", (pool.0 >> 10) - (MIN_MIB << 10));
    for (name, (slo, weight)) in names.iter().zip([(SLO, "200"), (SLO_LIGHT, "100")]) {
        let words = ["outbox", "set", name, "--space", "auto", "--slo", slo, "--min", &least, "--max", &max];
        lab.pagoda(&[&words[..], &["--weight", weight]].concat())?;
    }
    let steps = vec![vec![dropped("lead-in", LEAD_IN), dropped("both", periods)]; 2];
    let plans = Plans { steps: &steps, label: "pair", seed, manner: Manner::Steady };
    let tracks = drive::run(lab, &mut tenants, &plans, |_| Ok(()))?;
    let mut tallies = [Tally::default(); 2];
    for (nth, track) in tracks.iter().enumerate() {
        let records = records_of(track, &steps[nth])?;
        show(&names[nth], &records);
        tallies[nth] = tally(&records, 1, &slos[nth]);
    }
    for tenant in tenants {
        lab.end(tenant)?;
    }
    Ok(Pair { tallies, needs, pool })
}

fn show(name: &str, records: &[PeriodRecord]) {
    let of = |record: &PeriodRecord| format!("{:.1}", record.space.0 as f64 / MB);
    let spaces: Vec<String> = records.iter().map(of).collect();
    eprintln!("outbox-control: pair: {name}: MB by period: {}", spaces.join(" "));
}

/// Gives the host a pool that has `wanted` for outboxes, to [`POOL_STEP`]: the daemon refuses an outbox that may have more.
fn shrink_pool(lab: &Lab, wanted: Bytes, name: &str) -> Result<()> {
    let size = lab.daemon.host()?.pool_bytes;
    // The other VM's outbox, which is set by hand now, has its least already.
    let wanted = Bytes(wanted.0 - Bytes::from_mib(MIN_MIB).0);
    let has_room = |pool: u64| {
        if lab.daemon.set_host(&HostPatch { pool: Some(pool), ..HostPatch::default() }).is_err() {
            return false;
        }
        let max = format!("{}K", wanted.0 >> 10);
        lab.pagoda(&["outbox", "set", name, "--space", "auto", "--slo", SLO, "--min", "1M", "--max", &max]).is_ok()
    };
    let (mut low, mut high) = (0, size);
    ensure!(has_room(high), "the pool has no {wanted} for outboxes");
    while high - low > POOL_STEP {
        let middle = low.midpoint(high);
        if has_room(middle) { high = middle } else { low = middle }
    }
    ensure!(has_room(high), "a pool of {} has no {wanted} for outboxes", Bytes(high));
    eprintln!("outbox-control: pair: a pool of {} has {wanted} for outboxes", Bytes(high));
    Ok(())
}

/// Adds the rows of two VMs on a small pool to the report.
pub fn add<'a>(report: &mut Report, rounds: impl Iterator<Item = &'a Pair>) {
    let rounds: Vec<&Pair> = rounds.collect();
    let Some(first) = rounds.first() else { return };
    let above = |nth: usize| rounds.iter().map(|pair| pair.tallies[nth].windows_above() * 100.0).collect::<Vec<f64>>();
    let space = |nth: usize| rounds.iter().map(|pair| pair.tallies[nth].space() / MB).collect::<Vec<f64>>();
    let Pair { needs, pool, .. } = first;
    let row = "two VMs, pool too small: windows above, the VM of twice the weight";
    report.single(row, "%", &above(0), Bar::AtMost(WINDOWS_ABOVE_MAX));
    report.note(format!("{SLO} and {SLO_LIGHT}; {pool} for VMs that need {} and {}", needs[0], needs[1]));
    report.single("two VMs, pool too small: windows above, the lighter VM", "%", &above(1), Bar::None);
    report.pair(
        "two VMs, pool too small: space of the heavier VM, of the lighter",
        "MB",
        &space(0),
        &space(1),
        Bar::None,
    );
}
