//! A world in which nothing fails any more, and what is to be so then.

use rmap::client::Reach;
use rmap::units::SpaceId;
use rmap::wire::message::Pressure;

use crate::network::Weather;
use crate::node::{Node, Program};
use crate::world::World;

/// Everything that is under way ends within this once nothing fails any more: some failure detections, hellos with their
/// longest pauses between them, and copies.
const REST_NS: u64 = 20_000_000_000;

impl World {
    /// Nothing fails any more: all that is under way ends, and every page is right for a new owner too.
    pub fn rest(&mut self) {
        self.resting = true;
        self.network.weather = Weather::calm();
        self.network.heal();
        self.registry.away_until_ns = 0;
        for node in 0..self.nodes.len() {
            self.nodes[node].paused_until_ns = 0;
            if let Program::Server(workers) = &mut self.nodes[node].program {
                let server = &mut workers[0];
                server.set_pressure(Pressure::None);
                while server.adjust_memory() {}
            }
        }
        self.run_until_quiet();
        if self.plan.error_after.is_some() {
            self.run_until(World::is_all_heard, "a server is not heard");
            self.all_heard = true;
        }
        for round in 0..2 {
            for space in 0..self.plan.spaces as u64 {
                if round == 1 || !self.has_owner(space) {
                    self.hand_over(space);
                }
                for page in self.oracle.pages_of(space) {
                    for node in self.owners_of(space) {
                        self.ask(node, space, page, 0);
                    }
                    self.run_until_quiet();
                }
            }
        }
        self.run_until(|world| world.leftover().is_none(), "what nobody needs is not given back");
    }

    fn is_quiet(&self) -> bool {
        self.nodes.iter().all(|node| match &node.program {
            Program::Host(host) => host.asks.is_empty() && host.client.is_idle(),
            Program::Server(_) => true,
            Program::Nothing => false,
        })
    }

    fn is_all_heard(&self) -> bool {
        self.nodes.iter().all(|node| match &node.program {
            Program::Host(host) => host.client.reach().all(|(_, reach)| reach == Reach::Up),
            Program::Server(_) => true,
            Program::Nothing => false,
        })
    }

    pub fn run_until_quiet(&mut self) {
        self.run_until(World::is_quiet, "does not come to rest");
    }

    /// Whatever hosts have asked for is answered, though not all servers may be heard.
    pub fn run_until_answered(&mut self) {
        let asks_nothing = |node: &Node| !matches!(&node.program, Program::Host(host) if !host.asks.is_empty());
        self.run_until(|world| world.nodes.iter().all(asks_nothing), "something is not answered");
    }

    fn run_until(&mut self, done: impl Fn(&World) -> bool, otherwise: &str) {
        let deadline = self.now_ns + REST_NS;
        while !done(self) && self.violation.is_none() {
            if self.now_ns > deadline || !self.step() {
                let waiting: Vec<String> = self.nodes.iter().filter_map(waiting).chain(self.leftover()).collect();
                return self.fail(format!("{otherwise}: {waiting:?}"));
            }
        }
    }

    /// A server that has more of a space than its map says, or less. Readers of a sealed one leave everything as it is.
    fn leftover(&self) -> Option<String> {
        let spaces = || (0..self.plan.spaces as u64).filter(|space| !self.sealed.contains_key(space));
        self.nodes.iter().find_map(|node| {
            let Program::Server(workers) = &node.program else { return None };
            let (server, all) = (workers[0].id(), workers[0].spaces());
            spaces().find_map(|space| {
                let has = all.iter().find(|has| has.space == SpaceId(space)).map_or(0, |has| has.slabs as usize);
                let mapped = self.registry.copies_at(SpaceId(space), server);
                (has != mapped).then(|| format!("{server:?} has {has} slabs of space {space}, {mapped} by the map"))
            })
        })
    }
}

fn waiting(node: &Node) -> Option<String> {
    let Program::Host(host) = &node.program else { return None };
    let oldest = host.asks.values().min_by_key(|ask| ask.since_ns)?;
    Some(format!("{oldest:?} of {} with {:?}", host.asks.len(), host.client.reach().collect::<Vec<_>>()))
}
