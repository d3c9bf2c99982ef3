//! The properties of an option, read so that QEMU reads the same ones.

use super::super::cloned::target::shown;
use super::super::words::{Opt, Props};

/// Options with a list of properties of which one may be there twice.
const LISTS: [&str; 4] = ["dns", "dnssearch", "hostfwd", "net"];

/// The properties of an option. Who reads the first of two and who reads the last may not see different ones.
pub fn props(option: &Opt<'_>, implied: &str) -> Result<Props, String> {
    let props = Props::parse(option.name, option.value, implied).map_err(|error| error.to_string())?;
    let mut keys = props.keys();
    keys.retain(|key| !LISTS.contains(key));
    keys.sort_unstable();
    match keys.windows(2).find(|two| two[0] == two[1]) {
        Some(two) => Err(format!("{} says {} twice", shown(option), two[0])),
        None => Ok(props),
    }
}

/// What is on no list of what is known to be safe.
pub fn unknown(option: &Opt<'_>) -> Result<(), String> {
    Err(format!("{} is not known to be safe in a VM of another host", shown(option)))
}
