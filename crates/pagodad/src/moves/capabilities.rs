//! What this version can do in a move that not every version can.

use pagoda_move::wire::offer::Capabilities;

/// As a source and as a destination.
pub const OURS: Capabilities = Capabilities::POSTCOPY.with(Capabilities::LZ4).with(Capabilities::REMOTE_TIER);
