//! Servers, hosts, the network and the control plane under one virtual clock.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use rmap::client::{Client, ClientConfig, Event, Failure, ServerInfo, SpaceSpec, Tenure};
use rmap::control::{ControlReply, ControlRequest, QuestionId};
use rmap::crypto::{KEY_SIZE, Keypair, PoolKey};
use rmap::medium::Medium;
use rmap::server::{Fault, Server, ServerConfig, worker_of};
use rmap::units::{BootEpoch, Class, PAGE_SIZE, PageNo, SEALED_SIZE, ServerId, SlabSize, SpaceId, Time, content_of};
use rmap::wire::message::Pressure;

use crate::digest::Digest;
use crate::network::{Network, Weather};
use crate::node::{Ask, Asked, Happening, Host, Node, Program, Seeded, Shelf, address, node_at};
use crate::oracle::{Oracle, page_of};
use crate::registry::Registry;
use crate::rng::Rng;

pub const SLAB_PAGES: u32 = 8;
/// Timers of a client in a row after which the next is due at once: one for each request that it may have under way.
const HURRIED_MAX: usize = 1024;

/// What is broken on purpose, to see whether it is noticed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sabotage {
    pub server: Option<Fault>,
    pub client: Option<rmap::client::Fault>,
    /// Spaces are sealed while their copies differ.
    pub seals_early: bool,
}

/// What a run is made of.
#[derive(Clone, Debug)]
pub struct Plan {
    pub servers: usize,
    pub hosts: usize,
    pub spaces: usize,
    pub pages: u64,
    pub copies: usize,
    pub operations: usize,
    /// Chances per thousand that a chaos event is one of these.
    pub kills: usize,
    pub hand_overs: usize,
    pub seals: usize,
    /// Chance that a reader of a sealed space begins to make its parity.
    pub parity: usize,
    /// One server keeps its pages on a disk.
    pub overflow_disk: bool,
    /// Some hosts have somewhere else for pages that the map is late for.
    pub elsewhere: bool,
    /// Then hosts do not wait any longer for servers that are silent.
    pub error_after: Option<Duration>,
    pub steps: usize,
}

impl Plan {
    pub fn any(rng: &mut Rng) -> Plan {
        let plan = Plan::with_copies(rng);
        if rng.per_mille(250) { plan.with_parity(rng) } else { plan }
    }

    /// A plan in which nobody wants parity.
    pub fn with_copies(rng: &mut Rng) -> Plan {
        let plan = Plan {
            servers: rng.within(2, 5),
            hosts: rng.within(2, 3),
            spaces: rng.within(1, 3),
            pages: rng.within(2, 20) as u64,
            copies: *rng.pick(&[1, 2, 2, 2]),
            operations: rng.within(1, 24),
            kills: *rng.pick(&[0, 100, 300]),
            hand_overs: *rng.pick(&[0, 100, 300]),
            overflow_disk: rng.per_mille(300),
            steps: rng.within(200, 1200),
            seals: *rng.pick(&[0, 0, 0, 20, 100]),
            elsewhere: false,
            error_after: None,
            parity: 0,
        };
        // Without a draw, which would make other runs of the known seeds.
        Plan { elsewhere: plan.steps % 2 == 1, ..plan }
    }

    /// Servers enough, up to three groups of slabs, and somebody who wants parity for them.
    pub fn with_parity(self, rng: &mut Rng) -> Plan {
        let (servers, pages) = (rng.within(5, 7), rng.within(2, 80) as u64);
        Plan { servers, pages, spaces: rng.within(1, 2), seals: 100, parity: 200, ..self }
    }
}

#[derive(Debug)]
pub struct World {
    pub now_ns: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    happenings: std::collections::HashMap<u64, Happening>,
    ids: u64,
    pub nodes: Vec<Node>,
    pub network: Network,
    pub registry: Registry,
    pub oracle: Oracle,
    pub plan: Plan,
    pub rng: Rng,
    pub kills: usize,
    /// Reads and writes that failed because servers were silent.
    pub unanswered: [u64; 2],
    /// Sealed spaces, and the generation of the owner that sealed them.
    pub sealed: BTreeMap<u64, u32>,
    sabotage: Sabotage,
    pool: PoolKey,
    /// Nothing new begins any more; and every host has heard of every server since.
    pub resting: bool,
    pub all_heard: bool,
    pub violation: Option<String>,
    digest: Digest,
    buffer: Vec<u8>,
    trace: bool,
}

fn keys(node: usize) -> Keypair {
    Keypair::from_private([node as u8 + 1; KEY_SIZE])
}

impl World {
    pub fn new(seed: u64, plan: Option<Plan>, weather: Option<Weather>, sabotage: Sabotage, trace: bool) -> World {
        let mut rng = Rng::new(seed);
        let plan = plan.unwrap_or_else(|| Plan::any(&mut rng));
        let weather = weather.unwrap_or_else(|| Weather { stragglers: plan.stragglers(), ..Weather::any(&mut rng) });
        if trace {
            eprintln!("{plan:?} {weather:?}");
        }
        let mut world = World {
            now_ns: 1,
            queue: BinaryHeap::new(),
            happenings: std::collections::HashMap::new(),
            ids: 0,
            nodes: Vec::new(),
            network: Network::new(weather),
            registry: Registry::default(),
            oracle: Oracle::default(),
            rng,
            kills: 0,
            unanswered: [0; 2],
            sealed: BTreeMap::new(),
            sabotage,
            pool: PoolKey::new([9; KEY_SIZE]),
            resting: false,
            all_heard: false,
            violation: None,
            digest: Digest::new(),
            buffer: Vec::with_capacity(16 * 1024),
            trace,
            plan,
        };
        for _ in 0..world.plan.servers + world.plan.hosts {
            let node = Node::new(Program::Nothing, &mut world.rng);
            world.nodes.push(node);
            world.boot(world.nodes.len() - 1);
        }
        for space in 0..world.plan.spaces {
            world.hand_over(space as u64);
        }
        world.schedule(1000, Happening::Act);
        world.schedule(1000, Happening::Chaos);
        world
    }

    pub fn say(&self, what: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{:>12.3} us  {}", self.now_ns as f64 / 1000.0, what());
        }
    }

    fn schedule(&mut self, after_ns: u64, happening: Happening) {
        self.ids += 1;
        self.happenings.insert(self.ids, happening);
        self.queue.push(Reverse((self.now_ns + after_ns, self.ids)));
    }

    pub fn fail(&mut self, what: String) {
        self.say(|| format!("VIOLATION {what}"));
        self.violation.get_or_insert(what);
    }

    /// A program starts on a node, with empty memory.
    fn boot(&mut self, node: usize) {
        let servers = self.plan.servers;
        self.nodes[node].life += 1;
        let life = self.nodes[node].life;
        let entropy = Box::new(Seeded(Rng::new(self.rng.next())));
        let slab_size = SlabSize::new(SLAB_PAGES).expect("a power of two");
        // The last server, never the only one.
        let overflow_disk = self.plan.overflow_disk && node + 1 == servers;
        self.nodes[node].program = if node < servers {
            let config = ServerConfig {
                id: ServerId(node as u32),
                keys: keys(node),
                pool: self.pool.clone(),
                admitted: (servers..self.nodes.len().max(servers + self.plan.hosts))
                    .map(|n| keys(n).public())
                    .collect(),
                slabs: self.rng.within(3, 9),
                slab_size,
                quota: u32::MAX,
                epoch: BootEpoch(life),
                medium: overflow_disk.then(|| Box::new(Shelf::default()) as Box<dyn Medium>),
            };
            // Another number of workers in each life.
            let workers = 1 + (node + life as usize) % 3;
            let mut workers = Server::with_workers(config, entropy, workers).expect("the limits are kept");
            workers[0].inject(self.sabotage.server);
            Program::Server(workers)
        } else {
            let mut config = ClientConfig::new(keys(node), self.pool.clone());
            config.slab_size = slab_size;
            config.error_after = self.plan.error_after;
            config.scrub_pass = Some(Duration::from_millis(100));
            config.keep_after = Duration::from_millis(100);
            // About as long as an answer takes.
            config.map_patience = (self.plan.elsewhere && node % 2 == 1).then_some(Duration::from_millis(2));
            config.give_back_after = self.plan.give_back_after();
            config.parity_after = self.plan.parity_after();
            config.rekey_every = Some(50);
            // Without a draw, which would make other runs of the known seeds.
            config.rebuild_spread = Duration::from_millis([0, 1, 20][(node + life as usize) % 3]);
            // Some can hardly ask anything at a time.
            config.questions_max = [usize::MAX, 1, 3][(node + life as usize) % 3];
            config.fault = self.sabotage.client;
            let mut client = Client::new(config, entropy);
            for server in 0..servers {
                let info = ServerInfo {
                    id: ServerId(server as u32),
                    addr: address(server),
                    key: keys(server).public(),
                    zone: server as u32 / 2,
                    announcer: None,
                };
                client.add_server(self.nodes[node].local(self.now_ns), info).expect("few servers");
            }
            let (owns, asks, follows, followed) = Default::default();
            Program::Host(Box::new(Host { client, owns, asks, tokens: 0, follows, followed }))
        };
        self.say(|| format!("boot {node}, life {life}"));
        self.pump(node);
    }

    /// The space gets another owner. The old one is not told.
    pub fn hand_over(&mut self, space: u64) {
        let hosts: Vec<usize> = (self.plan.servers..self.nodes.len()).collect();
        let node = *self.rng.pick(&hosts);
        let id = SpaceId(space);
        // Room is kept for every second space, and one slab is always to be had.
        let (pages, copies, reserve) = (self.plan.pages, self.plan.copies, space as usize % 2);
        let spec = SpaceSpec { id, pages, copies, reserve, key: [7; KEY_SIZE] };
        if !matches!(self.nodes[node].program, Program::Host(_)) {
            return;
        }
        if let Some(today) = self.registry.sealed(id) {
            self.say(|| format!("{node} reads space {space}, generation {}, {:?}", today.generation.0, today.map));
            if let Program::Host(host) = &mut self.nodes[node].program
                && host.owns.get(&space).is_none_or(|(reference, _)| host.client.tenure(*reference) == Tenure::Owner)
            {
                let opened = host.client.attach_reader(&spec, &today).expect("the limits are kept");
                host.owns.insert(space, (opened, self.sealed[&space]));
            }
            return self.pump(node);
        }
        let (generation, map) = self.registry.take_over(id);
        self.say(|| format!("space {space} to {node}, generation {}, {map:?}", generation.0));
        if let Program::Host(host) = &mut self.nodes[node].program {
            let opened = host.client.attach(&spec, generation, &map).expect("the limits are kept");
            host.owns.insert(space, (opened, generation.0));
        }
        self.pump(node);
    }

    /// The owner of a space seals it, if all of its copies are alike now. Some hosts begin to read it.
    pub fn seal(&mut self, space: u64) {
        let Some(node) = self.owner_of(space).filter(|_| !self.sealed.contains_key(&space)) else { return };
        let Program::Host(host) = &mut self.nodes[node].program else { return };
        let (reference, generation) = host.owns[&space];
        let writes = host.asks.values().any(|ask| ask.space == space && matches!(ask.asked, Asked::Write(_)));
        let even = !writes && host.client.is_even(reference);
        if !(even || self.sabotage.seals_early) || !self.registry.seal(SpaceId(space), generation) {
            return;
        }
        self.say(|| format!("{node} seals space {space}, generation {generation}"));
        self.sealed.insert(space, generation);
        host_of(&mut self.nodes[node]).owns.remove(&space);
        for _ in 0..self.rng.within(1, 3) {
            self.hand_over(space);
        }
    }

    /// One of the readers of a sealed space makes its parity.
    pub fn make_parity(&mut self, space: u64) {
        let readers = self.owners_of(space);
        if readers.is_empty() || !self.sealed.contains_key(&space) {
            return;
        }
        let node = *self.rng.pick(&readers);
        let now = self.nodes[node].local(self.now_ns);
        self.say(|| format!("{node} makes parity for space {space}"));
        let host = host_of(&mut self.nodes[node]);
        let (reference, _) = host.owns[&space];
        host.client.make_parity(now, reference);
        self.oracle.gets_parity(space);
        self.pump(node);
    }

    /// Takes one thing that happens next. `false` when nothing does.
    pub fn step(&mut self) -> bool {
        let Some(Reverse((at, id))) = self.queue.pop() else { return false };
        let Some(happening) = self.happenings.remove(&id) else { return true };
        self.now_ns = self.now_ns.max(at);
        if let Happening::Arrival { to: node, .. } | Happening::Timer { node, .. } = &happening {
            let paused_until = self.nodes[*node].paused_until_ns;
            if paused_until > self.now_ns {
                self.happenings.insert(id, happening);
                self.queue.push(Reverse((paused_until, id)));
                return true;
            }
        }
        match happening {
            Happening::Arrival { to, from, bytes } => self.arrive(to, from, bytes),
            Happening::Timer { node, due_ns } => self.timer(node, due_ns),
            Happening::Question { node, life, id, request } => self.question(node, life, id, &request),
            Happening::Answer { node, life, id, reply } => self.answer(node, life, id, reply),
            Happening::Act => self.act(),
            Happening::Chaos => self.chaos(),
            Happening::Boot { node } => self.boot(node),
        }
        true
    }

    fn arrive(&mut self, to: usize, from: usize, mut bytes: Vec<u8>) {
        let now = self.nodes[to].local(self.now_ns);
        match &mut self.nodes[to].program {
            Program::Server(workers) => {
                let worker = worker_of(&bytes).unwrap_or(from) % workers.len();
                workers[worker].on_datagram(now, address(from), &mut bytes);
            }
            Program::Host(host) => host.client.on_datagram(now, address(from), &mut bytes),
            Program::Nothing => return,
        }
        self.pump(to);
    }

    fn timer(&mut self, node: usize, due_ns: u64) {
        if due_ns != self.nodes[node].timer_ns {
            return;
        }
        self.nodes[node].timer_ns = u64::MAX;
        let now = self.nodes[node].local(self.now_ns);
        match &mut self.nodes[node].program {
            Program::Host(host) => host.client.on_timeout(now),
            Program::Server(workers) => workers.iter_mut().for_each(|worker| worker.on_timeout(now)),
            Program::Nothing => {}
        }
        self.pump(node);
        let at_once = self.next_timeout(node).is_some_and(|due| due <= now);
        let hurried = &mut self.nodes[node].hurried;
        *hurried = if at_once { *hurried + 1 } else { 0 };
        if *hurried > HURRIED_MAX {
            self.fail(format!("{node} is due again at once, over and over: its driver never sleeps"));
        }
    }

    fn question(&mut self, node: usize, life: u64, id: QuestionId, request: &ControlRequest) {
        if self.now_ns < self.registry.away_until_ns {
            return;
        }
        // Done or not, it may be that only asking again tells.
        let later = !self.resting && self.rng.per_mille(self.network.weather.loss);
        let reply = self.registry.answer(request);
        let reply = if later { ControlReply::Later } else { reply };
        self.say(|| format!("{node} asks {request:?}: {reply:?}"));
        if !self.resting && self.rng.per_mille(self.network.weather.loss) {
            return;
        }
        let after = self.rng.within(50_000, 3_000_000) as u64;
        self.schedule(after, Happening::Answer { node, life, id, reply });
    }

    fn answer(&mut self, node: usize, life: u64, id: QuestionId, reply: ControlReply) {
        let now = self.nodes[node].local(self.now_ns);
        if self.nodes[node].life != life {
            return;
        }
        if let Program::Host(host) = &mut self.nodes[node].program {
            host.client.on_control(now, id, reply);
        }
        self.pump(node);
    }

    /// Takes out of a program whatever it has to say.
    pub fn pump(&mut self, node: usize) {
        let now = self.nodes[node].local(self.now_ns);
        let life = self.nodes[node].life;
        loop {
            self.buffer.clear();
            let transmit = match &mut self.nodes[node].program {
                Program::Server(workers) => {
                    workers.iter_mut().find_map(|worker| worker.poll_transmit(&mut self.buffer))
                }
                Program::Host(host) => host.client.poll_transmit(now, &mut self.buffer),
                Program::Nothing => None,
            };
            let Some(transmit) = transmit else { break };
            let to = node_at(transmit.to);
            let sent = std::mem::take(&mut self.buffer);
            for datagram in sent.chunks(transmit.segment) {
                self.digest.add_datagram(self.now_ns, node, to, datagram);
                for (at, bytes) in self.network.carry(self.now_ns, node, to, datagram, &mut self.rng) {
                    self.schedule(at - self.now_ns, Happening::Arrival { to, from: node, bytes });
                }
            }
            self.buffer = sent;
        }
        let mut questions = Vec::new();
        if let Program::Host(host) = &mut self.nodes[node].program {
            while let Some(question) = host.client.poll_control(now) {
                questions.push(question);
            }
        }
        let next = self.next_timeout(node);
        for (id, request) in questions {
            self.digest.add_text(self.now_ns, node, &(id.0, &request));
            if self.resting || !self.rng.per_mille(self.network.weather.loss) {
                let after = self.rng.within(50_000, 3_000_000) as u64;
                self.schedule(after, Happening::Question { node, life, id, request });
            }
        }
        self.collect(node);
        if let Some(next) = next {
            let at = self.nodes[node].global(next).max(self.now_ns + 1);
            if at < self.nodes[node].timer_ns {
                self.nodes[node].timer_ns = at;
                self.schedule(at - self.now_ns, Happening::Timer { node, due_ns: at });
            }
        }
    }

    fn next_timeout(&mut self, node: usize) -> Option<Time> {
        let now = self.nodes[node].local(self.now_ns);
        match &mut self.nodes[node].program {
            Program::Host(host) => host.client.poll_timeout(now),
            Program::Server(workers) => workers.iter().filter_map(Server::poll_timeout).min(),
            Program::Nothing => None,
        }
    }

    /// Takes the results that a host has, and has the oracle judge them.
    fn collect(&mut self, node: usize) {
        // Nobody's page: what the client does not put there is noticed.
        let mut room = Box::new([0xaa; SEALED_SIZE]);
        loop {
            let Program::Host(host) = &mut self.nodes[node].program else { return };
            let Some(event) = host.client.swap_event(&mut room) else { return };
            self.digest.add_text(self.now_ns, node, &event);
            let page = content_of(&room);
            let (Event::Read { token, result } | Event::Written { token, result }) = event;
            let Some(ask) = host.asks.remove(&token) else { continue };
            let Ask { space, page: number, generation, asked, reads_sealed: is_reader, .. } = ask;
            self.say(|| format!("{node} {space}/{number} {asked:?}: {result:?}"));
            let judged = match (asked, result) {
                (Asked::Follow(begun), result) => self.judge_followed(node, ask, begun, result, page),
                (Asked::Read(begun), Ok(())) => self.oracle.end_read(space, number, generation, begun, page),
                (Asked::Write(nth), Ok(())) => self.oracle.acknowledged(space, number, nth),
                (Asked::Write(nth), Err(Failure::Declined)) => {
                    self.oracle.declined(space, number, nth);
                    Ok(())
                }
                (_, Err(Failure::Lost)) if self.kills == 0 => Err("lost, and no server was killed".to_owned()),
                (_, Err(Failure::Lost)) => {
                    if is_reader || generation == self.registry.generation(SpaceId(space)) {
                        self.oracle.lost(space, number, generation);
                    }
                    Ok(())
                }
                (_, Err(Failure::Fenced)) if generation == self.registry.generation(SpaceId(space)) => {
                    Err("the owner of today was fenced".to_owned())
                }
                (_, Err(Failure::Fenced)) if is_reader => Err("a reader was fenced".to_owned()),
                (_, Err(Failure::Fenced)) => Ok(()),
                (_, Err(Failure::Silent)) if self.plan.error_after.is_none() => Err("did not wait".to_owned()),
                (_, Err(Failure::Silent)) if self.all_heard => Err("nobody is silent".to_owned()),
                (Asked::Read(_), Err(Failure::Silent)) => {
                    self.unanswered[0] += 1;
                    Ok(())
                }
                // To the oracle it is under way until a later one to the page is acknowledged: it may land until then, and not after.
                (Asked::Write(_), Err(Failure::Silent)) => {
                    self.unanswered[1] += 1;
                    Ok(())
                }
                (_, Err(failure)) => Err(format!("{failure:?}")),
            };
            if let Err(what) = judged {
                self.fail(format!("{space}/{number} at {node}, generation {generation}: {what}"));
            }
        }
    }

    /// Somebody reads or writes.
    fn act(&mut self) {
        if !self.resting {
            let after = self.rng.within(1_000, 400_000) as u64;
            let after = if self.is_quiet_time() { 10 * after } else { after };
            self.schedule(after, Happening::Act);
        }
        let node = self.rng.within(self.plan.servers, self.nodes.len() - 1);
        if self.nodes[node].paused_until_ns > self.now_ns {
            return;
        }
        for _ in 0..self.rng.within(1, 6) {
            let Program::Host(host) = &self.nodes[node].program else { return };
            if host.owns.is_empty() || host.asks.len() >= self.plan.operations {
                return;
            }
            let space = *host.owns.keys().nth(self.rng.below(host.owns.len())).expect("owns some");
            let page = self.rng.below(self.plan.pages as usize) as u64;
            match self.rng.below(10) {
                kind if kind >= 5 && self.is_left_alone() => self.ask(node, space, page, 0),
                5 if self.plan.empties() => self.empty_slab(node, space, page),
                kind => self.ask(node, space, page, kind),
            }
        }
    }

    /// One operation: a read for 0 to 4, a trim for 5, else a write.
    pub fn ask(&mut self, node: usize, space: u64, page: u64, kind: usize) {
        let now = self.nodes[node].local(self.now_ns);
        let class = *self.rng.pick(&Class::ALL);
        let Program::Host(host) = &mut self.nodes[node].program else { return };
        let Some(&(reference, generation)) = host.owns.get(&space) else { return };
        let reads_sealed = host.client.tenure(reference) != Tenure::Owner;
        if reads_sealed && kind >= 5 {
            let refused = host.client.write(now, reference, PageNo(page), class, &[0; PAGE_SIZE], 0);
            assert_eq!(refused, Err(rmap::client::Refused::ReadOnly));
            return;
        }
        if kind == 5 && self.trims_nothing(node, space, page) {
            return;
        }
        let Program::Host(host) = &mut self.nodes[node].program else { return };
        host.tokens += 1;
        let token = host.tokens;
        let (asked, begun) = if kind < 5 {
            let begun = self.oracle.begin_read(space, page, generation, reads_sealed);
            (Asked::Read(begun), host.client.read(now, reference, PageNo(page), class, token))
        } else {
            let trim = kind == 5;
            let (nth, value) = self.oracle.write(space, page, generation, trim);
            let begun = if trim {
                host.client.trim(now, reference, PageNo(page), class, token)
            } else {
                host.client.write(now, reference, PageNo(page), class, &page_of(space, page, value), token)
            };
            (Asked::Write(nth), begun)
        };
        if let Err(refused) = begun {
            // Writes that a new copy has not answered yet take room.
            assert_eq!(refused, rmap::client::Refused::Busy);
            if let Asked::Write(nth) = asked {
                self.oracle.declined(space, page, nth);
            }
            return;
        }
        host.asks.insert(token, Ask { space, page, generation, asked, reads_sealed, since_ns: self.now_ns });
        self.say(|| format!("{node} {space}/{page} {asked:?} begins"));
        self.pump(node);
    }

    /// Has something go wrong, chosen by chance, and schedules the next time.
    fn chaos(&mut self) {
        if self.resting {
            return;
        }
        let after = self.rng.within(100_000, 20_000_000) as u64;
        self.schedule(after, Happening::Chaos);
        let nodes = self.nodes.len();
        let (one, other) = (self.rng.below(nodes), self.rng.below(nodes));
        let long = 1000 * *self.rng.pick(&[500, 5_000, 50_000, 300_000]) as u64;
        if self.rng.per_mille(self.plan.kills) {
            self.kill(one);
        } else if self.rng.per_mille(self.plan.hand_overs) {
            let space = self.rng.below(self.plan.spaces) as u64;
            self.hand_over(space);
        } else if self.rng.per_mille(self.plan.seals) {
            let space = self.rng.below(self.plan.spaces) as u64;
            self.seal(space);
        } else if self.rng.per_mille(self.plan.parity) {
            let space = self.rng.below(self.plan.spaces) as u64;
            self.make_parity(space);
        }
        match self.rng.below(8) {
            0 => self.network.cut(one, other, self.now_ns + long),
            1 => {
                self.network.cut(one, other, self.now_ns + long);
                self.network.cut(other, one, self.now_ns + long);
            }
            2 | 3 => {
                self.say(|| format!("pause {one} for {long} ns"));
                self.nodes[one].paused_until_ns = self.now_ns + long;
            }
            4 => self.registry.away_until_ns = self.now_ns + long,
            5 => self.network.weather.mtu = *self.rng.pick(&[1200, 1430, 1472, 8972]),
            6 => {
                let levels = [Pressure::None, Pressure::None, Pressure::Yellow, Pressure::Orange, Pressure::Red];
                let level = *self.rng.pick(&levels);
                if let Program::Server(workers) = &mut self.nodes[one].program {
                    let server = &mut workers[0];
                    server.set_pressure(level);
                    // What its driver does ten times a second.
                    for _ in 0..self.rng.within(0, 9) {
                        server.adjust_memory();
                    }
                }
            }
            _ => {}
        }
    }

    /// The program on a node is gone, and its memory. It starts again a little later.
    pub fn kill(&mut self, node: usize) {
        if matches!(self.nodes[node].program, Program::Nothing) {
            return;
        }
        self.say(|| format!("kill {node}"));
        if matches!(self.nodes[node].program, Program::Server(_)) {
            self.kills += 1;
        }
        let owned: Vec<u64> = match &self.nodes[node].program {
            Program::Host(host) => host.owns.keys().copied().collect(),
            _ => Vec::new(),
        };
        self.nodes[node].program = Program::Nothing;
        let after = self.rng.within(1_000_000, 200_000_000) as u64;
        self.schedule(after, Happening::Boot { node });
        for space in owned {
            self.hand_over(space);
        }
    }

    pub fn owner_of(&self, space: u64) -> Option<usize> {
        self.owners_of(space).first().copied()
    }

    /// The owner of a space, or all readers of a sealed one.
    pub fn owners_of(&self, space: u64) -> Vec<usize> {
        let today = self.registry.generation(SpaceId(space));
        let today = self.sealed.get(&space).copied().unwrap_or(today);
        let owns = |node: &usize| match &self.nodes[*node].program {
            Program::Host(host) => host.owns.get(&space).is_some_and(|(_, generation)| *generation == today),
            _ => false,
        };
        (0..self.nodes.len()).filter(owns).collect()
    }

    pub fn has_owner(&self, space: u64) -> bool {
        self.owner_of(space).is_some()
    }

    pub fn run_for(&mut self, span_ns: u64) {
        let until_ns = self.now_ns + span_ns;
        while self.queue.peek().is_some_and(|Reverse((at, _))| *at <= until_ns) {
            self.step();
        }
        self.now_ns = until_ns;
    }
}

fn host_of(node: &mut Node) -> &mut Host {
    match &mut node.program {
        Program::Host(host) => host,
        _ => panic!("not a host"),
    }
}
