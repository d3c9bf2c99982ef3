//! Outboxes: how much memory a VM's outbox has, and what its writers do when that is full.
//!
//! An outbox is RAM shared by a guest, which writes files into it, and its host, which sends them (MemNet: Xu et al.,
//! "MemNet: Enhancing Throughput and Energy Efficiency for Hybrid Workloads via Para-virtualized Memory Sharing", IEEE
//! CLOUD 2016). The paper names the parts and keeps its equations to itself; these are ours (`docs/outbox-control.md`).
//!
//! Pure: no clock, no I/O, no thread. Once a control period, for each VM:
//!
//! 1. [`profile`]: the counts of the file server and of the transmitter become rates, and jobs' times.
//! 2. [`estimate`]: a queueing model ([`fluid`], [`stream`]) and what it gets wrong ([`rls`]) become a [`curve`] of
//!    response times by size, and a verdict: the SLO ([`slo`]) is kept, is marginal, or is out of reach of any size.
//! 3. [`control`]: the size that the VM should have; [`pi`] is the baseline without a model.
//!
//! For all VMs together:
//!
//! 4. [`pressure`]: what outboxes may have while the host is short. They give before VMs are paged out.
//! 5. [`orchestrate`]: that is divided by SLO and weight. [`explain`] puts the reasons into words.
//!
//! In [`simulate`] all of that runs, and [`backpressure`] decides for each write. [`charge`] says what an outbox costs
//! the pool.

pub mod backpressure;
pub mod charge;
pub mod control;
pub mod curve;
pub mod estimate;
pub mod explain;
pub mod fluid;
pub mod orchestrate;
pub mod pi;
pub mod pressure;
pub mod profile;
pub mod rls;
pub mod round;
pub mod settings;
pub mod simulate;
pub mod slo;
pub mod stream;
pub mod units;
