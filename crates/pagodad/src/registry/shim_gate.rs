//! The gate of a VM's shim, through the VM's engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use pagoda_pager::handle::{GateError, Handle};

use crate::qmp::state::Gate;

/// Opens and shuts the gate of one VM's shim.
#[derive(Debug)]
pub struct ShimGate {
    engine: Arc<Handle>,
    patience: Duration,
}

impl ShimGate {
    pub fn new(engine: Arc<Handle>) -> ShimGate {
        ShimGate { engine, patience: Duration::ZERO }
    }

    /// The same, which asks a silent shim again for as long as this. For who holds up no guest: many VMs may be starting on a busy
    /// host.
    pub fn patient(self, patience: Duration) -> ShimGate {
        ShimGate { patience, ..self }
    }
}

impl Gate for ShimGate {
    fn open(&self) -> Result<()> {
        let deadline = Instant::now() + self.patience;
        loop {
            match self.engine.open_gate() {
                Err(GateError::Silent) if Instant::now() < deadline => {}
                opened => return Ok(opened?),
            }
        }
    }

    fn shut(&self) {
        if let Err(error) = self.engine.shut_gate() {
            tracing::warn!("shut the gate of a VM's shim: {error}");
        }
    }
}
