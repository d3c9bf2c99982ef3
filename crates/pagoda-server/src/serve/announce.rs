//! A server that announces itself on its network.

use std::net::{IpAddr, SocketAddrV4};

use anyhow::{Context, Result};
use pagoda_cli::exit::UsageError;
use pagoda_pool::news::stamp_ms;
use rmap::announce::{ANNOUNCE_EVERY, AnnounceKey, Announcement, Announcer};
use rmap::client::ServerInfo;
use rmap::crypto::{Keypair, PoolKey};
use rmap::server::Server;
use rmap::units::Time;
use rmap_io::net::AnnounceSender;

/// Says each second where the server is.
#[derive(Debug)]
pub struct Announcing {
    announcer: Announcer,
    sender: AnnounceSender,
    to: SocketAddrV4,
    said_at: Option<Time>,
    fails: bool,
}

impl Announcing {
    /// Announces a server that listens at `ip`, which is one address, from the network card that has it.
    ///
    /// # Errors
    /// The address is none of IPv4, or cannot be sent from.
    pub fn start(ip: IpAddr, to: SocketAddrV4, keys: &Keypair, pool: PoolKey) -> Result<Announcing> {
        let IpAddr::V4(interface) = ip else {
            return Err(UsageError(format!("--announce goes over IPv4 only, and --listen is {ip}")).into());
        };
        let sender = AnnounceSender::bind(interface, to).with_context(|| format!("announce from {interface}"))?;
        Ok(Announcing { announcer: Announcer::new(keys, pool), sender, to, said_at: None, fails: false })
    }

    /// What clients know its announcements by.
    pub fn key(&self) -> AnnounceKey {
        self.announcer.public()
    }

    pub fn follow(&mut self, server: &Server, info: &ServerInfo, slabs: u32, now: Time) {
        if self.said_at.is_some_and(|at| now.since(at) < ANNOUNCE_EVERY) {
            return;
        }
        self.said_at = Some(now);
        let about = Announcement {
            server: info.id,
            addr: info.addr,
            key: info.key,
            zone: info.zone,
            epoch: server.epoch(),
            slabs,
            free: (server.free_slabs() as u32).min(slabs),
            pressure: server.pressure(),
        };
        let sent = self.sender.send(&self.announcer.encode(stamp_ms(), &about));
        if let Err(error) = &sent
            && !self.fails
        {
            eprintln!("pagoda: announcements cannot be sent to {}: {error}; it is tried again each second", self.to);
        }
        self.fails = sent.is_err();
    }
}
