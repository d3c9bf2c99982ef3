//! Which life of the host this is, from one start to the next: numbers of devices and processes, and what the page cache holds, mean
//! nothing in the next one.

use std::sync::OnceLock;

const PATH: &str = "/proc/sys/kernel/random/boot_id";

/// What the kernel calls it.
///
/// # Errors
/// It cannot be read, in words for the user.
pub fn id() -> Result<&'static str, String> {
    static ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = ID.get() {
        return Ok(id);
    }
    let read = std::fs::read_to_string(PATH).map_err(|error| format!("read {PATH}: {error}"))?;
    Ok(ID.get_or_init(|| read.trim().to_owned()))
}

/// When something was noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It was noted in this life of the host.
    This,
    Earlier,
    /// Nobody can tell, because the note or the kernel does not say.
    Unknown,
}

impl Life {
    /// Of what was noted in the life with this name.
    pub fn of(noted: Option<&str>) -> Life {
        match (noted, id()) {
            (Some(noted), Ok(id)) if noted == id => Life::This,
            (Some(_), Ok(_)) => Life::Earlier,
            _ => Life::Unknown,
        }
    }
}
