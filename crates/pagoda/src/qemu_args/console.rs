//! The default console, which an extra `-mon` would take away.
//!
//! QEMU makes a default monitor only when the command line has none of `-mon`, `-monitor` and
//! `-qmp` (`default_monitor` in `softmmu/vl.c`), and ours is one. So where QEMU would have made it, it
//! is asked for by name: with `-nographic` on the terminal, shared with the serial port if that has
//! its default too, else as a virtual console of the display.

use super::error::ArgError;
use super::words::{Opt, Props};

/// Options that say what QEMU would have done by itself.
pub fn kept_defaults(options: &[Opt<'_>]) -> Result<Option<(&'static str, &'static str)>, ArgError> {
    let has = |names: &[&str]| options.iter().any(|option| names.contains(&option.name));
    if has(&["mon", "monitor", "qmp", "qmp-pretty", "nodefaults"]) {
        return Ok(None);
    }
    if !has(&["nographic"]) {
        return Ok(Some(("-monitor", "vc:80Cx24C")));
    }
    let mut has_serial = has(&["serial"]);
    for option in options.iter().filter(|option| option.name == "device") {
        let props = Props::parse("device", option.value, "driver")?;
        has_serial |= props.get("driver").as_deref() == Some("isa-serial");
    }
    Ok(Some(if has_serial { ("-monitor", "stdio") } else { ("-serial", "mon:stdio") }))
}
