//! Drives a client by a socket, and has its questions answered by a control plane.

use std::io;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::port::{BATCH_BYTES_MAX, Port, Wait};
use rmap::client::{Client, Event};
use rmap::control::{ControlReply, ControlRequest};
use rmap::units::{Page, SEALED_SIZE, SealedPage, Time, content_of};
use rmap::wire::DATAGRAM_MAX;

/// Why a call failed.
#[derive(Debug, Error)]
pub enum UdpClientError {
    #[error("the socket: {0}")]
    Socket(#[from] io::Error),
    #[error("no result within {waited:?}: no server can be reached, or the control plane does not answer")]
    NoResult { waited: Duration },
}

/// Runs a [`Client`] on one thread: the caller's. A caller that waits for other things too waits for [`UdpClient::port`],
/// not longer than [`UdpClient::expire`] says, and calls [`UdpClient::turn`] then.
#[derive(Debug)]
pub struct UdpClient<C> {
    pub client: Client,
    port: Port,
    wait: Wait,
    start: Instant,
    control: C,
    out: Vec<u8>,
    page: Box<SealedPage>,
}

impl<C: FnMut(&ControlRequest) -> ControlReply> UdpClient<C> {
    /// `start` is when the client's clock began. `control` answers at once, as a registry in memory or in a file does;
    /// where it cannot, with [`ControlReply::Later`].
    pub fn new(client: Client, port: Port, wait: Wait, start: Instant, control: C) -> UdpClient<C> {
        let out = Vec::with_capacity(BATCH_BYTES_MAX + 2 * DATAGRAM_MAX);
        UdpClient { client, port, wait, start, control, out, page: Box::new([0; SEALED_SIZE]) }
    }

    /// The time by the client's clock, which counts from `start`.
    pub fn now(&self) -> Time {
        Time(self.start.elapsed().as_nanos() as u64)
    }

    /// Sends what there is to send.
    pub fn flush(&mut self) {
        let now = self.now();
        while let Some((id, request)) = self.client.poll_control(now) {
            let reply = (self.control)(&request);
            self.client.on_control(now, id, reply);
        }
        let client = &mut self.client;
        self.port.send_all(&mut self.out, |out| client.poll_transmit(now, out));
    }

    /// Takes in what is there, sends what follows. `false` if nothing was there.
    ///
    /// # Errors
    /// The socket is broken.
    pub fn turn(&mut self) -> io::Result<bool> {
        let now = self.now();
        let client = &mut self.client;
        let any = self.port.receive(|from, datagram| client.on_datagram(now, from, datagram))?;
        self.flush();
        Ok(any)
    }

    /// Goes on with another client, at this socket: whoever waits for it waits on. What the client before has asked for does not end.
    /// The other one's socket is closed.
    pub fn replace(&mut self, other: UdpClient<C>) {
        let UdpClient { client, wait, start, control, .. } = other;
        (self.client, self.wait, self.start, self.control) = (client, wait, start, control);
        self.out.clear();
    }

    /// Takes in what is there, for nobody. The client does not hear of it, and sends nothing.
    ///
    /// # Errors
    /// The socket is broken.
    pub fn ignore(&mut self) -> io::Result<()> {
        self.port.receive(|_, _| {}).map(drop)
    }

    /// The port by which this client sends and receives.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Does what is due by now, sends what follows, and says when something is due next.
    pub fn expire(&mut self) -> Option<Instant> {
        let now = self.now();
        if self.client.poll_timeout(now).is_some_and(|due| due <= now) {
            self.client.on_timeout(now);
            self.flush();
        }
        let due = self.client.poll_timeout(now)?;
        Some(self.start + Duration::from_nanos(due.0))
    }

    /// The next result and the page that was read. Waits for it until `patience` is over.
    ///
    /// # Errors
    /// The socket is broken, or there is no result in time.
    pub fn next(&mut self, patience: Duration) -> Result<(Event, &Page), UdpClientError> {
        let began = Instant::now();
        let (mut spun_from, mut slept) = (began, false);
        self.flush();
        loop {
            if let Some(event) = self.client.swap_event(&mut self.page) {
                return Ok((event, content_of(&self.page)));
            }
            // Without spinning there is no use in looking before sleeping: a reply takes a round trip.
            let looks = self.wait.spin > Duration::ZERO;
            if (looks || slept) && self.turn()? {
                spun_from = Instant::now();
                slept = false;
                continue;
            }
            let at = Instant::now();
            if at - began >= patience {
                return Err(UdpClientError::NoResult { waited: patience });
            }
            let now = self.now();
            let due = self.client.poll_timeout(now);
            if due.is_some_and(|due| due <= now) {
                self.client.on_timeout(now);
                self.flush();
                slept = true;
            } else if at - spun_from >= self.wait.spin {
                let until = due
                    .map_or(began + patience, |due| (self.start + Duration::from_nanos(due.0)).min(began + patience));
                self.port.wait(Some(until))?;
                spun_from = Instant::now();
                slept = true;
            }
        }
    }
}
