//! A space of the pool that the daemon has opened for a VM's remote tier.

use rmap::client::{Client, SpaceRef};
use rmap::control::{ControlReply, ControlRequest};
use rmap::units::Time;
use rmap_io::net::UdpClient;

/// How the pool's client asks its control plane.
pub type Control = Box<dyn FnMut(&ControlRequest) -> ControlReply + Send>;

/// What else is to be done with the pool's client now and then, such as to make servers known that have come. It never waits.
pub type Maintain = Box<dyn FnMut(&mut Client, Time) + Send>;

/// A space that was opened for a VM.
pub struct Opened {
    /// The client. A tier that has one keeps the socket of that.
    pub udp: UdpClient<Control>,
    /// The space of that client.
    pub space: SpaceRef,
    /// What is done with the client from time to time.
    pub maintain: Maintain,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("space", &self.space).finish_non_exhaustive()
    }
}
