//! The shim's gate, as those see it who need it open.

use anyhow::Result;

/// Keeps QEMU from finding the capability `x-ignore-shared`, unless it is open.
pub trait Gate {
    /// # Errors
    /// It cannot be opened, and is shut.
    fn open(&self) -> Result<()>;
    /// It is shut as soon as that can be: by its owner, or by the end of its owner's connection.
    fn shut(&self);
}

/// An open gate, which is shut when this is dropped.
pub struct Opened<'a>(&'a dyn Gate);

impl<'a> Opened<'a> {
    pub fn new(gate: &'a dyn Gate) -> Result<Opened<'a>> {
        gate.open()?;
        Ok(Opened(gate))
    }
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.shut();
    }
}
