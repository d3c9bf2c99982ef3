//! Sampled pages, armed and unarmed: what is used is counted, what is not is not, and a new daemon goes on.

use std::rc::Rc;
use std::time::Duration;

use anyhow::{Result, ensure};
use pagoda_api::SampleInfo;
use vm_tests::toy::ToyOptions;
use vm_tests::{Daemon, Folios, Lab, Toy, wait};

const MEMORY_MIB: u64 = 320;
const PAGES_PER_MIB: u64 = 256;
/// One page in 3.2 MiB, as at the default rate.
const SAMPLE: u64 = 100;

/// One page in each hundredth of the memory, others each time.
fn pages(nth: u64) -> Vec<u64> {
    let stratum = MEMORY_MIB * PAGES_PER_MIB / SAMPLE;
    (0..SAMPLE).map(|index| index * stratum + (index * 7919 + nth * 104_729) % stratum).collect()
}

fn start(lab: &Lab, daemon: &Daemon, dram_mib: u64) -> Result<Rc<Toy>> {
    let options = ToyOptions { name: "toy".into(), memory_mib: MEMORY_MIB, dram_mib, threads: 1 };
    // Its policy begins one period, and none for an hour.
    let toy = lab.toy_with(daemon, &options, &["--sample-period", "3600"])?;
    toy.map()?;
    wait_first_period(daemon)?;
    toy.touch(&format!("--mib {MEMORY_MIB} --in-order"))?;
    Ok(toy)
}

/// The policy's own period would end one of ours.
fn wait_first_period(daemon: &Daemon) -> Result<()> {
    wait::until("the policy's first period", wait::HANG, || Ok((daemon.sampled("toy")?.period > 0).then_some(())))
}

/// Samples, has the toy use the first `mib` of its memory, and gives what was counted.
fn period(daemon: &Daemon, toy: &Toy, nth: u64, mib: u64) -> Result<SampleInfo> {
    daemon.sample("toy", &pages(nth))?;
    if mib > 0 {
        toy.touch(&format!("--mib {mib}"))?;
    }
    daemon.sampled("toy")
}

/// Steps of ESX figure 6. `slack`: pages that others' use may take along.
fn steps(daemon: &Daemon, toy: &Toy, slack: u64) -> Result<()> {
    for (nth, mib) in [(0, 50), (1, 250), (2, 250), (3, 100), (4, 0)] {
        expect(&period(daemon, toy, nth, mib)?, nth, mib, slack)?;
    }
    Ok(())
}

/// What a sample counted of the first `mib` that were used.
fn expect(counted: &SampleInfo, nth: u64, mib: u64, slack: u64) -> Result<()> {
    let used = pages(nth).iter().filter(|page| **page < mib * PAGES_PER_MIB).count() as u64;
    ensure!(
        (used..=used + slack).contains(&u64::from(counted.touched)),
        "{mib} MiB used, that is {used} pages of the sample; counted: {counted:?}"
    );
    Ok(())
}

/// A period in which ages are looked at, too: blocks of huge pages are mapped page by page for that, which is no use of what is in them.
fn beside_ages(daemon: &Daemon, toy: &Toy, slack: u64) -> Result<()> {
    const NTH: u64 = 8;
    const MIB: u64 = 50;
    // As many zaps as the choices of some seconds make.
    const ZAPS_MIN: u64 = 20;
    let zaps = || -> Result<u64> { Ok(daemon.vm("toy")?.counters.get("watch_zaps").copied().unwrap_or(0)) };
    period(daemon, toy, NTH, MIB)?;
    let before = zaps()?;
    wait::until("ages are looked at", wait::HANG, || Ok((zaps()? >= before + ZAPS_MIN).then_some(())))?;
    expect(&daemon.sampled("toy")?, NTH, MIB, slack)
}

fn restarted(daemon: &Daemon, armed: bool) -> Result<()> {
    const BACK_MAX: Duration = Duration::from_secs(120);
    daemon.sample("toy", &pages(5))?;
    daemon.kill9()?;
    daemon.start_again()?;
    daemon.wait_vm("toy", "taken over", BACK_MAX, |info| {
        info.state == pagoda_api::VmState::Running && info.armed == armed
    })?;
    wait_first_period(daemon)?;
    let info = daemon.sampled("toy")?;
    ensure!(info.period == 1, "a new daemon knows of no period before its own: {info:?}");
    Ok(())
}

fn armed(name: &str, folios: Folios) -> Result<()> {
    Lab::run(name, 1, |lab| {
        let daemon = lab.daemon(folios)?;
        // Paging goes on meanwhile: sampled pages are in DRAM, on their way and in swap.
        let toy = start(lab, &daemon, MEMORY_MIB / 2)?;
        ensure!(daemon.vm("toy")?.armed, "a cap arms it");
        steps(&daemon, &toy, 0)?;
        restarted(&daemon, true)?;
        steps(&daemon, &toy, 0)?;
        toy.touch(&format!("--mib {MEMORY_MIB} --access load"))?;
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}

#[test]
fn armed_large_folios() -> Result<()> {
    armed("sampling, armed, large folios", Folios::Large)
}

#[test]
fn armed_small_folios() -> Result<()> {
    armed("sampling, armed, 4 KiB", Folios::Small)
}

fn unarmed(name: &str, folios: Folios, slack: u64) -> Result<()> {
    Lab::run(name, 1, |lab| {
        let daemon = lab.daemon(folios)?;
        let toy = start(lab, &daemon, MEMORY_MIB)?;
        steps(&daemon, &toy, slack)?;
        restarted(&daemon, false)?;
        beside_ages(&daemon, &toy, slack)?;
        steps(&daemon, &toy, slack)?;
        ensure!(!daemon.vm("toy")?.armed, "sampling must not arm a VM");
        // Armed in the middle of a period, the same pages are watched by other means.
        daemon.sample("toy", &pages(6))?;
        daemon.set_dram_mib("toy", MEMORY_MIB - 16)?;
        daemon.wait_vm("toy", "armed", Duration::from_secs(120), |info| info.armed)?;
        toy.touch("--mib 160")?;
        let info = daemon.sampled("toy")?;
        ensure!(info.period > 0 && (45..=60).contains(&info.touched), "half of it was used: {info:?}");
        toy.touch(&format!("--mib {MEMORY_MIB} --access load"))?;
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}

/// A sampled page stands for its huge page, which is smaller than what lies between two of them: at most the one at the edge
/// is counted too much.
#[test]
fn unarmed_large_folios() -> Result<()> {
    unarmed("sampling, unarmed, large folios", Folios::Large, 1)
}

#[test]
fn unarmed_small_folios() -> Result<()> {
    unarmed("sampling, unarmed, 4 KiB", Folios::Small, 1)
}

/// What it uses all the time it needs, and the rest it does not: known before it has a cap, and without one fault of ours.
/// What it uses is every other page, so that no huge page is unused.
fn cost_of_a_cap(name: &str, folios: Folios) -> Result<()> {
    Lab::run(name, 1, |lab| {
        // Of 160 MiB in use.
        const TOO_LITTLE_MIB: u64 = 64;
        const ENOUGH_MIB: u64 = 256;
        let daemon = lab.daemon(folios)?;
        let toy = start(lab, &daemon, MEMORY_MIB)?;
        let page_ins = |mib| -> Result<f64> {
            wait::until("a curve of ages", wait::HANG, || {
                toy.touch(&format!("--mib {MEMORY_MIB} --stride 2"))?;
                daemon.page_ins_with_dram_mib("toy", mib)
            })
        };
        let (too_little, enough) = (page_ins(TOO_LITTLE_MIB)?, page_ins(ENOUGH_MIB)?);
        ensure!(too_little > 1000.0, "most of what it uses all the time is not there: {too_little} pages/s");
        ensure!(enough < too_little / 10.0, "all it uses is there: {enough} pages/s, and {too_little} with less");
        ensure!(!daemon.vm("toy")?.armed, "looking at ages must not arm a VM");
        // Armed, its faults make the curve.
        daemon.set_dram_mib("toy", MEMORY_MIB / 2)?;
        daemon.wait_vm("toy", "armed", Duration::from_secs(120), |info| info.armed)?;
        toy.touch(&format!("--mib {MEMORY_MIB} --access load"))?;
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}

#[test]
fn the_cost_of_a_cap_before_there_is_one_large_folios() -> Result<()> {
    cost_of_a_cap("sampling, ages, large folios", Folios::Large)
}

#[test]
fn the_cost_of_a_cap_before_there_is_one_small_folios() -> Result<()> {
    cost_of_a_cap("sampling, ages, 4 KiB", Folios::Small)
}
