//! What this version can do in a move that not every version can.

use pagoda_move::units::RegisterId;
use pagoda_move::wire::offer::Capabilities;

/// What this version can do as a source, and as a destination.
const OURS: Capabilities = Capabilities::POSTCOPY
    .with(Capabilities::LZ4)
    .with(Capabilities::ZSTD)
    .with(Capabilities::REMOTE_TIER)
    .with(Capabilities::DISKS);

/// The same of a host that asks these registers of an arbiter, if it asks any.
pub const fn ours(register: Option<RegisterId>) -> Capabilities {
    if register.is_some() { OURS.with(Capabilities::ARBITER) } else { OURS }
}
