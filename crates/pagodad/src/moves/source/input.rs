//! What the thread of a move hears of.

use pagoda_link::LinkError;
use pagoda_move::units::ConnectionNo;
use pagoda_move::wire::Control;
use pagoda_pager::handle::Copied;

use super::standing::Outcome;
use crate::moves::channel::Connection;
use crate::moves::outgoing::Order;

#[derive(Debug)]
pub enum Input {
    /// The destination was called, and is there.
    Connected(Connection),
    /// It is not; it is called again.
    Unreachable(LinkError),
    Received(ConnectionNo, Control),
    /// A stream of this connection has ended, and why.
    LinkDown(ConnectionNo, String),
    /// Pages that were asked for while this connection was there.
    Copied(ConnectionNo, Copied),
    /// So many bytes of pages have gone into a stream, of which some were named instead of sent.
    Sent {
        connection: ConnectionNo,
        bytes: u64,
        spared: u64,
    },
    /// The VM stands still, or does not.
    Stopped(Outcome),
    Order(Order),
}
