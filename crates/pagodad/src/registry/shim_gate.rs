//! The gate of a VM's shim, through the VM's engine.

use std::sync::Arc;

use anyhow::Result;
use pagoda_pager::handle::Handle;

use crate::qmp::state::Gate;

/// See the module.
#[derive(Debug)]
pub struct ShimGate(Arc<Handle>);

impl ShimGate {
    pub fn new(engine: Arc<Handle>) -> ShimGate {
        ShimGate(engine)
    }
}

impl Gate for ShimGate {
    fn open(&self) -> Result<()> {
        Ok(self.0.open_gate()?)
    }

    fn shut(&self) {
        if let Err(error) = self.0.shut_gate() {
            tracing::warn!("shut the gate of a VM's shim: {error}");
        }
    }
}
