//! The guest: Debian's full kernel with the disks that the host gives it, and then as a client of the pool itself.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, Result};
use pagoda_guest::lines::Line;
use serde_json::Value;
use testkit::accel::Accelerator;
use testkit::image::Images;
use testkit::pool::{Pool, Server};

use super::fio::{Engine, Runs};
use crate::Setup;
use crate::balloon::guest::{Guest, Shape, Start};

/// fio and what it is linked with are in the guest's memory.
const MEMORY_MIB: u64 = 768;
/// The gateway of QEMU's own network. Behind it is what QEMU can reach: the servers' end of the link.
const GATEWAY: &str = "10.0.2.2";
const ADDRESS: &str = "10.0.2.15/24";
const POOL_DIR: &str = "/var/lib/pagoda/pool";
/// An emulated CPU may be silent for longer than real machines are.
const FAIL_AFTER_MS: u32 = 5000;

pub struct Inside {
    guest: Guest,
}

impl Inside {
    /// Boots a guest with virtio disks of these `-drive` words, vda being the first.
    ///
    /// # Errors
    /// It does not boot.
    pub fn boot(setup: &Setup, images: &Images, accelerator: Accelerator, drives: &[String]) -> Result<Inside> {
        // Where there is no KVM, what is emulated has instructions for AES, too.
        let cpu = if accelerator == Accelerator::Kvm { "host" } else { "max" };
        // Of virtio-net on the user network the transmit queue stands still now and then, for good (seen with QEMU 7.2 and TCG: the console
        // says "transmit queue 0 timed out"); what is emulated has no use for its speed.
        let nic = if accelerator == Accelerator::Kvm { "virtio-net-pci,netdev=n0" } else { "e1000,netdev=n0" };
        let mut more: Vec<String> = ["-cpu", cpu, "-netdev", "user,id=n0", "-device", nic].map(str::to_owned).into();
        for (index, drive) in drives.iter().enumerate() {
            let device = format!("virtio-blk-pci,drive=t{index}");
            more.extend(["-drive".to_owned(), format!("{drive},if=none,id=t{index}"), "-device".to_owned(), device]);
        }
        let shape = Shape { name: "bench-table1", memory_mib: MEMORY_MIB, more: &more, ..Shape::default() };
        let start = Start { images, accelerator, disk: None };
        Ok(Inside { guest: Guest::boot_alone(&setup.dir, &shape, &start)? })
    }

    /// Has fio measure one of its disks.
    ///
    /// # Errors
    /// It fails.
    pub fn measure(&mut self, setup: &Setup, runs: &mut Runs, device: &str) -> Result<()> {
        let device = PathBuf::from(format!("/dev/{device}"));
        runs.measure(setup, &mut |words| self.sh(&format!("fio {words}")), &Engine::File(&device))
    }

    /// What a datagram to a server and `bytes` back take.
    ///
    /// # Errors
    /// Too many are lost.
    pub fn echo_us(&mut self, server: SocketAddr, count: usize, bytes: usize) -> Result<f64> {
        self.join_network()?;
        let lines = self.guest.command(&format!("echo {server} {count} {bytes}"))?;
        let ns = lines.iter().find_map(|line| Line::parse(line)?.number("p50_ns")).context("the time of an echo")?;
        Ok(ns as f64 / 1e3)
    }

    fn join_network(&mut self) -> Result<()> {
        let up = "ip link set lo up; ip link set eth0 up; ip addr add";
        self.sh(&format!("{up} {ADDRESS} dev eth0; ip route add default via {GATEWAY}")).map(drop)
    }

    /// Makes it a client of the pool, with a disk at /dev/nbd0.
    ///
    /// # Errors
    /// A step fails.
    pub fn become_client(&mut self, pool: &Pool, servers: &[Server], bytes: u64) -> Result<()> {
        let key = std::fs::read_to_string(pool.dir().join("pool.key")).context("read the pool's key")?;
        self.sh(&format!("umask 077; mkdir -p /run {POOL_DIR}; echo {} > {POOL_DIR}/pool.key", key.trim()))?;
        let made: Value = serde_json::from_str(&self.sh("pagoda pool key init --json 2>/dev/null")?)?;
        pool.admit(made["public_key"].as_str().context("the guest's key")?)?;
        for server in servers {
            self.sh(&format!("echo {} >> {POOL_DIR}/servers", server.line(server.addr)))?;
        }
        self.sh(&format!("pagoda disk create guest --size {bytes}B --copies 1"))?;
        let export = format!("pagoda disk export guest --nbd /run/guest.sock --fail-after {FAIL_AFTER_MS}");
        self.sh(&format!(
            "{export} >/run/log 2>&1 & while ! [ -S /run/guest.sock ] && kill -0 $!; do sleep 0.1; done"
        ))?;
        self.sh("nbd-client -unix /run/guest.sock /dev/nbd0 -b 4096").map(drop)
    }

    /// Has the guest power off, and waits for its end.
    ///
    /// # Errors
    /// It does not end well.
    pub fn power_off(self) -> Result<()> {
        self.guest.power_off()
    }

    /// Has its shell do something; what that says.
    fn sh(&mut self, line: &str) -> Result<String> {
        let lines = self.guest.command(&format!("sh {line}"))?;
        let said = lines.iter().filter_map(|line| Line::parse(line)).filter(|line| line.kind == "output");
        Ok(said.map(|line| line.text().to_owned() + "\n").collect())
    }
}
