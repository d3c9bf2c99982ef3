//! A client, its servers, and the control plane.

use std::net::{Ipv4Addr, SocketAddr};

use super::*;
use crate::medium::Medium;
use crate::units::SlabNo;

#[derive(Debug)]
pub struct Counting(pub u64);

impl Entropy for Counting {
    fn fill(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            *byte = (self.0 >> 56) as u8;
        }
    }
}

/// A disk, for all that is asked of it.
#[derive(Debug, Default)]
struct Disk(HashMap<u64, Page>);

impl Medium for Disk {
    fn read(&mut self, index: u64, page: &mut Page) -> std::io::Result<()> {
        *page = *self.0.get(&index).ok_or(std::io::ErrorKind::UnexpectedEof)?;
        Ok(())
    }

    fn write(&mut self, index: u64, page: &Page) -> std::io::Result<()> {
        self.0.insert(index, *page);
        Ok(())
    }
}

pub struct Pool {
    pub client: Client,
    pub servers: Vec<Server>,
    pub space: SpaceRef,
    pub now: Time,
    /// Where each server is: at [`addr`], unless it has moved.
    pub at: Vec<SocketAddr>,
    /// Who sent something to whom, of the servers.
    pub sent_to_servers: Vec<(usize, usize)>,
    /// Servers, by their index, that no datagram reaches.
    pub deaf: Vec<usize>,
    /// What is longer gets lost.
    pub longest: usize,
    /// Its replies come late, when they are delivered.
    pub slow: Option<usize>,
    pub late: Vec<Vec<u8>>,
    /// The control plane answers nothing, or nothing of this slab.
    pub no_control: bool,
    pub no_control_of: Option<SlabNo>,
    /// What it knows of a sealed space, and how often somebody wanted to keep that.
    pub today: Today,
    pub keeps: usize,
}

/// Of whom [`addr`] is the client's.
pub const CLIENT: usize = 99;

pub fn addr(node: usize) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 100 + node as u16))
}

pub fn slab_size() -> SlabSize {
    SlabSize::new(8).unwrap()
}

impl Pool {
    pub fn new(servers: usize, copies: usize, slabs: usize) -> Pool {
        Pool::with(servers, copies, slabs, None)
    }

    /// One of the servers, if so, keeps its pages on a disk.
    pub fn with(servers: usize, copies: usize, slabs: usize, on_disk: Option<usize>) -> Pool {
        Pool::of(servers, copies, slabs, 64, on_disk)
    }

    pub fn of(servers: usize, copies: usize, slabs: usize, pages: u64, on_disk: Option<usize>) -> Pool {
        Pool::sized(slab_size(), servers, copies, slabs, pages, on_disk)
    }

    /// With slabs of another size.
    pub fn sized(
        size: SlabSize,
        servers: usize,
        copies: usize,
        slabs: usize,
        pages: u64,
        on_disk: Option<usize>,
    ) -> Pool {
        let (own, pool) = (Keypair::from_private([50; KEY_SIZE]), PoolKey::new([1; KEY_SIZE]));
        let mut config = ClientConfig::new(own.clone(), pool.clone());
        config.slab_size = size;
        config.rebuild_spread = Duration::ZERO;
        let mut client = Client::new(config, Box::new(Counting(1)));
        let mut all = Vec::new();
        for node in 0..servers {
            let keys = Keypair::from_private([node as u8 + 1; KEY_SIZE]);
            let (id, key) = (ServerId(node as u32), keys.public());
            client.add_server(Time(0), ServerInfo { id, addr: addr(node), key, zone: 0, announcer: None }).unwrap();
            let admitted = vec![own.public()];
            let (slab_size, epoch, pool) = (size, BootEpoch(1), pool.clone());
            let medium = (on_disk == Some(node)).then(|| Box::new(Disk::default()) as Box<dyn Medium>);
            let config = ServerConfig { id, keys, pool, admitted, slabs, slab_size, quota: u32::MAX, epoch, medium };
            all.push(Server::new(config, Box::new(Counting(node as u64 + 2))).unwrap());
        }
        let spec = SpaceSpec { id: SpaceId(1), pages, copies, reserve: 0, key: [2; KEY_SIZE] };
        let space = client.attach(&spec, Generation(1), &[]).unwrap();
        let (now, deaf, late) = (Time(1), Vec::new(), Vec::new());
        let mut pool = Pool {
            client,
            servers: all,
            space,
            now,
            at: (0..servers).map(addr).collect(),
            sent_to_servers: Vec::new(),
            deaf,
            longest: usize::MAX,
            slow: None,
            late,
            no_control: false,
            no_control_of: None,
            today: Today::default(),
            keeps: 0,
        };
        pool.run();
        pool
    }

    /// Servers that have a slab, by the map.
    pub fn holders(&self, slab: SlabNo) -> Vec<usize> {
        let slab = &self.client.pool.map.spaces[self.space.0].slabs[slab];
        self.client.pool.sessions.peers_of(&slab.entry).iter().map(|peer| peer.0).collect()
    }

    /// What everybody has to say now. `false` if that is nothing.
    pub fn step(&mut self) -> bool {
        let mut any = self.receive_client();
        for node in 0..self.servers.len() {
            any |= self.receive_server(node);
        }
        any | self.receive_control()
    }

    pub fn receive_client(&mut self) -> bool {
        let (mut any, mut out) = (false, Vec::new());
        while let Some(transmit) = self.client.poll_transmit(self.now, &mut out) {
            any = true;
            self.deliver(addr(CLIENT), transmit, &mut out);
        }
        any
    }

    pub fn receive_server(&mut self, node: usize) -> bool {
        let (mut any, mut out) = (false, Vec::new());
        while let Some(transmit) = self.servers[node].poll_transmit(&mut out) {
            any = true;
            self.deliver(self.at[node], transmit, &mut out);
        }
        any
    }

    pub fn receive_control(&mut self) -> bool {
        let mut any = false;
        while let Some((id, request)) = self.client.poll_control(self.now) {
            any = true;
            let is_odd = matches!(&request, ControlRequest::Change(change) if Some(change.slab) == self.no_control_of);
            if !self.no_control && !is_odd {
                let reply = self.answer(&request);
                self.client.on_control(self.now, id, reply);
            }
        }
        any
    }

    /// The first thing that the client has to say, and what servers say to it.
    pub fn single_step(&mut self) {
        let mut out = Vec::new();
        if let Some(transmit) = self.client.poll_transmit(self.now, &mut out) {
            self.deliver(addr(CLIENT), transmit, &mut out);
        }
        for node in 0..self.servers.len() {
            while let Some(transmit) = self.servers[node].poll_transmit(&mut out) {
                self.deliver(self.at[node], transmit, &mut out);
            }
        }
    }

    /// Nobody else changes anything.
    pub fn answer(&mut self, request: &ControlRequest) -> ControlReply {
        match request {
            ControlRequest::Change(_) | ControlRequest::Confirm { .. } => ControlReply::Done,
            ControlRequest::Look { .. } => ControlReply::Seen(self.today.clone()),
            ControlRequest::Keep { .. } => {
                self.keeps += 1;
                self.today.generation.0 += 1;
                ControlReply::Kept(self.today.clone())
            }
        }
    }

    /// To the client, or to a server from the client or another server.
    pub fn deliver(&mut self, from: SocketAddr, transmit: crate::server::Transmit, out: &mut Vec<u8>) {
        let node_at = |addr| self.at.iter().position(|at| *at == addr);
        let (to, source) = (node_at(transmit.to), node_at(from));
        self.sent_to_servers.extend(source.zip(to));
        for datagram in out.chunks_mut(transmit.segment) {
            match to {
                _ if datagram.len() > self.longest => {}
                Some(to) if self.deaf.contains(&to) => {}
                Some(to) => self.servers[to].on_datagram(self.now, from, datagram),
                None if transmit.to != addr(CLIENT) => {}
                None if self.slow.is_some_and(|slow| addr(slow) == from) => self.late.push(datagram.to_vec()),
                None => self.client.on_datagram(self.now, from, datagram),
            }
        }
        out.clear();
    }

    /// Until nobody has anything to say.
    pub fn run(&mut self) {
        loop {
            let any = self.step();
            // Copies wait for their share of the link, which time brings.
            self.now = self.now + Duration::from_micros(100);
            if self.client.pool.map.timed_due().is_some() {
                self.time_passes();
            } else if !any && self.client.redundancy.copies.is_idle() {
                return;
            }
        }
    }

    pub fn time_passes(&mut self) {
        self.client.on_timeout(self.now);
        self.servers.iter_mut().for_each(|server| server.on_timeout(self.now));
    }

    pub fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now = self.now + Duration::from_millis(1);
            self.time_passes();
            while self.step() {}
        }
    }

    /// The same of another than the first server; and what follows.
    pub fn deliver_late_from(&mut self, node: usize) {
        self.slow = None;
        for mut datagram in std::mem::take(&mut self.late) {
            self.client.on_datagram(self.now, addr(node), &mut datagram);
        }
        while self.step() {}
    }

    pub fn deliver_late(&mut self) {
        self.slow = None;
        for mut datagram in std::mem::take(&mut self.late) {
            self.client.on_datagram(self.now, addr(0), &mut datagram);
        }
    }

    /// Begins a write that somebody may be too deaf for.
    pub fn begin_write(&mut self, page: u64, byte: u8) {
        self.begin_write_late(page, byte);
        while self.step() {}
    }

    /// Begins a write of which nothing was sent yet.
    pub fn begin_write_late(&mut self, page: u64, byte: u8) {
        self.client.write(self.now, self.space, PageNo(page), Class::Eviction, &[byte; PAGE_SIZE], 1).unwrap();
    }

    /// Results of so many writes, all of them good.
    pub fn expect_written(&mut self, writes: usize) {
        let events: Vec<Event> = std::iter::from_fn(|| self.client.poll_event(&mut [0; PAGE_SIZE])).collect();
        assert_eq!(events, vec![Event::Written { token: 1, result: Ok(()) }; writes]);
    }

    /// Where somebody never answers: [`Pool::write`] would wait for that.
    pub fn write_in_time(&mut self, page: u64, byte: u8) -> Result<(), Failure> {
        self.begin_write(page, byte);
        match self.client.poll_event(&mut [0; PAGE_SIZE]) {
            Some(Event::Written { token: 1, result }) => result,
            event => panic!("{event:?} for a write"),
        }
    }

    pub fn write(&mut self, page: u64, byte: u8) -> Result<(), Failure> {
        self.client.write(self.now, self.space, PageNo(page), Class::Eviction, &[byte; PAGE_SIZE], 1).unwrap();
        self.run();
        match self.client.poll_event(&mut [0; PAGE_SIZE]) {
            Some(Event::Written { token: 1, result }) => result,
            event => panic!("{event:?} for a write"),
        }
    }

    /// The byte that fills the page.
    pub fn read(&mut self, page: u64) -> Result<u8, Failure> {
        self.client.read(self.now, self.space, PageNo(page), Class::Demand, 2).unwrap();
        self.run();
        let mut content = [0xee; PAGE_SIZE];
        match self.client.poll_event(&mut content) {
            Some(Event::Read { token: 2, result }) => {
                result?;
                assert!(content.iter().all(|byte| *byte == content[0]));
                Ok(content[0])
            }
            event => panic!("{event:?} for a read"),
        }
    }

    pub fn trim(&mut self, page: u64) {
        self.client.trim(self.now, self.space, PageNo(page), Class::Eviction, 3).unwrap();
        self.run();
        let event = self.client.poll_event(&mut [0; PAGE_SIZE]);
        assert_eq!(event, Some(Event::Written { token: 3, result: Ok(()) }));
    }
}
