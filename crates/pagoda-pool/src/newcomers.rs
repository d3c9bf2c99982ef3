//! Servers that come into etcd while a client is at work: it is told of them, so that its slabs can go there.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use anyhow::{Context, Result};
use rmap::client::{Client, ServerInfo};
use rmap::units::{ServerId, Time};

use crate::Tell;
use crate::config::{PoolConfig, info};

/// A server's lease lasts as long.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Looks for servers that come, on a thread that ends with this.
#[derive(Debug)]
pub struct Newcomers {
    servers: Receiver<ServerInfo>,
    tell: Tell,
    /// Nothing is sent: it is the thread's sign that this is still there.
    _wanted: Sender<()>,
}

impl Newcomers {
    /// Servers that come from now on, besides those `listed`. None come where there is no etcd. One that the client knows only
    /// as a silent stand-in ([`crate::connect::stand_in`]) comes when it is there again.
    ///
    /// # Errors
    /// etcd does not answer; no thread is to be had.
    pub fn of(pool: &PoolConfig, listed: &[ServerInfo]) -> Result<Newcomers> {
        let mut known: Vec<ServerId> = listed.iter().map(|server| server.id).collect();
        let (came, servers) = mpsc::channel();
        let (wanted, unwanted) = mpsc::channel();
        let newcomers = Newcomers { servers, tell: pool.tell, _wanted: wanted };
        let Some(mut etcd) = pool.connect()? else { return Ok(newcomers) };
        let look = move || {
            while unwanted.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                // While etcd is away nobody comes; that it is is said by others.
                let nodes = etcd.nodes().map_or(Vec::new(), |(nodes, _)| nodes);
                for server in nodes.into_iter().map(info) {
                    if !known.contains(&server.id) {
                        known.push(server.id);
                        // Nobody listens: the next look ends.
                        let _ = came.send(server);
                    }
                }
            }
        };
        std::thread::Builder::new().name("etcd-servers".into()).spawn(look).context("start a thread")?;
        Ok(newcomers)
    }

    /// Makes those known to the client that have come since the last time. Never waits.
    pub fn admit(&self, client: &mut Client, now: Time) {
        for server in self.servers.try_iter() {
            let id = server.id.0;
            match client.add_server(now, server) {
                Ok(()) => (self.tell)(&format!("server {id} has come")),
                Err(error) => (self.tell)(&format!("server {id} is not used: {error}")),
            }
        }
    }
}
