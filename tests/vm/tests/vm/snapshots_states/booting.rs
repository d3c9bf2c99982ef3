//! Snapshots of VMs that have no guest yet: the firmware waits for a key, and the kernel starts.

use anyhow::{Context, Result};
use serde_json::json;
use vm_tests::{Folios, GuestOptions, Lab, wait};

use super::led::Led;

/// The firmware waits for a key, as long as it can.
const WAITS: &str = "-boot menu=on,splash-time=65535";

fn press_a_key(led: &Led<'_>) -> Result<()> {
    let key = json!({ "keys": [{ "type": "qcode", "data": "a" }] });
    led.guest.qmp()?.execute("send-key", key).map(drop)
}

/// It boots to its end, and has memory that it can rely on.
fn boots(led: &mut Led<'_>) -> Result<()> {
    led.control.wait_ready()?;
    led.control.run("fill 60")?;
    led.control.run("run random passes=1 write=50")?;
    led.control.run("verify").map(drop)
}

#[test]
fn still_booting() -> Result<()> {
    Lab::run("a snapshot of a VM that boots", 1, |lab| {
        let daemon = lab.daemon(Folios::Small)?;
        let options = GuestOptions::new("web1", "").control().memory("-m 192M").dram("96M").more(WAITS);
        let mut led = Led::boot(lab, &daemon, &options)?;
        led.wait_vm("it is attached", |vm| vm.pid.is_some())?;
        wait::until("a snapshot of its firmware", wait::HANG, || Ok(led.take("firmware").ok()))?;
        led.wait_durable("firmware")?;
        press_a_key(&led)?;
        led.take("kernel").context("of what comes after the firmware")?;
        led.wait_durable("kernel")?;
        boots(&mut led).context("the VM that went on")?;

        led.roll_back("firmware")?;
        press_a_key(&led)?;
        boots(&mut led).context("put back to its firmware")?;
        led.roll_back("kernel")?;
        boots(&mut led).context("put back to its kernel")?;
        led.power_off()?;

        led.restore("kernel", &[])?;
        boots(&mut led).context("a new VM of the kernel")?;
        led.power_off()?;
        led.restore("firmware", &[])?;
        press_a_key(&led)?;
        boots(&mut led).context("a new VM of the firmware")?;
        led.power_off()
    })
}
