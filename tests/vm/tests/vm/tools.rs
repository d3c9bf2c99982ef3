//! Debian's memory testers in a guest under pressure.

use anyhow::Result;
use vm_tests::{Folios, GuestOptions, Lab, Watch};

fn tool(name: &str, folios: Folios, work: &str, pages_min: u64) -> Result<()> {
    Lab::run(name, 1, |lab| {
        let daemon = lab.daemon(folios)?;
        let guest = lab.guest(&daemon, &GuestOptions::new("web1", work).tools().dram("160M"))?;
        guest.wait_ready()?;
        let watch = Watch::start(&daemon, "web1");
        guest.finish()?;
        let seen = watch.stop()?;
        seen.ensure_capped()?;
        seen.ensure_paged(pages_min)?;
        daemon.wait_gone("web1")
    })
}

/// memtester takes a second for each MiB under TCG; the memory around it, filled first, makes the pressure.
#[test]
fn memtester() -> Result<()> {
    let work = "pagoda.work=fill,memtester,verify pagoda.mib=200 pagoda.memtester=12M,1";
    tool("memtester", Folios::Large, work, 1000)
}

#[test]
fn stress_ng() -> Result<()> {
    let work = "pagoda.work=stress \
                pagoda.stress=--vm,1,--vm-bytes,220M,--vm-method,zero-one,--verify,-t,20s,--vm-keep";
    tool("stress-ng", Folios::Small, work, 10_000)
}
