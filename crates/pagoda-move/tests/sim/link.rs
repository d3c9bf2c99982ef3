//! The link: a control stream and two data streams, each in order, until it is cut.

use std::time::Duration;

use pagoda_move::units::Moment;

use crate::host::STREAMS;

/// Streams of a connection: data, then control.
pub const CONTROL: usize = STREAMS;
const CHANNELS: usize = STREAMS + 1;

/// A frame on its way.
#[derive(Clone, Debug)]
pub struct Frame {
    pub to: usize,
    pub connection: u32,
    pub channel: usize,
    pub bytes: Vec<u8>,
}

#[derive(Debug, Default)]
pub struct Link {
    /// What comes from each host does not arrive.
    pub cut: [bool; 2],
    /// The connection as each host knows it; 0 is none.
    pub seen: [u32; 2],
    pub last: u32,
    /// When the last frame to each host arrives, by channel.
    arrives: [[Moment; CHANNELS]; 2],
    /// Frames that a cut holds back. Those of a connection that lives arrive when the cut heals.
    pub held: Vec<Frame>,
    pub is_connecting: bool,
}

impl Link {
    /// When a frame that is sent now arrives: behind those before it.
    pub fn arrival(&mut self, to: usize, channel: usize, now: Moment, delay: Duration) -> Moment {
        let last = &mut self.arrives[to][channel];
        *last = (*last).max(now + delay);
        *last
    }

    pub fn is_cut(&self) -> bool {
        self.cut[0] || self.cut[1]
    }
}
