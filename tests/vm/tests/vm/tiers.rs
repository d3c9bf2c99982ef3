//! A VM whose first tier is compressed memory: the daemon dies and is replaced, with and without that tier in its configuration.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagoda_api::{TierInfo, VmState};
use vm_tests::toy::{Toy, ToyOptions};
use vm_tests::{Daemon, DaemonOptions, Folios, Lab, wait};

/// A directory in memory, removed when dropped.
struct MemoryDir(PathBuf);

impl MemoryDir {
    fn make(name: &str) -> Result<Self> {
        let path = PathBuf::from(format!("/dev/shm/pagoda-test-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }
}

impl Drop for MemoryDir {
    fn drop(&mut self) {
        // What is left in it is a failure of the test, which says so.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn write_config(file: &Path, dir: &MemoryDir, room: &str) -> Result<()> {
    std::fs::write(file, format!("[compressed]\ndir = {:?}\nroom = {room:?}\n", dir.0))
        .context("write the configuration")
}

fn tier(daemon: &Daemon, name: &str) -> Result<TierInfo> {
    let tiers = daemon.vm("toy")?.tiers;
    tiers.iter().find(|tier| tier.name == name).cloned().with_context(|| format!("no tier {name} in {tiers:?}"))
}

fn touch(toy: &Toy, access: &str) -> Result<()> {
    toy.touch(&format!("--mib 192 --access {access}")).map(drop)
}

fn compressed(folios: Folios, name: &str) -> Result<()> {
    Lab::run(&format!("compressed tier, {name}"), 1, |lab| {
        let dir = MemoryDir::make(name)?;
        let config = lab.dir().join("pagoda.toml");
        // Less than what leaves DRAM: some pages go to the swap file.
        write_config(&config, &dir, "2M")?;
        let options =
            DaemonOptions { more: vec!["--config".into(), config.display().to_string()], ..DaemonOptions::new(folios) };
        let daemon = lab.daemon_with(options)?;
        let toy = lab.toy(&daemon, &ToyOptions { name: "toy".into(), memory_mib: 192, dram_mib: 64, threads: 1 })?;
        toy.map()?;
        touch(&toy, "store")?;
        for round in 0..3 {
            touch(&toy, "load").with_context(|| format!("round {round}"))?;
            touch(&toy, "store").with_context(|| format!("round {round}"))?;
            let found = [tier(&daemon, "compressed")?, tier(&daemon, "swap")?];
            ensure!(found.iter().all(|tier| tier.pages > 0 && tier.pages_out > 0), "round {round}: {found:?}");
            ensure!(found[0].memory_bytes > 0 && found[0].memory_bytes <= 2 << 20, "round {round}: {found:?}");
            daemon.kill9()?;
            if round == 1 {
                // A VM keeps its tiers, whatever the configuration says by now.
                std::fs::write(&config, "").context("write the configuration")?;
            }
            daemon.start_again()?;
            daemon.wait_vm("toy", "running", wait::HANG, |info| info.state == VmState::Running)?;
        }
        touch(&toy, "load")?;
        ensure!(tier(&daemon, "compressed")?.pages_in > 0, "nothing came back from compressed memory");
        // All of it comes home, and the tier is empty.
        daemon.set_dram_mib("toy", 192)?;
        daemon.wait_vm("toy", "unarmed", wait::HANG, |info| !info.armed)?;
        let left = tier(&daemon, "compressed")?;
        ensure!(left.pages == 0 && left.memory_bytes == 0, "{left:?}");
        touch(&toy, "load")?;
        toy.quit()?;
        daemon.wait_gone("toy")?;
        let left: Vec<_> = std::fs::read_dir(&dir.0)?.flatten().map(|entry| entry.path()).collect();
        ensure!(left.is_empty(), "files are left: {left:?}");
        Ok(())
    })
}

#[test]
fn compressed_memory_with_large_folios() -> Result<()> {
    compressed(Folios::Large, "large")
}

#[test]
fn compressed_memory_with_small_folios() -> Result<()> {
    compressed(Folios::Small, "small")
}

#[test]
fn compressed_pages_that_are_gone_are_not_zeros() -> Result<()> {
    Lab::run("compressed pages are gone", 1, |lab| {
        let dir = MemoryDir::make("gone")?;
        let config = lab.dir().join("pagoda.toml");
        write_config(&config, &dir, "64M")?;
        let options = DaemonOptions {
            more: vec!["--config".into(), config.display().to_string()],
            ..DaemonOptions::new(Folios::Small)
        };
        let daemon = lab.daemon_with(options)?;
        let toy = lab.toy(&daemon, &ToyOptions { name: "toy".into(), memory_mib: 192, dram_mib: 64, threads: 1 })?;
        toy.map()?;
        touch(&toy, "store")?;
        daemon.kill9()?;
        let hidden = lab.dir().join("hidden.blocks");
        let map = dir.0.join("toy.blocks");
        std::fs::copy(&map, &hidden).and_then(|_| std::fs::remove_file(&map)).context("hide the map")?;
        daemon.start_unanswered()?;
        let why =
            wait::until("the VM waits", wait::HANG, || Ok(daemon.client().vm("toy").ok().and_then(|info| info.waits)))?;
        ensure!(why.contains("compressed pages"), "{why}");
        std::fs::copy(&hidden, &map).context("bring the map back")?;
        daemon.wait_vm("toy", "running", wait::HANG, |info| info.state == VmState::Running)?;
        touch(&toy, "load")?;
        toy.quit()?;
        daemon.wait_gone("toy")
    })
}
