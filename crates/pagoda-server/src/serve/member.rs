//! Keeps a server's record in etcd, by which others learn of the server.

use std::time::Duration;

use anyhow::{Context, Result};
use rmap::client::ServerInfo;
use rmap::server::Server;
use rmap::units::SlabSize;
use rmap::wire::message::Pressure;
use rmap_etcd::{EtcdConfig, Load, Member, Membership, Node, NodeState};

/// As `docs/protocol/etcd.md` advises: an election of etcd takes a second, a slow disk as long.
const LEASE: Duration = Duration::from_secs(5);

/// The server's record, and what was said of it last.
#[derive(Debug)]
pub struct InEtcd {
    member: Member,
    load: Load,
    is_member: bool,
}

impl InEtcd {
    pub fn join(config: EtcdConfig, info: &ServerInfo, server: &Server) -> Result<InEtcd> {
        let load = load(server);
        let ServerInfo { id, addr, key, zone, announcer } = info.clone();
        let (slab_size, slabs, epoch) = (SlabSize::default(), server.free_slabs() as u32, server.epoch());
        let Load { free, state } = load;
        let node = Node { id, addr, key, zone, slab_size, slabs, free, state, epoch, announcer };
        let member = Member::join(config, node, LEASE).context("tell etcd of this server")?;
        Ok(InEtcd { member, load, is_member: true })
    }

    /// Tells others what has changed, and the operator whether others are told.
    pub fn follow(&mut self, server: &Server) {
        let load = load(server);
        if std::mem::replace(&mut self.load, load) != load {
            self.member.set_load(load);
        }
        let membership = self.member.membership();
        let is_member = membership == Membership::Member;
        if std::mem::replace(&mut self.is_member, is_member) != is_member {
            match membership {
                Membership::Member => eprintln!("pagoda: this server is in etcd again"),
                Membership::Unsure { why } => eprintln!(
                    "pagoda: new clients may not find this server: {why}; it goes on serving, and trying to be found"
                ),
                Membership::Refused { why } => {
                    eprintln!("pagoda: new clients do not find this server: {why}; it goes on serving");
                }
            }
        }
    }

    /// Not there any more, from now on.
    pub fn leave(self) {
        self.member.leave();
    }
}

fn load(server: &Server) -> Load {
    let free = server.free_slabs() as u32;
    let state = match server.pressure() {
        Pressure::Orange | Pressure::Red => NodeState::Draining,
        Pressure::Yellow => NodeState::Full,
        Pressure::None if free == 0 => NodeState::Full,
        Pressure::None => NodeState::Up,
    };
    Load { free, state }
}
